"""The command line: its output, its files, and its messages about mistakes."""

import importlib
import json
import random
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import models
import numpy as np
import pandas as pd
import pytest
import typer
from schemas import are_sentences, schema

import attnmech as am
from attnmech.cli import main as cli
from attnmech.cli.terminal import KEYS
from attnmech.errors import ExactnessError
from attnmech.runs import engine
from attnmech.runs.stream import Streaming

TEXTS = ["Anna sang of shells.", "Tom gave an old anchor to Clara.", "The keys are here."]

COMMANDS = ["report", "focus", "drift", "heads", "embed", "ablate", "null", "check"]

importlib.import_module("attnmech.pages.limits")  # so that the report of the first test also measures few other texts


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of `attnmech ARGUMENTS`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["attnmech", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


def to(*paths: Path) -> list[str]:
    """`--out` for every path."""
    return [argument for path in paths for argument in ("--out", str(path))]


def test_report_writes_a_page_and_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    assert run(monkeypatch, "report", "--text", "Anna painted a small boat.", "--out", str(out)) == 0
    printed = capsys.readouterr().out
    assert str(out) in printed
    assert "HookedModel('demo'" in printed
    for column in ("layer", "query_key", "key_bias", "position", "residual"):
        assert column in printed
    page = out.read_text(encoding="utf-8")
    assert "painted" in page
    assert "attnmech" in page
    assert list(tmp_path.iterdir()) == [out]


def test_report_reads_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "page.html"
    text.write_text("Tom gave an old anchor to Anna.", encoding="utf-8")
    assert run(monkeypatch, "report", "--file", str(text), "--out", str(out)) == 0
    assert "anchor" in out.read_text(encoding="utf-8")


def test_focus_of_a_text_and_of_a_corpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "heads.csv"
    assert run(monkeypatch, "focus", "--text", "Anna painted a small boat.", "--out", str(out)) == 0
    one = pd.read_csv(out)
    assert len(one) == 32 and one["first_top_low"].isna().all()
    corpus, table = tmp_path / "corpus.jsonl", tmp_path / "corpus.parquet"
    texts = [
        "Anna sang of shells.",
        "Tom gave an old anchor to Clara.",
        "The keys are here.",
        "Anna sang.",
        "Tom slept.",
    ]
    corpus.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts), encoding="utf-8")
    page = table.with_suffix(".html")
    assert run(monkeypatch, "focus", "--file", str(corpus), *to(table, page)) == 0
    assert "On 5 texts, averaged over 32 heads" in capsys.readouterr().out
    several = pd.read_parquet(table)
    model = models.demo()
    expected = am.attention_focus(model, texts).to_frame()
    assert several.columns.tolist() == expected.columns.tolist()
    assert np.allclose(several.first_mass, expected.first_mass, atol=1e-6)
    assert (several.first_mass_low <= several.first_mass).all() and (
        several.first_mass <= several.first_mass_high
    ).all()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["corpus.html", "corpus.jsonl", "corpus.parquet", "heads.csv"]
    assert "Figure 2. How often heads attend most to the first token" in page.read_text(encoding="utf-8")


def test_drift_of_a_text_and_of_a_corpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, corpus = tmp_path / "drift.csv", tmp_path / "corpus.txt"
    assert run(monkeypatch, "drift", "--text", "Anna painted a small boat.", "-k", "12", "--out", str(out)) == 0
    printed = capsys.readouterr().out
    assert "\nOn 1 text, the mean cosine" in printed and "do not support a verdict" in printed
    model = models.demo()
    expected = am.residual_drift(model, "Anna painted a small boat.", k=12).to_frame()
    pd.testing.assert_frame_equal(pd.read_csv(out), expected, check_dtype=False, atol=1e-6, rtol=1e-5)
    corpus.write_text("\n".join(TEXTS * 2), encoding="utf-8")
    assert run(monkeypatch, "drift", "--file", str(corpus), "--at", "resid_post", "--out", str(out)) == 2
    assert "give --overwrite" in capsys.readouterr().err
    assert run(
        monkeypatch, "drift", "--file", str(corpus), "--at", "resid_post", "--overwrite",
        *to(out, out.with_suffix(".html")),
    ) == 0  # fmt: skip
    expected = am.residual_drift(model, iter(TEXTS * 2), at="resid_post").to_frame()
    pd.testing.assert_frame_equal(pd.read_csv(out), expected, check_dtype=False, atol=1e-6, rtol=1e-5)
    assert "Churn of the nearest rows" in out.with_suffix(".html").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.txt", "drift.csv", "drift.html"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--file", "/nowhere/corpus.txt"], "there is no file /nowhere/corpus.txt."),
        (["--out", "/nowhere/heads.csv"], "there is no folder /nowhere."),
        (["--out", "heads.csv", "--out", "./heads.csv"], "--out names heads.csv more than once"),
        (["--text", "a", "--file", "b"], "expected --text or --file; got both. Leave one out."),
        (["--workers", "2"], "--address and --workers need --engine ray; got --engine local."),
    ],
)
def test_focus_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run(monkeypatch, "focus", *arguments) == 2
    assert said in capsys.readouterr().err


