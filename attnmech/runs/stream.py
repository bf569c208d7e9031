"""How does one forward pass give any number of statistics? Reducers see each layer's attention in blocks of rows.

A reducer keeps a few tensors (its state) and adds to them what it needs from each block of rows; the states of two
parts of a corpus can be merged, so the same code serves one text, a corpus and many workers, and memory grows with
the length of a text, not with its square.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeGuard, cast

import torch
from jaxtyping import Int
from torch import Tensor

from ..basics.arguments import flag, listed, optional_flag, shown
from ..basics.files import path_of
from ..batch import Batch
from ..errors import ExactnessError, InputError, JournalError, ReducerError
from ..model.attention.observed import LayerEnd, RowBlock
from ..model.inputs.encoder import Inputs
from ..model.run.hooked import HookedModel, require_model
from ..model.stack.stack import Stack
from ..points import PointKey
from ..results import Provenance
from .corpus import CorpusBatch, CorpusHash, batches, checked_shard
from .identity import digest_of, identity_of
from .journal import Entry, Journal, kept
from .progress import Meter, meter
from .workers import Workers, warn_left_out, workers_of

State: TypeAlias = dict[str, Tensor]
"""What a reducer has found so far: tensors by name."""

_JOURNAL_SHARE: Final = 0.05
"""Roughly the largest share of the time spent on writing the journal."""

_LEFT_OUT: Final = "left out"
"""What a journal calls the numbers of the documents that were left out."""


@dataclass(frozen=True)
class Run:
    """What a reducer knows before a batch goes through the model."""

    model: HookedModel
    stack: Stack
    layers: tuple[int, ...]
    """The layers that the reducer sees, in order; `block.index` is a layer's index among them."""
    batch: Batch
    documents: Int[Tensor, " batch"]
    """The number of each text in its corpus."""
    corpus: bool
    """Whether more batches may follow; for a single batch, a reducer may keep every row."""
    between: dict[Any, Any] = field(default_factory=dict, compare=False)
    """What reducers keep from one block of rows of this batch to the next, each under a key of its own."""

    @property
    def n_layers(self) -> int:
        """The number of layers that the reducer sees."""
        return len(self.layers)

    @property
    def n_heads(self) -> int:
        """The number of heads per layer."""
        return self.stack.n_heads


@dataclass(frozen=True)
class Source:
    """What a result comes from, known after the last batch."""

    model: HookedModel
    stack: Stack
    layers: tuple[int, ...]
    documents: int
    """How many texts there were."""
    truncated: int
    """How many of them were cut to the model's length (`truncate` in `stream`)."""
    batch: Batch | None
    """The texts; None for a corpus, whose texts are not kept."""
    provenance: Provenance


