"""Computes any number of statistics in one forward pass: reducers see each layer's attention in blocks of rows."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

from ..basics.arguments import flag, listed, optional_flag, shown, whole_number
from ..basics.files import path_of
from ..basics.public import public
from ..batch import Batch, every_bos
from ..errors import InputError, JournalError, ReducerError
from ..maths.copies import copies_of
from ..maths.intervals import TextMeans
from ..model.attention.observed import LayerEnd, RowBlock
from ..model.inputs.encoder import Inputs
from ..model.inputs.merged import is_chat
from ..model.parts.hashes import batch_hash
from ..model.run.hooked import HookedModel, require_model
from ..model.stack.stack import Stack
from ..points import PointKey
from .corpus import CorpusBatch, CorpusHash, batches, checked_shard
from .identity import digest_of, identity_of
from .journal import Journal, kept
from .progress import Meter, meter
from .reducer import Reducer, Run, Source, State
from .states import finite, on_cpu, require_same_shapes, shapes_of
from .total import Covered, Journalling, Total
from .workers import Workers, warn_left_out, workers_of


class RowFunction(Reducer):
    """Averages over all rows what a function of a block returns, `[batch head row]`; intervals are over texts."""

    def __init__(self, function: Callable[[RowBlock], Tensor]) -> None:
        self.function = function

    @property
    def options(self) -> dict[str, str]:
        return {"function": digest_of(self.function)}

    def start(self, run: Run) -> State:
        shape = run.n_layers, run.n_heads, len(run.batch.ids)
        return {name: torch.zeros(shape, device=run.model.device) for name in ("sums", "rows")}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        values, wanted = self.function(block), [*block.q.shape[:3]]
        if not isinstance(values, Tensor) or [*values.shape] != wanted:
            raise ReducerError(
                f"a function in `reducers` must return a number for each text, head and row, {wanted}, such as "
                f"block.pattern.amax(-1); got {shown(values)}. For anything else, subclass am.Reducer."
            )
        state["sums"][block.index] += values.float().masked_fill(~block.real[:, None], 0.0).sum(dim=-1).T
        state["rows"][block.index] += block.real.sum(dim=-1)

    def merge(self, one: State, other: State) -> State:
        return {name: torch.cat([one[name], other[name]], dim=-1) for name in one}

    def finish(self, state: State, source: Source) -> TextMeans:
        copies: Sequence[int] = source.provenance.copies
        return TextMeans.of_ratio(state["sums"], state["rows"], copies)


@public
def stream(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    reducers: Sequence[Reducer | Callable[[RowBlock], Tensor]],
    *,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    bos: bool | None = None,
    keep_rows: bool | None = None,
    truncate: bool = False,
    generate: int = 0,
    shard: tuple[int, int] = (0, 1),
    journal: str | Path | None = None,
    engine: str | Workers = "local",
    progress: bool = False,
) -> tuple[Any, ...]:
    """Runs the model once over the inputs and returns a result for each reducer.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> reducers = [am.results.AttentionFocus.reducer(), am.results.ResidualUpdates.reducer()]
    >>> focus, updates = am.stream(am.load(), iter(documents(6)), reducers)

    A corpus runs in batches of texts of similar length, and its texts are not kept. Active hooks change what reducers
    see. A reducer without `finish` returns states; merge those of shards with `reducer.merge(one, other)`.

    Args:
        model: the model.
        inputs: inputs as in `model.run`, or a corpus: an iterator (or another iterable that is not a list) of such
            inputs, or of records with a string "text", such as a split of a Hugging Face dataset.
        reducers: the statistics to sum, each an `am.Reducer`; or a function of a `am.reducers.RowBlock`, such as
            `lambda block: block.pattern.amax(-1)`, that returns a number for each text, head and row. Its result is
            an `am.reducers.TextMeans` with the mean over all rows, `[layer head]`, and intervals over texts.
        layers: the layers that reducers see; by default all.
        stack: the stack that reducers see, in a model with several.
        bos: whether each text begins with the tokenizer's BOS or CLS token.
        keep_rows: whether results keep the numbers of every row, which takes one batch of all texts; otherwise only
            sums are kept, batch by batch, and results of shards can be merged. By default, rows of a text or a list
            are kept, and rows of a corpus are not. Means are the same.
        truncate: whether documents that are too long for the model, or longer than those on which it was trained, are
            cut, and counted; otherwise the former are refused, and the first of the latter brings a `LongTextWarning`.
        generate: the model first continues each text by up to this many tokens, greedily and under the edits in force
            (`model.generate`); reducers see prompt and answer.
        shard: (k, n) takes every n-th document from the k-th on, under its own number, so that the merged states of n
            shards are those of the whole corpus.
        journal: the path of a file that keeps the states so far: after an interruption, the same call resumes from it
            and gives the same result; the file is removed at the end.
        engine: with `am.Ray(...)`, worker processes on this machine or a cluster run a corpus, with the same result.
        progress: whether to show a bar with rate and time left on stderr.

    Returns:
        One result per reducer, in order.

    Raises:
        InputError: for invalid inputs.
        MissingPointError: for a point that this model does not have.
        CertificateError: for a point that could not be proven.
        ReducerError: for a reducer that breaks its rules.
        JournalError: if the journal belongs to another run (or the code of a reducer or a hook has changed), is
            damaged, or is in use by another process.
    """
    require_model(model)
    work = Streaming(model, _checked(reducers), model.stack(stack), layers, whole_number("generate", generate, least=0))
    shard, truncate = checked_shard(shard), flag("truncate", truncate)
    bos, progress, workers = optional_flag("bos", bos), flag("progress", progress), workers_of(engine)
    # A text, list, tensor or image is one batch.
    whole = isinstance(inputs, str | torch.Tensor | Mapping | Batch | Sequence) or hasattr(inputs, "__array__")
    several = isinstance(inputs, Iterable) and not whole
    if optional_flag("keep_rows", keep_rows) if keep_rows is not None else not several:
        if shard != (0, 1) or journal is not None or truncate:
            raise InputError(
                "`shard`, `journal` and `truncate` are for a corpus whose rows are not kept: give keep_rows=False, an "
                "iterator of texts, such as iter(texts), or a file as am.Corpus(path)."
            )
        together = list(cast(Iterable[Any], inputs)) if several else inputs
        return work.batch(work.continued(model.encode(cast(Inputs, together), bos=bos)))
    listed_texts = isinstance(inputs, list | tuple) and not is_chat(inputs)
    texts = cast(Iterable[Inputs], inputs if several or listed_texts else [inputs])
    return work.corpus(texts, bos, truncate, shard, journal, progress, workers)


def _checked(reducers: Any) -> tuple[Reducer, ...]:
    wanted = (
        "a list of reducers, such as [am.results.AttentionFocus.reducer()] or [lambda block: block.pattern.amax(-1)]"
    )
    several = (reducers,) if isinstance(reducers, Reducer) else tuple(listed("reducers", reducers, wanted))
    several = tuple(
        RowFunction(entry) if inspect.isfunction(entry) and not hasattr(entry, "is_public") else entry
        for entry in several
    )
    for reducer in several:
        if not isinstance(reducer, Reducer):
            raise InputError(f"`reducers` must be {wanted}; got {shown(reducer)} in it.")
    if not several:
        raise InputError("`reducers` must hold at least one reducer; got an empty list.")
    return several


class Streaming:
    """One call of `stream`: its reducers, and the layers and the stack that they see."""

    def __init__(
        self,
        model: HookedModel,
        reducers: tuple[Reducer, ...],
        stack: Stack,
        layers: Iterable[int] | None,
        generate: int = 0,
    ) -> None:
        self.model, self.reducers, self.stack, self.generate = model, reducers, stack, generate
        self.layers = tuple(dict.fromkeys(model.points.check_layers(layers, stack.label)))
        self.see_rows = [place for place, reducer in enumerate(reducers) if type(reducer).add is not Reducer.add]
        self.see_layers = [
            place for place, reducer in enumerate(reducers) if type(reducer).add_layer is not Reducer.add_layer
        ]
        if self.see_rows:
            self._keys(("scores", "pattern"))
        wanted = {name: None for reducer in reducers for name in reducer.points}
        there = {
            name: None
            for reducer in reducers
            for name in reducer.optional_points
            if model.points[stack.point(name)].absent is None
        }
        self.passing = self._keys((*wanted, *there))

    def _keys(self, names: Iterable[str]) -> list[PointKey]:
        keys = self.model.points.resolve([self.stack.point(name) for name in names], self.layers, self.model.refused)
        for name, layer in keys:
            if layer is None:
                raise InputError(f"point {name!r} has no layer, so reducers cannot see it; capture it with model.run.")
        return keys

    def batch(self, batch: Batch) -> tuple[Any, ...]:
        states = self._reduced(Run(*self._place, batch, torch.arange(len(batch.ids)), corpus=False))
        tokens = batch.queries(self.stack.label).tokens
        copies = copies_of(batch.digests.tolist()) if len(batch.ids) > 1 else ()
        provenance = self.model.provenance(batch_hash(batch), tokens, self._options(batch.bos), copies)
        return self._finished(states, Source(*self._place, len(batch.ids), 0, batch, provenance))

    def corpus(
        self,
        inputs: Iterable[Inputs],
        bos: bool | None,
        truncate: bool,
        shard: tuple[int, int],
        path: str | Path | None,
        progress: bool,
        workers: Workers | None,
    ) -> tuple[Any, ...]:
        """The results for a corpus, batch by batch, in this process or on workers."""
        options = self._options(bos) | {"truncate": truncate, "shard": list(shard)}
        with kept(path):
            inputs = inputs if workers is None else workers.reading(inputs)
            journal = None if path is None else Journal(path_of(path), self._identity(options, inputs))
            total = Total(self.reducers, journal.resume() if journal else None)
            whole, begin = CorpusHash(), set[bool | None]()
            parts = batches(inputs, self.model, truncate=truncate, bos=bos, shard=shard, whole=whole)
            try:
                with meter(inputs, shard, show=progress) as bar:
                    further = _after(_noted(parts, begin), total, bar)
                    if workers is None:
                        now_and_then = Journalling(journal)
                        for part in further:
                            total.extend(self.of_part(part.batch, part.documents), Covered.of(part))
                            bar.advance(part)
                            now_and_then.write(total)
                    else:
                        workers.stream(self, further, total, journal, bar)
            finally:
                if journal and total.fresh:
                    journal.write(total.entry())
            options |= warn_left_out(total.left_out)
            if total.states is None:
                raise InputError(f"shard {shard} has no documents; use no more shards than there are documents.")
            options |= {"corpus": whole.value, "bos": every_bos(begin)}
            provenance = self.model.provenance(total.digest, (), options)
            source = Source(*self._place, total.documents, total.truncated, None, provenance)
            return self._finished(total.states, source)

    def of_part(self, batch: Batch, documents: Int[Tensor, " batch"]) -> list[State]:
        return self._reduced(Run(*self._place, self.continued(batch), documents, corpus=True))

    def continued(self, batch: Batch) -> Batch:
        """The texts with the model's answers, if it is to write any."""
        return self.model.generate(batch, self.generate) if self.generate else batch

    @property
    def _place(self) -> tuple[HookedModel, Stack, tuple[int, ...]]:
        return self.model, self.stack, self.layers

    def _options(self, bos: bool | None) -> dict[str, Any]:
        return {
            "layers": list(self.layers),
            "stack": self.stack.label or "self",
            "bos": bos,
            **({"generate": self.generate} if self.generate else {}),
            "reducers": [[reducer.name, reducer.options] for reducer in self.reducers],
        }

    def _identity(self, options: dict[str, Any], inputs: Any) -> dict[str, Any]:
        of_reducers = [_digest_of(reducer) for reducer in self.reducers]
        rest = {"code of the reducers": of_reducers, "corpus": getattr(inputs, "fingerprint", None), **options}
        return identity_of(self.model, self.model.weights_hash, rest)

    def _reduced(self, run: Run) -> list[State]:
        states = [reducer.start(run) for reducer in self.reducers]
        shapes = [shapes_of(reducer, state) for reducer, state in zip(self.reducers, states, strict=True)]

        def rows(block: RowBlock) -> None:
            for place in self.see_rows:
                self.reducers[place].add(states[place], block, run)

        def ends(end: LayerEnd) -> None:
            for place in self.see_layers:
                self.reducers[place].add_layer(states[place], end, run)

        self.model.forward(
            run.batch,
            rows=[rows] if self.see_rows else (),
            ends=[ends] if self.see_layers else (),
            passing=self.passing,
            layers=[(self.stack.label, layer) for layer in self.layers],
        )
        closed = []
        for reducer, state, before in zip(self.reducers, states, shapes, strict=True):
            require_same_shapes(reducer, before, shapes_of(reducer, state))
            kept_state = finite(reducer, reducer.close(state, run), run.documents.tolist())
            # A state from a journal is on the CPU too.
            closed.append(on_cpu(kept_state))
        return closed

    def _finished(self, states: Sequence[State], source: Source) -> tuple[Any, ...]:
        return tuple(reducer.finish(state, source) for reducer, state in zip(self.reducers, states, strict=True))


def _digest_of(reducer: Reducer) -> str:
    """A digest of a reducer's code and attributes; only of its code if it defines `options`."""
    says_itself = type(reducer).options is not Reducer.options
    return digest_of(type(reducer) if says_itself else reducer)


def _noted(parts: Iterable[CorpusBatch], begin: set[bool | None]) -> Iterator[CorpusBatch]:
    for part in parts:
        begin.add(part.batch.bos)
        yield part


def _after(parts: Iterator[CorpusBatch], total: Total, bar: Meter) -> Iterator[CorpusBatch]:
    """The batches that the total does not cover yet; raises `JournalError` if it covers different batches."""
    digest = ""
    for _ in range(total.batches):
        part = next(parts, None)
        if part is not None:
            digest = part.digest
            bar.advance(part, skipped=True)
    if digest != total.digest:
        raise JournalError(
            f"the journal resumes after {total.documents} documents, but these inputs begin with others. Give the "
            f"inputs of the first call, or another path, or delete the journal."
        )
    yield from parts
