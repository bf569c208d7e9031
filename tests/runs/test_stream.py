"""One pass for any number of reducers; corpora, shards and journals give the same numbers; errors name bad reducers."""

import itertools
import json
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import test_examples
import torch
from comparing import refuses
from safetensors import safe_open
from torch import Tensor
from transformers.models.bloom.modeling_bloom import BloomMLP

import attnmech as am
from attnmech.errors import CertificateError, ExactnessError, InputError, JournalError, MissingPointError, ReducerError
from attnmech.model.attention import attend as attention
from attnmech.runs import total
from attnmech.runs.progress import meter

ROOT = Path(__file__).parents[2]
State = dict[str, Tensor]


def documents_of(name: str, lengths: list[int], seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, models.plain(name).config.vocab_size, (n,), generator=generator) for n in lengths]


LENGTHS = [5, 9, 2, 14, 7, 11, 3, 16, 8, 6, 13, 1, 10, 4, 15, 9, 12, 2, 7, 5, 11]
"""More than two windows of `many_batches`."""


def entropies(pattern: Tensor) -> Tensor:
    """Σ over rows of −Σ p ln p, `[head]`, of the pattern of one text."""
    return -torch.xlogy(pattern.double(), pattern.double()).sum(dim=(-1, -2))


class Rows(am.Reducer):
    """The sum of entropies of each document, layer and head, and the number of rows."""

    def __init__(self, documents: int) -> None:
        self.documents = documents

    def start(self, run: am.reducers.Run) -> State:
        places = self.documents, run.n_layers, run.n_heads
        return {"sums": torch.zeros(places, dtype=torch.float64), "counts": torch.zeros(places, dtype=torch.int64)}

    def add(self, state: State, block: am.reducers.RowBlock, run: am.reducers.Run) -> None:
        found = -torch.xlogy(block.pattern.double(), block.pattern.double()).sum(dim=-1)
        found = found.masked_fill(~block.real[:, None], 0.0).sum(dim=-1)
        state["sums"][:, block.index].index_add_(0, run.documents, found)
        state["counts"][run.documents, block.index] += block.real.sum(dim=-1)[:, None]

    def merge(self, one: State, other: State) -> State:
        return {name: one[name] + other[name] for name in one}


class Layers(am.Reducer):
    """Sum of z of every layer and head, and the layers in the order in which they came."""

    points = ("z",)
    optional_points = ("q_rot",)

    def start(self, run: am.reducers.Run) -> State:
        return {
            "z": torch.zeros(run.n_layers, run.n_heads, dtype=torch.float64),
            "seen": torch.full((run.n_layers, 2), -1),
        }

    def add_layer(self, state: State, end: am.reducers.LayerEnd, run: am.reducers.Run) -> None:
        assert ("q_rot" in end) is (run.model.points["q_rot"].absent is None)
        assert "attn_in" not in end
        z = end["z"].double().masked_fill(~end.real[:, :, None, None], 0.0)
        state["z"][end.index] += z.sum(dim=(0, 1, 3))
        state["seen"][end.index] = torch.tensor([end.layer, end.index])

    def merge(self, one: State, other: State) -> State:
        return {"z": one["z"] + other["z"], "seen": torch.maximum(one["seen"], other["seen"])}


class Both(am.Reducer):
    """Rows of a layer before its end; the points of the block before those of the end."""

    points = ("resid_pre", "resid_post")

    def start(self, run: am.reducers.Run) -> State:
        return {"rows": torch.zeros(run.n_layers, dtype=torch.int64), "ends": torch.zeros(run.n_layers)}

    def add(self, state: State, block: am.reducers.RowBlock, run: am.reducers.Run) -> None:
        assert "resid_pre" in block and "resid_post" not in block
        assert state["ends"][block.index] == 0
        assert block.rows.start == state["rows"][block.index]
        state["rows"][block.index] += len(block.rows)

    def add_layer(self, state: State, end: am.reducers.LayerEnd, run: am.reducers.Run) -> None:
        assert "resid_pre" in end and "resid_post" in end
        assert state["rows"][end.index] == end.batch.ids.shape[1]
        state["ends"][end.index] += 1

    def merge(self, one: State, other: State) -> State:
        return {name: one[name] + other[name] for name in one}


