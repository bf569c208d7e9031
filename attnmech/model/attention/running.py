"""The running certificate: in every pass, the output of each layer is compared with what it was computed from.

Both sides of an identity, such as attn_raw = Σ_h z_h W_O^h + b_O, are multiplied by a few fixed random vectors r
and compared token by token (R. Freivalds 1977): Σ_h z_h · (W_O^h r) + b_O · r takes O(d_model) operations per token. If
the two sides differ by e, their products differ by e·r, which is of the size of ‖e‖. `identities` lists the identities.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ...batch import Batch
from ...points import full_name
from ..parts.weights import bias_of, matrix_of
from .identities import POINTS, STATEMENTS, Equations, Kind, StackTraits, Unbalanced, equations

_DIRECTIONS: Final = 2
_SEED: Final = 7


@dataclass(frozen=True, eq=False)
class Written:
    """W_O and b_O of a layer, multiplied by the directions."""

    weight: Float[Tensor, "layer direction features"]
    bias: Float[Tensor, "layer direction 1"]
    size: Float[Tensor, "layer 1"]  # ‖W_O‖, the root of the sum of squares
    source: tuple[tuple[int, int], ...]  # the address and version of each parameter that the products come from


class Directions:
    """The random vectors of one model, and the weights multiplied by them."""

    def __init__(self, d_model: int, device: torch.device, *, packed: bool = False) -> None:
        self.d_model = d_model
        self.packed = packed  # whether the model's projections have packed weights
        generator = torch.Generator().manual_seed(_SEED)
        self._vectors = torch.randn(_DIRECTIONS, d_model, generator=generator, dtype=torch.float64)
        self._device = device
        self._by_dtype: dict[torch.dtype, Tensor] = {}
        self._written: dict[tuple[str, int], Written] = {}
        self.changing: set[str] = set()  # kinds that this model changes in place; multiplied as soon as observed

    def of(self, dtype: torch.dtype) -> Float[Tensor, "direction d_model"]:
        """The random vectors, in a given precision."""
        if dtype not in self._by_dtype:
            self._by_dtype[dtype] = self._vectors.to(dtype).to(self._device)
        return self._by_dtype[dtype]

    def written(self, key: tuple[str, int], out: nn.Module) -> Written:
        """W_O r and b_O · r of a layer for each vector r, cached until the parameters change."""
        source = tuple((part.data_ptr(), version_of(part)) for part in out.parameters(recurse=False))
        known = self._written.get(key)
        if known is None or known.source != source:
            known = self._written[key] = self._multiplied(out, source)
        return known

    def together(self, written: tuple[Written, ...]) -> Written:
        """The products of several layers, concatenated."""
        if len(written) == 1:
            return written[0]
        parts = zip(*((layer.weight, layer.bias, layer.size) for layer in written), strict=True)
        weight, bias, size = (torch.cat(of_layers) for of_layers in parts)
        return Written(weight, bias, size, ())

    def forget_changed(self, key: tuple[str, int], out: nn.Module) -> bool:
        """Whether the weights changed although torch counts no change; if so, empties the cache."""
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
    """The number of times a tensor was changed in place; 0 if torch does not count them."""
    return 0 if value.is_inference() else value._version


@dataclass(frozen=True)
class _Holding:
    """The sizes up to which tensors are held, to be multiplied together."""

    small: int  # a tensor is held up to this many bytes: multiplying it alone would be mostly overhead
    held: int  # all held tensors together have at most this many bytes

    @classmethod
    def on(cls, device: torch.device) -> "_Holding":
        """The sizes for a device; on a GPU, a launch takes as long as copying a few MiB."""
        return cls(2**16, 2**22) if device.type == "cpu" else cls(2**22, 2**26)


_KEPT: Final = 64  # the number of quantities that one array holds

_ROUNDINGS: Final = 8.0  # in roundings of every term; the product e·r of one rounding seldom exceeds three
_PRODUCT_ROUNDINGS: Final = 16.0  # the tolerance of the products z W_O, whose rounding errors add up along d_head
_ROW_TOLERANCE: Final = 1e-4
_VALUES: Final = "values"  # the name for v in the set of kinds that a model changes in place

Key: TypeAlias = tuple[Kind, str, int]  # the kind, stack and layer of a quantity


class _Kept:
    """Stores the quantities of a pass in a few arrays; one for each would fragment the memory between layers."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._free = 0

    def add(self, quantities: Float[Tensor, "*directions quantity token"]) -> None:
        count = quantities.shape[-2]
        if count > self._free:
            self._cut()
            self._free = max(_KEPT, count)
            self._parts.append(quantities.new_empty(*quantities.shape[:-2], self._free, quantities.shape[-1]))
        last = self._parts[-1]
        begin = last.shape[-2] - self._free
        last[..., begin : begin + count, :] = quantities
        self._free -= count

    def all(self) -> list[Tensor]:
        self._cut()
        return self._parts

    def _cut(self) -> None:
        if self._free:
            self._parts[-1] = self._parts[-1][..., : -self._free, :]
            self._free = 0


