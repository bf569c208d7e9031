"""What is written comes back bit by bit; what belongs to another run, or is no journal, is left alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import attnmech as am
from attnmech.runs.journal import Entry, Journal

IDENTITY: dict[str, Any] = {
    "model": "5f", "version": "0.1.0", "reducers": ["Focus", {"bins": 7, "k": 3}], "corpus": None, "nan": float("nan"),
}  # fmt: skip

DTYPES = (torch.int64, torch.float64, torch.float32, torch.bool, torch.uint8, torch.bfloat16, torch.complex64)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    high = {torch.int64: 2**62, torch.bool: 2}.get(dtype, 256)
    return torch.randint(-high if dtype == torch.int64 else 0, high, shape, generator=generator).to(dtype)


NAMES = st.text(max_size=9) | st.sampled_from(["__metadata__", "0", "1", "a/b c\n", "\ud800", "names"])


@given(st.dictionaries(NAMES, tensors(), max_size=5), st.integers(0, 2**40), st.dictionaries(NAMES, st.integers()))
def test_an_entry_comes_back_as_it_was(held: dict[str, Tensor], batches: int, counters: dict[str, int]) -> None:
    with TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "run.journal", IDENTITY)
        assert journal.resume() is None
        for entry in (Entry({"old": torch.ones(2)}, 0, "x"), Entry(held, batches, "ab" * 32, counters)):
            journal.write(entry)
        found = Journal(Path(folder) / "run.journal", IDENTITY).resume()
        assert found is not None and list(found.tensors) == list(held)
        for name, value in held.items():
            assert found.tensors[name].dtype == value.dtype and found.tensors[name].shape == value.shape
            assert torch.equal(found.tensors[name], value)
        assert (found.batches, found.digest, found.counters) == (batches, "ab" * 32, counters)
        assert [file.name for file in Path(folder).iterdir()] == ["run.journal"]
        journal.remove()
        journal.remove()
        assert journal.resume() is None and not list(Path(folder).iterdir())


def test_tensors_that_share_memory_or_are_not_contiguous(tmp_path: Path) -> None:
    whole = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4)
    held = {"whole": whole, "again": whole, "part": whole[:, 1:], "turned": whole.permute(2, 0, 1), "nan": whole / 0,
            "one": whole[:1].expand(5, 3, 4), "number": torch.tensor(7)}  # fmt: skip
    journal = Journal(tmp_path / "journal", {})
    journal.write(Entry(held, 1, ""))
    found = journal.resume()
    assert found is not None
    for name, value in held.items():
        assert torch.equal(found.tensors[name].nan_to_num(7), value.nan_to_num(7)), name


def test_what_is_read_is_the_readers_own(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", {})
    journal.write(Entry({"sum": torch.ones(3)}, 1, ""))
    found = journal.resume()
    assert found is not None
    found.tensors["sum"].add_(5)
    journal.write(Entry({"sum": torch.zeros(3)}, 2, ""))
    assert found.tensors["sum"].tolist() == [6, 6, 6]


def refused(journal: Journal) -> str:
    before = journal.path.read_bytes() if journal.path.is_file() else None
    with pytest.raises(am.JournalError) as caught:
        journal.resume()
    assert (journal.path.read_bytes() if journal.path.is_file() else None) == before
    said = str(caught.value)
    assert "\n" not in said and said.endswith("Give another path or delete it.")
    assert isinstance(caught.value, am.AttnmechError) and isinstance(caught.value, ValueError)
    return said


def test_the_journal_of_another_run(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path, IDENTITY).write(Entry({"sum": torch.ones(3)}, 4, "d"))
    said = refused(Journal(path, IDENTITY | {"model": "6a"}))
    assert f'{path} is the journal of another run. model: expected "6a", the journal holds "5f". Give' in said
    assert "version" not in said
    said = refused(Journal(path, IDENTITY | {"version": "0.2.0", "reducers": ["Focus", {"bins": 8, "k": 3}]}))
    assert (
        'version: expected "0.2.0", the journal holds "0.1.0"; reducers: expected ["Focus", {"bins": 8, "k": 3}], '
        in said
    )
    said = refused(Journal(path, {"model": "5f", "shard": [0, 2]}))
    assert "shard: expected [0, 2], the journal holds none" in said and "corpus: expected none" in said
    for same in (IDENTITY | {"reducers": ("Focus", {"k": 3, "bins": 7})}, dict(reversed(IDENTITY.items()))):
        assert Journal(path, same).resume() is not None
    assert "expected true, the journal holds 1" in refused(_with(path, {"a": 1}, {"a": True}))


def _with(path: Path, written: dict[str, Any], read: dict[str, Any]) -> Journal:
    Journal(path, written).write(Entry({}, 0, ""))
    return Journal(path, read)


def test_files_that_are_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, IDENTITY)
    journal.write(Entry({"sum": torch.arange(100.0)}, 4, "d"))
    whole = path.read_bytes()
    for content in (
        b"",
        b"text\n",
        b"\0" * 4000,
        *(whole[:length] for length in (7, 30, len(whole) - 1)),
        whole + b"x",
    ):
        path.write_bytes(content)
        assert "is not a whole journal (" in refused(journal)
    path.unlink()
    am.decompose_scores(am.load(), "The key.").save(path)
    assert "is not a whole journal" in refused(journal)
    assert "is not a whole journal" in refused(Journal(tmp_path, IDENTITY))


def test_where_no_journal_can_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "journal"):
        with pytest.raises(am.OutputError):
            Journal(path, {}).write(Entry({}, 0, ""))
    with pytest.raises(TypeError):
        Journal(tmp_path / "journal", {"model": object()})


KILLED = """
import sys, torch
from pathlib import Path
from attnmech.runs.journal import Entry, Journal
journal = Journal(Path(sys.argv[1]), {"run": 1})
for step in range(10**9):
    journal.write(Entry({"sum": torch.full((300_000,), step)}, step, str(step)))
    print(step, flush=True)
"""


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Any]:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "journal")], stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_a_run_that_is_killed_leaves_a_whole_entry(steps: Any, tmp_path: Path) -> None:
    for _ in range(6):
        last = int(steps.stdout.readline())
    os.kill(steps.pid, signal.SIGKILL)
    rest = [int(line) for line in steps.stdout]
    last = max([last, *rest])
    found = Journal(tmp_path / "journal", {"run": 1}).resume()
    assert found is not None and found.batches in (last, last + 1)
    assert found.tensors["sum"].tolist() == [found.batches] * 300_000


def test_a_failed_write_leaves_the_last_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal", {})
    journal.write(Entry({"sum": torch.ones(3)}, 1, "d"))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(am.OutputError, match="No space left"):
        journal.write(Entry({"sum": torch.zeros(3)}, 2, "e"))
    found = journal.resume()
    assert found is not None and found.batches == 1
    assert [file.name for file in tmp_path.iterdir()] == ["journal"]