class Reducer(ABC):
    """A statistic of attention that is computed while the model runs; subclass it for your own.

    The largest score of each head:

    >>> class LargestScore(am.Reducer):                                             # doctest: +SKIP
    ...     def start(self, run):
    ...         shape = run.n_layers, run.n_heads
    ...         return {"largest": torch.full(shape, -torch.inf, device=run.model.device)}
    ...
    ...     def add(self, state, block, run):
    ...         counts = block.visible & block.real[:, None, :, None]
    ...         largest = block.scores.masked_fill(~counts, -torch.inf).amax(dim=(0, 2, 3))
    ...         state["largest"][block.index] = torch.maximum(state["largest"][block.index], largest)
    ...
    ...     def merge(self, one, other):
    ...         return {"largest": torch.maximum(one["largest"], other["largest"])}
    >>> am.stream(model, "Anna sang of shells.", [LargestScore()])[0]["largest"]       # doctest: +SKIP

    For every batch, `start` makes the tensors of a state, on the model's device. `add` receives the blocks of rows of
    each layer in turn; it changes the tensors in place, keeping shapes and dtypes, and must not keep views of a block's
    tensors. `add_layer` does the same with the points of each finished layer. A reducer has one of the two, or both.
    `close` may turn a batch's state into something else, such as sums. What it returns is moved to the CPU; then
    `merge` joins the states of two batches, or of two shards, in any order: the tensors keep their names, dtypes and
    number of axes. `finish` turns the final state into the result (by default, the state is the result).

    `add` must leave padding out: `block.real` is True at rows of real tokens and `block.visible` at the keys that a
    row can see; hidden keys have the lowest finite score and no weight. `run.batch` holds the tokens, `run.documents`
    the number of each text in its corpus, and `block.rows` the positions of the rows in the text. A state with NaN is
    refused; infinite numbers are allowed.

    States hold numbers, so keep a token as its id: `source.model.encode(ids).tokens` gives the texts in `finish`, as in
    `examples/reducers.py`.
    """

    points: tuple[str, ...] = ()
    """Activation points of the layers to pass to the reducer: `block["resid_pre"]`, `end["z"]`.

    Points that other reducers of the same call need may be there too; `block` has only those before attention.
    """
    optional_points: tuple[str, ...] = ()
    """Likewise, if the model has them (`"resid_mid" in end`)."""

    @abstractmethod
    def start(self, run: Run) -> State:
        """An empty state for one batch."""

    def add(self, state: State, block: RowBlock, run: Run) -> None:  # noqa: B027 - one of the two may do
        """Adds a block of rows of one layer."""

    def add_layer(self, state: State, end: LayerEnd, run: Run) -> None:  # noqa: B027
        """Adds the points of one finished layer."""

    def close(self, state: State, run: Run) -> State:
        """What to keep of a finished batch, padding included; by default the state as it is."""
        return state

    @abstractmethod
    def merge(self, one: State, other: State) -> State:
        """The state of both parts together."""

    def finish(self, state: State, source: Source) -> Any:
        """The result."""
        return state

    @property
    def name(self) -> str:
        """Its name in messages."""
        return type(self).__name__

    @property
    def options(self) -> dict[str, str]:
        """What distinguishes it from others of its class, for provenance and journal: by default its attributes.

        A run resumes from a journal only if these texts are the same, so none may hold a memory address. The code of
        the class must be the same too and, unless the class defines `options`, all attributes (tensors by content).
        """
        return {name: repr(value) for name, value in vars(self).items()}


def stream(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    reducers: Sequence[Reducer],
    *,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    bos: bool | None = None,
    truncate: bool = False,
    shard: tuple[int, int] = (0, 1),
    journal: str | Path | None = None,
    progress: bool = False,
    engine: str | Workers = "local",
) -> tuple[Any, ...]:
    """Runs the model once over the inputs and returns a result for each reducer.

    >>> focus, updates = am.stream(                                                  # doctest: +SKIP
    ...     model, "Anna sang of shells.", [am.AttentionFocus.reducer(), am.ResidualUpdates.reducer()]
    ... )

    A corpus is run in batches of similar length and is not kept. Active hooks change what reducers see. A reducer
    without `finish` returns states; merge those of shards with `reducer.merge(one, other)`.

    Args:
        model: the model.
        inputs: what `model.run` takes, or an iterator (or another iterable that is not a list) of these: a corpus.
        reducers: what to sum, each an `am.Reducer`.
        layers: which layers reducers see; by default all.
        stack: which stack they see, in a model with several.
        bos: whether each text begins with the tokenizer's first token.
        truncate: whether documents that are too long for the model are cut, and counted, rather than refused.
        shard: (k, n) takes every n-th document from the k-th on, under its own number, so that the merged states of n
            shards are those of the whole corpus.
        journal: a path, where the states so far are kept: after an interruption, the same call resumes from it and
            gives the same result; the file is removed at the end.
        progress: whether to show a bar with rate and time left on stderr.
        engine: `am.Ray(...)` has a corpus run by worker processes, on this machine or a cluster, with the same result.

    Returns:
        One result per reducer, in order.

    Raises:
        InputError: for invalid inputs.
        MissingPointError: for a point that this model does not have.
        CertificateError: for a point that could not be proven.
        ReducerError: for a reducer that breaks its rules.
        JournalError: for another run's journal (or if the code of a reducer or a hook has changed), a damaged one, or
            one that another process is writing.
    """
    require_model(model)
    work = Streaming(model, _checked(reducers), model.stack(stack), layers)
    shard, truncate = checked_shard(shard), flag("truncate", truncate)
    bos, progress, workers = optional_flag("bos", bos), flag("progress", progress), workers_of(engine)
    if not _is_corpus(inputs):
        if shard != (0, 1) or journal is not None or truncate:
            raise InputError(
                "`shard`, `journal` and `truncate` are for a corpus: give an iterator of texts, such as "
                "iter(texts), or a file as am.Corpus(path)."
            )
        return work.batch(model.encode(cast(Inputs, inputs), bos=bos))
    return work.corpus(inputs, bos, truncate, shard, journal, progress, workers)