@dataclass(frozen=True)
class _Check:
    """Identities tested on the device; the CPU waits once in a pass, to read the results of all sets."""

    holds: Bool[Tensor, ""]
    first_failure: Callable[[], Unbalanced | None]  # returns the first identity that fails at a real token


@dataclass
class _Group:
    """Values with the same number of tokens: the quantities of the stream, then z of each layer."""

    names: dict[Key, int] = field(default_factory=dict)  # the index of each quantity among the products of the stream
    count: int = 0
    held: list[tuple[Key, Tensor, int]] = field(default_factory=list)
    """Quantities not yet multiplied, in the order of their indices, each with its version."""
    products: _Kept = field(default_factory=_Kept)  # `[direction quantity token]`, of the stream
    sizes: _Kept = field(default_factory=_Kept)  # `[quantity token]`
    z_keys: list[tuple[str, int]] = field(default_factory=list)
    z_products: _Kept = field(default_factory=_Kept)
    z_sizes: _Kept = field(default_factory=_Kept)


class Balance:
    """Records the quantities of one pass, and compares them at its end."""

    def __init__(
        self,
        directions: Directions,
        columns: Sequence[StackTraits],
        dtype: torch.dtype,
        refused: Mapping[str, str],
        between: Collection[int] = (),
    ) -> None:
        self._directions, self._columns, self._dtype, self._between = directions, tuple(columns), dtype, between
        self._wide = torch.promote_types(dtype, torch.float32)
        self._refused = frozenset(refused)
        self._bytes = 0  # the number of bytes held so far
        self._last: tuple[Tensor, int, _Group, int] | None = None
        """The last quantity observed, with its version and its index; the next block's input may be the same tensor."""
        self._z: dict[tuple[str, int], Tensor] = {}
        self._held_z: list[tuple[tuple[str, int], Tensor, Written]] = []
        self._groups: dict[int, _Group] = {}
        self._held_rows: list[tuple[tuple[str, int, int], Tensor, Tensor | None, int]] = []
        self._rows: dict[tuple[int, ...], list[tuple[str, int, int, Tensor]]] = {}
        self._made: dict[tuple[str, int], tuple[Tensor, int]] = {}
        self._values: dict[tuple[int, ...], list[tuple[str, int, Tensor, Tensor]]] = {}
        self.skipped: list[str] = []  # the checks that could not be made, and why

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
        self._multiply_or_hold(value, partial(self._multiply, group), at_once=kind in self._directions.changing)

    def _group(self, value: Tensor) -> _Group:
        tokens = value.shape[0] * value.shape[1]
        group = self._groups.get(tokens)
        if group is None:
            group = self._groups[tokens] = _Group()
        return group

    def _multiply_or_hold(self, value: Tensor, multiply: Callable[[], None], *, at_once: bool = False) -> None:
        holding = _Holding.on(value.device)
        if at_once or value.nbytes > holding.small:
            # While it is in the cache; holding it would keep the next layer from reusing its memory.
            multiply()
            return
        self._bytes += value.nbytes
        if self._bytes > holding.held:
            self._multiply_all()

    def hold_z(self, stack: str, layer: int, z: Tensor) -> None:
        """Records z `[batch position head d_head]`, which W_O is about to multiply."""
        self._z[stack, layer] = z

    def hold_written(self, stack: str, layer: int, out: nn.Module, raw: Tensor) -> None:
        z = self._z.pop((stack, layer), None)
        if z is not None:
            self._held_z.append(((stack, layer), z, self._directions.written((stack, layer), out)))
            self._multiply_or_hold(z, self._multiply_z)
        self.hold("raw", stack, layer, raw)

    def hold_rows(
        self,
        stack: str,
        layer: int,
        first: int,
        pattern: Float[Tensor, "batch head row key"],
        at_sink: Float[Tensor, "batch head row"] | None,
    ) -> None:
        """Records a block of rows of the pattern; each row must sum to 1, a sink's mass included."""
        self._held_rows.append(((stack, layer, first), pattern, at_sink, version_of(pattern)))
        self._multiply_or_hold(pattern, self._add_rows)

    def hold_made(self, stack: str, layer: int, v: Float[Tensor, "batch key kv_head d_value"]) -> None:
        """Records v as the projection made it, after edits, until `hold_values` compares it."""
        kept = v.detach().clone() if _VALUES in self._directions.changing else v.detach()
        self._made[stack, layer] = kept, version_of(kept)

    @torch.no_grad()
    def hold_values(
        self, stack: str, layer: int, v: Float[Tensor, "batch head key d_value"], rows: int | None = None
    ) -> None:
        """Compares v as attention uses it (tokens first, then further keys) with v from the projection.

        With `rows`, only those of the last tokens, which follow cached ones.
        """
        made, version = self._made.pop((stack, layer), (None, 0))
        if made is None or any(full_name(stack, point) in self._refused for point in POINTS["values"]):
            return
        if version_of(made) != version:
            self._directions.changing.add(_VALUES)
            self.skip("values", stack, layer, "the model changes v in place")
            return
        last = slice(-rows if rows else None, None)
        projected, weighted = made.transpose(1, 2)[:, :, last], v.detach()[:, :, last][:, :, : made.shape[1]]
        if weighted.shape[1] > projected.shape[1]:
            projected = projected.repeat_interleave(weighted.shape[1] // projected.shape[1], dim=1)
        if _same_memory(projected, weighted):
            return
        if weighted.device.type == "cpu" and projected.dtype == weighted.dtype and torch.equal(projected, weighted):
            return
        wide = torch.promote_types(self._wide, weighted.dtype)
        apart, size = (
            torch.linalg.vector_norm(rearrange(value.to(wide), "batch head key d -> batch key (head d)"), dim=-1)
            for value in (projected.to(wide) - weighted.to(wide), projected)
        )
        self._values.setdefault(tuple(apart.shape), []).append((stack, layer, apart, size))

    def skip(self, identity: str, stack: str, layer: int, why: str) -> None:
        where = f"layer {layer}" + (f" of the {stack} stack" if stack else "")
        self.skipped.append(f"{STATEMENTS[identity]}, {where}: {why}")

    @torch.no_grad()
    def _multiply_all(self) -> None:
        """Multiplies the held tensors by the random vectors, and frees them."""
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
                self.skipped.append(f"what is computed from {key[0]} in layer {key[2]}: the model changes it in place")
                changed = group.names[key]
                group.names = {name: place for name, place in group.names.items() if place != changed}
        group.held = []
        flat = self._together(values).flatten(0, 1)
        products = self._directions.of(self._wide) @ flat.T
        group.products.add(products.view(len(products), len(values), -1))
        group.sizes.add(torch.linalg.vector_norm(flat, dim=-1).view(len(values), -1))

    @torch.no_grad()
    def _multiply_z(self) -> None:
        by_shape: dict[tuple[int, ...], list[tuple[tuple[str, int], Tensor, Written]]] = {}
        for entry in self._held_z:
            by_shape.setdefault(tuple(entry[1].shape), []).append(entry)
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
            for (key, _, _), mass, at_sink in zip(held, sums, sinks, strict=True):
                whole = mass if at_sink is None else mass + at_sink
                # Keeping the sums of every layer would fragment the memory between large arrays.
                if whole.device.type != "cpu" or not bool(_sum_to_one(whole).all()):
                    self._rows.setdefault(shape[:3], []).append((*key, whole))
        self._held_rows = []

    def _together(self, values: Sequence[Tensor]) -> Float[Tensor, "quantity token features"]:
        """Stacks tensors `[batch position ...]` of the same shape, in the precision of the comparison."""
        if len({value.dtype for value in values}) > 1:
            values = [value.to(self._wide) for value in values]
        together = values[0] if len(values) == 1 else torch.stack(list(values))
        return together.to(self._wide).reshape(len(values), values[0].shape[0] * values[0].shape[1], -1)

    @torch.no_grad()
    def unbalanced(self, batch: Batch) -> Unbalanced | None:
        """The first identity, layer by layer, that does not hold; None if all hold."""
        self._multiply_all()
        checks = [*self._of_groups(batch), *self._of_rows(batch), *self._of_values(batch)]
        if not checks:
            return None
        device = checks[0].holds.device
        hold = torch.stack([check.holds.to(device) for check in checks]).tolist()
        failures = [check.first_failure() for check, holds in zip(checks, hold, strict=True) if not holds]
        return min(filter(None, failures), key=lambda failure: failure.layer, default=None)

    def _of_groups(self, batch: Batch) -> Iterator[_Check]:
        for group in self._groups.values():
            names, z_keys = tuple(group.names.items()), tuple(group.z_keys)
            tried = equations(names, group.count, z_keys, self._columns, self._refused)
            if not tried.identities:
                continue
            products = torch.cat([*group.products.all(), *group.z_products.all()], dim=1)
            device = products.device
            of_z = _PRODUCT_ROUNDINGS * _product_eps(self._dtype, device, packed=self._directions.packed)
            of_stream = _ROUNDINGS * torch.finfo(self._dtype).eps
            of_stream += _product_eps(self._wide, device) * self._directions.d_model**0.5 / 2
            signs, scaled = tried.on(device, self._wide, rounding=(of_stream, of_z))
            difference = (signs @ products).abs().amax(dim=0)
            sizes = torch.cat([*group.sizes.all(), *group.z_sizes.all()])
            # No comparison with NaN is true, so NaN fails every bound.
            within = difference <= scaled @ sizes
            for number, identity in enumerate(tried.identities if self._between else ()):
                within[number] |= self._open(identity, batch).flatten()
            yield _Check(within.all(), partial(self._first_failure, tried, signs, scaled, products, sizes, batch))

    def _first_failure(
        self, tried: Equations, signs: Tensor, scaled: Tensor, products: Tensor, sizes: Tensor, batch: Batch
    ) -> Unbalanced | None:
        """The first identity that does not hold; each is tested alone, since 0 · NaN of another layer would be NaN."""
        for number, (identity, stack, layer) in enumerate(tried.identities):
            used = signs[number].nonzero()[:, 0]
            difference = (signs[number, used] @ products[:, used]).abs().amax(dim=0)
            allowed = scaled[number, used] @ sizes[used]
            real = batch.queries(stack).mask & ~self._open((identity, stack, layer), batch)
            rows = (~(difference <= allowed).view(real.shape) & real).nonzero()
            if len(rows):
                text, position = rows[0].tolist()
                at = text * real.shape[1] + position
                return Unbalanced(identity, stack, layer, text, position, float(difference[at]), float(allowed[at]))
        return None

    def _open(self, identity: tuple[str, str, int], batch: Batch) -> Bool[Tensor, "batch position"]:
        """The tokens of pictures, where the model adds pictures to the stream between blocks."""
        tokens = batch.queries(identity[1])
        added = identity[0] == "chain" and identity[2] in self._between
        return tokens.is_sensed if added else torch.zeros_like(tokens.mask)

    def _of_rows(self, batch: Batch) -> Iterator[_Check]:
        for blocks in () if "pattern" in self._refused else self._rows.values():
            holds = _sum_to_one(torch.stack([sums for *_, sums in blocks])).all()
            yield _Check(holds, partial(self._first_row, blocks, batch))

    def _first_row(self, blocks: Sequence[tuple[str, int, int, Tensor]], batch: Batch) -> Unbalanced | None:
        for stack, layer, first, sums in blocks:
            rows = (~_sum_to_one(sums) & batch.queries(stack).mask[:, None, first : first + sums.shape[-1]]).nonzero()
            if len(rows):
                text, head, row = rows[0].tolist()
                difference = float((sums[text, head, row] - 1).abs())
                return Unbalanced("rows", stack, layer, text, first + row, difference, _ROW_TOLERANCE)
        return None

    def _of_values(self, batch: Batch) -> Iterator[_Check]:
        eps = torch.finfo(self._dtype).eps
        for layers in self._values.values():
            apart, size = torch.stack([apart for *_, apart, _ in layers]), torch.stack([size for *_, size in layers])
            yield _Check((apart <= eps * size).all(), partial(self._first_value, layers, batch))

    def _first_value(self, layers: Sequence[tuple[str, int, Tensor, Tensor]], batch: Batch) -> Unbalanced | None:
        for stack, layer, apart, size in layers:
            allowed = torch.finfo(self._dtype).eps * size
            rows = (~(apart <= allowed) & batch.key_tokens(stack).mask).nonzero()
            if len(rows):
                text, key = rows[0].tolist()
                return Unbalanced("values", stack, layer, text, key, float(apart[text, key]), float(allowed[text, key]))
        return None


def _sum_to_one(sums: Float[Tensor, "*places"]) -> Bool[Tensor, "*places"]:
    return (sums - 1).abs() <= _ROW_TOLERANCE


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of the same memory, in the same order."""
    steps = zip(one.shape, one.stride(), other.stride(), strict=False)
    same = one.dtype == other.dtype and one.shape == other.shape and one.data_ptr() == other.data_ptr()
    return same and all(length == 1 or step == of_other for length, step, of_other in steps)


def _product_eps(dtype: torch.dtype, device: torch.device, *, packed: bool = False) -> float:
    """The rounding of the sums in a matrix product, which torch may be set to compute in less than float32."""
    if dtype == torch.float32:
        chosen = {"high": 2.0**-11, "medium": 2.0**-8}
        return chosen.get(torch.get_float32_matmul_precision(), torch.finfo(dtype).eps)
    if dtype == torch.float64:
        return torch.finfo(dtype).eps
    # 16-bit products are summed in float32; a GPU and the kernels of packed weights may round partial sums.
    whole = device.type == "cpu" and not packed
    return torch.finfo(torch.float32).eps if whole else torch.finfo(dtype).eps / 16
