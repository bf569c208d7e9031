"""Finds a layer's attention weights, in the field's names and shapes, and checks that they are usable."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from einops import EinopsError, rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from ...basics.public import public
from ...errors import UnsupportedModelError, WeightsError
from .packed import is_packed, is_packed_projection, outline_of, unpacked

HOME: Final = "attnmech_device"  # on a module: the device of its values, if that is not the device of its weights


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of one layer's attention, as views of the model's own parameters.

    q = x W_Q + b_Q and so on, with x = `attn_in`; attn_raw = Σ_h z_h W_O[h] + b_O. A bias that the model
    does not have is None. If keys and values are expanded from a latent, x is the latent for W_V, the latent followed
    by `attn_in` for W_K, and the queries' latent (if there is one) for W_Q.
    """

    W_Q: Float[Tensor, "head d_query_in d_head"]
    W_K: Float[Tensor, "kv_head d_key_in d_head"]
    W_V: Float[Tensor, "kv_head d_value_in d_value"]
    W_O: Float[Tensor, "head d_value d_model"]
    b_Q: Float[Tensor, "head d_head"] | None
    b_K: Float[Tensor, "kv_head d_head"] | None
    b_V: Float[Tensor, "kv_head d_value"] | None
    b_O: Float[Tensor, " d_model"] | None