def _is_corpus(inputs: Inputs | Iterable[Inputs]) -> TypeGuard[Iterable[Inputs]]:
    """Whether there may be more than one batch: an iterable other than a text, list, tensor or image."""
    known = isinstance(inputs, (str, torch.Tensor, Mapping, Batch, Sequence))
    return isinstance(inputs, Iterable) and not known and not hasattr(inputs, "__array__")


def _checked(reducers: Any) -> tuple[Reducer, ...]:
    wanted = "a list of reducers, such as [am.AttentionFocus.reducer()]"
    found = (reducers,) if isinstance(reducers, Reducer) else tuple(listed("reducers", reducers, wanted))
    for each in found:
        if not isinstance(each, Reducer):
            raise InputError(f"`reducers` must be {wanted}; got {shown(each)} in it.")
    if not found:
        raise InputError("`reducers` must hold at least one reducer; got an empty list.")
    return found


class Streaming:
    """One call of `stream`: which reducers see which layers of which stack."""

    def __init__(
        self, model: HookedModel, reducers: tuple[Reducer, ...], stack: Stack, layers: Iterable[int] | None
    ) -> None:
        self.model, self.reducers, self.stack = model, reducers, stack
        self.layers = tuple(dict.fromkeys(model.points.check_layers(layers, stack.label)))
        self.see_rows = [place for place, each in enumerate(reducers) if type(each).add is not Reducer.add]
        self.see_layers = [
            place for place, each in enumerate(reducers) if type(each).add_layer is not Reducer.add_layer
        ]
        if self.see_rows:
            self._keys(("scores", "pattern"))
        wanted = {name: None for each in reducers for name in each.points}
        there = {
            name: None
            for each in reducers
            for name in each.optional_points
            if model.points[stack.point(name)].absent is None
        }
        self.passing = self._keys((*wanted, *there))

    def _keys(self, names: Iterable[str]) -> list[PointKey]:
        full = [self.stack.point(name) for name in names]
        keys = self.model.points.resolve(full, self.layers, self.model.refused)
        for name, layer in keys:
            if layer is None:
                raise InputError(f"point {name!r} has no layer, so reducers cannot see it; take it from model.run.")
        return keys

    def batch(self, batch: Batch) -> tuple[Any, ...]:
        """The results for texts that are run at once."""
        states = self._reduced(Run(*self._place, batch, torch.arange(len(batch.ids)), corpus=False))
        tokens = batch.queries(self.stack.label).tokens
        provenance = self.model.provenance(batch, tokens, self._options(batch.bos))
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
        """The results for a corpus, batch by batch, here or by workers."""
        options = self._options(bos) | {"truncate": truncate, "shard": list(shard)}
        with kept(path):
            inputs = inputs if workers is None else workers.reading(inputs)
            journal = None if path is None else Journal(path_of(path), self._identity(options, inputs))
            total = Total(self.reducers, journal.resume() if journal else None)
            whole = CorpusHash()
            parts = batches(inputs, self.model, truncate=truncate, bos=bos, shard=shard, whole=whole)
            try:
                with meter(inputs, shard, show=progress) as bar:
                    further = _after(parts, total, bar)
                    if workers is None:
                        self._go_through(further, total, journal, bar)
                    else:
                        workers.stream(self, further, total, journal, bar)
            finally:
                if journal and total.fresh:
                    journal.write(total.entry())
            options |= warn_left_out(total.left_out)
            if total.states is None:
                raise InputError(f"shard {shard} has no documents; use no more shards than there are documents.")
            options |= {"corpus": whole.value}
            provenance = self.model.provenance_of(total.digest, (), options)
            source = Source(*self._place, total.documents, total.truncated, None, provenance)
            return self._finished(total.states, source)

    def _go_through(self, parts: Iterator[CorpusBatch], total: "Total", journal: Journal | None, bar: Meter) -> None:
        now_and_then = Journalling(journal)
        for part in parts:
            total.add(part, self.of_part(part.batch, part.documents))
            bar.advance(part)
            now_and_then.write(total)

    def of_part(self, batch: Batch, documents: Int[Tensor, " batch"]) -> list[State]:
        """The state of every reducer after one batch of a corpus."""
        return self._reduced(Run(*self._place, batch, documents, corpus=True))

    @property
    def _place(self) -> tuple[HookedModel, Stack, tuple[int, ...]]:
        return self.model, self.stack, self.layers

    def _options(self, bos: bool | None) -> dict[str, Any]:
        return {
            "layers": list(self.layers),
            "stack": self.stack.label or "self",
            "bos": bos,
            "reducers": [[each.name, each.options] for each in self.reducers],
        }

    def _identity(self, options: dict[str, Any], inputs: Any) -> dict[str, Any]:
        of_reducers = [_digest_of(each) for each in self.reducers]
        rest = {"code of the reducers": of_reducers, "corpus": getattr(inputs, "fingerprint", None), **options}
        return identity_of(self.model, self.model.weights_hash, rest)

    def _reduced(self, run: Run) -> list[State]:
        """The state of every reducer after one batch."""
        states = [each.start(run) for each in self.reducers]
        shapes = [_shapes(each, state) for each, state in zip(self.reducers, states, strict=True)]

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
        for each, state, before in zip(self.reducers, states, shapes, strict=True):
            _require_same_shapes(each, before, _shapes(each, state))
            found = _finite(each, each.close(state, run), run.documents.tolist())
            # A state from a journal is on the CPU too.
            closed.append({name: value.cpu() for name, value in found.items()})
        return closed

    def _finished(self, states: Sequence[State], source: Source) -> tuple[Any, ...]:
        return tuple(each.finish(state, source) for each, state in zip(self.reducers, states, strict=True))


