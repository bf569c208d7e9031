"""The command line: `attnmech report`, `focus`, `ablate`, `null` and `check`.

Neither torch nor transformers is imported until a command needs it.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .errors import AttnmechError, InputError

if TYPE_CHECKING:
    import pandas as pd

    from .model.certificate import Certificate
    from .model.hooked import HookedModel

app = typer.Typer(
    name="attnmech",
    help="Where each attention head looks, why it looks there, what it writes, and whether that matters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="Hub name or folder; the demo model if left out.")
]
TextOption = Annotated[str | None, typer.Option("--text", "-t", help="The text to look at.")]
FileOption = Annotated[Path | None, typer.Option("--file", "-f", help="A UTF-8 file that holds the text.")]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Where the page goes.")]
CorpusOption = Annotated[
    Path | None,
    typer.Option(
        "--file", "-f", help="A corpus: a document a line, .jsonl with a text a line, or .parquet (column text)."
    ),
]
TableOption = Annotated[
    Path, typer.Option("--out", "-o", help="Where the table goes, .csv or .parquet; the page goes beside it.")
]
MemoryOption = Annotated[float, typer.Option(help="By how many GB the sweep may grow.")]


@app.callback()
def about() -> None:
    """Where each attention head looks, why it looks there, what it writes, and whether that matters."""


@app.command()
def report(
    model: ModelOption = None,
    text: TextOption = None,
    file: FileOption = None,
    out: OutOption = Path("report.html"),
) -> None:
    """Writes one offline page about one text: every attention score as a sum of its terms."""
    console = Console()
    from .files import check_writable

    check_writable(out)
    wanted = _text(text, file)
    with _stages("importing torch and transformers", total=4) as step:
        from .model.load import load
        from .report import report as make_report

        step("loading and certifying the model")
        hooked = load(model)
        step("decomposing the scores")
        made = make_report(hooked, wanted if wanted is not None else _own_paragraph())
        step("writing the page")
        made.save(out)
    _print_report(console, hooked, made.to_frame(), made.notes)
    console.print(f"\n[bold]{out.resolve()}[/bold]  ({out.stat().st_size / 1e6:.1f} MB, opens offline)", soft_wrap=True)


@app.command()
def focus(
    model: ModelOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    out: TableOption = Path("focus.csv"),
    truncate: Annotated[bool, typer.Option(help="Cut documents that are longer than the model allows.")] = False,
) -> None:
    """Writes where every head looks, over a text or a corpus of any size, as a table and a page.

    Of a corpus a journal stands beside the table until the end: the same command goes on after an interruption.
    """
    console = Console()
    from .runs.tables import check_table, write_table

    page = out.with_suffix(".html")
    check_table(out)
    if text is not None and file is not None:
        raise InputError("give either --text or --file, not both.")
    with _stages("importing torch and transformers", total=2) as step:
        from .methods.focus import attention_focus
        from .model.load import load
        from .runs.corpus import Corpus

        step("loading and certifying the model")
        corpus = None if file is None else Corpus(file)
        hooked = load(model)
    if corpus is None:
        found = attention_focus(hooked, text if text is not None else _own_paragraph())
    else:
        journal = out.with_name(f"{out.name}.journal")
        found = attention_focus(hooked, corpus, truncate=truncate, journal=journal, progress=True)
    write_table(found.to_frame(), out)
    found.to_html(page)
    console.print(_plain(repr(hooked)), soft_wrap=True, highlight=False)
    console.print(_plain(repr(found)), soft_wrap=True, highlight=False)
    if found.truncated:
        console.print(f"{found.truncated} of {found.documents} texts were cut to the model's length.")
    console.print(f"\n[bold]{out.resolve()}[/bold] and [bold]{page.name}[/bold]", soft_wrap=True)


@app.command()
def ablate(
    model: ModelOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    out: TableOption = Path("ablation.csv"),
    method: Annotated[str, typer.Option(help="zero, mean (over the texts themselves) or resample.")] = "zero",
    metric: Annotated[str, typer.Option(help="loss or kl.")] = "loss",
    memory: MemoryOption = 1.0,
) -> None:
    """Writes by how much the loss changes when each head is ablated, as a table and a page.

    A journal stands beside the table until the end: the same command goes on after an interruption. Without a text,
    64 documents of the demo model's language are taken.
    """
    hooked, texts, journal = _sweep_inputs(model, text, file, out)
    from .methods.ablation import ablate_heads

    reference = texts if method == "mean" else None
    found = ablate_heads(
        hooked, texts, method=method, metric=metric, reference=reference, memory=memory, journal=journal, progress=True
    )
    _write_sweep(hooked, found, out, found.strongest(10), "Heads that matter most")


@app.command()
def null(
    model: ModelOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    out: TableOption = Path("null.csv"),
    target: Annotated[str, typer.Option(help="Where heads may rest: first, most_attended or special.")] = "first",
    delta: Annotated[float, typer.Option(help="Effects within ±delta nats count as none.")] = 0.01,
    metric: Annotated[str, typer.Option(help="loss or kl.")] = "loss",
    memory: MemoryOption = 1.0,
) -> None:
    """Tells which heads rest on the first token without effect, by measured interventions, as a table and a page.

    A verdict is called "null", which pandas reads from a .csv as missing: pd.read_csv(path, keep_default_na=False).

    A journal stands beside the table until the end: the same command goes on after an interruption. Without a text,
    64 documents of the demo model's language are taken.
    """
    hooked, texts, journal = _sweep_inputs(model, text, file, out)
    from .methods.null_attention import null_attention

    found = null_attention(
        hooked, texts, target=target, delta=delta, metric=metric, memory=memory, journal=journal, progress=True
    )
    columns = ["layer", "head", "sink_mass", "value_ratio", "remove", "zero_value", "verdict"]
    shown = found.to_frame().nlargest(10, "sink_mass")[columns]
    _write_sweep(hooked, found, out, shown, "Heads that rest there most")


def _sweep_inputs(
    model: str | None, text: str | None, file: Path | None, out: Path
) -> tuple["HookedModel", list[str], Path]:
    """The model, the texts and the journal of a sweep; what cannot be written is refused before the model is loaded."""
    if text is not None and file is not None:
        raise InputError("give either --text or --file, not both.")
    from .runs.tables import check_table

    check_table(out)
    with _stages("importing torch and transformers", total=2) as step:
        from .demo.text import documents
        from .model.load import load
        from .runs.corpus import Corpus

        texts = list(Corpus(file)) if file is not None else [text] if text is not None else documents(64)
        step("loading and certifying the model")
        hooked = load(model)
    return hooked, texts, out.with_name(f"{out.name}.journal")


def _write_sweep(model: "HookedModel", found: Any, out: Path, shown: "pd.DataFrame", title: str) -> None:
    from .runs.tables import write_table

    console = Console()
    page = out.with_suffix(".html")
    write_table(found.to_frame(), out)
    found.to_html(page)
    console.print(_plain(repr(model)), soft_wrap=True, highlight=False)
    console.print(_plain(repr(found)), soft_wrap=True, highlight=False)
    table = Table(title=title, title_justify="left")
    for name in shown.columns:
        table.add_column(str(name), justify="right", overflow="fold")
    for row in shown.itertuples(index=False):
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else _plain(str(value)) for value in row))
    console.print(table)
    console.print(f"\n[bold]{out.resolve()}[/bold] and [bold]{page.name}[/bold]", soft_wrap=True)


@app.command()
def check(
    model: Annotated[str | None, typer.Argument(help="Hub name or folder; the demo model if left out.")] = None,
) -> None:
    """Proves that every activation point of a model means what its name says; exits with 1 where one does not."""
    with _stages("importing torch and transformers", total=2) as step:
        from .model.load import load

        step("loading and certifying the model")
        hooked = load(model)
    _print_certificate(Console(), hooked, hooked.certificate)
    if not hooked.certificate.ok:
        raise typer.Exit(1)


def main() -> None:
    """The entry point: a user's mistake is one line on stderr and exit status 2."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a user must know is in the output
            app()
    except AttnmechError as error:
        Console(stderr=True).print(f"[red]error:[/red] {_plain(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; the same command goes on from the journal, if one stands beside --out.")
        sys.exit(130)


