"""A running certificate: in every pass, what a layer outputs is compared with what it was computed from.

Both sides of an identity, such as attn_raw = Σ_h z_h W_O^h + b_O, are multiplied by a few fixed random vectors r
and compared token by token (R. Freivalds 1977): Σ_h z_h · (W_O^h r) + b_O · r takes O(d_model) operations per token,
and two sides that differ by e have products that differ by e·r, of the size of ‖e‖.

| identity | holds between |
|---|---|
| `heads` | attn_raw = Σ_h z_h W_O^h + b_O |
| `block` | resid_post = resid_pre + attn_out (+ mixer_out) + mlp_out; post-norm: resid_mid = resid_pre + attn_out |
| `mlp` | post-norm models: input of the last norm = N(resid_mid) + mlp_out |
| `chain` | resid_pre of a layer = resid_post of the one before |
| `rows` | Σ_j pattern_ij = 1, with a sink's mass |
| `values` | the v that attention weights = the v that the projection made, number by number |

They hold between values after hooks and interventions. An edit of `result` comes between the two sides of `heads`,
which is then skipped, and the run says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ...batch import Batch
from ...errors import ExactnessError
from ...points import full_name
from ..parts.weights import bias_of, matrix_of

Kind: TypeAlias = Literal[
    "pre_in", "pre", "raw", "out", "mid_in", "mid", "mid_normed", "mixer", "mlp", "end_in", "post_in", "post"
]
"""A place where the stream, or what is added to it, is observed; those with "_in" come before edits there."""

_DIRECTIONS: Final = 2
_SEED: Final = 7
_HELD_BYTES: Final = 2**22
"""The most that is held before it is multiplied."""
_TOGETHER: Final = 8
"""For how many sets of layers the concatenated weights are cached."""
_SMALL_BYTES: Final = 2**16
"""Tensors up to this size are held and multiplied together, since an operation's overhead exceeds its work."""

_KEPT: Final = 64
"""How many quantities are kept in one array."""

_ROUNDINGS: Final = 8.0
"""How many roundings of every term the two sides may differ by; e·r of one rounding seldom exceeds three."""
_PRODUCT_ROUNDINGS: Final = 16.0
"""The same for the products z W_O, whose rounding errors add up along d_head."""
_ROW_TOLERANCE: Final = 1e-4
_VALUES: Final = "values"
"""What v is called among the kinds of tensors that a model changes in place."""

_POINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "heads": ("z", "attn_raw"),
    "block": ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"),
    "mlp": ("resid_mid", "mlp_out", "resid_post"),
    "chain": ("resid_pre", "resid_post"),
    "rows": ("pattern",),
    "values": ("v", "z"),
}
"""The points in each identity: if the certificate refuses one of them, the identity is not tried."""

STATEMENTS: Final = {
    "heads": "attn_raw = Σ_h z W_O + b_O",
    "block": "the stream after a block = the stream before + what attention and MLP add",
    "mlp": "input of the last norm = N(resid_mid) + mlp_out",
    "chain": "resid_pre = resid_post of the layer before",
    "rows": "a row of the pattern sums to 1",
    "values": "z = pattern v, of the v that the projection made",
}


@dataclass(frozen=True)
class StackTraits:
    """What the identities of a stack depend on."""

    label: str
    post_norm: bool
    has_mlp: bool
    interposed: str
    chained: bool
    """Whether a layer continues from where the previous layer ended."""
    has_mixer: bool = False
    """Whether a mixer writes into the stream beside attention."""


@dataclass(frozen=True, eq=False)
class Written:
    """W_O and b_O of a layer, multiplied by the directions."""

    weight: Float[Tensor, "layer direction features"]
    bias: Float[Tensor, "layer direction 1"]
    size: Float[Tensor, "layer 1"]
    """‖W_O‖, the root of the sum of squares."""
    source: tuple[tuple[int, int], ...]
    """Address and version of the parameters that it was computed from."""


_PRODUCTS: Final = ("weight", "bias", "size")