class Journalling:
    """Writes a run's journal now and then, for a bounded share of the time."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal, self._spent, self._since = journal, 0.0, time.perf_counter()

    @property
    def due(self) -> bool:
        """Whether it is time to write it."""
        passed = time.perf_counter() - self._since
        return self._journal is not None and self._spent <= _JOURNAL_SHARE * passed

    def write(self, total: "Total") -> None:
        """Writes what has been found so far, if it is time to."""
        if self._journal is None or not self.due:
            return
        before = time.perf_counter()
        self._journal.write(total.entry())
        total.fresh = False
        self._spent, self._since = time.perf_counter() - before, time.perf_counter()


def _digest_of(reducer: Reducer) -> str:
    """A digest of a reducer's code and attributes; of its code alone if it defines `options`."""
    says_itself = type(reducer).options is not Reducer.options
    return digest_of(type(reducer) if says_itself else reducer)


def _after(parts: Iterator[CorpusBatch], total: "Total", bar: Meter) -> Iterator[CorpusBatch]:
    """The batches that are not in the total yet; `JournalError` if those already in it were others."""
    digest = ""
    for _ in range(total.batches):
        part = next(parts, None)
        if part is not None:
            digest = part.digest
            bar.advance(part, skipped=True)
    if digest != total.digest:
        raise JournalError(
            f"the journal resumes after {total.documents} documents, but these inputs begin with others. Give the "
            "inputs that it was started with, another path, or delete it."
        )
    yield from parts


@dataclass(frozen=True)
class Covered:
    """Which part of a corpus some states are of."""

    batches: int
    documents: range
    """As many numbers as there are documents, from the smallest one on."""
    truncated: int
    digest: str
    """`CorpusBatch.digest` of the last batch."""
    left_out: tuple[int, ...] = ()
    """The numbers of documents that ended their workers; they are counted in `documents`."""

    @classmethod
    def of(cls, part: CorpusBatch) -> "Covered":
        """A single batch."""
        first = int(part.documents.min())
        return cls(1, range(first, first + len(part.documents)), part.truncated, part.digest)

    def then(self, other: "Covered") -> "Covered":
        """With the batches that follow."""
        first = min(self.documents.start, other.documents.start)
        count = len(self.documents) + len(other.documents)
        return Covered(
            self.batches + other.batches,
            range(first, first + count),
            self.truncated + other.truncated,
            other.digest,
            self.left_out + other.left_out,
        )


