"""Measures many interventions on the same texts.

One clean pass stores the stream that enters each block. A change affects nothing below the first block that it changes,
so its pass begins there. The interventions with which all changes begin run in one pass, and the other passes continue
from its streams. If one of the changes will be in force in the next sweep, the streams under each change are cached for
that sweep. Changes that begin at the same block share a batch, as copies of the texts. Logits are computed only for the
tokens that the metric needs (`attnmech.runs.engine`).
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..basics.arguments import finite_number, flag, shown
from ..basics.files import path_of
from ..batch import Batch, every_bos
from ..errors import InputError
from ..model.inputs.encoder import Inputs
from ..model.inputs.encoders import tokenized
from ..model.parts.pieces import Tokenized
from ..model.run.applying import require_means
from ..model.run.hooked import HookedModel, require_model
from ..results.provenance import Provenance
from .answers import Answers
from .corpus import CorpusBatch, batches, by_text, contents_of
from .engine import After, Change, Engine, Receivers
from .identity import digest_of, identity_of
from .journal import Entry, Journal, kept, leave
from .judged import JudgedTexts
from .metrics import Metric, MetricLike, require_finite
from .progress import Steps, steps
from .workers import Workers, warn_left_out, workers_of

LATER: Final = ("recompute", "frozen")  # whether what follows the change is recomputed, or fixed at its clean output


@dataclass(frozen=True)
class Swept:
    """The measurements of a sweep."""

    before: Float[Tensor, " text"]  # the metric of each text, with nothing changed
    after: Float[Tensor, "change text"]  # the metric under each change; NaN if an interruption came before it
    documents: int
    provenance: Provenance
    tokens: tuple[tuple[str, ...], ...]
    shift: Float[Tensor, "change layer head"] | None = None
    """The shift of each head's pattern: Jensen-Shannon divergence in nats, averaged over rows, then over texts."""
    keyless: Float[Tensor, "change text"] | None = None  # rows left without keys, of all heads; NaN where not measured

    @property
    def complete(self) -> bool:
        return not bool(self.after.isnan().any())


def run_sweep(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    changes: Sequence[Change],
    metric: MetricLike = "loss",
    *,
    journal: str | Path | None = None,
    partial: bool = False,
    progress: bool = False,
    engine: str | Workers = "local",
    **options: Any,
) -> Swept:
    """Measures each change on every text, in one sweep of `Sweeps` with these options."""
    sweeps = Sweeps(model, inputs, metric, **options)
    return sweeps.sweep(changes, journal=journal, partial=partial, progress=progress, engine=engine)