class Directions:
    """The random vectors of one model, and the weights multiplied by them."""

    def __init__(self, d_model: int, device: torch.device) -> None:
        self.d_model = d_model
        generator = torch.Generator().manual_seed(_SEED)
        self._vectors = torch.randn(_DIRECTIONS, d_model, generator=generator, dtype=torch.float64).to(device)
        self._by_dtype: dict[torch.dtype, Tensor] = {}
        self._written: dict[tuple[str, int], Written] = {}
        self._together: dict[tuple[Written, ...], Written] = {}
        self.changing: set[str] = set()
        """The kinds of tensors that this model changes in place, which are therefore multiplied immediately."""

    def of(self, dtype: torch.dtype) -> Float[Tensor, "direction d_model"]:
        """The vectors in a precision."""
        if dtype not in self._by_dtype:
            self._by_dtype[dtype] = self._vectors.to(dtype)
        return self._by_dtype[dtype]

    def written(self, key: tuple[str, int], out: nn.Module) -> Written:
        """W_O r and b_O r of a layer, cached until the parameters change."""
        source = tuple((part.data_ptr(), version_of(part)) for part in out.parameters(recurse=False))
        known = self._written.get(key)
        if known is None or known.source != source:
            known = self._written[key] = self._multiplied(out, source)
        return known

    def together(self, written: tuple[Written, ...]) -> Written:
        """The same for several layers."""
        if len(written) == 1:
            return written[0]
        if written not in self._together:
            weight, bias, size = (torch.cat([getattr(each, name) for each in written]) for name in _PRODUCTS)
            if len(self._together) >= _TOGETHER:
                self._together.clear()
            self._together[written] = Written(weight, bias, size, ())
        return self._together[written]

    def forget_changed(self, key: tuple[str, int], out: nn.Module) -> bool:
        """Whether weights were changed in a way that leaves no trace; if so, the cache is emptied."""
        known = self._written.get(key)
        fresh = self._multiplied(out, ())
        if known is None or (torch.equal(known.weight, fresh.weight) and torch.equal(known.bias, fresh.bias)):
            return False
        self._written.clear()
        return True

    def _multiplied(self, out: nn.Module, source: tuple[tuple[int, int], ...]) -> Written:
        matrix, bias = matrix_of(out).detach(), bias_of(out)
        wide = torch.promote_types(matrix.dtype, torch.float32)
        r, matrix = self.of(wide), matrix.to(wide)
        by_bias = r.new_zeros(len(r)) if bias is None else r @ bias.detach().to(wide)
        return Written(
            (r @ matrix.T)[None], by_bias[None, :, None], torch.linalg.vector_norm(matrix)[None, None], source
        )


def version_of(value: Tensor) -> int:
    """How often a tensor was changed in place, where torch counts it."""
    return 0 if value.is_inference() else value._version


Key: TypeAlias = tuple[Kind, str, int]
"""What a tensor is, of which stack and layer."""


@dataclass
class _Group:
    """Values with the same number of tokens: the quantities of the stream, then z of each layer."""

    names: dict[Key, int] = field(default_factory=dict)
    """The index of each quantity among the products of the stream."""
    count: int = 0
    held: list[tuple[Key, Tensor, int]] = field(default_factory=list)
    """Quantities still to be multiplied, in the order of their indices, each with its version."""
    products: "_Kept" = field(default_factory=lambda: _Kept())
    """`[direction quantity token]`, of the stream."""
    sizes: "_Kept" = field(default_factory=lambda: _Kept())
    """`[quantity token]`."""
    z_keys: list[tuple[str, int]] = field(default_factory=list)
    z_products: "_Kept" = field(default_factory=lambda: _Kept())
    z_sizes: "_Kept" = field(default_factory=lambda: _Kept())


class _Kept:
    """What is kept of the quantities of a pass, in a few arrays.

    One array for each quantity would lie between the large arrays of the layers, whose memory could then not be used
    again whole: a pass would take several times as much.
    """

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._free = 0

    def add(self, found: Float[Tensor, "*directions quantity token"]) -> None:
        """Appends some quantities."""
        count = found.shape[-2]
        if count > self._free:
            self._cut()
            self._free = max(_KEPT, count)
            self._parts.append(found.new_empty(*found.shape[:-2], self._free, found.shape[-1]))
        last = self._parts[-1]
        begin = last.shape[-2] - self._free
        last[..., begin : begin + count, :] = found
        self._free -= count

    def all(self) -> list[Tensor]:
        """Every quantity so far, in order."""
        self._cut()
        return self._parts

    def _cut(self) -> None:
        if self._free:
            self._parts[-1] = self._parts[-1][..., : -self._free, :]
            self._free = 0