@pytest.fixture
def forwards() -> Iterator[Callable[[am.HookedModel], list[tuple[int, ...]]]]:
    """Records the shapes of the ids on which a model runs from now on."""
    handles: list[Any] = []

    def watch(model: am.HookedModel) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []
        module: Any = model._model.base_model

        def note(_: Any, args: Any, kwargs: Any) -> None:
            seen.append(tuple((kwargs["input_ids"] if "input_ids" in kwargs else args[0]).shape))

        handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
        return seen

    yield watch
    for handle in handles:
        handle.remove()


# -- what reducers see ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bloom", "llama", "bert"])
def test_one_pass_whatever_the_number_of_reducers(name: str, forwards: Any) -> None:
    hooked, ids = models.hooked(name), models.token_ids(name)
    seen = forwards(hooked)
    both, focus = Both(), am.results.AttentionFocus.reducer()
    results = am.stream(hooked, ids, [Rows(3), Layers(), both, both, Layers(), focus, focus])
    assert seen == [(3, 7)]
    rows, layers, one, two, again, *focuses = results
    assert all(torch.equal(value, focuses[1].state[key]) for key, value in focuses[0].state.items())
    assert torch.equal(one["rows"], torch.full((hooked.n_layers,), 7)) and torch.equal(one["ends"], torch.ones(2))
    assert torch.equal(two["rows"], one["rows"]) and torch.equal(again["z"], layers["z"])
    acts = hooked.run(ids, points=["z", "pattern"])
    assert torch.allclose(layers["z"], acts["z"].double().sum(dim=(1, 2, 4)), atol=1e-5)
    assert (rows["counts"] == 7).all()
    for document in range(3):
        for layer in range(hooked.n_layers):
            expected = entropies(acts["pattern", layer][document])
            assert torch.allclose(rows["sums"][document, layer], expected, atol=1e-5)


class Spoilt(BloomMLP):
    """An MLP that changes the stream in place after adding to it."""

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        found: Tensor = super().forward(hidden_states, residual)
        residual.mul_(3.0)
        return found


def test_observers_have_copies_of_points_that_the_model_changes_in_place() -> None:
    """`resid_mid` of a BLOOM whose MLP overwrites it."""
    original, ids = models.fresh("bloom"), torch.tensor([[5, 6, 7, 8, 9]])
    wanted = am.residual_updates(am.load(original), ids)
    for block in original.transformer.h:
        block.mlp.__class__ = Spoilt
    found = am.residual_updates(am.load(original), ids)
    assert all(torch.equal(found.state[key], wanted.state[key]) for key in wanted.state)


@pytest.mark.parametrize(
    ("chosen", "expected"), [(None, (0, 1, 2)), ([2], (2,)), ([2, 0], (2, 0)), ([1, 1, 0], (1, 0))]
)
def test_layers_and_their_places(chosen: Any, expected: tuple[int, ...]) -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    whole, part = (
        am.stream(hooked, ids, [Rows(3), Layers()]),
        am.stream(hooked, ids, [Rows(3), Layers()], layers=chosen),
    )
    assert part[1]["seen"].tolist() == [[layer, place] for place, layer in enumerate(expected)]
    assert torch.allclose(part[0]["sums"], whole[0]["sums"][:, list(expected)], rtol=0, atol=1e-9)
    assert torch.equal(part[1]["z"], whole[1]["z"][list(expected)])


@pytest.mark.core
def test_blocks_of_rows_make_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked, ids = models.hooked("bloom", torch.float64), models.token_ids("bloom", batch=2, length=53)
    whole = am.stream(hooked, ids, [Rows(2)])[0]
    monkeypatch.setattr(attention, "block_bytes", lambda device: 1)
    starts: list[range] = []

    class Blocks(Rows):
        def add(self, state: State, block: am.reducers.RowBlock, run: am.reducers.Run) -> None:
            starts.append(block.rows)
            super().add(state, block, run)

    blocks = am.stream(hooked, ids, [Blocks(2)])[0]
    assert starts == [range(0, 16), range(16, 32), range(32, 48), range(48, 53)] * 2
    assert torch.allclose(blocks["sums"], whole["sums"], rtol=0, atol=1e-9)
    assert torch.equal(blocks["counts"], whole["counts"])