class Sweeps:
    """Runs sweeps over the same texts with the same metric.

    `memory` is the number of GB (10⁹ bytes) that a step may use on top of the model; it decides how many changes share
    a batch. `shifts` also measures how patterns move; `keyless` counts the rows that changes leave without a key. With
    `through`, a change affects only the q, k or v of these heads: a separate pass computes them under the change, and
    they replace the values in an otherwise clean run. `noted` must then name the heads. Texts with equal `contents`
    (by default their tokens) and equal answers are copies.

    Raises `InputError` for a metric, texts or options that do not fit together.
    """

    def __init__(
        self,
        model: HookedModel,
        inputs: Inputs | Iterable[Inputs],
        metric: MetricLike = "loss",
        *,
        answers: Answers = None,
        against: Answers = None,
        later: str = "recompute",
        shifts: bool = False,
        keyless: bool = False,
        through: Receivers | None = None,
        bos: bool | None = None,
        memory: float = 1.0,
        noted: Mapping[str, Any] | None = None,
        contents: Sequence[Hashable] | None = None,
    ) -> None:
        require_model(model)
        if not isinstance(later, str) or later not in LATER:
            raise InputError(f'`later` must be "recompute" or "frozen"; got {shown(later)}.')
        memory = finite_number("memory", memory, above=0.0, below=1e9)
        if flag("shifts", shifts) and later == "frozen":
            raise InputError('`shifts` cannot be measured with later="frozen", which holds the patterns fixed.')
        self._model, self._shifts, self._keyless = model, shifts, keyless
        self._engine = Engine(
            model, memory * 1e9, frozen=later == "frozen", shifts=shifts, keyless=keyless, through=through
        )
        parts = batches_of(model, inputs, self._engine.text_tokens, bos)
        self.texts = sum(len(part.documents) for part in parts)
        judge = judge_of(model, parts, metric, answers, against)
        for part in parts:
            self._engine.check(part.batch)
        self._judged = JudgedTexts.of(parts, judge, self._engine.text_tokens)
        self.judge = self._judged.judge
        self._engine.text_of = self._judged.text_of
        bos = every_bos(part.batch.bos for part in parts)
        settings = {"bos": bos, "metric": self.judge.name, "later": later, **self.judge.noted, **(noted or {})}
        self.tokens = tokens_of(parts, model.output_stack.label)
        copies = judge.copies(contents_of(parts) if contents is None else contents)
        self.provenance = model.provenance(parts[-1].digest, self.tokens, settings, copies)

    def sweep(
        self,
        changes: Sequence[Change],
        *,
        journal: str | Path | None = None,
        partial: bool = False,
        progress: bool = False,
        engine: str | Workers = "local",
        keep: bool = False,
    ) -> Swept:
        """Measures each change on every text.

        `journal` is the path of a file that stores the measurements; after an interruption, the same call resumes from
        it. The file is removed at the end. Ctrl-C raises `KeyboardInterrupt`; with `partial`, it ends the sweep and
        returns the finished part. `engine=am.Ray(...)` divides texts and changes among worker processes. `keep` says
        that one of the changes will be in force in the next sweep of the others (`Engine.share`).

        Raises `InputError` for a change that the model does not accept, and `JournalError` for the journal of a sweep
        with other weights, texts, changes, hooks or metric; hooks and metric are compared by their code, and by
        measuring the first texts again.
        """
        model, provenance, judged = self._model, self.provenance, self._judged
        progress, workers = flag("progress", progress), workers_of(engine)
        interventions = [intervention for change in changes for intervention in change]
        for intervention in interventions:
            model.applied(intervention)  # which checks it
        require_means(interventions, lambda: model.weights_hash)
        self._engine.share(changes, sum(part.batch.ids.numel() for part in judged.parts), keep=keep and workers is None)
        inputs = len(judged.text_of)
        record = Record(len(changes), inputs, model if self._shifts else None, keyless=self._keyless)
        with kept(journal):
            file = None
            if journal is not None:
                changed = [[intervention.digest for intervention in change] for change in changes]
                measured_too = {"shifts": self._shifts, "keyless": self._keyless}
                identity = identity_of_sweep(model, provenance, self.judge, {"changes": changed, **measured_too})
                file = Journal(path_of(journal), identity)
            work = Sweeping(model, self._engine, changes, self.judge, record, file)
            if file and (entry := file.resume()):
                record.restore(entry)
                work.check(judged.parts)
            with steps("ablations", len(changes) * inputs, show=progress) as bar:
                try:
                    if workers is None:
                        for part in judged.parts:
                            work.part(part, bar)
                    else:
                        workers.sweep(work, judged.parts, bar)
                except KeyboardInterrupt:
                    if not partial or bool(record.values["after"].isnan().all()):
                        raise
                    leave(journal)
        if record.left_out:
            left_out = sorted(set(judged.text_of[sorted(record.left_out)].tolist()))
            provenance = replace(provenance, options={**provenance.options, **warn_left_out(left_out)})
        of_texts = {
            name: judged.by_text(values, axis=min(1, values.ndim - 1)) for name, values in record.values.items()
        }
        if "shift" in of_texts:
            of_texts["shift"] = of_texts["shift"].nanmean(dim=1)
        return Swept(documents=self.texts, provenance=provenance, tokens=self.tokens, **of_texts)


