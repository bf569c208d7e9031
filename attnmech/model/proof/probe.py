"""Compares attnmech's model, transformers and TransformerLens on a few probe tokens."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from ...basics.axes import spread
from ...batch import Batch
from ...errors import UnsupportedModelError
from ...maths.precision import (
    least_rounding,
    pass_tolerance,
    product_rounding,
    step_tolerance,
    steps_rounding,
    table_tolerance,
)
from ...points import POINTS, PointKey, split_stack
from ..attention.observed import RowBlock
from ..parts.certificate import Check, LensHook
from ..parts.modules import submodule
from ..run.hooked import HookedModel
from ..run.passes import call
from ..stack.stack import Stack
from ..structure.copies import copy_of, use_attention
from .texts import long_batch, probe_batch

_LONG_LAYERS: Final = 3
"""The long probe is checked in this many layers of a stack, the short probe in all."""
_EDITED_LAYERS: Final = 6
"""Edits are tried in at most this many layers, since each edit takes one copy of a text."""

FROM_STREAM: Final = tuple(name for name in POINTS if name != "embed")
"""The points computed from the stream: if the stream is wrong, so are all of these."""


@dataclass(frozen=True, eq=False)
class ProbeRun:
    """One pass of the probe through attnmech's model: the values at every point of some layers."""

    batch: Batch
    layers: Mapping[str, Sequence[int]]
    """The checked layers of each stack."""
    values: Mapping[PointKey, Tensor]
    blocks: Mapping[tuple[str, int], RowBlock]
    out_inputs: Mapping[tuple[str, int], Tensor]
    """The input of W_O, by stack and layer."""

    def real(self, stack: str) -> Bool[Tensor, "batch position"]:
        """True at the real query tokens."""
        return self.batch.queries(stack).mask

    def real_keys(self, stack: str) -> Bool[Tensor, "batch position"]:
        """True at the real key tokens."""
        return self.batch.keys(stack).mask


@dataclass(frozen=True)
class Compared:
    """One comparison: its place, and the largest difference in units of what rounding can explain there."""

    where: str
    excess: float


