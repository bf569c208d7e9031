"""Gives closed forms of position tables, against which a model's own are checked, and the forms of rotation.

The score ledger uses the model's own tensors (its ALiBi tensor, its rotary tables); the formulas here say what these
tensors should be, and how a rotary table is applied.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from einops import rearrange
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from ...basics.public import public
from ...maths.float64 import as_float64

_ByHead: TypeAlias = Float[Tensor, "*axes d_head"]
_Twice: TypeAlias = Float[Tensor, "*#axes d_rotary"]  # holds every angle twice
_Once: TypeAlias = Float[Tensor, "*#axes half"]  # holds every angle once


def alibi_slopes(heads: int) -> Float[Tensor, " head"]:
    """The slopes of ALiBi (Press et al. 2022); head 0 is the steepest if the number of heads is a power of two.

    slope_h = 2^(−8(h+1)/H) for H a power of two. Otherwise the first n = 2^⌊log2 H⌋ heads take the slopes of n heads,
    and the other heads take every second slope of 2n heads, starting with the first. In float32, as in the models. MPT
    takes the same slopes from those of the next power of two.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * (head + 1) / whole) for head in range(whole)]
    slopes += [2.0 ** (-8 * (2 * extra + 1) / (2 * whole)) for extra in range(heads - whole)]
    return torch.tensor(slopes, dtype=torch.float32)


@public
@dataclass(frozen=True)
class Alibi:
    """How a family adds ALiBi, for the closed form that the certificate checks.

    position_hj = slope_h · factor · place_j, where place_j counts from the first real token, or from the end.
    """

    slopes: Callable[[int], Tensor] = alibi_slopes
    factor: float = 1.0
    from_end: bool = False
    rounded_to: torch.dtype = torch.float32
    """The precision in which the family computes slope · place, whatever the precision of the model."""

    def __str__(self) -> str:
        end = ", from the end" if self.from_end else ""
        rounded = str(self.rounded_to).removeprefix("torch.")
        return f"{self.factor:.3g} × {self.slopes.__name__}{end}, rounded to {rounded}"


def rotary_tables(
    parameters: Mapping[str, Any], d_head: int, positions: Int[Tensor, " position"]
) -> tuple[Float[Tensor, "position half"], Float[Tensor, "position half"]] | None:
    """Cosine and sine of position · θ^(−2i/d), i < d/2 (Su et al. 2021), in float64.

    Returns None if the model scales its frequencies by another rule (`rope_type` other than "default"),
    for which there is no closed form here.
    """
    if parameters.get("rope_type", "default") != "default" or "rope_theta" not in parameters:
        return None
    places = as_float64(positions)
    exponent = torch.arange(0, d_head, 2, dtype=places.dtype, device=places.device) / d_head
    angle = places[:, None] * float(parameters["rope_theta"]) ** -exponent
    return angle.cos(), angle.sin()


def rotate_halves(x: _ByHead, cos: _Twice, sin: _Twice) -> _ByHead:
    """Rotary position embedding in Llama's layout: dimension i rotates with dimension i + d/2.

    (x_i, x_{i+d/2}) ↦ (x_i cos − x_{i+d/2} sin, x_{i+d/2} cos + x_i sin), with the model's own tables, which
    hold every angle twice. Tables narrower than the head rotate its first dimensions and leave the others unchanged.
    """
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rearrange(turned, "... (two half) -> two ... half", two=2)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)


def rotate_halves_once(x: _ByHead, cos: _Once, sin: _Once) -> _ByHead:
    """`rotate_halves` with tables that hold every angle once (gpt-oss)."""
    return rotate_halves(x, torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1))


def rotate_halves_back(x: _ByHead, cos: _Twice, sin: _Twice) -> _ByHead:
    """`rotate_halves` by the negated angles (nanochat)."""
    return rotate_halves(x, cos, -sin)


def rotate_pairs(x: _ByHead, cos: _Twice, sin: _Twice) -> _ByHead:
    """Rotary position embedding in GPT-J's layout: dimension 2i rotates with dimension 2i + 1.

    Tables hold every angle twice in a row. Tables narrower than the head rotate its first dimensions.
    """
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    even, odd = rearrange(turned, "... (half two) -> two ... half", two=2)
    swapped = rearrange(torch.stack((-odd, even)), "two ... half -> ... (half two)")
    return torch.cat((turned * cos + swapped * sin, rest), dim=-1)


def rotate_pairs_once(x: _ByHead, cos: _Once, sin: _Once) -> _ByHead:
    """`rotate_pairs` with tables that hold every angle once (Llama 4's complex numbers)."""
    return rotate_pairs(x, cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1))


def rotate_pairs_by_halves(x: _ByHead, cos: _Twice, sin: _Twice) -> _ByHead:
    """`rotate_pairs` with Llama's tables, which hold the list of all angles twice (GLM, ERNIE 4.5)."""
    half = cos.shape[-1] // 2
    return rotate_pairs_once(x, cos[..., :half], sin[..., :half])


