"""Compares attnmech's model, transformers and TransformerLens on a few probe tokens."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import isnan
from typing import Any, Final, TypeAlias

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
    score_rounding,
    step_tolerance,
    steps_rounding,
    table_tolerance,
)
from ...points import POINTS, PointKey, split_stack
from ..attention.observed import LayerEnd, RowBlock
from ..inputs.transcripts import TranscriptEncoder
from ..parts.certificate import Check, LensHook
from ..parts.mask import MaskRule
from ..parts.modules import submodule
from ..parts.packed import packed_projections
from ..parts.weights import bias_of, matrix_of
from ..run.hooked import HookedModel
from ..run.wired import ENCODED, call
from ..stack.stack import Stack
from ..structure.copies import copy_of, use_attention
from ..structure.signals import below_head
from .depth import SHORT, Depth
from .texts import beginning_of, long_batch, probe_batch

_EDITED_LAYERS: Final = 6  # the largest number of layers edited in one pass, since each takes two copies of a text
_CONDITION: Final = 4  # values may differ by this many times what the rounding of scores moves (`Passes.handed_on`)
_EDITED_POSITIONS: Final = 512  # in all these copies, unless one layer needs more: images and recordings are long
_HIDDEN: Final = -1e30  # scores below this are those of hidden keys
FROM_STREAM: Final = tuple(name for name in POINTS if name != "embed")  # if the stream is wrong, so are these


@dataclass(frozen=True, eq=False)
class ProbeRun:
    """One pass of the probe through attnmech's model, read layer by layer: only the layer that just ran is complete."""

    batch: Batch
    layers: Mapping[str, Sequence[int]]  # the checked layers of each stack
    kept: frozenset[PointKey] = frozenset()  # the points that stay when their layer has been read
    values: dict[PointKey, Tensor] = field(default_factory=dict)
    blocks: dict[tuple[str, int], RowBlock] = field(default_factory=dict)
    out_inputs: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # the input of W_O, by stack and layer
    masks: dict[tuple[str, int], MaskRule] = field(default_factory=dict)  # of the layers whose attention was reached
    ended: set[tuple[str, int]] = field(default_factory=set)
    moved: dict[PointKey, Tensor] = field(default_factory=dict)  # how far streams and patterns move, once needed

    def hold(self, block: RowBlock) -> None:
        """Holds the first block of a layer's rows: all of them, since `scores` and `pattern` ask for whole rows."""
        self.blocks.setdefault((block.stack, block.layer), block)
        self.masks.setdefault((block.stack, block.layer), block.mask)

    def forget(self, stacks: Collection[str], layer: int) -> None:
        """Frees the values of a layer, except the stream that the next one continues."""
        for key in list(self.values):
            if key[1] is None or key in self.kept or split_stack(key[0])[0] not in stacks:
                continue
            if key[1] < layer or split_stack(key[0])[1] != "resid_post":
                del self.values[key]
        for stack in stacks:
            self.blocks.pop((stack, layer), None)
            self.out_inputs.pop((stack, layer), None)

    def real(self, stack: str) -> Bool[Tensor, "batch position"]:
        return self.batch.queries(stack).mask

    def real_keys(self, stack: str) -> Bool[Tensor, "batch position"]:
        return self.batch.keys(stack).mask


@dataclass(frozen=True)
class Compared:
    """One comparison: its place, and the largest difference in units of what rounding can explain there."""

    where: str
    excess: float