def test_hooks_in_force_are_seen_and_nothing_stays() -> None:
    hooked, ids = models.hooked("bloom"), models.token_ids("bloom")
    before = am.stream(hooked, ids, [Rows(3)])[0]["sums"]

    def first(pattern: Tensor) -> Tensor:
        return torch.zeros_like(pattern).index_fill_(-1, torch.tensor([0]), 1.0)

    with hooked.hooks({("pattern", 1): first}):
        inside = am.stream(hooked, iter([ids]), [Rows(3), Layers()])
        focus = am.attention_focus(hooked, ids)
    assert torch.allclose(inside[0]["sums"][:, 0], before[:, 0], atol=1e-9)
    assert (inside[0]["sums"][:, 1] == 0).all()
    assert focus.provenance.edits == ("pattern 1",)
    assert torch.equal(am.stream(hooked, ids, [Rows(3)])[0]["sums"], before)


def test_points_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked, ids = models.hooked("bloom"), models.token_ids("bloom")
    rows = Rows(3)

    def needing(*names: str, optional: bool = False) -> am.Reducer:
        made = Layers()
        monkeypatch.setattr(made, "points", () if optional else names, raising=False)
        monkeypatch.setattr(made, "optional_points", names if optional else (), raising=False)
        monkeypatch.setattr(type(made), "add_layer", lambda *_: None)
        return made

    refuses("no point 'q_rot'", am.stream, hooked, ids, [rows, needing("q_rot")], error=MissingPointError)
    refuses("no point 'zz'", am.stream, hooked, ids, [needing("zz")])
    for outside in ("embed", "logits"):
        refuses(f"{outside!r} has no layer", am.stream, hooked, ids, [needing(outside)])
    am.stream(hooked, ids, [needing("q_rot", optional=True)])
    for refused, reducer in (("z", needing("z")), ("z", needing("z", optional=True)), ("scores", rows)):
        with monkeypatch.context() as patch:
            patch.setattr(type(hooked), "refused", {refused: "not proven"})
            refuses("not proven", am.stream, hooked, ids, [reducer], error=CertificateError)


