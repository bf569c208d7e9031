"""Files are written whole or not at all, through links, and only at paths where a regular file can be."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from comparing import refuses
from safetensors.torch import save_file

import attnmech as am
from attnmech.basics.files import check_writable, making, writing
from attnmech.errors import OutputError


def put(target: Path, text: str) -> None:
    with writing(target) as draft:
        draft.write_text(text)


def test_a_file_is_new_or_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    put(target, "one")
    assert target.read_text() == "one"
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            broken(target, error)
        assert target.read_text() == "one" and list(tmp_path.iterdir()) == [target]
    with pytest.raises(OutputError, match=r"cannot write .*page.html: No such file"), writing(target):
        pass
    assert target.read_text() == "one"


def broken(target: Path, error: type[BaseException]) -> None:
    with writing(target) as draft:
        draft.write_text("two")
        raise error


def test_links_stay_links(tmp_path: Path) -> None:
    real, link, chain, dangling = (tmp_path / name for name in ("folder/real", "link", "chain", "dangling"))
    real.parent.mkdir()
    real.write_text("old")
    link.symlink_to(real)
    chain.symlink_to("link")
    dangling.symlink_to("folder/other")
    for path in (link, chain, dangling):
        put(path, path.name)
        assert path.is_symlink() and path.read_text() == path.name
    assert real.read_text() == "chain"
    assert sorted(path.name for path in real.parent.iterdir()) == ["other", "real"]
    lost, loop = tmp_path / "lost", tmp_path / "loop"
    lost.symlink_to("nowhere/file")
    loop.symlink_to("loop")
    refuses(r"cannot write .*lost: there is no folder .*nowhere", put, lost, "", error=OutputError)
    refuses(r"loop.* cannot be used: Too many levels of symbolic links", put, loop, "", error=OutputError)


def test_permissions_stay_and_new_files_have_the_usual_ones(tmp_path: Path) -> None:
    held, usual = tmp_path / "held", tmp_path / "usual"
    held.write_text("")
    usual.write_text("")
    held.chmod(0o640)
    put(held, "new")
    assert stat.S_IMODE(held.stat().st_mode) == 0o640
    saved = am.Intervention.zero([(0, 1)]).save(tmp_path / "saved.safetensors")
    with writing(tmp_path / "tensors") as draft:
        save_file({"a": torch.ones(2)}, draft)
    for path in (saved, tmp_path / "tensors"):
        assert path.stat().st_mode == usual.stat().st_mode


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everything")
def test_a_file_without_write_permission_is_refused(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.write_text("kept")
    held.chmod(0o444)
    refuses(r"cannot write .*held: Permission denied", put, held, "new", error=OutputError)
    assert held.read_text() == "kept"


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Paths of files that are not regular, and a link to one."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s"))
        yield {"pipe": pipe, "link": link, "socket": tmp_path / "s"}


def test_what_is_no_regular_file_is_left_alone(odd: dict[str, Path], tmp_path: Path) -> None:
    before = {path: path.lstat().st_mode for path in odd.values()}
    for path in (*odd.values(), Path("/dev/null"), Path("/dev/full")):
        for write in (check_writable, am.Intervention.zero([(0, 1)]).save):
            with pytest.raises(OutputError) as caught:
                write(path)
            message = f"cannot write {path}: it is a device, a pipe or a socket; name a regular file."
            assert str(caught.value) == message
    assert {path: path.lstat().st_mode for path in odd.values()} == before
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode) and len(list(tmp_path.iterdir())) == 3
    for path, message in ((tmp_path, "it is a folder"), (tmp_path / "pipe" / "page", "there is no folder")):
        refuses(message, put, path, "", error=OutputError)


def test_folders_are_made_for_a_block_that_succeeds(tmp_path: Path) -> None:
    def fail() -> None:
        with making(tmp_path / "new" / "more"):
            assert (tmp_path / "new" / "more").is_dir()
            raise OutputError("full")

    refuses("full", fail, error=OutputError)
    assert list(tmp_path.iterdir()) == []
    with making(tmp_path / "new" / "more"):
        (tmp_path / "new" / "file").touch()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["file", "more"]


FULL = """
import resource, sys
from pathlib import Path
import pandas as pd, torch
import attnmech as am
from attnmech.basics.files import writing
from attnmech.runs.journal import Entry, Journal
folder = Path(sys.argv[1])
values = am.results.Values({0: torch.ones(1, 1, 3, 4000)})
writes = {
    "text": lambda path: write(path, lambda draft: draft.write_text("new" * 9000)),
    "csv": lambda path: write(path, lambda draft: pd.DataFrame({"a": range(9000)}).to_csv(draft)),
    "parquet": lambda path: write(path, lambda draft: pd.DataFrame({"a": range(9000)}).to_parquet(draft)),
    "file.safetensors": am.Intervention.replace([(0, 1)], values).save,
    "journal": lambda path: Journal(path, {}).write(Entry({"sum": torch.ones(9000)}, 1, "")),
}
def write(path, put):
    with writing(path) as draft:
        put(draft)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for name, save in writes.items():
    try:
        save(folder / name)
    except am.errors.OutputError as error:
        print(name, "|", error)