def identity_of_sweep(model: HookedModel, origin: Provenance, judge: Metric, rest: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a run that measures a metric, for its journal."""
    targets = [None if tokens is None else tokens.tolist() for tokens in (judge.answers, judge.against, judge.endings)]
    measured = {
        "code of the metric": None if judge.compute is None else digest_of(judge.compute),
        "inputs": origin.inputs,
        "options": {name: str(value) for name, value in origin.options.items()},
        "answers": targets,
        "masked with": judge.mask_id,
    }
    return identity_of(model, origin.weights, {**measured, **rest})


def batches_of(
    model: HookedModel, inputs: Inputs | Iterable[Inputs], tokens: int, bos: bool | None = None
) -> list[CorpusBatch]:
    """All texts, in batches of up to `tokens` tokens (a longer text alone); the digest does not depend on `tokens`."""
    parts = batches(inputs, model, tokens_per_batch=tokens, window=4096, bos=bos)
    return [piece for part in parts for piece in part.pieces(tokens)]


def tokens_of(parts: Sequence[CorpusBatch], stack: str) -> tuple[tuple[str, ...], ...]:
    return tuple(by_text(parts, lambda part: part.batch.queries(stack).real_tokens))


def prompts_of(parts: Sequence[CorpusBatch], model: HookedModel) -> list[Tokenized]:
    """The query tokens of each text, in the stack that makes the output."""
    return by_text(parts, lambda part: tokenized(model.encoder, part.batch.queries(model.output_stack.label)))


def judge_of(
    model: HookedModel, parts: Sequence[CorpusBatch], metric: MetricLike, answers: Answers, against: Answers
) -> Metric:
    prompts = None if answers is None else prompts_of(parts, model)
    return Metric.of(model, metric, answers, against, sum(len(part.documents) for part in parts), prompts)


class Record:
    """The measurements so far."""

    def __init__(self, changes: int, texts: int, shifting: HookedModel | None, *, keyless: bool = False) -> None:
        shapes: dict[str, tuple[int, ...]] = {"before": (texts,), "after": (changes, texts)}
        if shifting is not None:
            shapes["shift"] = changes, texts, len(shifting.output_stack.layers), shifting.output_stack.n_heads
        if keyless:
            shapes["keyless"] = changes, texts
        self.values = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in shapes.items()}
        """The numbers that `Swept` has, by text; NaN where they are not measured yet."""
        self.written = 0
        self.left_out: set[int] = set()  # the numbers of the texts on which workers ended

    def entry(self) -> Entry:
        self.written += 1
        return Entry(self.values, self.written, "")

    def put(self, measurements: "Measured") -> None:
        documents, rows, after = measurements.documents, torch.tensor(measurements.group), measurements.after
        self.values["before"][documents] = measurements.before
        for name, values in (("after", after.metric), ("shift", after.shift), ("keyless", after.keyless)):
            if name in self.values and values is not None:
                self.values[name][rows[:, None], documents] = values.double()

    def restore(self, entry: Entry) -> None:
        self.values, self.written = dict(entry.tensors), entry.batches


@dataclass(frozen=True)
class Measured:
    """The measurements under some changes that share a pass, on some texts."""

    documents: Int[Tensor, " text"]
    group: list[int]  # the numbers of the changes
    before: Float[Tensor, " text"]
    after: After


def measured(
    runner: Engine,
    judge: Metric,
    changes: Sequence[Change],
    batch: Batch,
    documents: Int[Tensor, " text"],
    groups: Sequence[list[int]],
) -> Iterator[Measured]:
    """Measures groups of changes, given by their numbers, on the texts of a batch; they share one clean pass."""
    judge = judge.at(documents)
    texts = runner.texts(batch, documents, [changes[number] for group in groups for number in group])
    before = texts.before(judge)
    numbers = runner.texts_of(documents).tolist()
    require_finite(judge.name, before, numbers, "with nothing changed")
    for group in groups:
        results = texts.after([changes[number] for number in group], judge)
        for number, values in zip(group, results.metric, strict=True):
            require_finite(judge.name, values, numbers, _named(changes[number]))
        yield Measured(documents, group, before, results)


@dataclass
class Sweeping:
    """One call of `sweep`."""

    model: HookedModel
    engine: Engine
    changes: Sequence[Change]
    judge: Metric
    record: Record
    journal: Journal | None

    def check(self, parts: Sequence[CorpusBatch]) -> None:
        """Measures the first texts of the journal again; raises `JournalError` if the numbers differ."""
        done = ~self.record.values["after"].isnan()
        for part in parts:
            first = next(self.engine.groups(part, self.changes, range(len(self.changes))))
            rows = done[first[0], part.documents].nonzero()[:, 0]
            if len(rows):
                # The numbers are bit-identical if the same texts and changes share a batch.
                batch = part.batch if len(rows) == len(part.documents) else part.batch.texts(rows)
                documents = part.documents[rows]
                self._check(batch, documents, [number for number in first if bool(done[number, documents].all())])
                return

    def _check(self, batch: Batch, documents: Tensor, group: Sequence[int]) -> None:
        assert self.journal is not None
        changes = [self.changes[number] for number in group]
        texts, judge = self.engine.texts(batch, documents, changes), self.judge.at(documents)
        values = self.record.values
        held = values["before"][documents][None], values["after"][torch.tensor(group)[:, None], documents]
        measured_again = texts.before(judge)[None], texts.after(changes, judge).metric
        names = [
            f"the {judge.name} of text {document} ({_named(change)})"
            for change in ((), *changes)
            for document in self.engine.texts_of(documents).tolist()
        ]
        self.journal.require_same(names, torch.cat(held), torch.cat(measured_again), self.model.dtype)

    def part(self, part: CorpusBatch, bar: Steps) -> None:
        """Measures all changes that have not been measured on these texts yet."""
        if groups := self.missing(part, bar):
            for measurements in measured(self.engine, self.judge, self.changes, part.batch, part.documents, groups):
                self.note(measurements, bar)

    def missing(self, part: CorpusBatch, bar: Steps) -> list[list[int]]:
        """The changes that have not been measured on these texts yet, in groups that share passes."""
        missing = self.record.values["after"][:, part.documents].isnan().any(dim=1)
        bar.advance(int((~missing).sum()) * len(part.documents))
        return list(self.engine.groups(part, self.changes, missing.nonzero()[:, 0].tolist()))

    def note(self, measurements: Measured, bar: Steps) -> None:
        self.record.put(measurements)
        if self.journal:
            self.journal.write(self.record.entry())
        bar.advance(len(measurements.group) * len(measurements.documents))


def _named(change: Change) -> str:
    return "; ".join(map(str, change)) or "nothing changed"
