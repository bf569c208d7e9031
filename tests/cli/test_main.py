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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pandas as pd
import pytest
import typer
from schemas import are_sentences, schema

import attnmech as am
from attnmech.cli import main as cli
from attnmech.cli.outputs import FOLLOWS, Outputs
from attnmech.cli.terminal import KEYS
from attnmech.errors import ExactnessError
from attnmech.pages.result import AWAITED
from attnmech.runs.engine import Texts
from attnmech.runs.stream import Streaming

from .conftest import Command

TEXTS = ["Anna sang of shells.", "Tom gave an old anchor to Clara.", "The keys are here."] * 2
RESUMABLE = ("focus", "ablate", "null")
"""Commands with a journal: one reads texts as a stream, the others sweep over heads."""

importlib.import_module("attnmech.pages.limits")  # so that the report of the first test also measures few other texts


def to(*paths: Path) -> list[str]:
    return [argument for path in paths for argument in ("--out", str(path))]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text("\n".join(TEXTS))
    return file


METHODS: dict[str, tuple[list[str], Callable[[am.HookedModel], am.results.Result], str]] = {
    "focus": ([], lambda model: am.attention_focus(model, iter(TEXTS)), "How often heads attend most to the first"),
    "drift": (
        ["-k", "12", "--at", "resid_post"],
        lambda model: am.residual_drift(model, iter(TEXTS), k=12, at="resid_post"),
        "Churn of the nearest rows",
    ),
    "heads": ([], lambda model: am.head_types(model, iter(TEXTS)), "All heads by type"),
    "embed": (
        ["--projection", "pca", "--dims", "3", "--layers", "0,2"],
        lambda model: am.joint_embedding(model, TEXTS, layers=[0, 2], dims=3),
        "Joint embedding of the queries and keys",
    ),
    "ablate": (
        ["--method", "mean", "--metric", "kl"],
        lambda model: am.ablate_heads(model, TEXTS, method="mean", metric="kl", reference=TEXTS),
        "has the largest effect",
    ),
    "null": (
        ["--sink", "most_attended", "--delta", "0.02"],
        lambda model: am.null_attention(model, TEXTS, sink="most_attended", delta=0.02),
        "not attending",
    ),
    "kv": (
        ["--first", "1", "--last", "3", "--context", "56"],
        lambda model: am.kv_scores(model, TEXTS, first=1, last=3, context=56),
        "As more kv heads stream",
    ),
}
"""Of each command with a result: its options, the same in Python, and words of its page."""
COMMANDS = ["report", *METHODS, "check"]


def assert_answer(printed: str, command: str) -> dict[str, Any]:
    """The JSON object, which has the documented keys."""
    answer: dict[str, Any] = json.loads(printed)
    assert list(answer) == [key for key in KEYS if command == "check" or key not in ("ok", "points")]
    schema("answer").validate(answer)
    assert answer["version"] == 1 and answer["command"] == command and answer["certificate"]["ok"]
    assert are_sentences(answer["findings"])
    assert list(answer["table"]) == ["title", "units", "rows", "rows_in_all"]
    assert answer["table"]["rows_in_all"] == len(answer["table"]["rows"])
    assert all(set(answer["table"]["units"]) <= set(row) for row in answer["table"]["rows"])
    return answer


@pytest.mark.parametrize("command", METHODS)
def test_a_command_writes_what_its_method_finds(attnmech: Command, tmp_path: Path, corpus: Path, command: str) -> None:
    options, method, words = METHODS[command]
    outs = [tmp_path / f"a{suffix}" for suffix in (".csv", ".parquet", ".html", ".safetensors")]
    ended = attnmech(command, "--file", corpus, *options, *to(*outs), "--json")
    assert ended.status == 0, ended.err
    answer, expected = assert_answer(ended.out, command), method(models.demo())
    assert answer["findings"][0] == expected.lead and answer["files"] == [str(path) for path in outs]
    table, page = expected.by_head(), outs[2].read_text("utf-8")
    found, kept = pd.read_csv(outs[0], keep_default_na=False, na_values=[""]), pd.read_parquet(outs[1])
    assert list(found) == list(table) == list(kept)
    numbers = list(table.select_dtypes("number"))
    for each in (found, kept):
        pd.testing.assert_frame_equal(each[numbers], table[numbers], check_dtype=False, atol=1e-5, rtol=1e-4)
    pd.testing.assert_frame_equal(am.load_result(outs[3]).to_frame(), expected.to_frame(), atol=1e-5, rtol=1e-4)
    assert words in page
    assert sorted(tmp_path.iterdir()) == sorted([corpus, *outs])