"""


def test_a_disk_that_takes_no_more_is_an_output_error(tmp_path: Path) -> None:
    names = ["csv", "file.safetensors", "journal", "parquet", "text"]
    for name in names:
        (tmp_path / name).write_text("old")
    done = subprocess.run(  # -B: compiled modules of other packages would be cut off, too, and stay so
        [sys.executable, "-B", "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    messages = dict(line.split(" | ") for line in done.stdout.splitlines())
    assert sorted(messages) == names
    for name, message in messages.items():
        assert message == f"cannot write {tmp_path / name}: File too large."
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert all((tmp_path / name).read_text() == "old" for name in names)


def test_what_cannot_be_moved_into_place_is_an_output_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "page"

    def busy(self: Path, _: Path) -> Any:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    refuses(r"cannot write .*page: Device or resource busy", put, target, "new", error=OutputError)
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from attnmech.basics.files import writing
with writing(Path(sys.argv[1])) as draft:
    draft.write_text("theirs")
    print(draft, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts processes that write the file `page` until they are told to end."""
    started = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "page")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_several_processes_write_one_file(writer: Callable[[], Any], tmp_path: Path) -> None:
    target = tmp_path / "page"
    one, other = writer(), writer()
    drafts = {Path(process.stdout.readline().strip()) for process in (one, other)}
    assert len(drafts) == 2 and drafts == set(tmp_path.iterdir())
    put(target, "ours")
    assert set(tmp_path.iterdir()) == {*drafts, target}, "drafts of processes that run stay"
    one.communicate("\n")
    assert target.read_text() == "theirs"
    other.kill()
    other.communicate()
    assert len(list(tmp_path.glob(".page.*.part"))) == 1
    check_writable(target)
    assert list(tmp_path.iterdir()) == [target], "that of the killed one is gone"


def test_a_folder_that_cannot_be_listed_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", refused)
        put(tmp_path / "page", "new")
    assert (tmp_path / "page").read_text() == "new"


@pytest.mark.parametrize("fails", ["table", "page"])
def test_a_full_disk_names_the_file_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    from attnmech.cli.outputs import Outputs

    focus = am.attention_focus(am.load(), "Anna sang of shells.")
    files = {"table": tmp_path / "heads.csv", "page": tmp_path / "heads.html"}

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, f"Could not write {tmp_path}/.draft.part: disk full")

    where, name = {"table": (pd.DataFrame, "to_csv"), "page": (Path, "write_text")}[fails]
    with monkeypatch.context() as patched:
        patched.setattr(where, name, full)
        with pytest.raises(OutputError) as caught:
            Outputs(list(files.values()), overwrite=True, resumable=False).write(
                focus.to_frame(), {".html": focus.write_html}
            )
    assert str(caught.value) == f"cannot write {files[fails]}: No space left on device."
    assert list(tmp_path.iterdir()) == []
