"""A journal comes back bit by bit; a file that is not this run's journal is left alone; one run at a time owns a
journal, which is removed when that run succeeds."""

import contextvars
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
from comparing import refuses
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attnmech as am
from attnmech.errors import JournalError, OutputError
from attnmech.runs.journal import Entry, Journal, kept, leave

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


@settings(max_examples=40)
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
    with pytest.raises(JournalError) as caught:
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
    assert f'{path} is the journal of another run. model: expected "6a", the journal has "5f". Give' in said
    assert "version" not in said
    said = refused(Journal(path, IDENTITY | {"version": "0.2.0", "reducers": ["Focus", {"bins": 8, "k": 3}]}))
    assert (
        'version: expected "0.2.0", the journal has "0.1.0"; reducers: expected ["Focus", {"bins": 8, "k": 3}], '
        in said
    )
    said = refused(Journal(path, {"model": "5f", "shard": [0, 2]}))
    assert "shard: expected [0, 2], the journal has none" in said and "corpus: expected none" in said
    for same in (IDENTITY | {"reducers": ("Focus", {"k": 3, "bins": 7})}, dict(reversed(IDENTITY.items()))):
        assert Journal(path, same).resume() is not None
    assert "expected true, the journal has 1" in refused(_with(path, {"a": 1}, {"a": True}))


def _with(path: Path, written: dict[str, Any], read: dict[str, Any]) -> Journal:
    Journal(path, written).write(Entry({}, 0, ""))
    return Journal(path, read)


def test_where_no_journal_can_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "journal"):
        with pytest.raises(OutputError):
            Journal(path, {}).write(Entry({}, 0, ""))
    with pytest.raises(TypeError):
        Journal(tmp_path / "journal", {"model": object()})


KILLED = """
import sys, torch
from pathlib import Path
from attnmech.runs.journal import Entry, Journal, kept, leave
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
    refuses("No space left", journal.write, Entry({"sum": torch.zeros(3)}, 2, "e"), error=OutputError)
    found = journal.resume()
    assert found is not None and found.batches == 1
    assert [file.name for file in tmp_path.iterdir()] == ["journal"]


def test_what_is_cut_off_or_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, {"run": 1})
    journal.write(Entry({"sum": torch.tensor([1.5, -2.0]), "n": torch.tensor(3)}, 4, "ab", {"documents": 7}))
    whole = path.read_bytes()
    for content in (b"", b"text\n", whole[:7], whole[:30], whole[:-1], whole + b"x"):
        path.write_bytes(content)
        assert "is not a valid journal (" in refused(journal)
    assert "is not a valid journal" in refused(Journal(tmp_path, {"run": 1}))
    # One bit of every byte.
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        refuses("is not a valid journal", journal.resume, error=JournalError)
    # The last bytes are the numbers: safetensors reads any bytes there.
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "its content does not match its digest" in refused(journal)
    path.write_bytes(whole)
    assert journal.resume() is not None


@pytest.mark.parametrize(
    ("dtype", "same", "other"),
    [
        (torch.float32, [3.0, 0.0, 1e-6, torch.inf], [3.0004, 1e-4, 0.0, torch.inf]),
        (torch.float64, [3.0, 0.0, 1e-15, 7.0], [3 + 1e-13, 1e-14, 0.0, 7.0]),
        (torch.bfloat16, [3.0, 0.0, 1e-3, 7.0], [3.3, 0.05, 0.0, 7.5]),
    ],
)
def test_numbers_measured_again_may_differ_by_rounding(
    tmp_path: Path, dtype: torch.dtype, same: list[float], other: list[float]
) -> None:
    journal, names = Journal(tmp_path / "journal", {}), ["a", "b", "c", "d"]
    held, found = (torch.tensor(values, dtype=torch.float64) for values in (same, other))
    journal.require_same(names, held, held, dtype)
    journal.require_same(names, held, found, dtype)
    for place, step in ((1, 0.2), (0, 1.0), (3, torch.nan)):
        changed = held.clone()
        changed[place] = held[place] + step if step == step else step
        with pytest.raises(JournalError, match=f"{names[place]} is {held[place]:.6g} in the journal, .* now. The"):
            journal.require_same(names, held, changed, dtype)


def interrupted(path: Path, error: type[BaseException]) -> None:
    Journal(path, {}).write(Entry({}, 1, ""))
    raise error


def test_a_journal_is_removed_when_its_owner_has_ended_well(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with kept(path):
        Journal(path, {}).write(Entry({}, 1, ""))
        with kept(str(path)):
            pass
        assert path.exists(), "the outer owner decides"
    assert list(tmp_path.iterdir()) == []
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), kept(path):
            interrupted(path, error)
        assert list(tmp_path.iterdir()) == [path]
    with kept(path):
        leave(path)
    with kept(path), kept(path):
        leave(str(path))
    assert list(tmp_path.iterdir()) == [path]
    with kept(None):
        leave(None)


def test_the_journal_behind_a_symbolic_link(tmp_path: Path) -> None:
    link, real = tmp_path / "link", tmp_path / "scratch" / "real"
    real.parent.mkdir()
    link.symlink_to(real)
    with kept(link):
        Journal(link, {}).write(Entry({}, 1, ""))
        assert real.is_file() and link.is_symlink()
        said = contextvars.Context().run(refused_owner, real)
        assert f"{real} is in use by another run" in said
    assert not real.exists() and list(real.parent.iterdir()) == []


def refused_owner(path: Path) -> str:
    with pytest.raises(JournalError) as caught, kept(path):
        pass
    return str(caught.value)


def test_where_no_journal_can_be_kept(tmp_path: Path) -> None:
    for path, said in ((tmp_path, "it is a folder"), (tmp_path / "no" / "journal", "there is no folder")):
        with pytest.raises(OutputError, match=said), kept(path):
            raise AssertionError("no work begins")


OWNER = """
import sys
from pathlib import Path
from attnmech.runs.journal import Entry, Journal, kept
path = Path(sys.argv[1])
with kept(path):
    Journal(path, {}).write(Entry({}, 1, ""))
    print("owned", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Any]:
    """Another process that owns the journal until it is told to end."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "journal")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "owned\n"
        yield process
        process.kill()


def test_another_process_is_refused_at_once_and_harms_nothing(owner: Any, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    held = path.read_bytes()
    said = refused_owner(path)
    assert said == f"{path} is in use by another run. Wait until it has finished, or give another path."
    assert path.read_bytes() == held
    owner.stdin.write("\n")
    owner.stdin.flush()
    assert owner.wait() == 0
    assert list(tmp_path.iterdir()) == []
    with kept(path):
        assert not path.exists()


def test_a_killed_owner_leaves_the_journal_and_no_lock(owner: Any, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    owner.kill()
    owner.wait()
    assert Journal(path, {}).resume() is not None
    with pytest.raises(KeyboardInterrupt) as raised, kept(path):
        interrupted(path, KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == [path]
    assert raised.value.__notes__ == [f"The finished part is in {path}: the same call resumes from it."]