def test_report_writes_a_page_and_a_table(attnmech: Command, tmp_path: Path) -> None:
    page, table, file = tmp_path / "page.html", tmp_path / "terms.csv", tmp_path / "text.txt"
    file.write_text("Anna painted a small boat.")
    answer = assert_answer(attnmech("report", "--file", file, *to(page, table), "--json").out, "report")
    assert "opens offline" in answer["notes"][-1] and answer["files"] == [str(page), str(table)]
    assert [row["layer"] for row in answer["table"]["rows"]] == pd.read_csv(table).layer.tolist() == [0, 1, 2, 3]
    assert "Anna painted a small boat." in page.read_text("utf-8") and sorted(tmp_path.iterdir()) == [page, table, file]
    printed = attnmech("report", "--text", "Anna sang.", *to(page), "--overwrite").out
    assert str(page) in printed and "HookedModel('demo'" in printed
    assert all(column in printed for column in ("layer", "query_key", "key_bias", "position", "residual"))


def test_check_writes_its_checks(attnmech: Command, tmp_path: Path) -> None:
    out, checks = tmp_path / "checks.csv", models.demo().certificate.checks
    answer = assert_answer(attnmech("check", "--json", "--out", out).out, "check")
    assert answer["ok"] and len(answer["table"]["rows"]) == len(checks)
    assert {point["point"] for point in answer["points"]} == set(models.demo().points)
    assert pd.read_csv(out).check.tolist() == [check.name for check in checks]
    printed = attnmech("check", "--device", "cpu", "--dtype", "float64").out
    assert "float64 on cpu" in printed and "Certified" in printed.splitlines()[-1]
    assert all(name in printed for name in ("transformers", "ledger", "pattern edit", "hook_embed ≠ embed"))
    assert "; alibi 1 × alibi_slopes, rounded to float32; " in printed and " None" not in printed


def test_check_runs_the_full_proof_when_asked(attnmech: Command, tmp_path: Path) -> None:
    models.randomised(models.llama(layers=7)).save_pretrained(tmp_path)
    for options, edited in (([], "0, 1, 2, 4, 5, 6"), (["--full"], "0, 1, 2, 3, 4, 5, 6")):
        assert re.search(rf"edits tried in layers {edited}\s", attnmech("check", "--model", tmp_path, *options).out)


def test_a_table_says_what_it_leaves_out_and_in_which_units(attnmech: Command, tmp_path: Path) -> None:
    out = tmp_path / "effects.csv"
    arguments = ["ablate", "--text", TEXTS[0], "--out", out, "--overwrite", "--rows"]
    printed = attnmech(*arguments, 3).out
    assert "(nats of loss)" in printed and "… 29 more (--rows 32)" in printed and "No intervals: 1 text" in printed
    found = pd.read_csv(out)
    largest = found.loc[found.effect.abs().nlargest(3).index]
    shown = [line.split("│")[1:4] for line in printed.splitlines() if line.startswith("│")]
    assert [(int(layer), int(head)) for layer, head, _ in shown] == list(
        zip(largest.layer, largest["head"], strict=True)
    )
    assert [float(effect.replace("−", "-")) for *_, effect in shown] == pytest.approx(largest.effect.tolist(), rel=5e-3)
    answer = json.loads(attnmech(*arguments, 2, "--json").out)
    assert len(answer["table"]["rows"]) == 32 and answer["table"]["units"]["effect"] == "nats of loss"
    assert [row["effect"] for row in answer["table"]["rows"]][:3] == pytest.approx(largest.effect.tolist())