class Passes:
    """The passes of the probe through one model, shared by the statements about all of its stacks."""

    def __init__(self, model: HookedModel, depth: Depth = SHORT, batch: Batch | None = None) -> None:
        self.model, self.depth = model, depth
        self.batch = probe_batch(model) if batch is None else batch
        self.runs: tuple[ProbeRun, ...] = ()
        self._aside = False  # whether a pass beside the pass that is read is under way

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """A short text and a padded one, read in all layers; longer ones, padded on both sides, in some or all."""
        long = None if self.batch.senses else long_batch(self.model, self.depth.long_texts)
        return (self.batch,) if long is None else (self.batch, self.encoded(long))

    def encoded(self, batch: Batch) -> Batch:
        """The batch with its recordings replaced by the short probe's first, encoded, which a decoder's texts share."""
        states = getattr(self.states, "encoder_last_hidden_state", None)
        if states is None or not isinstance(self.model.encoder, TranscriptEncoder):
            return batch
        return replace(batch, extra={ENCODED: states[:1].expand(len(batch.ids), -1, -1)})

    def run(self, kept: Collection[PointKey], read: Callable[[ProbeRun, str, int], None]) -> None:
        """Runs attnmech's model on both probes, capturing every point; an error of a broken model is raised.

        `read` is called with each stack and layer when it has run; then all its values are freed but those at `kept`.
        """
        stacks = self.model.stacks.values()
        every: dict[str, Sequence[int]] = {stack.label: stack.layers for stack in stacks}
        some: dict[str, Sequence[int]] = {
            stack.label: [stack.layers[place] for place in spread(stack.n_layers, self.depth.long_layers)]
            for stack in stacks
            if not (stack.label == "encoder" and ENCODED in self.batches[-1].extra)
        }
        _ = self.states, self.longer, self.eager
        for batch, layers in zip(self.batches, (every, some), strict=False):
            self.runs = (*self.runs, ProbeRun(batch, layers, frozenset(kept)))
            self._run(self.runs[-1], read)

    @cached_property
    def states(self) -> Any:
        """The output of plain transformers for the short probe, with all hidden states; or the error that it raises."""
        return attempt(lambda: hidden_states(self.model.plain, self.batch))

    @cached_property
    def plain(self) -> Tensor:
        """The output of plain transformers for the short probe."""
        return plain_output(self.model, self.batch) if isinstance(self.states, Exception) else output_of(self.states)

    @cached_property
    def eager(self) -> Any:
        """The output for the short probe in eager attention, which returns patterns; or the error that it raises."""

        def run() -> Any:
            plain = use_attention(copy_of(self.model.original), "eager", self.model.towers)
            # If attnmech follows another implementation, the logits of eager attention are compared.
            whole = self.model.architecture.trusted == "sdpa"
            with torch.no_grad():
                return call(plain if whole else below_head(plain), self.batch, output_attentions=True)

        return attempt(run)

    @cached_property
    def longer(self) -> Any:
        """The output of plain transformers, below the head, for the longer texts; or the error that it raises."""
        return attempt(lambda: hidden_states(self.model.plain.base_model, self.batches[-1]))

    def handed_on(self, values: Callable[[], Mapping[PointKey, Tensor]]) -> dict[PointKey, Tensor]:
        """How far each row of the values of a pass moves if every score is changed by what rounding may do to it.

        Nothing moves in a model whose passes do not repeat themselves: their difference says nothing about rounding.
        """
        model, rounding = self.model, score_rounding(self.model.dtype)

        def shake(scores: Tensor) -> Tensor:
            # Neighbours in a row's order move apart or together, such as two keys that share the attention.
            signs = 1 - 2 * (scores.argsort(dim=-1).argsort(dim=-1) % 2)
            return torch.where(scores > _HIDDEN, scores * (1 + rounding * signs), scores)

        edits = [((stack.point("scores"), layer), shake) for stack in model.stacks.values() for layer in stack.layers]
        self._aside = True
        try:
            before, again = values(), values()
            with model.in_force.editing(edits):
                after = values()
        finally:
            self._aside = False
        same = all(torch.equal(value.nan_to_num(), again[key].nan_to_num()) for key, value in before.items())
        return {key: same * (after[key] - value).abs().amax(dim=-1, keepdim=True) for key, value in before.items()}

    def _run(self, run: ProbeRun, read: Callable[[ProbeRun, str, int], None]) -> None:
        model, points = self.model, self.model.points
        names = [name for name, point in points.items() if point.absent is None]
        chosen = {(label, layer) for label, of_stack in run.layers.items() for layer in of_stack}
        keys = [key for key in points.resolve(names) if key[1] is None or (split_stack(key[0])[0], key[1]) in chosen]

        def end(layer: LayerEnd) -> None:
            run.ended.add((layer.stack, layer.layer))
            run.values.update((key, value) for key, value in layer.values.items() if key[1] == layer.layer)
            # A decoder and its cross-attention, which one block holds, read each other's points.
            together = [label for label in run.layers if (label == "encoder") == (layer.stack == "encoder")]
            places = [(label, layer.layer) for label in together if (label, layer.layer) in chosen]
            if run.ended.issuperset(places):
                for label, place in places:
                    read(run, label, place)
                run.forget(together, layer.layer)

        with self._keeping_out_inputs(chosen, run.out_inputs):
            values = model.forward(
                run.batch,
                captures=[key for key in keys if key[1] is None or key in run.kept],
                rows=[run.hold],
                ends=[end],
                passing=[key for key in keys if key[1] is not None],
                layers=sorted(chosen),
            )
        run.values.update(values)

    @contextmanager
    def _keeping_out_inputs(
        self, layers: Iterable[tuple[str, int]], inputs: dict[tuple[str, int], Tensor]
    ) -> Iterator[None]:
        """Stores the inputs of W_O, independently of attnmech's points."""

        def keeping(place: tuple[str, int]) -> Callable[..., None]:
            def keep(module: Any, args: Any) -> None:
                if not self._aside:
                    inputs[place] = args[0].detach().clone()

            return keep

        with ExitStack() as hooks:
            for label, layer in layers:
                stack = self.model.stacks[label]
                out = stack.module(layer, stack.architecture.out)
                hooks.enter_context(out.register_forward_pre_hook(keeping((label, layer))))
            yield