def test_ablate_and_null_write_what_the_methods_find(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.txt"
    texts = ["Anna sang of shells.", "Tom gave an old anchor to Clara.", "The keys are here."]
    corpus.write_text("\n".join(texts), encoding="utf-8")
    model = models.demo()
    for command, method, shown in (
        ("ablate", am.ablate_heads, "has the largest effect"),
        ("null", am.null_attention, "not attending"),
    ):
        out = tmp_path / f"{command}.csv"
        assert run(monkeypatch, command, "--file", str(corpus), *to(out, out.with_suffix(".html"))) == 0
        assert shown in capsys.readouterr().out
        found, expected = pd.read_csv(out, keep_default_na=False, na_values=[""]), method(model, texts).to_frame()
        pd.testing.assert_frame_equal(found, expected, check_dtype=False, atol=1e-5, rtol=1e-4)
        assert shown in out.with_suffix(".html").read_text(encoding="utf-8")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["ablate.csv", "ablate.html", "corpus.txt", "null.csv", "null.html"]


@pytest.mark.parametrize("command", ["focus", "ablate", "null"])
def test_what_an_earlier_run_wrote_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    table, page = tmp_path / "heads.csv", tmp_path / "heads.html"
    arguments = [command, "--text", "Anna sang of shells.", *to(table, page)]

    def refused(*more: str) -> str:
        with monkeypatch.context() as patched:
            patched.setattr("attnmech.model.files.load.load", None)  # no work begins
            assert run(patched, *arguments, *more) == 2
        return " ".join(capsys.readouterr().err.split())

    for there in (table, page):
        there.write_text("of an earlier run")
        assert f"{there} exists; give --overwrite to replace it, or name another --out." in refused()
        assert [there.read_text() for there in tmp_path.iterdir()] == ["of an earlier run"]
        there.unlink()
    page.mkdir()
    assert f"cannot write {page}: it is a folder" in refused("--overwrite")
    page.rmdir()
    table.write_text("of an earlier run")
    assert run(monkeypatch, *arguments, "--overwrite") == 0
    assert len(pd.read_csv(table)) == 32 and sorted(tmp_path.iterdir()) == [table, page]


@pytest.mark.parametrize("command", ["focus", "null", "heads"])
def test_what_another_command_wrote_in_the_meantime_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    """The other command ends after this one has looked at the files, but before it locks their journal."""
    table, page = tmp_path / "heads.csv", tmp_path / "heads.html"
    arguments = [command, *(() if command == "heads" else ("--text", "Anna sang of shells.")), *to(table, page)]
    check = cli.Outputs.check

    def other_ends(self: cli.Outputs, *requirements: Any) -> None:
        check(self, *requirements)
        for path in (table, page):
            path.write_text("of another run")

    with monkeypatch.context() as patched:
        patched.setattr(cli.Outputs, "check", other_ends)
        patched.setattr("attnmech.model.files.load.load", None)  # no work begins
        assert run(patched, *arguments) == 2
        assert f"{table} exists; give --overwrite to replace it" in " ".join(capsys.readouterr().err.split())
    assert [path.read_text() for path in (table, page)] == ["of another run"] * 2
    assert sorted(tmp_path.iterdir()) == [table, page]


@pytest.mark.parametrize("command", ["report", "focus", "ablate", "null"])
def test_what_is_read_is_not_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    outs = [tmp_path / "a.csv", tmp_path / "a.html"]
    for file in (*outs, tmp_path / "a.csv.journal"):
        file.write_text("\n".join(TEXTS))
        assert run(monkeypatch, command, "--file", str(file), *to(*outs), "--overwrite") == 2
        assert "--file reads it. Name another --out." in " ".join(capsys.readouterr().err.split())
        assert file.read_text() == "\n".join(TEXTS)
        file.unlink()


def test_a_journal_of_something_else_stops_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table, journal = tmp_path / "heads.csv", tmp_path / "heads.csv.journal"
    journal.write_text("of another run")
    for arguments, said in (
        (["focus", "--text", "Anna sang."], "holds an unfinished run that would write"),
        (["ablate", "--text", "Anna sang."], "is not a valid journal"),
    ):
        assert run(monkeypatch, *arguments, "--out", str(table), "--overwrite") == 2
        assert said in " ".join(capsys.readouterr().err.split())
        assert journal.read_text() == "of another run" and list(tmp_path.iterdir()) == [journal]


def test_the_journal_stays_until_table_and_page_stand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    corpus, journal = tmp_path / "corpus.txt", tmp_path / "heads.csv.journal"
    corpus.write_text("\n".join(TEXTS))

    def full(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    from attnmech.runs import engine, stream

    measured: list[str] = []

    def counted(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def counting(*arguments: Any) -> Any:
            measured.append(name)
            return real(*arguments)

        return counting

    for command in ("focus", "ablate", "null"):
        arguments = [command, "--file", str(corpus), *to(tmp_path / "heads.csv", tmp_path / "heads.html")]
        with monkeypatch.context() as patched:
            patched.setattr("attnmech.results.result.head_page", full)
            assert run(patched, *arguments) == 1
        assert "No space left on device" in capsys.readouterr().err
        assert sorted(tmp_path.iterdir()) == [corpus, journal]
        with monkeypatch.context() as patched:
            patched.setattr(engine.Texts, "after", counted(engine.Texts, "after"))
            patched.setattr(stream.Streaming, "_reduced", counted(stream.Streaming, "_reduced"))
            assert run(patched, *arguments) == 0
        # A sweep compares its first changes with the journal; the sinks of null are no part of it.
        assert measured == {"focus": [], "ablate": ["after"], "null": ["_reduced", "after"]}[command]
        measured.clear()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.txt", "heads.csv", "heads.html"]
        for path in tmp_path.glob("heads.*"):
            path.unlink()


STOPS = """
import signal, sys
from pathlib import Path
from attnmech.cli import main as cli
from attnmech.runs import engine
from attnmech.runs.stream import Streaming
from attnmech.runs import engine
signal.signal(signal.SIGINT, signal.default_int_handler)
ready = Path(sys.argv[1])
real, calls = engine.Texts.after, []
def waiting(self, *arguments):
    calls.append(1)
    if len(calls) == 2:
        ready.touch()
        signal.pause()
    return real(self, *arguments)
engine.Texts.after = waiting
sys.argv = ["attnmech", *sys.argv[2:]]
cli.main()
"""


@pytest.mark.parametrize("command", ["report", "focus", "null"])
def test_an_interrupted_run_leaves_what_was_there_and_resumes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    corpus, out = tmp_path / "corpus.txt", tmp_path / "heads.csv"
    corpus.write_text("\n".join(TEXTS * 100 if command == "focus" else TEXTS))
    arguments = [command, "--file", str(corpus), *to(out, out.with_suffix(".html")), "--overwrite"]
    out.write_text("of an earlier run")
    owner, name = (Streaming, "_reduced") if command == "focus" else (engine.Texts, "after")
    real, calls = getattr(owner, name), []

    def stopping(self: Any, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, stopping)
        assert run(monkeypatch, *arguments) == 130
    assert_stopped(out, capsys.readouterr().err, {corpus, out}, resumes=command != "report")
    if command != "report":
        assert_resumes(monkeypatch, corpus, out, arguments)


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A signal to a separate process; while it runs, no other run can use its journal."""
    corpus, out, ready = tmp_path / "corpus.txt", tmp_path / "heads.csv", tmp_path / "ready"
    corpus.write_text("\n".join(TEXTS))
    arguments = ["ablate", "--file", str(corpus), *to(out, out.with_suffix(".html")), "--overwrite"]
    out.write_text("of an earlier run")
    process = subprocess.Popen([sys.executable, "-c", STOPS, str(ready), *arguments], stderr=subprocess.PIPE, text=True)
    while not ready.exists() and process.poll() is None:
        time.sleep(0.02)
    assert run(monkeypatch, *arguments) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"error: {out}.journal is in use by another run." in said
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert_stopped(out, said, {corpus, out, ready}, resumes=True)
    assert_resumes(monkeypatch, corpus, out, arguments)


@pytest.mark.parametrize(
    "module", ["typer", "torch", "transformers.modeling_utils", "transformers.models.bloom.modeling_bloom", "plotly"]
)
def test_ctrl_c_during_imports(tmp_path: Path, module: str) -> None:
    """The signal comes within an `exec` of the import, after which Python would end by the signal; transformers turns
    Ctrl-C into another error."""
    script = (
        "import os, runpy, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: exec('os.kill(os.getpid(), signal.SIGINT)')\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"sys.argv = ['attnmech', 'focus', '--text', 'Anna sang.', '--out', {str(tmp_path / 'heads.csv')!r}]\n"
        "runpy.run_module('attnmech', run_name='__main__')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.split(), ended.stdout) == (130, ["interrupted"], "")
    assert not list(tmp_path.iterdir())


def assert_stopped(out: Path, said: str, files: set[Path], *, resumes: bool) -> None:
    """Existing files are unchanged; the run says that it was interrupted, and how to resume it."""
    assert out.read_text() == "of an earlier run"
    journal = out.with_name("heads.csv.journal")
    assert set(out.parent.iterdir()) == files | ({journal} if resumes else set())
    resume = f"; run the same command again to resume from {journal}" if resumes else ""
    assert [line for line in said.splitlines() if line.strip()] == [f"interrupted{resume}"]


def assert_resumes(monkeypatch: pytest.MonkeyPatch, corpus: Path, out: Path, arguments: list[str]) -> None:
    """Repeating the command writes what an uninterrupted run writes."""
    assert run(monkeypatch, *arguments) == 0
    whole = out.with_name("whole.csv")
    assert run(monkeypatch, arguments[0], "--file", str(corpus), "--out", str(whole)) == 0
    found, expected = (pd.read_csv(path).select_dtypes("number") for path in (out, whole))
    pd.testing.assert_frame_equal(found, expected, atol=1e-6, rtol=1e-5)
    assert not out.with_name("heads.csv.journal").exists() and out.with_suffix(".html").exists()


@pytest.mark.parametrize("command", ["ablate", "null"])
def test_sweeps_say_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for arguments, said in (
        (["--file", "/nowhere/corpus.txt"], "there is no file /nowhere/corpus.txt."),
        (["--text", "a", "--file", "b"], "expected --text or --file; got both."),
        (["--metric", "accuracy"], "'accuracy' is not one of 'loss', 'kl'"),
    ):
        assert run(monkeypatch, command, *arguments) == 2
        assert said in capsys.readouterr().err


def test_check_prints_every_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "check") == 0
    printed = capsys.readouterr().out
    assert "certified" in printed.splitlines()[-1]
    for name in ("transformers", "ledger", "pattern edit", "hook_embed ≠ embed", "resid_mid"):
        assert name in printed


def test_check_runs_the_full_proof_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    models.randomised(models.llama(layers=7)).save_pretrained(tmp_path)
    for options, edited in (([], "0, 1, 2, 4, 5, 6"), (["--full"], "0, 1, 2, 3, 4, 5, 6")):
        assert run(monkeypatch, "check", "--model", str(tmp_path), *options) == 0
        assert re.search(rf"edits tried in layers {edited}\s", capsys.readouterr().out)


def test_the_model_has_the_precision_and_the_device_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "check", "--device", "cpu", "--dtype", "float64", "--json") == 0
    assert "float64 on cpu" in json.loads(capsys.readouterr().out)["model"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--text", " "], "the text is empty"),
        (["--model", "./nowhere"], "there is no folder ./nowhere."),
        (["--device", "nowhere:1"], "device 'nowhere:1' cannot be used here"),
        (["--model", "nobody/nothing"], "'nobody/nothing' is not a folder and not in the local cache"),
        (["--out", "/nowhere/page.html"], "there is no folder /nowhere."),
        (["--out", "."], "--out must end in .html (page)"),
        (["--file", "/nowhere/text.txt"], "there is no file /nowhere/text.txt."),
        (["--text", "a", "--file", "b"], "expected --text or --file; got both."),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "report", *arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.splitlines()[-1].startswith("error: ")
    assert said in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, message in (("image", "is not UTF-8: line 1 has the byte 0x89"), ("image.png", "ends in .png, which")):
        binary = tmp_path / name
        binary.write_bytes(b"\x89PNG\xff\xfe")
        assert run(monkeypatch, "report", "--file", str(binary), "--out", str(tmp_path / "page.html")) == 2
        assert f"{name} {message}" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["image", "image.png"]


def test_a_column_of_a_table_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = tmp_path / "reviews.csv"
    table.write_text('title,body\nshells,"Anna sang, of shells."\nanchor,Tom gave an old anchor.\n')
    options = ("focus", "--file", str(table), "--out", str(tmp_path / "focus.csv"), "--overwrite", "--json")
    assert run(monkeypatch, *options) == 2
    assert "its columns are 'title', 'body'. Give the option column the name of one" in capsys.readouterr().err
    assert run(monkeypatch, *options, "--column", "body") == 0
    assert "2 texts" in capsys.readouterr().out
    assert run(monkeypatch, "focus", "--column", "body", "--out", str(tmp_path / "focus.csv"), "--overwrite") == 2
    assert "--column body names a column of --file; give --file too." in capsys.readouterr().err


def test_help_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from attnmech.cli import main as cli; sys.argv = ['attnmech', '--help']\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'transformer_lens', 'plotly'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "report" in done.stdout


REPORTS = """
import runpy, sys
import attnmech.pages.limits
attnmech.pages.limits.OTHER_TEXTS = 2
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_installed_command_runs(tmp_path: Path) -> None:
    """As installed, in a separate process, with as few other texts as in the reports of all tests."""
    command = Path(sys.executable).with_name("attnmech")
    done = subprocess.run(
        [sys.executable, "-c", REPORTS, str(command), "report", "--text", "Anna sang."],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").is_file()
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    assert version.returncode == 0, version.stderr


def test_heads_without_and_with_a_corpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "heads.csv"
    assert run(monkeypatch, "heads", *to(out, out.with_suffix(".html"))) == 0
    expected = am.head_types(models.demo())
    assert pd.read_csv(out).types.fillna("").tolist() == expected.by_head().types.tolist()
    printed = " ".join(capsys.readouterr().out.split())
    assert expected.lead in printed and "induction" in printed
    assert "All heads by type" in out.with_suffix(".html").read_text("utf-8")

    corpus, table = tmp_path / "texts.txt", tmp_path / "of_texts.csv"
    corpus.write_text("\n".join(TEXTS * 2), "utf-8")
    assert run(monkeypatch, "heads", "--file", str(corpus), "--out", str(table)) == 0
    of_texts = am.head_types(models.demo(), iter(TEXTS * 2)).by_head()
    assert pd.read_csv(table)["first"].to_numpy() == pytest.approx(of_texts["first"].to_numpy(), abs=1e-4)
    assert run(monkeypatch, "heads", "--out", str(out)) == 2
    assert "exists; give --overwrite" in capsys.readouterr().err


def test_embed_writes_a_table_and_a_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = tmp_path / "embed.csv", "When Anna and Tom met at the shore, Tom gave an old anchor to Clara."
    options = ["--projection", "pca", "--dims", "3", "--layers", "0,2", *to(out, out.with_suffix(".html"))]
    assert run(monkeypatch, "embed", "--text", text, *options) == 0
    expected = am.joint_embedding(models.demo(), [text], layers=[0, 2], dims=3)
    table = pd.read_csv(out)
    assert table[["layer", "head"]].drop_duplicates().to_numpy().tolist() == [list(each) for each in expected.heads]
    assert table.correlation.to_numpy() == pytest.approx(expected.to_frame().correlation.to_numpy(), nan_ok=True)
    assert expected.lead in " ".join(capsys.readouterr().out.split())
    assert "Joint embedding of the queries and keys" in out.with_suffix(".html").read_text("utf-8")
    assert run(monkeypatch, "embed", "--layers", "0;2", "--out", str(tmp_path / "other.csv")) == 2
    assert "--layers must be whole numbers separated by commas, such as 0,5,11; got '0;2'." in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_two_examples_that_the_command_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    examples = [line.strip() for line in capsys.readouterr().out.splitlines() if f"attnmech {command} " in line]
    examples = [line for line in examples if line.startswith("attnmech")]
    assert len(examples) == 2
    click = typer.main.get_command(cli.app).commands[command]
    for example in examples:
        click.make_context(command, shlex.split(example)[2:])  # raises for an option that it does not take


def test_a_table_says_what_it_leaves_out_and_in_which_units(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "effects.csv"
    arguments = ["ablate", "--text", "Anna sang of shells.", "--out", str(out), "--overwrite", "--rows"]
    assert run(monkeypatch, *arguments, "3") == 0
    printed = capsys.readouterr().out
    assert "(nats of loss)" in printed and "… 29 more (--rows 32)" in printed and "No intervals: 1 text" in printed
    found = pd.read_csv(out)
    largest = found.loc[found.effect.abs().nlargest(3).index]
    shown = [line.split("│")[1:4] for line in printed.splitlines() if line.startswith("│")]
    assert [(int(layer), int(head)) for layer, head, _ in shown] == list(
        zip(largest.layer, largest["head"], strict=True)
    )
    assert [float(effect.replace("−", "-")) for *_, effect in shown] == pytest.approx(largest.effect.tolist(), rel=5e-3)

    assert run(monkeypatch, *arguments, "2", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["table"]["rows"]) == 32 and printed["table"]["units"]["effect"] == "nats of loss"
    assert [row["effect"] for row in printed["table"]["rows"]][:3] == pytest.approx(largest.effect.tolist())
    assert printed["files"] == [str(out)]


def test_check_writes_its_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, checks = tmp_path / "checks.csv", models.demo().certificate.checks
    assert run(monkeypatch, "check", "--json", "--out", str(out)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] and len(printed["table"]["rows"]) == len(checks)
    assert {point["point"] for point in printed["points"]} == set(models.demo().points)
    assert pd.read_csv(out).check.tolist() == [check.name for check in checks]
    assert run(monkeypatch, "check", "--out", str(out)) == 2
    assert "exists; give --overwrite" in capsys.readouterr().err


def test_report_writes_a_page_and_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, table = tmp_path / "page.html", tmp_path / "terms.csv"
    assert run(monkeypatch, "report", "--text", "Anna sang.", *to(page, table), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert "opens offline" in printed["notes"][-1] and printed["files"] == [str(page), str(table)]
    assert [row["layer"] for row in printed["table"]["rows"]] == pd.read_csv(table).layer.tolist() == [0, 1, 2, 3]


def test_a_result_is_written_for_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "focus.safetensors"
    assert run(monkeypatch, "focus", "--text", TEXTS[0], "--out", str(out)) == 0
    expected = am.attention_focus(models.demo(), TEXTS[0])
    pd.testing.assert_frame_equal(am.load_result(out).to_frame(), expected.to_frame())
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_suffix_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    monkeypatch.setattr("attnmech.model.files.load.load", None)
    suffixes = ".csv (table) or .parquet (table)"
    if command != "check":
        suffixes = f".html (page), {suffixes}"
    if command not in ("check", "report"):
        suffixes = suffixes.replace(" or", ",") + " or .safetensors (result for Python)"
    assert run(monkeypatch, command, *to(tmp_path / "a.csv", tmp_path / "a.txt")) == 2
    assert f"--out must end in {suffixes}; got {tmp_path / 'a.txt'}." in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_json_has_the_documented_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    text = [] if command in ("heads", "check") else ["--text", TEXTS[0]]
    assert run(monkeypatch, command, *text, "--out", str(tmp_path / "table.csv"), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == [key for key in KEYS if command == "check" or key not in ("ok", "points")]
    schema("answer").validate(printed)
    assert printed["version"] == 1 and printed["command"] == command and printed["certificate"]["ok"]
    assert are_sentences(printed["findings"])
    assert list(printed["table"]) == ["title", "units", "rows", "rows_in_all"]
    assert printed["table"]["rows_in_all"] == len(printed["table"]["rows"])
    assert all(set(printed["table"]["units"]) <= set(row) for row in printed["table"]["rows"])
    assert run(monkeypatch, "--help") == 0
    helped = " ".join(capsys.readouterr().out.split())
    assert all(f"{key}: {' '.join(meaning.split())}" in helped for key, meaning in KEYS.items())


def test_commands_list_shared_options_in_one_order() -> None:
    order = [
        "--model", "--device", "--dtype", "--text", "--file", "--truncate", "--out", "--overwrite", "--rows",
        "--json", "--memory", "--engine", "--address", "--workers",
    ]  # fmt: skip
    commands = typer.main.get_command(cli.app).commands
    assert set(commands) == {*COMMANDS, "atlas", "mcp"}
    for command in (each for name, each in commands.items() if name != "mcp"):
        names = [option.opts[0] for option in command.params]
        assert [name for name in names if name in order] == [name for name in order if name in names]
        assert {"--model", "--device", "--dtype", "--out", "--overwrite", "--json"} <= set(names)


def test_help_keeps_brackets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (*COMMANDS, "atlas", "mcp"):
        assert run(monkeypatch, command, "--help") == 0
        helped = "".join(capsys.readouterr().out.replace("│", " ").split())
        callback = typer.main.get_command(cli.app).commands[command]
        texts = [callback.help, callback.epilog, *(option.help for option in callback.params)]
        brackets = [word for text in texts for word in re.findall(r"\S*\[\S+", (text or "").replace("\\[", "["))]
        assert all(word in helped for word in brackets) and (command != "mcp" or '"attnmech[mcp]").' in brackets)


def test_an_error_keeps_brackets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name = "[INST]:tada:\\[/red]"
    assert run(monkeypatch, "focus", "--file", name) == 2
    assert capsys.readouterr().err == f"error: there is no file {name}.\n"


def test_failed_work_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def inexact(*_: Any, **__: Any) -> None:
        raise ExactnessError("the terms do not add up")

    monkeypatch.setattr("attnmech.model.files.load.load", inexact)
    assert run(monkeypatch, "check") == 1
    assert capsys.readouterr().err.strip().splitlines()[-1] == "error: the terms do not add up"


def folder_of(model: object, folder: Path) -> list[str]:
    """A folder with a model and a tokenizer, and a file with one text of 90 words."""
    models.randomised(model).save_pretrained(folder)
    tokenizer = models.tokenizer()
    tokenizer.save_pretrained(folder)
    words = [word for word in tokenizer.get_vocab() if word.isalpha()]
    (folder / "texts.txt").write_text(" ".join(random.Random(1).choices(words, k=90)), encoding="utf-8")
    return ["--model", str(folder), "--file", str(folder / "texts.txt"), "--out", str(folder / "out.csv")]


def test_a_text_beyond_the_training_is_named_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = folder_of(models.llama(), tmp_path)
    beyond = "warning: document 0 has 90 tokens, but this model was trained on texts of at most 64"
    assert run(monkeypatch, "focus", *arguments) == 0
    error = capsys.readouterr().err
    assert error.count("warning:") == 1
    assert beyond in error
    assert "give --truncate to cut it after 64." in error
    assert run(monkeypatch, "focus", *arguments, "--truncate", "--overwrite") == 0
    assert "warning:" not in capsys.readouterr().err
    text = (tmp_path / "texts.txt").read_text(encoding="utf-8")
    assert run(monkeypatch, "focus", *arguments[:2], "--text", text, "--truncate", *arguments[4:], "--overwrite") == 0
    assert "warning:" not in capsys.readouterr().err
    assert run(monkeypatch, "ablate", *arguments, "--overwrite") == 0
    error = capsys.readouterr().err
    assert beyond in error
    assert "truncate" not in error


def test_a_text_beyond_the_positions_is_refused_with_what_the_command_can_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = folder_of(models.gpt2(), tmp_path)
    for command, remedy in (("focus", "; split it, or give --truncate to cut it after 19."), ("null", "; split it.")):
        assert run(monkeypatch, command, *arguments) == 2
        assert f"has 19 positions{remedy}" in capsys.readouterr().err
    with pytest.raises(am.errors.InputError, match="split it, or give truncate=True"):
        am.attention_focus(am.load(tmp_path), am.Corpus(tmp_path / "texts.txt"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert am.attention_focus(am.load(tmp_path), am.Corpus(tmp_path / "texts.txt"), truncate=True).truncated == 1