# -- mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["report", "focus", "ablate", "null"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--file", "/nowhere/[INST]:tada:\\[/red]"], "there is no file /nowhere/[INST]:tada:\\[/red]."),
        (["--out", "/nowhere/a.html"], "there is no folder /nowhere."),
        (["--out", "a.html", "--out", "./a.html"], "--out names a.html more than once"),
        (["--text", "a", "--file", "b"], "expected --text or --file; got both. Leave one out."),
        (["--column", "body"], "--column body names a column of --file; give --file too."),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    attnmech: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = attnmech(command, *arguments)
    (line,) = ended.err.strip().splitlines()
    assert ended.status == 2 and line.startswith("error: ") and said in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("report --text ' '", "the text is empty"),
        ("report --model ./nowhere", "there is no folder ./nowhere."),
        ("report --device nowhere:1", "device 'nowhere:1' cannot be used here"),
        ("report --model nobody/nothing", "'nobody/nothing' is not a folder and not in the local cache"),
        ("report --file image --out a.html", "image is not UTF-8: line 1 has the byte 0x89"),
        ("report --file image.png --out a.html", "image.png ends in .png, which"),
        ("report --out .", "--out must end in .html (page)"),
        ("focus --workers 2", "--address and --workers need --engine ray; got --engine local."),
        ("focus --file table.csv", "its columns are 'title', 'body'. Give the option column the name of one"),
        ("embed --layers 0;2", "--layers must be whole numbers separated by commas, such as 0,5,11; got '0;2'."),
        ("ablate --metric accuracy", "'accuracy' is not one of 'loss', 'kl'"),
        ("null --metric accuracy", "'accuracy' is not one of 'loss', 'kl'"),
    ],
)
def test_mistakes_of_single_commands(
    attnmech: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("image", "image.png"):
        Path(name).write_bytes(b"\x89PNG\xff\xfe")
    Path("table.csv").write_text("title,body\nshells,Anna sang.\n")
    ended = attnmech(*shlex.split(arguments))
    assert ended.status == 2 and said in ended.said.replace("│ ", "") and "Traceback" not in ended.err
    assert {path.name for path in tmp_path.iterdir()} == {"image", "image.png", "table.csv"}


def test_a_column_of_a_table_is_named(attnmech: Command, tmp_path: Path) -> None:
    table = tmp_path / "reviews.csv"
    table.write_text('title,body\nshells,"Anna sang, of shells."\nanchor,Tom gave an old anchor.\n')
    assert "On 2 texts" in attnmech("focus", "--file", table, "--column", "body", *to(tmp_path / "focus.csv")).out


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("command", COMMANDS)
def test_files_are_checked_before_any_work(attnmech: Command, tmp_path: Path, command: str) -> None:
    suffixes = ".csv (table) or .parquet (table)"
    if command != "check":
        suffixes = f".html (page), {suffixes}"
    if command not in ("check", "report"):
        suffixes = suffixes.replace(" or", ",") + " or .safetensors (result for Python)"
    if command == "kv":
        suffixes = f"no suffix (folder with a page), {suffixes}"
    first, second = outs = [tmp_path / "a.csv", tmp_path / ("b.csv" if command == "check" else "a.html")]
    said = attnmech(command, *to(first, tmp_path / "a.txt")).said
    assert said == f"error: --out must end in {suffixes}; got {tmp_path / 'a.txt'}."
    for there in outs:
        there.write_text("of an earlier run")
        ended = attnmech(command, *to(*outs))
        assert ended.said == f"error: {there} exists; give --overwrite to replace it, or name another --out."
        assert ended.status == 2 and [path.read_text() for path in tmp_path.iterdir()] == ["of an earlier run"]
        there.unlink()
    second.mkdir()
    assert f"cannot write {second}: it is a folder" in attnmech(command, *to(*outs), "--overwrite").said


@pytest.mark.parametrize("command", ["check", "report", "heads", "drift", *RESUMABLE])
def test_an_earlier_file_is_replaced_if_asked(attnmech: Command, tmp_path: Path, command: str) -> None:
    out = tmp_path / "a.csv"
    out.write_text("of an earlier run")
    text = [] if command in ("check", "heads") else ["--text", "Anna sang."]
    assert attnmech(command, *text, *to(out), "--overwrite").status == 0
    assert len(pd.read_csv(out)) > 3 and list(tmp_path.iterdir()) == [out]


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("command", ["focus", "null", "heads"])
def test_what_another_command_wrote_in_the_meantime_is_left_alone(
    attnmech: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    """The other command ends after this one has looked at the files, but before it locks their journal."""
    outs, check = [tmp_path / "heads.csv", tmp_path / "heads.html"], Outputs.check

    def other_ends(self: Outputs, *requirements: Any) -> None:
        check(self, *requirements)
        for path in outs:
            path.write_text("of another run")

    monkeypatch.setattr(Outputs, "check", other_ends)
    assert f"{outs[0]} exists; give --overwrite to replace it" in attnmech(command, *to(*outs)).said
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["of another run"] * 2


@pytest.mark.parametrize("command", ["report", *RESUMABLE])
def test_what_is_read_is_not_written(attnmech: Command, tmp_path: Path, command: str) -> None:
    outs = [tmp_path / "a.csv", tmp_path / "a.html"]
    for file in (*outs, tmp_path / "a.csv.journal"):
        file.write_text("\n".join(TEXTS))
        ended = attnmech(command, "--file", file, *to(*outs), "--overwrite")
        assert ended.status == 2 and "--file reads it. Name another --out." in ended.said
        assert file.read_text() == "\n".join(TEXTS)
        file.unlink()


# -- journals and Ctrl-C ---------------------------------------------------------------------------------------


def test_a_journal_of_something_else_stops_the_command(attnmech: Command, tmp_path: Path) -> None:
    table, journal = tmp_path / "heads.csv", tmp_path / "heads.csv.journal"
    journal.write_text("of another run")
    for command, said in (("focus", "holds an unfinished run that would write"), ("ablate", "is not a valid journal")):
        ended = attnmech(command, "--text", "Anna sang.", "--out", table, "--overwrite")
        assert ended.status == 2 and said in ended.said
        assert journal.read_text() == "of another run" and list(tmp_path.iterdir()) == [journal]


@pytest.mark.parametrize("command", RESUMABLE)
def test_the_journal_stays_until_table_and_page_stand(
    attnmech: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Path, command: str
) -> None:
    table, page, measured = tmp_path / "heads.csv", tmp_path / "heads.html", list[str]()

    def full(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    def counted(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def counting(*arguments: Any) -> Any:
            measured.append(name)
            return real(*arguments)

        return counting

    with monkeypatch.context() as patched:
        patched.setattr("attnmech.results.result.head_page", full)
        ended = attnmech(command, "--file", corpus, *to(table, page))
    assert ended.status == 1 and "No space left on device" in ended.err
    assert sorted(tmp_path.iterdir()) == [corpus, tmp_path / "heads.csv.journal"]
    monkeypatch.setattr(Texts, "after", counted(Texts, "after"))
    monkeypatch.setattr(Streaming, "_reduced", counted(Streaming, "_reduced"))
    assert attnmech(command, "--file", corpus, *to(table, page)).status == 0
    # A sweep compares its first changes with the journal; the sinks of null are no part of it.
    assert measured == {"focus": [], "ablate": ["after"], "null": ["_reduced", "after"]}[command]
    assert sorted(tmp_path.iterdir()) == [corpus, table, page]


STOPS = """
import signal, sys
from pathlib import Path
from attnmech.cli import main as cli
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
    attnmech: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Path, command: str
) -> None:
    out = tmp_path / "heads.csv"
    if command == "focus":
        corpus.write_text("\n".join(TEXTS * 50))
    arguments = [command, "--file", corpus, *to(out, out.with_suffix(".html")), "--overwrite"]
    out.write_text("of an earlier run")
    owner, name = (Streaming, "_reduced") if command == "focus" else (Texts, "after")
    real, calls = getattr(owner, name), []

    def stopping(self: Any, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, stopping)
        ended = attnmech(*arguments)
    assert ended.status == 130
    if command == "report":
        page = out.with_suffix(".html")
        assert AWAITED in page.read_text("utf-8") and out.read_text() == "of an earlier run"
        assert ended.err.splitlines() == [f"{page} opens now; {FOLLOWS}", f"interrupted; {page} stays without them"]
        return
    assert_stopped(out, ended.err, {corpus, out})
    assert_resumes(attnmech, corpus, out, arguments)


def test_ctrl_c(attnmech: Command, tmp_path: Path, corpus: Path) -> None:
    """A signal to a separate process; while it runs, no other run can use its journal."""
    out, ready = tmp_path / "heads.csv", tmp_path / "ready"
    arguments = ["ablate", "--file", str(corpus), *to(out, out.with_suffix(".html")), "--overwrite"]
    out.write_text("of an earlier run")
    process = subprocess.Popen([sys.executable, "-c", STOPS, str(ready), *arguments], stderr=subprocess.PIPE, text=True)
    while not ready.exists() and process.poll() is None:
        time.sleep(0.02)
    ended = attnmech(*arguments)
    assert ended.status == 2 and f"error: {out}.journal is in use by another run." in ended.said
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert_stopped(out, said, {corpus, out, ready})
    assert_resumes(attnmech, corpus, out, arguments)


@pytest.mark.parametrize(
    "module",
    [
        "attnmech.basics.lazy_names", "typer", "transformers.models.bloom.modeling_bloom",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "transformers.modeling_utils", "plotly")),
    ],
)  # fmt: skip
def test_ctrl_c_during_imports(tmp_path: Path, module: str) -> None:
    """Within an `exec` of the import, Python ends by the signal, which shells show as 130 too.

    transformers turns Ctrl-C into another error.
    """
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
    assert ended.returncode in (130, -signal.SIGINT) and (ended.stderr.split(), ended.stdout) == (["interrupted"], "")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_during_the_import_of_the_package_is_the_users(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'attnmech.basics.lazy_names': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "try: import attnmech\n"
        "except KeyboardInterrupt: print('caught')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("caught\n", "")


def assert_stopped(out: Path, said: str, files: set[Path]) -> None:
    """Existing files are unchanged; the run says that it was interrupted, and how to resume it."""
    assert out.read_text() == "of an earlier run"
    journal = out.with_name("heads.csv.journal")
    assert set(out.parent.iterdir()) == files | {journal}
    resume = f"run the same command again to resume from {journal}"
    assert [line for line in said.splitlines() if line.strip()] == [f"interrupted; {resume}"]


def assert_resumes(attnmech: Command, corpus: Path, out: Path, arguments: list[Any]) -> None:
    """Repeating the command writes what an uninterrupted run writes."""
    assert attnmech(*arguments).status == 0
    whole = out.with_name("whole.csv")
    assert attnmech(arguments[0], "--file", corpus, "--out", whole).status == 0
    found, expected = (pd.read_csv(path).select_dtypes("number") for path in (out, whole))
    pd.testing.assert_frame_equal(found, expected, atol=1e-6, rtol=1e-5)
    assert not out.with_name("heads.csv.journal").exists() and out.with_suffix(".html").exists()


# -- help and the installed command ----------------------------------------------------------------------------

REPORTS = """
import runpy, sys
import attnmech.pages.limits
attnmech.pages.limits.OTHER_TEXTS = 2
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
HELP = """
import sys
from attnmech.cli import main as cli
for option in ('--help', '--version'):
    sys.argv = ['attnmech', option]
    try: cli.main()
    except SystemExit as ended: assert not ended.code
assert not {'torch', 'transformers', 'transformer_lens', 'plotly'} & set(sys.modules)
"""


def test_the_installed_command_runs(tmp_path: Path) -> None:
    """As installed, in separate processes, with as few other texts as in the reports of all tests; help needs neither
    torch nor transformers."""
    command = str(Path(sys.executable).with_name("attnmech"))
    for arguments in (
        [sys.executable, "-c", REPORTS, command, "report", "--text", "Anna sang."],
        [sys.executable, "-c", HELP],
    ):
        done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and done.stdout, done.stderr
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("command", [*COMMANDS, "atlas", "mcp", "engine"])
def test_help_keeps_brackets_and_has_two_examples_that_the_command_takes(attnmech: Command, command: str) -> None:
    helped, click = attnmech(command, "--help").out, typer.main.get_command(cli.app).commands[command]
    examples = [line.strip() for line in helped.splitlines() if line.strip().startswith(f"attnmech {command} ")]
    assert len(examples) == 2
    for example in examples:
        click.make_context(command, shlex.split(example)[2:])  # raises for an option that it does not take
    printed = "".join(helped.replace("│", " ").split())
    texts = [click.help, click.epilog, *(option.help for option in click.params)]
    brackets = [word for text in texts for word in re.findall(r"\S*\[\S+", (text or "").replace("\\[", "["))]
    assert all(word in printed for word in brackets) and (command != "mcp" or '"attnmech[mcp]").' in brackets)


def test_help_explains_the_keys_of_json(attnmech: Command) -> None:
    helped = " ".join(attnmech("--help").out.split())
    assert all(f"{key}: {' '.join(meaning.split())}" in helped for key, meaning in KEYS.items())


def test_commands_list_shared_options_in_one_order() -> None:
    order = [
        "--model", "--device", "--dtype", "--text", "--file", "--truncate", "--out", "--overwrite", "--rows",
        "--json", "--memory", "--engine", "--address", "--workers",
    ]  # fmt: skip
    commands = typer.main.get_command(cli.app).commands
    assert set(commands) == {*COMMANDS, "atlas", "mcp", "serve", "engine"}
    for command in (each for name, each in commands.items() if name not in ("mcp", "serve", "engine")):
        names = [option.opts[0] for option in command.params]
        assert [name for name in names if name in order] == [name for name in order if name in names]
        assert {"--model", "--device", "--dtype", "--out", "--overwrite", "--json"} <= set(names)


def test_failed_work_exits_with_1(attnmech: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def inexact(*_: Any, **__: Any) -> None:
        raise ExactnessError("the terms do not add up")

    monkeypatch.setattr("attnmech.model.files.load.load", inexact)
    ended = attnmech("check")
    assert ended.status == 1 and ended.said.endswith("error: the terms do not add up")


# -- long texts ------------------------------------------------------------------------------------------------


def folder_of(model: object, folder: Path) -> list[str]:
    """A folder with a model and a tokenizer, and a file with one text of 90 words."""
    models.randomised(model).save_pretrained(folder)
    tokenizer = models.tokenizer()
    tokenizer.save_pretrained(folder)
    words = [word for word in tokenizer.get_vocab() if word.isalpha()]
    (folder / "texts.txt").write_text(" ".join(random.Random(1).choices(words, k=90)), encoding="utf-8")
    return ["--model", str(folder), "--file", str(folder / "texts.txt"), "--out", str(folder / "out.csv")]


def test_a_text_beyond_the_training_is_named_once(attnmech: Command, tmp_path: Path) -> None:
    arguments = [*folder_of(models.llama(), tmp_path), "--overwrite"]
    beyond = "warning: document 0 has 90 tokens, but this model was trained on texts of at most 64"
    error = attnmech("focus", *arguments).err
    assert error.count("warning:") == 1 and beyond in error and "give --truncate to cut it after 64." in error
    assert "warning:" not in attnmech("focus", *arguments, "--truncate").err
    text = (tmp_path / "texts.txt").read_text(encoding="utf-8")
    assert "warning:" not in attnmech("focus", *arguments[:2], "--text", text, "--truncate", *arguments[4:]).err
    error = attnmech("ablate", *arguments).err
    assert beyond in error and "truncate" not in error


def test_a_text_beyond_the_positions_is_refused_with_what_the_command_can_do(attnmech: Command, tmp_path: Path) -> None:
    arguments = folder_of(models.gpt2(), tmp_path)
    for command, remedy in (("focus", "; split it, or give --truncate to cut it after 19."), ("null", "; split it.")):
        ended = attnmech(command, *arguments)
        assert ended.status == 2 and f"has 19 positions{remedy}" in ended.err
    with pytest.raises(am.errors.InputError, match="split it, or give truncate=True"):
        am.attention_focus(am.load(tmp_path), am.Corpus(tmp_path / "texts.txt"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert am.attention_focus(am.load(tmp_path), am.Corpus(tmp_path / "texts.txt"), truncate=True).truncated == 1