def _text(text: str | None, file: Path | None) -> str | None:
    if text is not None and file is not None:
        raise InputError("give either --text or --file, not both.")
    if file is None:
        return text
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {file}: it is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}.") from error


def _own_paragraph() -> str:
    from .demo.text import PARAGRAPH

    return PARAGRAPH


@contextmanager
def _stages(first: str, total: int) -> Iterator["Step"]:
    """A bar on stderr that names what is being done; gone when done."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        yield Step(bar, first, total)


class Step:
    """Call it with the name of the next stage."""

    def __init__(self, bar: Progress, first: str, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task(first, total=total)

    def __call__(self, description: str) -> None:
        self._bar.update(self._task, advance=1, description=description)


def _print_report(console: Console, model: "HookedModel", frame: "pd.DataFrame", notes: tuple[str, ...]) -> None:
    console.print(_plain(repr(model)), soft_wrap=True, highlight=False)
    shares = [str(name) for name in frame.filter(like="_share")]
    table = Table(title="Mean share of each term in a row's highest score; largest residual", title_justify="left")
    table.add_column("layer", justify="right")
    for name in shares:
        table.add_column(name.removesuffix("_share"), justify="right")
    table.add_column("residual", justify="right")
    for row in frame.to_dict("records"):
        cells = [f"{row[name]:.0%}" for name in shares]
        table.add_row(str(int(row["layer"])), *cells, f"{row['residual']:.1e}")
    console.print(table)
    for note in notes:
        console.print(note)


def _print_certificate(console: Console, model: "HookedModel", certificate: "Certificate") -> None:
    console.print(_plain(repr(model)), soft_wrap=True, highlight=False)
    table = Table(
        title=f"every layer checked; edits tried in layers {', '.join(map(str, certificate.edited))}",
        title_justify="left",
    )
    for column in ("check", "", "statement", "evidence"):
        table.add_column(column, overflow="fold")
    for item in certificate.checks:
        style = {"holds": "green", "differs": "yellow", "FAILS": "bold red"}.get(item.status, "dim")
        table.add_row(item.name, f"[{style}]{item.status}[/{style}]", _plain(item.statement), _plain(item.evidence))
    console.print(table)
    differing = [hook for hook in certificate.lens if hook.verdict == "differs"]
    if differing:
        console.print(
            "TransformerLens hooks that mean something else on this model (attnmech gives the right value): "
            + ", ".join(f"{hook.hook} ≠ {hook.point}" for hook in differing),
            highlight=False,
        )
    points = Table(title="points", title_justify="left")
    for column in ("point", "shape", "meaning"):
        points.add_column(column, overflow="fold")
    for point in model.points.values():
        refused = certificate.refused.get(point.name)
        about_point = point.meaning if point.absent is None else f"absent: {point.absent}"
        points.add_row(
            point.name, _plain(point.shape), _plain(about_point if refused is None else f"REFUSED: {refused}")
        )
    console.print(points)
    console.print(_plain(certificate.verdict), style="green" if certificate.ok else "bold red", highlight=False)


def _plain(text: str) -> str:
    """Text without rich's markup: a model's name is anybody's text."""
    return text.replace("[", "\\[")