class Total:
    """The merged states of the batches so far."""

    def __init__(self, reducers: Sequence[Reducer], done: Entry | None) -> None:
        self.reducers = reducers
        self.states: list[State] | None = None
        self.batches = self.documents = self.truncated = 0
        self.digest = ""
        self.left_out: list[int] = []
        """The numbers of the documents that ended their workers."""
        self.fresh = False
        """Whether it holds anything that the journal does not."""
        if done is not None:
            self.batches, self.digest = done.batches, done.digest
            self.documents, self.truncated = done.counters["documents"], done.counters["truncated"]
            self.left_out = done.tensors[_LEFT_OUT].tolist() if _LEFT_OUT in done.tensors else []
            self.states = [
                {name.split(" ", 1)[1]: value for name, value in done.tensors.items() if name.startswith(f"{place} ")}
                for place in range(len(reducers))
            ]

    def add(self, part: CorpusBatch, states: list[State]) -> None:
        """Merges the states of one more batch."""
        self.extend(states, Covered.of(part))

    def extend(self, states: list[State] | None, covered: "Covered") -> None:
        """Merges the states of the next batches; None if no document of these was finished."""
        # A merge may change its first argument; if interrupted half-way, that must not get into the journal.
        self.fresh = False
        if self.states is None:
            self.states = states
        elif states is not None:
            self.states = merged_states(self.reducers, self.states, states, covered.documents)
        self.batches += covered.batches
        self.documents += len(covered.documents) - len(covered.left_out)
        self.truncated += covered.truncated
        self.left_out += covered.left_out
        self.digest = covered.digest
        self.fresh = self.states is not None

    def entry(self) -> Entry:
        """What the journal holds."""
        tensors = {f"{place} {name}": x for place, state in enumerate(self.states or ()) for name, x in state.items()}
        if self.left_out:
            tensors[_LEFT_OUT] = torch.tensor(self.left_out)
        return Entry(tensors, self.batches, self.digest, {"documents": self.documents, "truncated": self.truncated})


def merged_states(
    reducers: Sequence[Reducer], one: list[State], other: list[State], documents: Sequence[int]
) -> list[State]:
    """The states of two parts of a corpus together; `documents` are those of the second part, for errors."""
    return [_merged(*each, documents) for each in zip(reducers, one, other, strict=True)]


def _shapes(reducer: Reducer, state: Any) -> dict[str, tuple[Any, ...]]:
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ReducerError(f"{reducer.name}: a state must be a dictionary of tensors by name; got {state!r}.")
    return {name: (tuple(value.shape), value.dtype) for name, value in state.items()}


def _require_same_shapes(reducer: Reducer, before: dict[str, Any], after: dict[str, Any]) -> None:
    if before == after:
        return
    name = next(name for name in (*before, *after) if before.get(name) != after.get(name))
    raise ReducerError(
        f"{reducer.name}: `add` must keep the tensors that `start` made; {name!r} was "
        f"{_told(before.get(name))} and became {_told(after.get(name))}. Change them in place."
    )


def _merged(reducer: Reducer, one: State, other: State, documents: Sequence[int]) -> State:
    expected = {name: (value.dtype, value.ndim) for name, value in other.items()}
    found = _finite(reducer, reducer.merge(one, other), documents)
    for name in (*expected, *found):
        if name not in found or (found[name].dtype, found[name].ndim) != expected.get(name):
            raise ReducerError(
                f"{reducer.name}: `merge` must keep names, dtypes and number of axes; {name!r} was "
                f"{_told(_shapes(reducer, other).get(name))} and became {_told(_shapes(reducer, found).get(name))}."
            )
    return found


def _told(shape: tuple[Any, ...] | None) -> str:
    return "absent" if shape is None else f"{shape[1]} {list(shape[0])}"


def _finite(reducer: Reducer, state: Any, documents: Sequence[int]) -> State:
    _shapes(reducer, state)
    for name, value in state.items():
        # A sum needs no second array; it is also NaN where both infinities are.
        if value.is_floating_point() and bool(value.sum().isnan()) and bool(value.isnan().any()):
            first, last = min(documents), max(documents)
            where = f"document {first}" if len(documents) == 1 else f"documents {first} to {last}"
            if type(reducer).__module__.startswith("attnmech."):
                raise ExactnessError(
                    f"{reducer.name}: {name!r} is NaN after {where}, which finite activations never give. "
                    "Try dtype=torch.float32, and report it as a bug in attnmech."
                )
            raise ReducerError(
                f"{reducer.name}: {name!r} is NaN after {where}. Leave out what is undefined (padding, rows without a "
                "choice) before summing."
            )
    found: State = state
    return found