def query_factor(
    attention: nn.Module,
) -> Callable[[Float[Tensor, "batch position d_model"], Int[Tensor, "#batch position"] | None, int], Tensor] | None:
    """A function from the input and the positions of an attention, and the number of cached tokens before them, to the
    factor of each query; None if there is none.

    Ministral 3 and Mistral 4 multiply queries by 1 + β ln(1 + ⌊position / n⌋), with n the length before the rotation
    was extended; layers of Llama 4 without rotation by 1 + a ln(1 + ⌊(column + 1) / n⌋) (Nakanishi 2025).
    """
    config: Any = getattr(attention, "config", None)
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    beta, length = (parameters.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))

    def by_position(x: Tensor, positions: Tensor | None, past: int) -> Tensor:
        assert positions is not None and beta is not None and length is not None
        factor: Tensor = 1 + beta * torch.log(1 + torch.floor(positions / length))
        return factor.to(x.dtype).expand(x.shape[:2])

    def by_column(x: Tensor, positions: Tensor | None, past: int) -> Tensor:
        columns = torch.arange(past, past + x.shape[1], device=x.device)
        steps = torch.floor((columns.float() + 1.0) / config.floor_scale)
        factor: Tensor = torch.log1p(steps) * config.attn_scale + 1.0
        return factor.expand(x.shape[:2])

    if beta is not None and length is not None:
        return by_position
    tuned = getattr(config, "attn_temperature_tuning", False) and not getattr(attention, "use_rope", True)
    return by_column if tuned else None


def tables_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine `[batch position width]` among the arguments of an attention; None if there are none."""
    embeddings = kwargs.get("position_embeddings")
    candidates = [embeddings] if embeddings is not None else [*args[1:], *kwargs.values()]
    return next((tables for candidate in candidates if (tables := as_tables(candidate)) is not None), None)


def as_tables(value: Any) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine, from two tensors of one shape, a complex one, or one with both side by side; else None."""
    if isinstance(value, torch.Tensor) and value.is_complex():
        value = (value.real, value.imag)
    elif isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[:2] == (1, 1):
        value = _side_by_side(value[0])
    if not isinstance(value, tuple | list) or len(value) != 2:
        return None
    if not all(
        isinstance(table, torch.Tensor) and table.is_floating_point() and table.ndim in (2, 3) for table in value
    ):
        return None
    cos, sin = (table if table.ndim == 3 else table[None] for table in value)
    return (cos, sin) if cos.shape == sin.shape else None