class Probe:
    """Compares values on one stack of a model, and turns comparisons into checks."""

    def __init__(self, passes: Passes, stack: Stack) -> None:
        self.passes, self.model = passes, passes.model
        self.stack, self.plan = stack, stack.architecture
        self.layers = list(stack.layers)
        step = max(1, min(_EDITED_LAYERS, _EDITED_POSITIONS // (2 * self.beginning.ids.shape[1])))
        self.edited = [self.layers[place] for place in spread(stack.n_layers, step * passes.depth.edit_passes)]
        self.edited_by_pass = [self.edited[first : first + step] for first in range(0, len(self.edited), step)]
        dtype = self.model.dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.local, self.whole, self.tables = step_tolerance(dtype), pass_tolerance(dtype), table_tolerance(dtype)
        self.of_norms = max(self.local, step_tolerance(torch.float32))  # norms may compute in float32
        self.batch = passes.batch
        self._packed = next(packed_projections(self.model.base), None) is not None
        self.lens_hooks: tuple[LensHook, ...] = ()

    @property
    def beginning(self) -> Batch:
        """The first tokens of the first short text, which run in one copy per token or edit."""
        return beginning_of(self.passes.batch, 0, self.passes.depth.beginning)

    @property
    def short(self) -> ProbeRun:
        return self.passes.runs[0]

    def plain_module(self, layer: int, path: str) -> nn.Module:
        return plain_module(self.model, self.stack, layer, path)

    def plain_by_token(self, batch: Batch) -> list[Tensor]:
        """The output of plain transformers, if it has one row per token; else empty."""
        output = plain_output(self.model, batch)
        return [output] if _has_row_a_token(output, self.written(batch)) else []

    def output(self, batch: Batch) -> Tensor:
        """The output of attnmech's model: logits or, without a head, the final stream after the final norm."""
        return output_of(self.model.output(batch))

    def by_token(self, batch: Batch) -> Tensor:
        """The output of attnmech's model if it has one row per token; else (heads for whole texts) its final stream."""
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

    def projected(self, run: ProbeRun, layer: int, path: str) -> Tensor:
        """attn_in W + b of a projection inside the attention, in float32 at least."""
        projection = self.stack.module(layer, f"{self.plan.attention}.{path}")
        made, bias = self.at(run, "attn_in", layer) @ matrix_of(projection).to(self.wide), bias_of(projection)
        return made if bias is None else made + bias.to(self.wide)

    def block(self, run: ProbeRun, layer: int) -> RowBlock:
        return run.blocks[self.stack.label, layer]

    def comparable(self, run: ProbeRun, name: str, layer: int | None, value: Tensor) -> Tensor:
        """The values at which two models must agree: at real tokens and, for scores, at visible pairs."""
        if layer is not None and name in ("scores", "pattern"):
            mask = run.masks[self.stack.label, layer]
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

    def conditioned(
        self, run: ProbeRun, layer: int, name: str, ours: Tensor, theirs: Tensor, allowed: Tensor, keep: Tensor
    ) -> Compared:
        """A comparison behind earlier layers; where it fails, it allows for what their rounding of scores moves."""
        compared = self.compared(run, layer, ours, theirs, allowed, keep)
        if compared.excess <= 1 or self.model.is_own:
            return compared
        if not run.moved:
            points = [self.stack.point(point) for point in ("resid_pre", "pattern")]
            keys = [(point, place) for point in points for place in run.layers[self.stack.label]]
            run.moved.update(self.passes.handed_on(lambda: self.model.forward(run.batch, captures=keys)))
        moved = run.moved[self.stack.point(name), layer].to(self.wide)
        return self.compared(run, layer, ours, theirs, allowed + _CONDITION * moved, keep)

    def weighted(self, terms: int) -> float:
        """The share of Σ|t| by which a product with weights may be off, without the rounding of the result.

        Kernels of packed weights round on the way to the precision of the result, and the weights are read from that.
        """
        rounding, dtype = product_rounding(self.model.dtype, terms), self.model.dtype
        return max(rounding, torch.finfo(dtype).eps) if self._packed else rounding

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
        with torch.no_grad():
            worst = worst_of(comparisons)
        passed, limit = worst.excess <= 1, self.local if tolerance is None else tolerance
        detail = "" if passed else f"{worst.where}: off by {worst.excess * limit:.1e} of the sum of magnitudes there"
        return Check(name, statement, () if passed else points, passed, worst.excess * limit, limit, detail)

    def compare(
        self,
        name: str,
        statement: str,
        points: tuple[str, ...],
        ours: Tensor,
        theirs: Tensor,
        tolerance: float | None = None,
        real: Tensor | None = None,
        again: Callable[[], Tensor] | None = None,
    ) -> Check:
        """A check of two tensors, row by row at real tokens, or as a whole if they have one row per text.

        `again` computes `ours` again; if it is needed, it shows how far the rounding of scores is handed on.
        """
        limit = self.whole if tolerance is None else tolerance
        keep = self.comparable(self.short, name, None, ours) if real is None else real
        allowed = by_row(theirs, limit)
        excess = excess_of(ours, theirs, allowed, keep)
        if excess > 1 and again is not None and not self.model.is_own:
            (moved,) = self.passes.handed_on(lambda: {("", None): again()}).values()
            excess = excess_of(ours, theirs, allowed + _CONDITION * moved, keep)
        passed = excess <= 1
        detail = "" if passed else f"off by {excess * limit:.1e} of the largest value of its row"
        return Check(name, statement, points, passed, excess * limit, limit, detail)


LayerComparisons: TypeAlias = Callable[[Probe, ProbeRun, int], Iterable[Compared]]  # of values in one layer of a run


@dataclass(eq=False)
class Statement:
    """What must hold in every layer: of the comparisons in each layer that has run, the worst is kept."""

    name: str
    statement: str
    points: tuple[str, ...]
    comparisons: LayerComparisons
    tolerance: float | None = None  # by default, that of a step of the model's own computation
    further: Callable[[Probe], Iterable[Compared]] | None = None  # a function that compares values after the passes
    worst: Compared = Compared("nowhere", 0.0)
    error: Exception | None = None  # why a layer could not be compared

    def read(self, probe: Probe, run: ProbeRun, layer: int) -> None:
        worst = attempt(lambda: worst_of((self.worst, *self.comparisons(probe, run, layer))))
        if isinstance(worst, Exception):  # the certificate reports whatever a broken model raises
            self.error = self.error or worst
        else:
            self.worst = worst

    def check(self, probe: Probe) -> Check:
        """The check; raises what a comparison raised."""
        if self.error is not None:
            raise self.error
        compared = chain((self.worst,), () if self.further is None else self.further(probe))
        return probe.by_layer(self.name, self.statement, self.points, compared, self.tolerance)


def worst_of(comparisons: Iterable[Compared]) -> Compared:
    """The comparison that is farthest apart; NaN is farther than any number."""
    return max(comparisons, key=lambda one: (isnan(one.excess), one.excess), default=Compared("nowhere", 0.0))


def _has_row_a_token(output: Tensor, tokens: Batch) -> bool:
    return output.ndim == 3 and output.shape[:2] == tokens.mask.shape


def by_row(value: Tensor, tolerance: float) -> Tensor:
    """`tolerance` times the largest value of each row."""
    return tolerance * value.abs().amax(dim=-1, keepdim=True)


def norm_of(value: Tensor, dim: int = -1) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(value, dim=dim)
    return norms


def with_least(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """allowed + `least_rounding(dtype)`."""
    least = least_rounding(dtype)
    # Skipped if the sum would round back to `allowed`: subnormal numbers would make it many times slower.
    return allowed if bool((allowed > 4 * least / torch.finfo(allowed.dtype).eps).all()) else allowed + least


def excess_of(ours: Tensor, theirs: Tensor, allowed: Tensor, keep: Tensor | None = None) -> float:
    """max |ours − theirs| / allowed where `keep` (of the leading axes) is True; 0 where equal; NaN always fails."""
    wide = torch.promote_types(torch.promote_types(ours.dtype, theirs.dtype), torch.float32)
    difference = (ours.to(wide) - theirs.to(wide)).abs()
    if keep is not None and not keep.all():
        difference = difference.masked_fill(~keep.reshape(*keep.shape, *[1] * (difference.ndim - keep.ndim)), 0.0)
    return 0.0 if not difference.any() else float(torch.where(difference == 0, 0.0, difference / allowed).amax())


def output_of(output: object) -> Tensor:
    """The logits or, for a model without a head, the final stream after the final norm."""
    logits = getattr(output, "logits", None)
    tensor = getattr(output, "last_hidden_state", None) if logits is None else logits
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedModelError(
            f"expected a model that returns logits or its final stream; this one returns a {type(output).__name__}. "
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


def hidden_states(model: nn.Module, batch: Batch, **options: Any) -> Any:
    with torch.no_grad():
        return call(model, batch, output_hidden_states=True, **options)


def attempt(run: Callable[[], Any]) -> Any:
    """What a run returns, or its exception: a model is not at fault if transformers cannot run it this way."""
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return error.with_traceback(None)  # its frames would hold the passes, which hold the error
