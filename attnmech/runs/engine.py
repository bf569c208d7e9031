"""Runs changes: chooses where a pass begins, which changes share a batch, and which tokens need logits."""

import copy as copying
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, TypeAlias

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

from ..batch import Batch
from ..errors import InputError
from ..interventions import Intervention, Values
from ..interventions.edits import Replace
from ..maths.blocks import block_bytes
from ..model.attention.applied import Applied
from ..model.attention.observed import RowObserver
from ..model.reading.partial_pass import Blocks, can_begin_in_the_middle
from ..model.run.hooked import HookedModel
from ..model.stack.block import PostNormEnd
from .corpus import CorpusBatch
from .metrics import Metric
from .outputs import Judging, Keyless, Output, PatternShifts

Change: TypeAlias = tuple[Intervention, ...]  # the interventions applied together in one measurement

STEP_BYTES: Final = 6 * 2**20  # on the CPU, about the bytes of a step's widest activation, so that caches hold it

LEAST_TOKENS: Final = 512  # in a step: with fewer, reading the weights takes longer than multiplying

TEXT_TOKENS: Final = 512  # texts are measured together up to about this many tokens, so that steps hold several changes


def step_tokens(widest: int, device: torch.device) -> int:
    """The number of tokens that go through a model at once if its widest activation takes `widest` bytes per token.

    On an accelerator, the activation takes as much as a block of scores, which is a share of the free memory.
    """
    size = STEP_BYTES if device.type == "cpu" else block_bytes(device)
    return max(LEAST_TOKENS, size // widest)


Receivers: TypeAlias = Mapping[tuple[str, int], tuple[int, ...]]
"""The heads (kv heads at k and v) that receive a change in q, k or v, by point and layer."""


class Engine:
    """Runs a model under changes, within a memory budget in bytes.

    The interventions with which all changes of a sweep begin (`share`) run only once. The pass of each change begins at
    the first block that its other interventions change.
    """

    def __init__(
        self,
        model: HookedModel,
        memory: float,
        *,
        frozen: bool,
        shifts: bool,
        keyless: bool = False,
        through: Receivers | None = None,
    ) -> None:
        self.model, self.memory, self.frozen, self.shifts, self.keyless = model, memory, frozen, shifts, keyless
        self.through = through
        self._plain = not (frozen or shifts or keyless or through)  # only the metric is measured
        self.blocks = Blocks(model) if can_begin_in_the_middle(model) else None
        if through and self.blocks is None:
            raise InputError("paths to heads need a model with a single stack, whose passes can begin at any block.")
        if frozen and self.blocks is None:
            raise InputError('later="frozen" needs a model with a single stack, whose passes can begin at any block.')
        self.text_of: Int[Tensor, " input"] | None = None  # for inputs that are copies of texts (`JudgedTexts`)
        self.held: Change = ()  # the interventions with which all changes begin
        self.kept_at: Sequence[int] = ()  # the blocks at which the stream under each change is kept
        self._texts: dict[int, Texts] | None = None  # kept for the next sweep, by the number of the first
        self._changes: Sequence[Change] = ()  # all changes of a sweep, if it keeps streams
        widest = 4 * model.d_model
        if self.blocks is not None:
            widest = max(max(parameter.shape) for parameter in self.blocks.first.parameters())
        size = torch.empty((), dtype=model.dtype).element_size()
        # Stream, its norm, q k v z, the MLP's activations, and at least 32 rows of scores and pattern.
        self._per_token = size * (12 * model.d_model + 3 * widest) + 330 * model.n_heads
        self._per_stream = size * model.d_model
        self._per_text = 2 * (model.n_layers + 2) * self._per_stream  # bytes per token of all blocks, twice
        self._at_once = step_tokens(size * widest, model.device)
        self._per_row = 4 * max(size, 4) * max(model.n_vocab, 1)

    def on(self, model: HookedModel | None) -> "Engine":
        """The same engine on another copy of the model; with None, without a model, to be sent to a worker."""
        engine = copying.copy(self)
        blocks = Blocks(model) if model and can_begin_in_the_middle(model) else None
        engine.__dict__.update(model=model, blocks=blocks, _texts=None, _changes=())
        return engine

    def texts_of(self, documents: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """The numbers of the texts from which inputs were made; an intervention takes its values by them."""
        return documents if self.text_of is None else self.text_of[documents]

    def share(self, changes: Sequence[Change], tokens: int, *, keep: bool) -> None:
        """Prepares for a sweep, in which the interventions with which all changes begin run once on each text.

        With `keep`, the next sweep on the same texts (of `tokens` tokens in all) will measure the same changes with one
        of them applied throughout. The streams under each change are then cached for that sweep, up to a quarter of
        the budget: they stay valid below the first block of the applied intervention.
        """
        if not self._plain or self.blocks is None:
            return
        held = changes[0][: shared(changes)] if changes else ()
        room = self.memory / 4 - tokens * self._per_text
        if not keep or room < 0:
            self._texts, self.kept_at = None, ()
        elif self._texts is None or shared([held, self.held]) < len(self.held):
            self._texts = {}
        self.held, self._changes = held, changes
        if self._texts is None:
            return
        starts, count = [self.start_of(change) for change in changes], len(self.blocks)
        streams = [tokens * self._per_stream * sum(start < block for start in starts) for block in range(count)]
        spaced = (range(step, count, step) for step in range(1, count))
        self.kept_at = next((at for at in spaced if sum(streams[block] for block in at) <= room), ())
        self._texts = {first: texts for first, texts in self._texts.items() if texts.streams.keys() >= set(starts)}
        for texts in self._texts.values():
            texts.hold(held)

    @property
    def text_tokens(self) -> int:
        """The number of tokens whose streams and z, in all blocks, fit into a quarter of the budget."""
        return max(1, min(TEXT_TOKENS, int(self.memory / 4 / self._per_text)))

    def check(self, batch: Batch) -> None:
        """Raises `InputError` if one change of one text of the batch does not fit into the budget."""
        length = batch.ids.shape[1]
        needed = 2 * length * self._per_token + 8 * length * (self.model.n_layers + 2) * self._per_stream
        needed = max(needed, 4 * self._per_row)
        if needed > self.memory:
            raise InputError(
                f"one change of a text of {length} tokens needs about {needed / 1e9:.2g} GB; `memory` is "
                f"{self.memory / 1e9:.2g} GB. Give more memory, or shorter texts."
            )

    def start_of(self, change: Change) -> int:
        """The first block that a change affects, beyond the interventions that all changes share."""
        return 0 if self.blocks is None else _first_of(change[len(self.held) :])

    def begin_of(self, documents: Int[Tensor, " batch"], change: Change) -> tuple[int, bool]:
        known = self._known(documents)
        return (self.start_of(change), False) if known is None else known.begin_of(change)

    def groups(self, part: CorpusBatch, changes: Sequence[Change], todo: Sequence[int]) -> Iterator[list[int]]:
        """The changes to measure, grouped so that each group begins at the same block and fits into a step."""
        tokens = part.batch.ids.numel()
        fit = min(int(self.memory / 2 / self._per_token), self._at_once)
        count = max(1, fit // tokens - (1 if self.shifts or self.frozen else 0))
        begins: dict[tuple[int, bool], list[int]] = {}
        for number in todo:
            begins.setdefault(self.begin_of(part.documents, changes[number]), []).append(number)
        for _, numbers in sorted(begins.items()):
            yield from (numbers[first : first + count] for first in range(0, len(numbers), count))

    def rows_at_once(self) -> int:
        """The number of tokens whose logits fit into a quarter of the budget."""
        return max(1, int(self.memory / 4 / self._per_row))

    def texts(self, batch: Batch, documents: Int[Tensor, " batch"], changes: Sequence[Change]) -> "Texts":
        """Some texts after their clean pass, ready for the changes to measure on them."""
        if (known := self._known(documents)) is not None:
            return known
        changes = changes if self._texts is None else self._changes
        texts = Texts(self, batch, documents, sorted({start for change in changes for start in self._starts(change)}))
        if self._texts is not None:
            self._texts[int(documents[0])] = texts
        return texts

    def _known(self, documents: Int[Tensor, " batch"]) -> "Texts | None":
        """The same texts with their cached streams, if the last sweep kept them."""
        texts = None if self._texts is None else self._texts.get(int(documents[0]))
        return texts if texts is not None and torch.equal(texts.documents, documents) else None

    def _starts(self, change: Change) -> list[int]:
        if self.through:
            return sorted({self.start_of(change), *(layer for _, layer in self.through)})
        if not self.frozen:
            return [self.start_of(change)]
        return sorted(
            {layer for intervention in change for layer in intervention.touches or self.model.output_stack.layers}
        )


@dataclass(frozen=True)
class After:
    """The measurements under some changes."""

    metric: Float[Tensor, "change batch"]
    shift: Float[Tensor, "change batch layer head"] | None = None  # the shift of each pattern
    keyless: Int[Tensor, "change batch"] | None = None  # the number of rows, over all heads, that are left without keys


class Texts:
    """Texts, with the values that their clean pass stored."""

    def __init__(self, engine: Engine, batch: Batch, documents: Int[Tensor, " batch"], starts: Sequence[int]) -> None:
        self.engine, self.model, self.blocks = engine, engine.model, engine.blocks
        self.batch, self.documents = batch, documents
        self._source: slice | Tensor = engine.texts_of(documents)
        self.queries = batch.queries(self.model.output_stack.label)
        self._later: dict[tuple[str, int], Tensor] = {}
        self._kept: dict[tuple[int, ...], Tensor] = {}
        """Streams under single changes, by the block and the interventions that the change adds to the shared ones."""
        self._held: Change = ()
        if self.blocks is None:
            values = self.model.forward(batch, captures=[("logits", None)])
            self.streams, self.clean = {}, Output(None, values["logits", None])
            return
        layers = self.model.output_stack.layers if engine.frozen and self._post_norm else ()
        captures = [(name, layer) for layer in layers for name in ("attn_out", "mlp_out")]
        end, begin = len(self.blocks), [_first_of(engine.held)] if engine.held else []
        ran = self.blocks.run(batch, streams=[*starts, *begin, end], captures=captures)
        self.streams = dict(ran.streams)
        self._later = {(name, layer): ran.values[name, layer] for name, layer in captures}
        self.clean = Output(self.streams.pop(end), None)
        self.hold(engine.held)

    def hold(self, held: Change) -> None:
        """Applies the interventions that all changes share to the streams; `held` begins with those applied so far."""
        if len(held) == len(self._held):
            return
        assert self.blocks is not None
        begin = _first_of(held[len(self._held) :])
        self._held = held
        later = [block for block in self.streams if block >= begin]
        with self.model.in_force.applying(self._applied_now([held], 0)):
            ran = self.blocks.run(
                self.batch, start=begin, stream=self.streams[begin], stop=max(later) + 1, streams=later
            )
        self.streams |= ran.streams
        self._kept = {
            key: stream for key, stream in self._kept.items() if key[0] <= begin and key[0] in self.engine.kept_at
        }

    def begin_of(self, change: Change) -> tuple[int, bool]:
        """The first block of a change's pass, and whether the pass begins with a stream cached under that change."""
        start = self.engine.start_of(change)
        kept = [block for block in self.engine.kept_at if block > start and self._key(block, change) in self._kept]
        return (max(kept), True) if kept else (start, False)

    def _key(self, block: int, change: Change) -> tuple[int, ...]:
        return (block, *map(id, change[len(self._held) :]))

    @property
    def _post_norm(self) -> bool:
        return self.model.output_stack.architecture.norm == "post"

    @property
    def _judging(self) -> Judging:
        return Judging(self.batch, self.queries, self.blocks, self.clean, self.engine.rows_at_once())

    def before(self, judge: Metric) -> Float[Tensor, " batch"]:
        return self._judging.of(self.clean, 1, judge)[0]

    def after(self, changes: Sequence[Change], judge: Metric) -> After:
        """The measurements under each of some changes that begin at the same block."""
        if self.engine.through:
            texts = copying.copy(self)
            texts._source = slice(None)  # the values of these changes are only for these texts
            return texts.measured(self._at_receivers(changes, self.engine.through), judge)
        return self.measured(changes, judge)

    def measured(self, changes: Sequence[Change], judge: Metric) -> After:
        keyless = Keyless(len(self.batch.ids), len(changes)) if self.engine.keyless else None
        output, shift = (
            (self._frozen(changes, keyless), None) if self.engine.frozen else self._recomputed(changes, keyless)
        )
        return After(self._judging.of(output, len(changes), judge), shift, None if keyless is None else keyless.counts)

    def _at_receivers(self, changes: Sequence[Change], receivers: Receivers) -> list[Change]:
        """Replaces each change by interventions that put the receivers' q, k and v under it into a clean run."""
        assert self.blocks is not None
        start, stack = self.engine.start_of(changes[0]), self.model.output_stack
        later = {key: heads for key, heads in receivers.items() if key[1] > start}
        keys = {(point, layer): (stack.point(point), layer) for point, layer in later}
        stream = repeat(self.streams[start], "text ... -> (copy text) ...", copy=len(changes))
        with self.model.in_force.applying(self._applied_now(changes, 0)):
            ran = self.blocks.run(
                self._copies(len(changes)), start=start, stream=stream, stop=1 + max(layer for _, layer in later),
                captures=keys.values(),
            )  # fmt: skip
        values = {
            key: rearrange(ran.values[name], "(copy text) ... -> copy text ...", copy=len(changes))
            for key, name in keys.items()
        }
        return [
            tuple(
                Intervention(
                    Replace(Values({layer: values[point, layer][number]}), point),
                    tuple((layer, head) for head in heads), stack=stack.label,
                )
                for (point, layer), heads in later.items()
            )
            for number in range(len(changes))
        ]  # fmt: skip

    def _applied_now(self, changes: Sequence[Change], first: int) -> list[Applied]:
        """Applies each change to a separate copy of the texts; the copies before `first` stay unchanged."""
        texts = len(self.batch.ids)
        return [
            self.model.applied(intervention, slice(number * texts, (number + 1) * texts), self._source)
            for number, change in enumerate(changes, start=first)
            for intervention in change
        ]

    def _copies(self, count: int) -> Batch:
        return self.batch.texts(torch.arange(len(self.batch.ids)).repeat(count))

    def _recomputed(self, changes: Sequence[Change], keyless: "Keyless | None") -> tuple[Output, Tensor | None]:
        ((start, kept),) = {self.begin_of(change) for change in changes}
        first = 1 if self.engine.shifts else 0
        count = first + len(changes)
        texts = len(self.batch.ids)
        watch = PatternShifts(self.model, texts, len(changes), start) if self.engine.shifts else None
        rows: list[RowObserver] = [observer for observer in (watch, keyless) if observer is not None]
        layers = watch.layers if watch else _layers_of(changes, self.model) if keyless else None
        copies = self._copies(count)
        with self.model.in_force.applying(self._applied_now(changes, first)):
            if self.blocks is None:
                values = self.model.forward(copies, captures=[("logits", None)], rows=rows, layers=layers)
                output = Output(None, values["logits", None][first * texts :])
            else:
                end, keep = len(self.blocks), [block for block in self.engine.kept_at if block > start]
                if kept:
                    stream = torch.cat([self._kept[self._key(start, change)] for change in changes])
                else:
                    stream = repeat(self.streams[start], "text ... -> (copy text) ...", copy=count)
                ran = self.blocks.run(
                    copies, start=start, stream=stream, streams=[*keep, end], rows=rows, layers=layers
                )
                output = Output(ran.streams[end][first * texts :], None)
                for block in keep:
                    for change, under in zip(changes, torch.split(ran.streams[block], texts), strict=True):
                        self._kept[self._key(block, change)] = under
        return output, None if watch is None else watch.means()

    def _frozen(self, changes: Sequence[Change], keyless: "Keyless | None") -> Output:
        """The final stream if only the attention of the changed layers differs from the clean pass."""
        assert self.blocks is not None and self.clean.stream is not None
        touched = sorted({layer for change in changes for layer in self.engine._starts(change)})
        moved = {layer: self._moved(changes, layer, keyless) for layer in touched}
        clean = repeat(self.clean.stream, "text ... -> change text ...", change=len(changes))
        if not self._post_norm:
            return Output(rearrange(clean + sum(moved.values()), "change text ... -> (change text) ..."), None)
        stream = repeat(self.streams[touched[0]], "text ... -> change text ...", change=len(changes))
        for layer in range(touched[0], len(self.blocks)):
            resid_mid = stream + (self._later["attn_out", layer] + moved.get(layer, 0.0))
            stream = PostNormEnd.of(self.model.output_stack, layer)(resid_mid, self._later["mlp_out", layer])
        return Output(rearrange(stream, "change text ... -> (change text) ..."), None)

    def _moved(
        self, changes: Sequence[Change], layer: int, keyless: "Keyless | None"
    ) -> Float[Tensor, "change text position d_model"]:
        """The change of a layer's attention output, computed on the clean stream."""
        assert self.blocks is not None
        here = [
            tuple(intervention for intervention in change if layer in (intervention.touches or (layer,)))
            for change in changes
        ]
        for intervention in (intervention for change in here for intervention in change):
            if not intervention.by_head:
                raise InputError(f'later="frozen" needs changes to heads; got {intervention}.')
        count = 1 + len(changes)
        stream = repeat(self.streams[layer], "text ... -> (copy text) ...", copy=count)
        point = self.model.output_stack.point("attn_out"), layer
        with self.model.in_force.applying(self._applied_now(here, 1)):
            ran = self.blocks.run(
                self._copies(count), start=layer, stream=stream, stop=layer + 1, captures=[point],
                rows=[] if keyless is None else [keyless],
            )  # fmt: skip
        written = rearrange(ran.values[point], "(copy text) ... -> copy text ...", copy=count)
        return written[1:] - written[:1]


def shared(changes: Sequence[Change]) -> int:
    """The number of interventions (identical objects) with which all changes begin."""
    if len(changes) < 2:
        return 0
    columns = zip(*changes, strict=False)
    return len(list(takewhile(lambda column: all(intervention is column[0] for intervention in column), columns)))


def _first_of(change: Change) -> int:
    """The first block that interventions change."""
    return min((min(intervention.touches) if intervention.touches else 0 for intervention in change), default=0)


def _layers_of(changes: Sequence[Change], model: HookedModel) -> list[tuple[str, int]]:
    layers = {}
    for change in changes:
        for intervention in change:
            stack = model.stack(intervention.stack or None)
            layers.update(dict.fromkeys((stack.label, layer) for layer in intervention.touches or stack.layers))
    return list(layers)