def _side_by_side(table: Float[Tensor, "*one position width"]) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine from a table with the sines of all angles before the cosines (RoFormer); else None."""
    if table.ndim != 3 or table.shape[-1] % 2:
        return None
    sin, cos = table.chunk(2, dim=-1)
    size, eps = sin.square() + cos.square(), torch.finfo(table.dtype).eps
    # The model may have computed the table in float32 and then cast it.
    return (cos, sin) if bool(((size - 1).abs() <= 8 * max(eps, torch.finfo(torch.float32).eps)).all()) else None


def tables_for(tables: tuple[Tensor, Tensor], length: int) -> tuple[Tensor, Tensor]:
    """Tables `[batch position width]` for all positions; tables with fewer rows cover only the last positions.

    A class token and registers before the patches are not rotated: their cosine is 1, their sine 0 (DINOv3).
    """
    cos, sin = (table.transpose(0, 1) if table.shape[:2] == (length, 1) else table for table in tables)
    still = cos.new_zeros(cos.shape[0], max(0, length - cos.shape[1]), cos.shape[2])
    return torch.cat((still + 1, cos), dim=1), torch.cat((still, sin), dim=1)


@public
@dataclass(frozen=True)
class Rotary:
    """How a model rotates its queries and keys.

    `am.architecture` has the forms of transformers' families: `HALVES`, `HALVES_ONCE`, `HALVES_BACK`, `PAIRS`,
    `PAIRS_ONCE` and `PAIRS_BY_HALVES`. `dataclasses.replace(HALVES, share=0.25)` rotates a quarter of each head.
    """

    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Rotates `[... d_head]` by cosine and sine tables."""
    spread: Callable[[Tensor], Tensor]
    """Converts a table that holds every angle once to the family's layout."""
    share: float = 1.0
    """The fraction of a head's dimensions that rotates."""
    first: int = 0
    """The first dimension that rotates; dimensions before it, and after the last that rotates, stay unchanged."""
    tables: str = ""
    """The module inside the attention that returns the tables, if the attention does not receive them."""
    theta: float | None = None
    """The base of the angles, if the config does not give it."""

    def __str__(self) -> str:
        share = "" if self.share == 1 else f", {self.share:.3g} of each head from dimension {self.first} on"
        return f"{self.rotate.__name__}{share}"

    def __call__(
        self,
        x: Float[Tensor, "*axes d_head"],
        cos: Float[Tensor, "*#axes d_table"],
        sin: Float[Tensor, "*#axes d_table"],
    ) -> Float[Tensor, "*axes d_head"]:
        if self.first == 0:
            return self.rotate(x, cos, sin)
        return torch.cat((x[..., : self.first], self.rotate(x[..., self.first :], cos, sin)), dim=-1)

    def width(self, table: int) -> int:
        """The number of dimensions that tables of this width rotate."""
        return 2 * table * table // int(self.spread(torch.zeros(1, table)).shape[-1])


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation R of one layer's queries and keys at each position: a form of rotation with a pass's tables."""

    form: Rotary
    cos: Float[Tensor, "#batch 1 position d_table"]
    sin: Float[Tensor, "#batch 1 position d_table"]

    def __call__(self, x: Float[Tensor, "*batch head position d_head"]) -> Float[Tensor, "*batch head position d_head"]:
        return self.form(x, self.cos, self.sin)

    def back(self, x: Float[Tensor, "batch head position d_head"]) -> Float[Tensor, "batch head position d_head"]:
        """R_i⁻¹ x_i, divided by the factor of the tables if they have one (YaRN)."""
        size = self.cos.square() + self.sin.square()
        return self.form(x, self.cos / size, -self.sin / size)

    def transposed(self, x: Float[Tensor, "batch head position d_head"]) -> Float[Tensor, "batch head position d_head"]:
        """R_iᵀ x_i, which differs from R_i⁻¹ x_i if the tables have a factor."""
        return self.form(x, self.cos, -self.sin)

    def at(self, places: slice) -> "Rotation":
        return Rotation(self.form, self.cos[:, :, places], self.sin[:, :, places])

    def on(self, device: torch.device) -> "Rotation":
        return Rotation(self.form, self.cos.to(device), self.sin.to(device))

    def wavelengths(self, d_head: int) -> Float64[Tensor, " d_head"]:
        """For each dimension of a head, the number of tokens in a full turn, 2π / ω; infinite if it does not rotate.

        ω is the mean step of the tables' angles from one position to the next. NaN if there is only one position.
        """
        angle = torch.atan2(as_float64(self.sin), as_float64(self.cos))[:, 0]
        step = (torch.remainder(angle.diff(dim=1) + math.pi, 2 * math.pi) - math.pi).flatten(0, 1)
        # Padding on the left may have a constant position; positions jump at gaps, and between texts in one row.
        moved = step[step.abs().sum(dim=1) > 0]
        if len(moved):
            moved = moved[((moved - moved.median(dim=0).values).abs() < 0.1).all(dim=1)]
        speed = moved.mean(dim=0).abs()
        # With cosines of 0, a form maps each dimension to its partner times the column's sine; here the sine is its
        # number.
        width = self.sin.shape[-1]
        number = torch.arange(1, width + 1, dtype=speed.dtype, device=speed.device)[None]
        turned = self.form(torch.eye(d_head, dtype=speed.dtype, device=speed.device)[:, None], 0 * number, number)
        still = turned[:, 0].diagonal() == 1
        column = turned[:, 0].abs().amax(dim=-1).long() - 1
        return torch.where(still, torch.inf, 2 * math.pi / speed[column.clamp(0, width - 1)])


HALVES: Final = Rotary(rotate_halves, lambda table: torch.cat((table, table), dim=-1))
"""Dimension i rotates with dimension i + d_rotary / 2 (Llama)."""
HALVES_ONCE: Final = Rotary(rotate_halves_once, lambda table: table)
"""As `HALVES`, with tables that hold every angle once (gpt-oss)."""
HALVES_BACK: Final = Rotary(rotate_halves_back, lambda table: torch.cat((table, table), dim=-1))
"""As `HALVES`, by the negated angles (nanochat)."""
PAIRS: Final = Rotary(rotate_pairs, lambda table: table.repeat_interleave(2, dim=-1))
"""Dimension 2i rotates with dimension 2i + 1 (GPT-J)."""
PAIRS_ONCE: Final = Rotary(rotate_pairs_once, lambda table: table)
"""As `PAIRS`, with tables that hold every angle once (Llama 4)."""
PAIRS_BY_HALVES: Final = Rotary(rotate_pairs_by_halves, lambda table: torch.cat((table, table), dim=-1))
"""As `PAIRS`, with tables that hold the list of all angles twice (GLM, ERNIE 4.5)."""
FORMS: Final = (HALVES, HALVES_ONCE, HALVES_BACK, PAIRS, PAIRS_ONCE, PAIRS_BY_HALVES)
"""The forms of rotation in transformers' families."""