class Passes:
    """The passes of the probe through one model, shared by the statements about all of its stacks."""

    def __init__(self, model: HookedModel) -> None:
        self.model = model
        self.batch = probe_batch(model)
        self.runs: tuple[ProbeRun, ...] = ()
        """The runs on two short texts (one padded), checked in all layers, and on longer texts padded on either side,
        in some."""

    def run(self) -> None:
        """Runs attnmech's model on both probes, capturing every point; an error of a broken model is raised."""
        stacks = self.model.stacks.values()
        every = {stack.label: stack.layers for stack in stacks}
        runs = [self._run(self.batch, every)]
        long = long_batch(self.model)
        if long is not None:
            some = {
                stack.label: [stack.layers[place] for place in spread(stack.n_layers, _LONG_LAYERS)] for stack in stacks
            }
            runs.append(self._run(long, some))
        self.runs = tuple(runs)

    @cached_property
    def plain(self) -> Tensor:
        """The output of plain transformers for the short probe."""
        return plain_output(self.model, self.batch)

    @cached_property
    def eager(self) -> Any:
        """The output for the short probe in transformers' eager attention, which returns patterns; or the error that it
        raises.
        """
        return self.in_attention("eager", output_attentions=True)

    @cached_property
    def longer(self) -> Any:
        """The output of plain transformers, below the head, for the longer texts; or the error that it raises."""
        return _attempt(lambda: _hidden_states(self.model.plain.base_model, self.runs[-1].batch))

    def in_attention(self, implementation: str, **options: Any) -> Any:
        """The output for the short probe in one of transformers' implementations; or the error that it raises."""

        def run() -> Any:
            plain = use_attention(copy_of(self.model.original), implementation)
            return _hidden_states(plain, self.batch, **options)

        return _attempt(run)

    def _run(self, batch: Batch, layers: Mapping[str, Sequence[int]]) -> ProbeRun:
        model, points = self.model, self.model.points
        names = [name for name, point in points.items() if point.absent is None]
        chosen = {(label, layer) for label, of_stack in layers.items() for layer in of_stack}
        keys = [key for key in points.resolve(names) if key[1] is None or (split_stack(key[0])[0], key[1]) in chosen]
        blocks: dict[tuple[str, int], RowBlock] = {}
        out_inputs: dict[tuple[str, int], Tensor] = {}

        def keep(block: RowBlock) -> None:
            blocks.setdefault((block.stack, block.layer), block)

        with self._keeping_out_inputs(chosen, out_inputs):
            values = model.forward(batch, captures=keys, rows=[keep], layers=sorted(chosen))
        return ProbeRun(batch, layers, values, blocks, out_inputs)

    @contextmanager
    def _keeping_out_inputs(
        self, layers: Iterable[tuple[str, int]], inputs: dict[tuple[str, int], Tensor]
    ) -> Iterator[None]:
        """Stores the inputs of W_O, independently of attnmech's points."""

        def keeping(place: tuple[str, int]) -> Callable[..., None]:
            def keep(module: Any, args: Any) -> None:
                inputs[place] = args[0].detach().clone()

            return keep

        handles = []
        for label, layer in layers:
            stack = self.model.stacks[label]
            out = stack.module(layer, stack.architecture.out)
            handles.append(out.register_forward_pre_hook(keeping((label, layer))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Probe:
    """Compares values on one stack of a model, and turns comparisons into checks."""

    def __init__(self, passes: Passes, stack: Stack) -> None:
        self.passes, self.model = passes, passes.model
        self.stack, self.plan = stack, stack.architecture
        self.layers = list(stack.layers)
        self.edited = [self.layers[place] for place in spread(stack.n_layers, _EDITED_LAYERS)]
        dtype = self.model.dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.local, self.whole, self.tables = step_tolerance(dtype), pass_tolerance(dtype), table_tolerance(dtype)
        self.batch = passes.batch
        self.lens_hooks: tuple[LensHook, ...] = ()

    @property
    def short(self) -> ProbeRun:
        """The pass over the short probe."""
        return self.passes.runs[0]

    def places(self) -> Iterator[tuple[ProbeRun, int]]:
        """Every layer of the stack that a run checks, with the run."""
        for run in self.passes.runs:
            for layer in run.layers[self.stack.label]:
                yield run, layer

    def plain_module(self, layer: int, path: str) -> nn.Module:
        """A module of one block of the plain model, by its dotted path."""
        return plain_module(self.model, self.stack, layer, path)

    def plain_by_token(self, batch: Batch) -> list[Tensor]:
        """The output of plain transformers, if it has one row per token; else empty."""
        output = plain_output(self.model, batch)
        return [output] if _has_row_a_token(output, self.written(batch)) else []

    def output(self, batch: Batch) -> Tensor:
        """The output of attnmech's model: logits or, without a head, the last stream after the final norm."""
        return output_of(self.model.output(batch))

    def by_token(self, batch: Batch) -> Tensor:
        """The output of attnmech's model if it has one row per token, else (a head for whole texts) the last stream."""
        output = self.output(batch)
        return output if _has_row_a_token(output, self.written(batch)) else self.last_stream(batch)

    def last_stream(self, batch: Batch) -> Tensor:
        """The stream that leaves the last block of attnmech's model."""
        last = self.model.last_stream
        return self.model.forward(batch, captures=[last])[last]

    def written(self, batch: Batch) -> Batch:
        """The batch of the tokens for which the output has rows."""
        return batch.queries(self.model.output_stack.label)

    def at(self, run: ProbeRun, name: str, layer: int) -> Tensor:
        """A point of the stack under proof, in float32 at least."""
        return run.values[self.stack.point(name), layer].to(self.wide)

    def block(self, run: ProbeRun, layer: int) -> RowBlock:
        """The attention of a layer of the stack under proof."""
        return run.blocks[self.stack.label, layer]

    def comparable(self, run: ProbeRun, name: str, layer: int | None, value: Tensor) -> Tensor:
        """The values at which two models must agree: at real tokens and, for scores, at visible pairs."""
        if layer is not None and name in ("scores", "pattern"):
            mask = self.block(run, layer).mask
            visible = mask.visible(range(mask.queries)) & run.real(self.stack.label)[:, None, :, None]
            return visible.expand_as(value)
        real = self.written(run.batch).mask if layer is None else run.real(self.stack.label)
        if name in ("k", "v", "k_rot"):
            real = run.real_keys(self.stack.label)
        return real if value.shape[:2] == real.shape else torch.ones_like(value, dtype=torch.bool)

    def compared(
        self, run: ProbeRun, layer: int, ours: Tensor, theirs: Tensor, allowed: Tensor, keep: Tensor | None = None
    ) -> Compared:
        """A comparison at the real query tokens, or where `keep` is True."""
        keep = run.real(self.stack.label) if keep is None else keep
        where = f"layer {layer}" if run is self.short else f"layer {layer} in texts of {run.batch.ids.shape[1]} tokens"
        return Compared(where, excess_of(ours, theirs, with_least(allowed, self.model.dtype), keep))

    def product(self, terms: int) -> float:
        """The rounding of a product of `terms` terms, the result's included, as a share of Σ|t|."""
        return product_rounding(self.model.dtype, terms) + steps_rounding(self.model.dtype)

    def by_layer(
        self,
        name: str,
        statement: str,
        points: tuple[str, ...],
        comparisons: Iterable[Compared],
        tolerance: float | None = None,
    ) -> Check:
        """A check of the worst among many comparisons, with its layer."""
        limit = self.local if tolerance is None else tolerance
        worst = Compared("nowhere", 0.0)
        with torch.no_grad():
            for one in comparisons:
                if not one.excess <= worst.excess:
                    worst = one
        passed = worst.excess <= 1
        residual = worst.excess * limit
        detail = "" if passed else f"{worst.where}: off by {residual:.1e} of the sum of magnitudes there"
        return Check(name, statement, () if passed else points, passed, residual, limit, detail)

    def compare(
        self,
        name: str,
        statement: str,
        points: tuple[str, ...],
        ours: Tensor,
        theirs: Tensor,
        tolerance: float | None = None,
        real: Tensor | None = None,
    ) -> Check:
        """A check of two tensors, row by row at real tokens, or as a whole if they have one row per text."""
        limit = self.whole if tolerance is None else tolerance
        keep = self.comparable(self.short, name, None, ours) if real is None else real
        excess = excess_of(ours, theirs, by_row(theirs, limit), keep)
        passed = excess <= 1
        detail = "" if passed else f"off by {excess * limit:.1e} of the largest value of its row"
        return Check(name, statement, points, passed, excess * limit, limit, detail)


def _has_row_a_token(output: Tensor, tokens: Batch) -> bool:
    return output.ndim == 3 and output.shape[:2] == tokens.mask.shape


def by_row(value: Tensor, tolerance: float) -> Tensor:
    """`tolerance` times the largest value of each row."""
    return tolerance * value.abs().amax(dim=-1, keepdim=True)


def norm_of(value: Tensor, dim: int = -1) -> Tensor:
    """The length of each vector."""
    norms: Tensor = torch.linalg.vector_norm(value, dim=dim)
    return norms


def with_least(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """allowed + `least_rounding(dtype)`."""
    least = least_rounding(dtype)
    # Skipped if the sum would round back to `allowed`: subnormal numbers would make it many times slower.
    if bool((allowed > 4 * least / torch.finfo(allowed.dtype).eps).all()):
        return allowed
    return allowed + least


def excess_of(ours: Tensor, theirs: Tensor, allowed: Tensor, keep: Tensor | None = None) -> float:
    """max |ours − theirs| / allowed where `keep` is True, with 0 where they are equal; NaN, which always fails, if
    either is NaN.

    `keep` names the leading axes of the tensors.
    """
    wide = torch.promote_types(torch.promote_types(ours.dtype, theirs.dtype), torch.float32)
    difference = (ours.to(wide) - theirs.to(wide)).abs()
    if keep is not None and not keep.all():
        difference = difference.masked_fill(~keep.reshape(*keep.shape, *[1] * (difference.ndim - keep.ndim)), 0.0)
    if not difference.any():
        return 0.0
    return float(torch.where(difference == 0, 0.0, difference / allowed).amax())


def output_of(output: object) -> Tensor:
    """The logits or, for a model without a head, the last stream after the final norm."""
    logits = getattr(output, "logits", None)
    tensor = getattr(output, "last_hidden_state", None) if logits is None else logits
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedModelError(
            f"expected a model that returns logits or its last stream; this one returns a {type(output).__name__}. "
            "Load the model below its head: am.load(model.base_model)."
        )
    return tensor


def plain_module(model: HookedModel, stack: Stack, layer: int, path: str) -> nn.Module:
    """A module of one block of a stack in `model.plain`, by its dotted path."""
    plan = stack.architecture
    if plan.replaced and plan.replacement is not None and path.startswith(f"{plan.replaced}."):
        # attnmech's replacement has other names for the modules of the attention.
        made = plan.replacement(plain_module(model, stack, layer, plan.replaced))
        return submodule(made, path.removeprefix(f"{plan.replaced}."))
    inner = f"{layer}.{plan.within}.{path}" if plan.within else f"{layer}.{path}"
    return submodule(submodule(model.plain.base_model, plan.blocks), inner)


def plain_output(model: HookedModel, batch: Batch) -> Tensor:
    with torch.no_grad():
        return output_of(call(model.plain, batch))


def _hidden_states(model: nn.Module, batch: Batch, **options: Any) -> Any:
    with torch.no_grad():
        return call(model, batch, output_hidden_states=True, **options)


def _attempt(run: Callable[[], Any]) -> Any:
    """What a run returns, or its exception: it is no fault of a model if transformers cannot run it this way."""
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return error.with_traceback(None)  # its frames would hold the passes, which hold the error


def bridge_run(model: HookedModel, batch: Batch, hooks: Sequence[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The output of TransformerLens's bridge, and its values at some hooks."""
    mask = batch.mask.long() if batch.padded else None
    inputs = batch.extra.get("pixel_values", batch.ids)
    options: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
    with torch.no_grad(), model._bridges.passing() as bridge:
        logits, cache = bridge.run_with_cache(
            inputs, names_filter=set(hooks).__contains__, return_cache_object=True, **options
        )
        values = dict(cache.items())  # type: ignore[no-untyped-call]
    assert isinstance(logits, torch.Tensor)
    return logits, values