@public
@dataclass(frozen=True)
class Fused:
    """q, k and v from one projection; `layout` is the einops pattern of its output features."""

    path: str
    layout: str

    def __str__(self) -> str:
        return f"{self.path} ({self.layout})"

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the projections within the attention module."""
        return (self.path,)

    def split(self, outputs: Sequence[Tensor], heads: int, kv_heads: int, rest: str) -> tuple[Tensor, ...]:
        """q, k, v with the axes `rest head d_head`, from the projection's output with axes `rest features`."""
        del kv_heads
        return tuple(rearrange(outputs[0], f"{rest} ({self.layout}) -> qkv {rest} head d_head", head=heads, qkv=3))

    def taken(self, path: str, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        """q, k and v, each with its columns in the projection's output."""
        parts = self.split([torch.arange(width)[None]], heads, heads, rest="one")
        return {name: tuple(part.flatten().tolist()) for name, part in zip("qkv", parts, strict=True)}


@public
@dataclass(frozen=True)
class Separate:
    """q, k and v from three projections, head by head."""

    q: str
    k: str
    v: str

    def __str__(self) -> str:
        return ", ".join(self.paths)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the projections within the attention module."""
        return (self.q, self.k, self.v)

    def split(self, outputs: Sequence[Tensor], heads: int, kv_heads: int, rest: str) -> tuple[Tensor, ...]:
        """q, k, v with the axes `rest head d_head`, from three outputs with axes `rest features`."""
        return _by_heads(outputs, heads, kv_heads, rest)

    def taken(self, path: str, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        """The ones among q, k and v that a projection makes, each with its columns: all of them."""
        return {name: tuple(range(width)) for name, own in zip("qkv", self.paths, strict=True) if own == path}


@public
@dataclass(frozen=True)
class Columns:
    """q, k and v as columns of projections, in any order: fused, grouped, or with other columns between them."""

    of: tuple[str, str, str]
    """The projections that make q, k and v; often all three are the same."""
    columns: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """The columns of q, k and v in these projections, head by head."""

    def __str__(self) -> str:
        return f"columns of {', '.join(self.paths)}"

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the projections within the attention module."""
        return tuple(dict.fromkeys(self.of))

    def taken(self, path: str, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        """The ones among q, k and v that a projection makes, each with its columns."""
        return {name: columns for name, of, columns in zip("qkv", self.of, self.columns, strict=True) if of == path}

    def split(self, outputs: Sequence[Tensor], heads: int, kv_heads: int, rest: str) -> tuple[Tensor, ...]:
        """q, k, v with the axes `rest head d_head`, from the projections' outputs with axes `rest features`."""
        by_path = dict(zip(self.paths, outputs, strict=True))
        parts = [select(by_path[path], columns) for path, columns in zip(self.of, self.columns, strict=True)]
        return _by_heads(parts, heads, kv_heads, rest)


@dataclass(frozen=True)
class Latent:
    """The latent of queries, or of keys and values: N((attn_in W + b)[columns])."""

    projection: str  # the path of the module with W and b, within the attention module
    columns: tuple[int, ...]
    norm: str  # the path of the module N


@dataclass(frozen=True)
class Expanded:
    """q, k and v as columns of projections of latents (multi-head latent attention, DeepSeek-V2).

    v are columns of the output of `kv`, a projection of the latent. k are columns of that output followed by the output
    of the projection that makes the latent, which contains the part of the keys that all heads share.
    """

    q: str
    kv: str
    columns: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # the columns of q, k and v, head by head
    latent: Latent
    query_latent: Latent | None = None  # the latent of the queries; None if the projection `q` reads `attn_in`

    def __str__(self) -> str:
        queries = "" if self.query_latent is None else f" of {self.query_latent.norm}"
        return f"columns of {self.q}{queries}, {self.kv} of {self.latent.norm}, {self.latent.projection}"

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.q, self.kv, self.latent.projection)

    def split(self, outputs: Sequence[Tensor], heads: int, kv_heads: int, rest: str) -> tuple[Tensor, ...]:
        """W_Q, W_K and W_V with the axes `rest head d_head`, from the projections' matrices."""
        q, kv, shared = outputs
        both = torch.cat((pad(kv, (0, shared.shape[1])), pad(shared, (kv.shape[1], 0))))
        parts = [select(held, own) for held, own in zip((q, both, kv), self.columns, strict=True)]
        return _by_heads(parts, heads, kv_heads, rest)

    def keys(self, kv: Float[Tensor, "*rest d_kv"], shared: Float[Tensor, "*rest d_shared"]) -> Tensor:
        """k `[... (head d_head)]`, from the outputs of the two projections."""
        return select(torch.cat((kv, shared), dim=-1), self.columns[1])


def select(value: Float[Tensor, "*rest features"], columns: tuple[int, ...]) -> Float[Tensor, "*rest chosen"]:
    """Some columns of a tensor; a view if they are adjacent."""
    if columns == tuple(range(columns[0], columns[0] + len(columns))):
        return value[..., columns[0] : columns[0] + len(columns)]
    return value[..., list(columns)]


def _by_heads(parts: Sequence[Tensor], heads: int, kv_heads: int, rest: str) -> tuple[Tensor, ...]:
    pattern, counts = f"{rest} (head d_head) -> {rest} head d_head", (heads, kv_heads, kv_heads)
    return tuple(rearrange(part, pattern, head=count) for part, count in zip(parts, counts, strict=True))


Layout: TypeAlias = Columns | Fused | Separate  # how q, k and v are laid out in the projections


def attention_weights(
    projections: Sequence[nn.Module],
    layout: Layout | Expanded,
    out: nn.Module,
    heads: int,
    kv_heads: int,
    matrix: Callable[[nn.Module], Tensor],
) -> AttentionWeights:
    """The weights of one layer, from its projections; `matrix` returns the matrix of each."""
    matrices = [matrix(projection) for projection in projections]
    biases = [bias_of(projection) for projection in projections]
    try:
        W_Q, W_K, W_V = (
            rearrange(W, "d_in head d -> head d_in d") for W in layout.split(matrices, heads, kv_heads, rest="d_in")
        )
        W_O = rearrange(matrix(out), "(head d_head) d_model -> head d_head d_model", head=heads)
    except (EinopsError, IndexError) as error:
        shapes = ", ".join(str(tuple(matrix(part).shape)) for part in (*projections, out))
        raise WeightsError(
            f"the config's {heads} heads ({kv_heads} of keys and values) do not fit projections of the shapes "
            f"{shapes}; the config and the weights do not belong together."
        ) from error
    b_Q, b_K, b_V = _split_biases(matrices, biases, layout, heads, kv_heads)
    return AttentionWeights(W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, bias_of(out))


def _split_biases(
    matrices: Sequence[Tensor], biases: Sequence[Tensor | None], layout: Layout | Expanded, heads: int, kv_heads: int
) -> Iterator[Tensor | None]:
    rows = [
        W.new_zeros(1, W.shape[1]) if bias is None else bias[None] for W, bias in zip(matrices, biases, strict=True)
    ]
    there = [torch.full((1, W.shape[1]), float(bias is not None)) for W, bias in zip(matrices, biases, strict=True)]
    by_name, known = (layout.split(parts, heads, kv_heads, rest="one") for parts in (rows, there))
    for part, held in zip(by_name, known, strict=True):
        # Keys from a latent have a row for each of their projections, which is 0 in the columns of the other.
        yield None if not held.any() else part[0] if len(part) == 1 else part.sum(dim=0)


def matrix_of(module: nn.Module) -> Float[Tensor, "d_in d_out"]:
    """The matrix W of a projection whose output is x W + b; packed weights are unpacked in each call."""
    if is_packed_projection(module):
        return at_home(module, unpacked(module))
    weight = _as_used(module, "weight")
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or is_packed(weight):
        raise UnsupportedModelError(
            f"a projection of kind {type(module).__name__} has no plain matrix of floating-point weights, and no "
            "in_features and out_features by which packed ones are read; load the model without quantised or adapted "
            "layers, or merge them."
        )
    return weight if isinstance(module, Conv1D) else weight.T


def sized_matrix(module: nn.Module) -> Float[Tensor, "d_in d_out"]:
    """The matrix of a projection or, where its weights are packed, a tensor of its shape."""
    return outline_of(module) if is_packed_projection(module) else matrix_of(module)


def has_matrix(module: nn.Module) -> bool:
    """Whether a module is a projection that multiplies by a matrix."""
    try:
        return sized_matrix(module).ndim == 2 and not isinstance(module, nn.Embedding)
    except UnsupportedModelError:
        return False


def bias_of(module: nn.Module) -> Float[Tensor, " d_out"] | None:
    bias = _as_used(module, "bias")
    return bias if isinstance(bias, torch.Tensor) else None


def _as_used(module: nn.Module, name: str) -> Tensor | None:
    """A weight as the next pass will use it; attnmech's projections that join several of the model's compute theirs."""
    made: Callable[[str], Tensor | None] | None = getattr(module, "as_used", None)
    return as_stored(module, name) if made is None else made(name)


def at_home(module: nn.Module, value: Tensor) -> Tensor:
    """A weight of a module on the device of the model's values."""
    return value.to(getattr(module, HOME, value.device))


def as_stored(module: nn.Module, name: str) -> Tensor | None:
    """A module's own weight; under `torch.nn.utils.prune`, the original times its mask."""
    original, mask = (getattr(module, f"{name}_{part}", None) for part in ("orig", "mask"))
    if isinstance(original, torch.Tensor) and isinstance(mask, torch.Tensor):
        # The tensor under the plain name is left over from the last pass: each pass computes a new one.
        return at_home(module, original * mask.to(original))
    value = getattr(module, name, None)
    return at_home(module, value) if isinstance(value, torch.Tensor) else None


def check_real(model: nn.Module) -> None:
    """Raises `WeightsError` naming the first parameter of complex numbers, or of integers that nothing unpacks."""
    for path, module in model.named_modules():
        unpacks = is_packed_projection(module) and type(module) is not nn.Linear
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.is_complex() or not (unpacks or parameter.is_floating_point()):
                raise WeightsError(
                    f"weights must be floating-point numbers; {name} is {str(parameter.dtype).removeprefix('torch.')}. "
                    "Load the model in its own precision, without quantisation."
                )


def check_finite(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises `WeightsError` naming the first parameter that holds NaN or infinity."""
    for name, parameter in parameters:
        if is_packed(parameter):
            continue
        # A sum needs no second array, and is finite unless an entry is not (or the sum overflows).
        if not torch.isfinite(parameter.sum()) and not torch.isfinite(parameter).all():
            bad = int((~torch.isfinite(parameter)).sum())
            raise WeightsError(
                f"weights must be finite; {name} holds NaN or infinity in {bad} of {parameter.numel()} entries. "
                "Load an intact checkpoint."
            )