class Balance:
    """What one pass records for comparison."""

    def __init__(
        self, directions: Directions, columns: Sequence[StackTraits], dtype: torch.dtype, refused: Mapping[str, str]
    ) -> None:
        self._directions, self._columns, self._dtype = directions, tuple(columns), dtype
        self._wide = torch.promote_types(dtype, torch.float32)
        self._refused = frozenset(refused)
        self._bytes = 0
        """How much is held."""
        self._last: tuple[Tensor, int, _Group, int] | None = None
        """The last quantity observed, with its version and its index: the next block receives it."""
        self._z: dict[tuple[str, int], Tensor] = {}
        self._held_z: list[tuple[tuple[str, int], Tensor, Written]] = []
        self._groups: dict[int, _Group] = {}
        self._held_rows: list[tuple[tuple[str, int, int], Tensor, Tensor | None, int]] = []
        self._rows: dict[tuple[int, ...], list[tuple[str, int, int, Tensor]]] = {}
        self._made: dict[tuple[str, int], tuple[Tensor, int]] = {}
        self._values: list[tuple[str, int, Tensor, Tensor]] = []
        self.skipped: list[str] = []
        """What could not be checked, and why."""

    def hold(self, kind: Kind, stack: str, layer: int, value: Tensor) -> None:
        """Records a quantity `[batch position d_model]`."""
        version, last = version_of(value), self._last
        if last is not None and last[0] is value and last[1] == version:
            last[2].names[kind, stack, layer] = last[3]
            return
        group = self._group(value)
        place, group.count = group.count, group.count + 1
        group.names[kind, stack, layer] = place
        group.held.append(((kind, stack, layer), value, version))
        self._last = value, version, group, place
        if value.nbytes > _SMALL_BYTES or kind in self._directions.changing:
            # Immediately, while it is in the cache; holding it would keep the next layer from reusing its memory.
            self._multiply(group)
        else:
            self._count(value)

    def _group(self, value: Tensor) -> _Group:
        tokens = value.shape[0] * value.shape[1]
        group = self._groups.get(tokens)
        if group is None:
            group = self._groups[tokens] = _Group()
        return group

    def _count(self, value: Tensor) -> None:
        self._bytes += value.nbytes
        if self._bytes > _HELD_BYTES:
            self._multiply_all()

    def hold_z(self, stack: str, layer: int, z: Tensor) -> None:
        """Records z `[batch position head d_head]`, which W_O is about to multiply."""
        self._z[stack, layer] = z

    def hold_written(self, stack: str, layer: int, out: nn.Module, raw: Tensor) -> None:
        """Records what W_O made of the layer's z."""
        z = self._z.pop((stack, layer), None)
        if z is not None:
            self._held_z.append(((stack, layer), z, self._directions.written((stack, layer), out)))
            if z.nbytes > _SMALL_BYTES:
                self._multiply_z()
            else:
                self._count(z)
        self.hold("raw", stack, layer, raw)

    def hold_rows(
        self,
        stack: str,
        layer: int,
        first: int,
        pattern: Float[Tensor, "batch head row key"],
        at_sink: Float[Tensor, "batch head row"] | None,
    ) -> None:
        """Records a block of rows of the pattern, with a sink's mass: their sums must be 1."""
        self._held_rows.append(((stack, layer, first), pattern, at_sink, version_of(pattern)))
        if pattern.nbytes > _SMALL_BYTES:
            self._add_rows()
        else:
            self._count(pattern)

    def hold_made(self, stack: str, layer: int, v: Float[Tensor, "batch key kv_head d_value"]) -> None:
        """Records v as the projection made it, after edits, until attention is given it."""
        kept = v.detach().clone() if _VALUES in self._directions.changing else v.detach()
        self._made[stack, layer] = kept, version_of(kept)

    @torch.no_grad()
    def hold_values(self, stack: str, layer: int, v: Float[Tensor, "batch head key d_value"]) -> None:
        """Compares v as attention is given it, whose first keys are the tokens', with what the projection made."""
        made, version = self._made.pop((stack, layer), (None, 0))
        if made is None or any(full_name(stack, point) in self._refused for point in _POINTS["values"]):
            return
        if version_of(made) != version:
            self._directions.changing.add(_VALUES)
            self.skip("values", stack, layer, "the model changes v in place")
            return
        wanted, given = made.transpose(1, 2), v.detach()[:, :, : made.shape[1]]
        if given.shape[1] > wanted.shape[1]:
            wanted = wanted.repeat_interleave(given.shape[1] // wanted.shape[1], dim=1)
        if given.device.type == "cpu" and wanted.dtype == given.dtype and torch.equal(wanted, given):
            return
        wide = torch.promote_types(self._wide, given.dtype)
        apart, size = (
            torch.linalg.vector_norm(rearrange(value.to(wide), "batch head key d -> batch key (head d)"), dim=-1)
            for value in (wanted.to(wide) - given.to(wide), wanted)
        )
        self._values.append((stack, layer, apart, size))

    def skip(self, identity: str, stack: str, layer: int, why: str) -> None:
        """Records that an identity is not tried in a layer."""
        where = f"layer {layer}" + (f" of the {stack} stack" if stack else "")
        self.skipped.append(f"{STATEMENTS[identity]}, {where}: {why}")

    @torch.no_grad()
    def _multiply_all(self) -> None:
        """Multiplies what is held by the directions, and frees it."""
        for group in self._groups.values():
            if group.held:
                self._multiply(group)
        self._multiply_z()
        self._add_rows()
        self._bytes = 0

    @torch.no_grad()
    def _multiply(self, group: _Group) -> None:
        values = [value for _, value, _ in group.held]
        for key, value, version in group.held:
            if version_of(value) != version:
                self._directions.changing.add(key[0])
                self.skipped.append(f"what is made of {key[0]} in layer {key[2]}: the model changes it in place")
                gone = group.names[key]
                group.names = {name: place for name, place in group.names.items() if place != gone}
        group.held = []
        flat = self._together(values).flatten(0, 1)
        products = self._directions.of(self._wide) @ flat.T
        group.products.add(products.view(len(products), len(values), -1))
        group.sizes.add(torch.linalg.vector_norm(flat, dim=-1).view(len(values), -1))

    @torch.no_grad()
    def _multiply_z(self) -> None:
        by_shape: dict[tuple[int, ...], list[tuple[tuple[str, int], Tensor, Written]]] = {}
        for each in self._held_z:
            by_shape.setdefault(tuple(each[1].shape), []).append(each)
        for held in by_shape.values():
            group = self._group(held[0][1])
            together = self._together([z for _, z, _ in held])
            layers = self._directions.together(tuple(written for *_, written in held))
            products = torch.baddbmm(layers.bias, layers.weight, together.transpose(1, 2))
            group.z_products.add(products.transpose(0, 1))
            group.z_sizes.add(torch.linalg.vector_norm(together, dim=-1) * layers.size)
            group.z_keys += [key for key, _, _ in held]
        self._held_z = []

    @torch.no_grad()
    def _add_rows(self) -> None:
        by_shape: dict[tuple[int, ...], list[tuple[tuple[str, int, int], Tensor, Tensor | None]]] = {}
        for key, pattern, at_sink, version in self._held_rows:
            if version_of(pattern) == version:
                by_shape.setdefault(tuple(pattern.shape), []).append((key, pattern, at_sink))
        for shape, held in by_shape.items():
            patterns, sinks = [pattern for _, pattern, _ in held], [at_sink for *_, at_sink in held]
            sums = (patterns[0][None] if len(held) == 1 else torch.stack(patterns)).sum(dim=-1)
            for (key, _, _), one, at_sink in zip(held, sums, sinks, strict=True):
                whole = one if at_sink is None else one + at_sink
                # Sums that were kept would lie between large arrays, whose memory could not be used again whole.
                if whole.device.type != "cpu" or not _sum_to_one(whole):
                    self._rows.setdefault(shape[:3], []).append((*key, whole))
        self._held_rows = []

    def _together(self, values: Sequence[Tensor]) -> Float[Tensor, "quantity token features"]:
        """Tensors `[batch position ...]` of the same shape as one, in the precision of the comparison."""
        if len({value.dtype for value in values}) > 1:
            values = [value.to(self._wide) for value in values]
        together = values[0] if len(values) == 1 else torch.stack(list(values))
        return together.to(self._wide).reshape(len(values), values[0].shape[0] * values[0].shape[1], -1)

    @torch.no_grad()
    def unbalanced(self, batch: Batch) -> "Unbalanced | None":
        """The first identity that does not hold, layer by layer; None if all do."""
        self._multiply_all()
        found = [each for group in self._groups.values() if (each := self._in_group(group, batch)) is not None]
        if "pattern" not in self._refused and (row := self._in_rows(batch)) is not None:
            found.append(row)
        if (value := self._in_values(batch)) is not None:
            found.append(value)
        return min(found, key=lambda each: each.layer, default=None)

    def _in_group(self, group: _Group, batch: Batch) -> "Unbalanced | None":
        names, z_keys = tuple(group.names.items()), tuple(group.z_keys)
        found = _equations(names, group.count, z_keys, self._columns, self._refused)
        if not found.identities:
            return None
        products = _joined((*group.products.all(), *group.z_products.all()), dim=1)
        device = products.device
        each_z = _PRODUCT_ROUNDINGS * _product_eps(self._dtype, device)
        each_stream = _ROUNDINGS * torch.finfo(self._dtype).eps
        each_stream += _product_eps(self._wide, device) * self._directions.d_model**0.5 / 2
        signs, scaled = found.on(device, self._wide, (each_stream, each_z))
        difference = (signs @ products).abs().amax(dim=0)
        sizes = _joined((*group.sizes.all(), *group.z_sizes.all()))
        allowed = scaled @ sizes
        # NaN is not within any bound.
        if bool((difference <= allowed).all()):
            return None
        return self._told(found, signs, scaled, products, sizes, batch)

    def _told(
        self, found: "_Equations", signs: Tensor, scaled: Tensor, products: Tensor, sizes: Tensor, batch: Batch
    ) -> "Unbalanced | None":
        """The first identity that does not hold, each tested alone: 0 · NaN of another layer would be NaN."""
        for number, (identity, stack, layer) in enumerate(found.identities):
            used = signs[number].nonzero()[:, 0]
            difference = (signs[number, used] @ products[:, used]).abs().amax(dim=0)
            allowed = scaled[number, used] @ sizes[used]
            real = batch.queries(stack).mask
            rows = (~(difference <= allowed).view(real.shape) & real).nonzero()
            if len(rows):
                text, position = rows[0].tolist()
                at = text * real.shape[1] + position
                return Unbalanced(identity, stack, layer, text, position, float(difference[at]), float(allowed[at]))
        return None

    def _in_values(self, batch: Batch) -> "Unbalanced | None":
        for stack, layer, apart, size in self._values:
            allowed = torch.finfo(self._dtype).eps * size
            rows = (~(apart <= allowed) & batch.key_tokens(stack).mask).nonzero()
            if len(rows):
                text, key = rows[0].tolist()
                here = float(apart[text, key]), float(allowed[text, key])
                return Unbalanced("values", stack, layer, text, key, *here)
        return None

    def _in_rows(self, batch: Batch) -> "Unbalanced | None":
        for shape, blocks in self._rows.items():
            sums = torch.stack([each for *_, each in blocks])
            if _sum_to_one(sums):
                continue
            for stack, layer, first, one in blocks:
                real = batch.queries(stack).mask[:, None, first : first + shape[-1]]
                rows = (~((one - 1).abs() <= _ROW_TOLERANCE) & real).nonzero()
                if len(rows):
                    text, head, row = rows[0].tolist()
                    off = float((one[text, head, row] - 1).abs())
                    return Unbalanced("rows", stack, layer, text, first + row, off, _ROW_TOLERANCE)
        return None


def _sum_to_one(sums: Tensor) -> bool:
    return bool(((sums - 1).abs() <= _ROW_TOLERANCE).all())


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _product_eps(dtype: torch.dtype, device: torch.device) -> float:
    """The rounding of the sums in a matrix product, which torch may be set to compute in less than float32."""
    if dtype == torch.float32:
        chosen = {"high": 2.0**-11, "medium": 2.0**-8}
        return chosen.get(torch.get_float32_matmul_precision(), torch.finfo(dtype).eps)
    if dtype == torch.float64:
        return torch.finfo(dtype).eps
    # 16-bit products are summed in float32; a GPU may round partial sums.
    return torch.finfo(torch.float32).eps if device.type == "cpu" else torch.finfo(dtype).eps / 16


@dataclass(frozen=True)
class Unbalanced:
    """An identity that does not hold at a token."""

    identity: str
    stack: str
    layer: int
    text: int
    position: int
    difference: float
    allowed: float

    def error(self, batch: Batch) -> ExactnessError:
        """The error to raise."""
        where = f"layer {self.layer}" + (f" of the {self.stack} stack" if self.stack else "")
        tokens = (batch.key_tokens if self.identity == "values" else batch.queries)(self.stack).tokens
        token = tokens[self.text][self.position] if self.text < len(tokens) else ""
        text = f" of text {self.text}" if len(batch.ids) > 1 else ""
        place = f"{where}, token {self.position} ({token!r}){text}"
        if not self.difference < float("inf"):
            return ExactnessError(
                f"{place}: the model computes NaN or infinity there (found at: {STATEMENTS[self.identity]}). 16-bit "
                "streams may overflow: try dtype=torch.float32."
            )
        multiplied = "" if self.identity in ("rows", "values") else "multiplied by random vectors, "
        return ExactnessError(
            f"{place}: {STATEMENTS[self.identity]} does not hold; {multiplied}the two sides differ by "
            f"{self.difference:.2e}, of which rounding explains at most {self.allowed:.2e}. A module of this model was "
            "changed or hooked since it was loaded, or behaves differently on this text than on the certificate's. Run "
            "am.certify(model)."
        )


@dataclass(frozen=True)
class _Equations:
    """Identities as rows of signs over the quantities of a pass: what they sum to must be 0."""

    identities: tuple[tuple[str, str, int], ...]
    signs: Float[Tensor, "identity quantity"]
    streams: int
    """How many of the quantities belong to the stream; the others are z."""
    _placed: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def on(self, device: torch.device, dtype: torch.dtype, rounding: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """The signs, and their sizes times the rounding of each quantity of the stream and of each z."""
        key = device, dtype, rounding
        if key not in self._placed:
            signs = self.signs.to(device, dtype)
            each = [rounding[0]] * self.streams + [rounding[1]] * (signs.shape[1] - self.streams)
            self._placed[key] = signs, signs.abs() * signs.new_tensor(each)
        return self._placed[key]


@lru_cache(maxsize=64)
def _equations(
    names: tuple[tuple[tuple[Kind, str, int], int], ...],
    streams: int,
    z_keys: tuple[tuple[str, int], ...],
    columns: tuple[StackTraits, ...],
    refused: frozenset[str],
) -> _Equations:
    """The identities that can be tried between the recorded quantities."""
    place = dict(names)
    by_label = {column.label: column for column in columns}
    rows: list[tuple[tuple[str, str, int], dict[int, float]]] = []

    def add(identity: str, stack: str, layer: int, plus: Sequence[int | None], minus: Sequence[int | None]) -> None:
        if any(each is None for each in (*plus, *minus)):
            return
        if any(full_name(stack, point) in refused for point in _POINTS[identity]):
            return
        signs: dict[int, float] = {}
        for sign, places in ((1.0, plus), (-1.0, minus)):
            for each in places:
                assert each is not None
                signs[each] = signs.get(each, 0.0) + sign
        if any(signs.values()):
            rows.append(((identity, stack, layer), signs))

    layers = dict.fromkeys((stack, layer) for (_, stack, layer), _ in names)
    for stack, layer in layers:
        column = by_label[stack]

        def at(kind: Kind, stack: str = stack, layer: int = layer) -> int | None:
            return place.get((kind, stack, layer))

        if (stack, layer) in z_keys:
            add("heads", stack, layer, [streams + z_keys.index((stack, layer))], [at("raw")])
        written = at("raw") if at("out") is None else at("out")
        if column.post_norm:
            add("block", stack, layer, [at("pre"), written], [at("mid_in")])
            add("mlp", stack, layer, [at("mid_normed"), at("mlp")], [at("end_in")])
        else:
            added = [at("pre"), written]
            added += [at("mlp")] if column.has_mlp else []
            added += [at("mixer")] if column.has_mixer else []
            if column.interposed:
                other = at("out", column.interposed)
                added.append(at("raw", column.interposed) if other is None else other)
            edited = at("mid") is not None
            ended = at("post") if at("post_in") is None else at("post_in")
            add(
                "block", stack, layer, [*added, *([at("mid")] if edited else [])],
                [ended, *([at("mid_in")] if edited else [])],
            )  # fmt: skip
        before = place.get(("post", stack, layer - 1))
        entered = at("pre") if at("pre_in") is None else at("pre_in")
        if column.chained and before is not None and before != entered:
            add("chain", stack, layer, [before], [entered])
    signs = torch.zeros(len(rows), streams + len(z_keys))
    for number, (_, row) in enumerate(rows):
        for quantity, sign in row.items():
            signs[number, quantity] = sign
    return _Equations(tuple(identity for identity, _ in rows), signs, streams)