def test_rows_are_kept_as_asked() -> None:
    """A list and an iterator of the same texts give the same numbers; `keep_rows` decides what is stored."""
    hooked, ids = models.hooked("bloom"), models.token_ids("bloom", batch=7)
    together, apart = (am.attention_focus(hooked, list(ids), keep_rows=keep) for keep in (True, False))
    kept, corpus = (am.attention_focus(hooked, iter(list(ids)), keep_rows=keep) for keep in (True, None))
    for name in together.quantities:
        assert torch.equal(apart[name].mean.nan_to_num(9), corpus[name].mean.nan_to_num(9))
        torch.testing.assert_close(kept.by_row(name), together.by_row(name), rtol=0, atol=0, equal_nan=True)
        for one, other in zip(apart[name].interval(), together[name].interval(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
    shards = [am.attention_focus(hooked, list(ids), keep_rows=False, shard=(part, 2)) for part in range(2)]
    torch.testing.assert_close(shards[0].merged(shards[1]).entropy, apart.entropy)
    refuses("keep_rows=False", together.merged, kept)
    assert am.attention_focus(hooked, ids[:1], keep_rows=False).documents == 1


@pytest.mark.usefixtures("unchecked")
def test_inputs_options_and_reducers_that_cannot_be(tmp_path: Path) -> None:
    hooked, ids = models.hooked("bloom"), models.token_ids("bloom")
    for more in ({"shard": (0, 2)}, {"journal": tmp_path / "j"}, {"truncate": True}):
        for plain in (ids, {"input_ids": ids}, hooked.encode(ids), ids.numpy()):
            refuses("are for a corpus whose rows are not kept", am.stream, hooked, plain, [Rows(3)], **more)
    assert not list(tmp_path.iterdir())
    for layers in ([], [5]):
        refuses("layer", am.stream, hooked, ids, [Rows(3)], layers=layers)
    refuses("`stack` must be one of", am.stream, hooked, ids, [Rows(3)], stack="cross")
    refuses("have no documents", am.stream, hooked, iter([]), [Rows(3)], journal=tmp_path / "j")
    with pytest.raises(InputError, match=r"shard \(4, 5\) has no documents"):
        am.stream(hooked, iter([ids]), [Rows(3)], shard=(4, 5), journal=tmp_path / "j")
    refuses("`shard` must be", am.stream, hooked, iter([ids]), [Rows(3)], shard=(2, 2))
    assert not list(tmp_path.iterdir())
    for wrong in ([Rows(3), "focus"], [Rows], [None], [am.results.AttentionFocus], "focus", 5):
        with pytest.raises(InputError, match="`reducers` must be a list of reducers") as caught:
            am.stream(hooked, ids, wrong)  # type: ignore[arg-type]
        assert caught.value.args[0].endswith(" in it.") == isinstance(wrong, list)
    refuses("at least one reducer", am.stream, hooked, ids, [])
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (am.Reducer,), {"start": lambda *_: {}})()


# -- corpora -------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.usefixtures("many_batches")
def test_a_corpus_is_its_documents_together() -> None:
    """In float64, the sums are the same for single documents, batches, and one padded batch."""
    hooked = models.hooked("bloom", torch.float64)
    documents = documents_of("bloom", LENGTHS)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in documents], batch_first=True)
    together = {"input_ids": torch.nn.utils.rnn.pad_sequence(documents, batch_first=True), "attention_mask": mask}
    reducers = [Rows(len(documents)), Layers()]
    found, in_memory = (am.stream(hooked, given, reducers) for given in (iter(documents), together))
    assert found[0]["counts"][:, 0, 0].tolist() == LENGTHS
    for one, other in zip(found, in_memory, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-9)
    for number, ids in enumerate(documents):
        alone = am.stream(hooked, ids, [Rows(1)])[0]
        assert torch.allclose(found[0]["sums"][number], alone["sums"][0], rtol=0, atol=1e-9)


def test_nothing_of_a_batch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass stores no batches, and beyond the maximum of groups nothing that grows with the number of documents."""
    monkeypatch.setattr("attnmech.maths.groups.GROUPS", 4)
    hooked = models.hooked("bloom")
    alive: list[weakref.ref[Any]] = []
    together: list[int] = []
    sizes: list[int] = []

    class Looks(am.Reducer):
        def start(self, run: am.reducers.Run) -> State:
            alive.append(weakref.ref(run.batch))
            together.append(sum(each() is not None for each in alive))
            return {"n": torch.zeros(1)}

        def merge(self, one: State, other: State) -> State:
            return {"n": one["n"] + other["n"]}

    focus = am.results.AttentionFocus.reducer()

    def measured(one: State, other: State) -> State:
        merged = type(focus).merge(focus, one, other)
        sizes.append(sum(each.nbytes for each in merged.values()))
        return merged

    object.__setattr__(focus, "merge", measured)
    try:
        # A further input, so that each is a batch by itself.
        given = [{"input_ids": ids[None], "attention_mask": torch.tensor([[1, 0, 1]])} for ids in
                 documents_of("bloom", [3] * 12)]  # fmt: skip
        am.stream(hooked, iter(given), [Looks(), focus])
    finally:
        object.__delattr__(focus, "merge")
    assert len(together) == 12 and max(together) <= 2
    assert len(sizes) == 11 and sizes[0] < sizes[2] == max(sizes) and len(set(sizes[2:])) <= 3


def test_progress_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("the keys\n\na dog\nthe dog\nthere\nhere\n")
    hooked = am.load(models.fresh("bloom"), tokenizer=models.tokenizer())
    (rows,) = am.stream(hooked, am.Corpus(path), [Rows(5)], progress=True, shard=(1, 2))
    assert rows["counts"][:, 0, 0].tolist() == [0, 2, 0, 1, 0]
    assert capsys.readouterr().out == ""
    with meter(am.Corpus(path), (1, 2), show=True) as bar:
        assert bar._bar.tasks[0].total == 2
    with meter(iter("ab"), show=True) as bar:
        assert bar._bar.tasks[0].total is None


# -- journals ------------------------------------------------------------------------------------------------


class InPlace(Rows):
    """A `merge` that adds to its first argument, as a reducer may."""

    def merge(self, one: State, other: State) -> State:
        for name in one:
            one[name] += other[name]
        return one


class Breaks(am.Reducer):
    """A reducer that raises at the `at`-th call of its method `where`."""

    def __init__(self) -> None:
        self._calls = itertools.count(1)
        self._error: tuple[str, int, BaseException] | None = None

    @property
    def options(self) -> dict[str, str]:
        return {}

    def breaking(self, where: str, at: int, error: BaseException) -> "Breaks":
        self._error = where, at, error
        return self

    def _call(self, where: str) -> None:
        if self._error and self._error[0] == where and next(self._calls) == self._error[1]:
            raise self._error[2]

    def start(self, run: am.reducers.Run) -> State:
        return {"n": torch.zeros(1, dtype=torch.int64), "batches": torch.ones(1, dtype=torch.int64)}

    def add(self, state: State, block: am.reducers.RowBlock, run: am.reducers.Run) -> None:
        self._call("add")
        state["n"] += int(block.real.sum())

    def add_layer(self, state: State, end: am.reducers.LayerEnd, run: am.reducers.Run) -> None:
        self._call("add_layer")

    def close(self, state: State, run: am.reducers.Run) -> State:
        self._call("close")
        return state

    def merge(self, one: State, other: State) -> State:
        self._call("merge")
        return {name: one[name] + other[name] for name in one}

    def finish(self, state: State, source: am.reducers.Source) -> State:
        return state | {"documents": torch.tensor([source.documents, source.truncated])}


@pytest.mark.usefixtures("many_batches")
@pytest.mark.parametrize("where", ["add", "add_layer", "close", "merge", "read"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("full")])
def test_what_breaks_off_is_gone_on_with(
    where: str, error: BaseException, tmp_path: Path, forwards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(total, "_JOURNAL_SHARE", 0.0)
    hooked, documents, path = models.hooked("gpt2"), documents_of("gpt2", [25, *LENGTHS[1:]]), tmp_path / "journal"
    seen = forwards(hooked)
    whole = am.stream(hooked, iter(documents), [InPlace(21), Breaks()], truncate=True)
    batches = seen.copy()

    def interrupted() -> Iterator[Tensor]:
        yield from documents[:16]
        raise error

    seen.clear()
    inputs = interrupted() if where == "read" else iter(documents)
    breaks = Breaks().breaking(where, 13 if where.startswith("add") else 5, error)
    with pytest.raises(type(error)) as caught:
        am.stream(hooked, inputs, [InPlace(21), breaks], journal=path, truncate=True)
    assert caught.value is error
    done = json.loads(safe_open(path, "pt").metadata()["attnmech"])["batches"]
    # Besides the current batch, only the interrupted merge may be lost: here, all but the first.
    assert done == {"add": 4, "add_layer": 4, "close": 4, "merge": 1, "read": done}[where] and done >= 1
    assert hooked.edited == ()
    seen.clear()
    again = am.stream(hooked, iter(documents), [InPlace(21), Breaks()], journal=path, truncate=True)
    assert seen == batches[done:]
    for mine, theirs in zip(again, whole, strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-12, atol=0)
    assert again[1]["documents"].tolist() == [21, 1]
    assert again[1]["batches"].item() == len(batches) and not list(tmp_path.iterdir())


@pytest.fixture
def broken_off(tmp_path: Path, many_batches: None) -> Path:
    """The journal of BLOOM's corpus, interrupted after some batches."""
    path = tmp_path / "journal"
    breaks = Breaks().breaking("add", 7, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        am.stream(models.hooked("bloom"), iter(documents_of("bloom", LENGTHS)), [Rows(21), breaks], journal=path)
    return path


def test_journals_of_something_else(broken_off: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked, documents = models.hooked("bloom"), documents_of("bloom", LENGTHS)
    held = broken_off.read_bytes()
    changed = models.fresh("bloom")
    changed.transformer.h[1].mlp.dense_h_to_4h.weight.data[3, 2] += 1e-3

    def refused(*reducers: am.Reducer, model: am.HookedModel = hooked, inputs: Any = None, **options: Any) -> str:
        given = iter(documents) if inputs is None else inputs
        with pytest.raises(JournalError) as caught:
            am.stream(model, given, reducers or (Rows(21), Breaks()), journal=broken_off, **options)
        assert broken_off.read_bytes() == held and list(broken_off.parent.iterdir()) == [broken_off]
        return str(caught.value)

    assert "weights: expected" in refused(model=am.load(changed))
    assert "reducers: expected" in refused(Rows(22), Breaks())
    assert "reducers: expected" in refused(Breaks(), Rows(21))
    assert "reducers: expected" in refused(Rows(21))
    assert "layers: expected [1]" in refused(layers=[1])
    assert "truncate: expected true" in refused(truncate=True)
    assert "shard: expected [0, 2]" in refused(shard=(0, 2))
    assert "bos: expected false" in refused(bos=False)
    other_code = type("Rows", (Rows,), {"merge": lambda self, one, other: one})
    assert "code of the reducers: expected" in refused(other_code(21), Breaks())
    marked = Rows(21)
    marked.marks = torch.ones(3)  # type: ignore[attr-defined]
    assert "code of the reducers: expected" in refused(marked, Breaks())
    with hooked.hooks({"z": lambda z: z}):
        said = refused()
        assert "hooks: expected" in said and "code and values of the hooks: expected" in said
    other = [documents[0] + 1, *documents[1:]]
    assert "these inputs begin with others" in refused(inputs=iter(other))
    assert "these inputs begin with others" in refused(inputs=iter(documents[:3]))
    assert "these inputs begin with others" in refused(inputs=iter(documents[1:]))
    file = broken_off.parent.with_suffix(".txt")
    file.write_text("the keys\n")
    assert "corpus: expected" in refused(inputs=am.Corpus(file))
    with monkeypatch.context() as patch:
        patch.setattr("attnmech.runs.identity.version", lambda _: "9.9")
        assert 'attnmech: expected "9.9"' in refused()
    am.stream(hooked, iter(documents), [Rows(21), Breaks()], journal=str(broken_off))
    assert not broken_off.exists()


# -- reducers that misbehave ---------------------------------------------------------------------------------


class Bad(Rows):
    def __init__(self, where: str, wrong: Callable[[State], Any]) -> None:
        super().__init__(21)
        self.where, self.wrong = where, wrong

    def start(self, run: am.reducers.Run) -> Any:
        state = super().start(run)
        return self.wrong(state) if self.where == "start" else state

    def add(self, state: State, block: am.reducers.RowBlock, run: am.reducers.Run) -> None:
        super().add(state, block, run)
        if self.where == "add" and block.index == run.n_layers - 1:
            self.wrong(state)

    def close(self, state: State, run: am.reducers.Run) -> Any:
        return self.wrong(state) if self.where == "close" else state

    def merge(self, one: State, other: State) -> Any:
        merged = super().merge(one, other)
        return self.wrong(merged) if self.where == "merge" else merged


NO_DICTIONARY = "Bad: a state must be a dictionary of tensors by name; got"
NOT_KEPT = r"Bad: `add` must keep the tensors that `start` made; 'sums' was torch.float64 \[21, 2, 3\] and became "
NOT_MERGED = r"Bad: `merge` must keep names, dtypes and number of axes; "


@pytest.mark.usefixtures("many_batches", "unchecked")
@pytest.mark.parametrize(
    ("where", "wrong", "message"),
    [
        ("start", lambda state: None, NO_DICTIONARY + " None"),
        ("start", lambda state: list(state.values()), NO_DICTIONARY),
        ("start", lambda state: {"sums": 3.0}, NO_DICTIONARY),
        ("close", lambda state: state["sums"], NO_DICTIONARY),
        ("close", lambda state: {**state, "n": 3}, NO_DICTIONARY),
        ("merge", lambda state: None, NO_DICTIONARY + " None"),
        ("merge", lambda state: tuple(state), NO_DICTIONARY),
        ("add", lambda state: state.update(sums=state["sums"].float()), NOT_KEPT + r"torch.float32 \[21, 2, 3\]"),
        ("add", lambda state: state.update(sums=state["sums"][:3]), NOT_KEPT + r"torch.float64 \[3, 2, 3\]"),
        ("add", lambda state: state.update(sums=[]), NO_DICTIONARY),
        ("add", lambda state: state.update(more=torch.ones(2)), r"'more' was absent and became torch.float32 \[2\]"),
        ("add", lambda state: state.pop("sums", None), NOT_KEPT + "absent"),
        ("add", lambda state: state["sums"].fill_(torch.nan), "Bad: 'sums' is NaN after document"),
        ("close", lambda state: {"ratio": state["sums"] / 0.0}, "Bad: 'ratio' is NaN after document"),
        ("merge", lambda state: {**state, "sums": state["sums"] * torch.nan}, "Bad: 'sums' is NaN after document"),
        ("merge", lambda state: {"sums": state["sums"]}, NOT_MERGED + "'counts' was .* became absent"),
        ("merge", lambda state: {**state, "n": state["sums"]}, NOT_MERGED + "'n' was absent"),
        ("merge", lambda state: {**state, "sums": state["sums"].float()}, NOT_MERGED + "'sums' was"),
        ("merge", lambda state: {**state, "sums": state["sums"].sum(0)}, NOT_MERGED + "'sums' was"),
    ],
)
def test_reducers_that_misbehave_are_named(where: str, wrong: Any, message: str) -> None:
    documents = documents_of("bloom", LENGTHS)
    with pytest.raises(ReducerError, match=message) as caught:
        am.stream(models.hooked("bloom"), iter(documents), [Rows(21), Bad(where, wrong)])
    assert isinstance(caught.value, am.AttnmechError) and isinstance(caught.value, ValueError)
    if where != "merge":
        with pytest.raises(ReducerError, match=message):  # the message may show a tensor on several lines
            am.stream(models.hooked("bloom"), documents[0], [Bad(where, wrong)])


def test_nan_names_the_documents() -> None:
    def third(state: State) -> None:
        state["sums"][2].fill_(torch.nan)

    with pytest.raises(ReducerError, match="'sums' is NaN after documents 0 to 2"):
        am.stream(models.hooked("bloom"), models.token_ids("bloom"), [Bad("add", third)])
    with pytest.raises(ReducerError, match=r"'sums' is NaN after document 2\."):
        am.stream(models.hooked("gpt2"), iter(documents_of("gpt2", [3, 4, 5])), [Bad("add", third)], shard=(2, 3))


# -- the examples --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example() -> Any:
    return test_examples.example("reducers")


@pytest.mark.usefixtures("many_batches")
@pytest.mark.parametrize(("name", "count", "around"), [("bloom", 4, 2), ("llama", 3, 1), ("bert", 2, 0)])
def test_largest_score_and_top_pairs(
    example: Any, name: str, count: int, around: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "block_bytes", lambda device: 1)
    hooked, documents = models.hooked(name), documents_of(name, [*LENGTHS, 20])
    reducers = [example.LargestScore(), example.TopPairs(count, around)]
    largest, found = am.stream(hooked, iter(documents), reducers, layers=[1, 0])
    captured = [hooked.run(ids, points=["scores"]) for ids in documents]
    expected, every = [], {}
    # ALiBi's slopes of three heads: the powers of 2^−4 for two, then one between.
    slope = defaultdict(lambda: [0.0] * hooked.n_heads, bloom=[2.0**-4, 2.0**-8, 2.0**-2])
    for place, (layer, head) in enumerate(itertools.product((1, 0), range(hooked.n_heads))):
        raw, pairs = [], []
        for number, (ids, acts) in enumerate(zip(documents, captured, strict=True)):
            scores = acts["scores", layer][0, head].tolist()
            for query, key in itertools.product(range(len(ids)), repeat=2):
                if not hooked.causal or key <= query:
                    raw.append(scores[query][key])
                    pairs.append(scores[query][key] - slope[name][head] * key)
                    every[layer, head, number, query, key] = pairs[-1]
        assert float(largest["largest"].flatten()[place]) == pytest.approx(max(raw), abs=1e-5)
        expected += sorted(pairs, reverse=True)[:count]
    columns = ["layer", "head", "document", "query", "key"]
    places = [tuple(row) for row in found[columns].to_numpy().tolist()]
    # Equal tokens have equal scores in layer 0, so any of these pairs may appear, but none twice.
    assert len(set(places)) == len(places) == count * 2 * hooked.n_heads
    assert found["score"].tolist() == pytest.approx(expected, abs=1e-4)
    assert found["score"].tolist() == pytest.approx([every[place] for place in places], abs=1e-4)
    for row in found.itertuples():
        for position, text in ((row.query, row.query_text), (row.key, row.key_text)):
            ids = documents[row.document].tolist()
            window = [f" [{t}]" if n == position else str(t) for n, t in enumerate(ids)]
            assert text == "".join(window[max(0, position - around) : position + around + 1])


def test_the_example_prints_its_tables(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.DOCUMENTS = 6
    example.main()
    said = capsys.readouterr().out
    assert "largest score" in said and "pairs that match best" in said
    assert all(f"L{layer}H" in said for layer in range(4))


def test_nan_of_our_own_is_not_the_fault_of_a_reducer(monkeypatch: pytest.MonkeyPatch) -> None:
    reducer = am.results.AttentionFocus.reducer()
    monkeypatch.setattr(type(reducer), "close", lambda self, state, run: state | {"sums": state["sums"] * torch.nan})
    with pytest.raises(ExactnessError, match=r"FocusReducer: 'sums' is NaN after document.* bug in attnmech"):
        am.attention_focus(models.hooked("gpt2"), models.token_ids("gpt2"))


@pytest.mark.parametrize("every", [0.0, 1e9])
def test_in_a_log_lines_say_how_far_a_run_is(
    every: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("attnmech.runs.progress.LOGGED_EVERY", every)
    am.ablate_heads(models.hooked("gpt2"), models.token_ids("gpt2", batch=2), [(0, 1), (2, 4)], progress=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert not lines if every else lines[-1].startswith("ablations: 4 of 4 after ")


@pytest.mark.parametrize("corpus", [False, True])
def test_a_plain_function_of_rows_is_averaged_over_all_rows(corpus: bool, tmp_path: Path) -> None:
    model, texts = models.hooked("bloom"), documents_of("bloom", LENGTHS)
    batch = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    inputs: Any = iter(texts) if corpus else {"input_ids": batch, "attention_mask": mask}
    journal = {"journal": tmp_path / "largest"} if corpus else {}
    (largest,) = am.stream(model, inputs, [lambda block: block.pattern.amax(-1)], **journal)
    sums = torch.zeros(model.n_layers, model.n_heads, dtype=torch.float64)
    for text in texts:
        patterns = model.run(text[None], points=["pattern"])["pattern"]  # [layer 1 head query key]
        sums += patterns[:, 0].amax(-1).double().sum(-1)
    assert isinstance(largest, am.reducers.TextMeans)
    torch.testing.assert_close(largest.mean, sums / sum(LENGTHS), rtol=1e-5, atol=1e-6)
    assert len({round(float(value), 6) for value in largest.per_text[1, 2]}) > 15


def test_functions_that_return_something_else_are_refused() -> None:
    model, text = models.hooked("bloom"), documents_of("bloom", [5])[0][None]
    with pytest.raises(ReducerError, match=r"return a number for each text, head and row, \[1, \d, 5\], such as "):
        am.stream(model, text, [lambda block: block.pattern.amax()])  # type: ignore[list-item, unused-ignore]
    with pytest.raises(
        InputError, match=r"must be a list of reducers, .* or \[lambda block: block.pattern.amax\(-1\)\]; got"
    ):
        am.stream(model, text, [am.attention_focus])  # type: ignore[list-item, unused-ignore]
