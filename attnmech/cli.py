"""The command line: `attnmech report`, `focus`, `drift`, `heads`, `embed`, `ablate`, `null` and `check`.

Neither torch nor transformers is imported until a command needs it.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

from . import __version__
from .errors import AttnmechError, InputError, JournalError, OutputError

if TYPE_CHECKING:
    import pandas as pd

    from .model.certificate import Certificate
    from .model.hooked import HookedModel
    from .report import Report
    from .results import PagedResult


class _Commands(TyperGroup):
    """Lets Ctrl-C through to `main`, which says how to resume; click would only exit."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise Interrupted(*stop.args) from stop


class Interrupted(BaseException):
    """Ctrl-C, with what the user should be told."""


app = typer.Typer(
    name="attnmech",
    cls=_Commands,
    help="Where each attention head looks, why it looks there, what it writes, and whether that matters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="Hub name, folder or GGUF file; the demo model if left out.")
]
TextOption = Annotated[str | None, typer.Option("--text", "-t", help="The text to look at.")]
FileOption = Annotated[Path | None, typer.Option("--file", "-f", help="A UTF-8 file that holds the text.")]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Where the page goes; an existing page is replaced.")]
CorpusOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        help="A corpus: one document per line, .jsonl with one text per line, or .parquet (column text).",
    ),
]
TableOption = Annotated[
    Path, typer.Option("--out", "-o", help="Where the table goes, .csv or .parquet; the page goes beside it.")
]
OverwriteOption = Annotated[bool, typer.Option(help="Replace an existing table and page.")]
EngineOption = Annotated[
    Literal["local", "ray"], typer.Option("--engine", help="Where it runs: in this process, or by Ray's workers.")
]
AddressOption = Annotated[
    str | None,
    typer.Option("--address", help="A Ray cluster: auto, host:port or ray://host:port; this machine if left out."),
]
WorkersOption = Annotated[int | None, typer.Option("--workers", help="How many workers; as many as fit if left out.")]
MemoryOption = Annotated[float, typer.Option(help="Extra memory that the sweep may use, in GB.")]


def _print_version(asked: bool) -> bool:
    if asked:
        print(f"attnmech {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Where each attention head looks, why it looks there, what it writes, and whether that matters."""


@app.command()
def report(
    model: ModelOption = None,
    text: TextOption = None,
    file: FileOption = None,
    out: OutOption = Path("report.html"),
    target: Annotated[
        str | None,
        typer.Option("--target", help="What the decoder of an encoder-decoder reads; its own words if left out."),
    ] = None,
    start: Annotated[int, typer.Option(help="First token to run and show, if the text is longer.")] = 0,
) -> None:
    """Writes one offline page about one text of up to 192 tokens: every attention score as a sum of its terms.

    Of a longer text, only 192 tokens are run and shown: the first ones, or those from --start on. Of an
    encoder-decoder, --text is the encoder's, and the page has a choice of stack: encoder, decoder or cross.
    """
    console = Console()
    from .files import check_writable

    check_writable(out)
    _check_apart(file, out)
    wanted = _text(text, file)
    with _stages("importing torch and transformers", total=4) as step:
        from .model.load import load
        from .report import report as make_report

        step("loading and certifying the model")
        hooked = load(model)
        step("decomposing the scores")
        made = make_report(hooked, wanted if wanted is not None else _own_paragraph(), target=target, start=start)
        step("writing the page")
        made.save(out)
    _print_report(console, hooked, made)
    console.print(f"\n[bold]{out.resolve()}[/bold]  ({out.stat().st_size / 1e6:.1f} MB, opens offline)", soft_wrap=True)


@app.command()
def focus(
    model: ModelOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    out: TableOption = Path("focus.csv"),
    overwrite: OverwriteOption = False,
    truncate: Annotated[bool, typer.Option(help="Cut documents that are longer than the model allows.")] = False,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Writes where every head looks, over a text or a corpus of any size, as a table and a page.

    Over a corpus, a journal is kept beside the table: if interrupted, run the same command again to resume.
    """
    with _outputs(text, file, out, overwrite) as outputs, _engine(engine, address, workers) as where:
        hooked, given, options = _streamed(model, text, file, outputs, truncate, where)
        from .methods.focus import attention_focus

        found = attention_focus(hooked, given, **options)
        outputs.write(found)
    _print_streamed(hooked, found, outputs, found.truncated, found.documents)


@app.command()
def drift(
    model: ModelOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    out: TableOption = Path("drift.csv"),
    overwrite: OverwriteOption = False,
    truncate: Annotated[bool, typer.Option(help="Cut documents that are longer than the model allows.")] = False,
    at: Annotated[str, typer.Option(help="resid_mid (attention + residual) or resid_post.")] = "resid_mid",
    metric: Annotated[str, typer.Option(help="cosine, centred cosine or dot.")] = "cosine",
    k: Annotated[int, typer.Option("-k", help="How many nearest tokens are compared between layers.")] = 100,
    position: Annotated[bool, typer.Option(help="Add each token's position embedding to the vocabulary.")] = False,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Writes how far tokens move from their own embeddings, layer by layer, as a table and a page.

    Over a corpus, a journal is kept beside the table: if interrupted, run the same command again to resume.
    """
    with _outputs(text, file, out, overwrite) as outputs, _engine(engine, address, workers) as where:
        hooked, given, options = _streamed(model, text, file, outputs, truncate, where)
        from .methods.drift import residual_drift

        found = residual_drift(hooked, given, at=at, metric=metric, k=k, position=position, **options)
        outputs.write(found)
    _print_streamed(hooked, found, outputs, found.truncated, found.documents, found.verdicts().lead)


@app.command()
def heads(
    model: ModelOption = None,
    file: CorpusOption = None,
    out: TableOption = Path("heads.csv"),
    overwrite: OverwriteOption = False,
    truncate: Annotated[bool, typer.Option(help="Cut documents that are longer than the model allows.")] = False,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Says what type of head each one is: previous token, induction, first token, …; writes a table and a page.

    Without a file, on random tokens, each sequence twice. Over a corpus, a journal is kept beside the table: if
    interrupted, run the same command again to resume.
    """
    with _outputs(None, file, out, overwrite) as outputs, _engine(engine, address, workers) as where:
        if file is None:
            outputs.require_no_journal()
        with _stages("importing torch and transformers", total=3) as step:
            from .methods.head_types import head_types
            from .model.load import load
            from .runs.corpus import Corpus

            step("loading and certifying the model")
            corpus = None if file is None else Corpus(file)
            hooked = load(model)
            if corpus is None:
                step("looking at the heads")
                found = head_types(hooked, **where)
        if corpus is not None:
            found = head_types(hooked, corpus, truncate=truncate, journal=outputs.journal, progress=True, **where)
        outputs.write(found)
    shown = found.to_frame()[["layer", "head", "type", "score", "baseline", "score_low", "score_high"]].head(15)
    _print_sweep(hooked, found, outputs, shown, "Kinds of heads, the strongest first")


@app.command()
def embed(
    model: ModelOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    out: TableOption = Path("embed.csv"),
    overwrite: OverwriteOption = False,
    projection: Annotated[
        list[str] | None,
        typer.Option("--projection", help="pca (usual), tsne, umap, pacmap or opentsne; may be repeated."),
    ] = None,
    dims: Annotated[int, typer.Option(help="Dimensions of the picture, 2 or 3.")] = 2,
    layers: Annotated[str | None, typer.Option(help="Layers, such as 0,5,11; all if left out.")] = None,
    sample: Annotated[int, typer.Option(help="Most tokens that become points.")] = 2000,
    truncate: Annotated[bool, typer.Option(help="Cut documents that are longer than the model allows.")] = False,
) -> None:
    """Shows queries and keys of all heads in one space, near where attended to; writes a table and a page.

    Without a text, 64 documents in the demo model's language are used.
    """
    wanted = _numbers("--layers", layers)
    with _outputs(text, file, out, overwrite) as outputs:
        outputs.require_no_journal()
        with _stages("importing torch and transformers", total=3) as step:
            from .demo.text import documents
            from .methods.head_types import head_types
            from .methods.joint_embedding import joint_embedding
            from .model.load import load
            from .runs.corpus import Corpus

            step("loading and certifying the model")
            inputs = Corpus(file) if file is not None else [text] if text is not None else documents(64)
            hooked = load(model)
            step("looking at the heads")
            types = head_types(hooked).strongest if hooked.grid is None and len(hooked.stacks) == 1 else {}
        found = joint_embedding(
            hooked, inputs, layers=wanted, projection=projection or ["pca"], dims=cast(Literal[2, 3], dims),
            sample=sample, truncate=truncate, progress=True,
        ).with_types(types)  # fmt: skip
        outputs.write(found)
    shown = found.to_frame().nsmallest(10, "correlation")
    columns = ["layer", "head", "correlation", "spearman", "scale", "disparity", "separation"]
    _print_sweep(hooked, found, outputs, shown[columns], "Heads whose distances say most of their scores")


@app.command()
def ablate(
    model: ModelOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    out: TableOption = Path("ablation.csv"),
    overwrite: OverwriteOption = False,
    method: Annotated[str, typer.Option(help="zero, mean (over the texts themselves) or resample.")] = "zero",
    metric: Annotated[str, typer.Option(help="loss or kl.")] = "loss",
    memory: MemoryOption = 1.0,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Writes how much the loss changes when each head is ablated, as a table and a page.

    A journal is kept beside the table until the end: if interrupted, run the same command again to resume.
    Without a text, 64 documents in the demo model's language are used.
    """
    with _outputs(text, file, out, overwrite) as outputs, _engine(engine, address, workers) as where:
        hooked, texts = _sweep_inputs(model, text, file)
        from .methods.ablation import ablate_heads

        found = ablate_heads(
            hooked, texts, method=method, metric=metric, reference=texts if method == "mean" else None, memory=memory,
            journal=outputs.journal, progress=True, **where,
        )  # fmt: skip
        outputs.write(found)
    _print_sweep(hooked, found, outputs, found.strongest(10), "Heads that matter most")


@app.command()
def null(
    model: ModelOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    out: TableOption = Path("null.csv"),
    overwrite: OverwriteOption = False,
    target: Annotated[str, typer.Option(help="Where heads may rest: first, most_attended or special.")] = "first",
    delta: Annotated[float, typer.Option(help="Effects within ±delta nats count as none.")] = 0.01,
    metric: Annotated[str, typer.Option(help="loss or kl.")] = "loss",
    memory: MemoryOption = 1.0,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Finds the heads that rest on one token without effect, by interventions; writes a table and a page.

    A journal is kept beside the table until the end: if interrupted, run the same command again to resume.
    Without a text, 64 documents in the demo model's language are used.
    """
    with _outputs(text, file, out, overwrite) as outputs, _engine(engine, address, workers) as where:
        hooked, texts = _sweep_inputs(model, text, file)
        from .methods.null_attention import null_attention

        found = null_attention(
            hooked, texts, target=target, delta=delta, metric=metric, memory=memory, journal=outputs.journal,
            progress=True, **where,
        )  # fmt: skip
        outputs.write(found)
    columns = ["layer", "head", "sink_mass", "value_ratio", "remove", "zero_value", "verdict"]
    shown = found.to_frame().nlargest(10, "sink_mass")[columns]
    _print_sweep(hooked, found, outputs, shown, "Heads that attend most to the target")


def _streamed(
    model: str | None, text: str | None, file: Path | None, outputs: "Outputs", truncate: bool, where: dict[str, Any]
) -> tuple["HookedModel", Any, dict[str, Any]]:
    """The model, a text or a corpus, and how a corpus is run: with a journal and a bar."""
    if file is None:
        outputs.require_no_journal()
    with _stages("importing torch and transformers", total=2) as step:
        from .model.load import load
        from .runs.corpus import Corpus

        step("loading and certifying the model")
        corpus = None if file is None else Corpus(file)
        hooked = load(model)
    if corpus is None:
        return hooked, text if text is not None else _own_paragraph(), {}
    return hooked, corpus, {"truncate": truncate, "journal": outputs.journal, "progress": True, **where}


def _print_streamed(
    model: "HookedModel", found: "PagedResult", outputs: "Outputs", truncated: int, documents: int, *further: str
) -> None:
    console = Console()
    for line in (repr(model), repr(found), *further):
        console.print(_plain(line), soft_wrap=True, highlight=False)
    if truncated:
        console.print(f"{truncated} of {documents} texts were cut to the model's length.")
    outputs.print(console)


def _sweep_inputs(model: str | None, text: str | None, file: Path | None) -> tuple["HookedModel", list[str]]:
    """The model and the texts of a sweep."""
    with _stages("importing torch and transformers", total=2) as step:
        from .demo.text import documents
        from .model.load import load
        from .runs.corpus import Corpus

        texts = list(Corpus(file)) if file is not None else [text] if text is not None else documents(64)
        step("loading and certifying the model")
        return load(model), texts


def _print_sweep(
    model: "HookedModel", found: "PagedResult", outputs: "Outputs", shown: "pd.DataFrame", title: str
) -> None:
    console = Console()
    console.print(_plain(repr(model)), soft_wrap=True, highlight=False)
    console.print(_plain(repr(found)), soft_wrap=True, highlight=False)
    table = Table(title=title, title_justify="left")
    for name in shown.columns:
        table.add_column(str(name), justify="right", overflow="fold")
    for row in shown.itertuples(index=False):
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else _plain(str(value)) for value in row))
    console.print(table)
    outputs.print(console)


class Outputs:
    """Where a command's table, its page and, until both are written, its journal go."""

    def __init__(self, table: Path) -> None:
        self.table, self.page = table, table.with_suffix(".html")
        self.journal = table.with_name(f"{table.name}.journal")

    def check(self, overwrite: bool) -> None:
        """Raises `OutputError` for what cannot be written, and for what an earlier run wrote.

        Where there is a journal, this run resumes the one that was to write them.
        """
        from .files import check_writable
        from .runs.tables import check_table

        check_table(self.table)
        check_writable(self.page)
        there = [path for path in (self.table, self.page) if path.exists()]
        if there and not overwrite and not self.journal.exists():
            raise OutputError(f"{there[0]} exists; give --overwrite to replace it, or name another --out.")

    def require_no_journal(self) -> None:
        """Raises `JournalError` where an unfinished run of another kind was to write the same files."""
        if self.journal.exists():
            raise JournalError(
                f"{self.journal} holds an unfinished run that would write {self.table}. Finish it with its own "
                "command, delete it, or name another --out."
            )

    def write(self, found: "PagedResult") -> None:
        """Writes table and page."""
        from .runs.tables import write_table_and_page

        write_table_and_page(found, self.table, self.page)

    def print(self, console: Console) -> None:
        """Says where they are."""
        where = f"\n[bold]{_plain(str(self.table.resolve()))}[/bold] and [bold]{_plain(self.page.name)}[/bold]"
        console.print(where, soft_wrap=True)


@contextmanager
def _outputs(text: str | None, file: Path | None, out: Path, overwrite: bool) -> Iterator[Outputs]:
    """The outputs of a command, checked before any work; its journal is kept until the block succeeds."""
    if text is not None and file is not None:
        raise InputError("give either --text or --file, not both.")
    outputs = Outputs(out)
    outputs.check(overwrite)
    for path in (outputs.table, outputs.page, outputs.journal):
        _check_apart(file, path)
    try:
        with _stages("importing torch and transformers", total=1):
            from .runs.journal import kept

        with kept(outputs.journal):
            yield outputs
    except KeyboardInterrupt:
        if outputs.journal.exists():
            raise KeyboardInterrupt(f"run the same command again to resume from {outputs.journal}") from None
        raise


@contextmanager
def _engine(engine: str, address: str | None, workers: int | None) -> Iterator[dict[str, Any]]:
    """How a command's method is told where to run; Ray's workers end with the block."""
    if engine == "local":
        if address is not None or workers is not None:
            raise InputError("--address and --workers are for --engine ray.")
        yield {}
        return
    from .distributed.engine import Ray

    with Ray(address, workers=workers) as found:
        yield {"engine": found}


def _check_apart(file: Path | None, out: Path) -> None:
    """Raises `OutputError` where a command would write over what it reads."""
    if file is not None and file.exists() and out.exists() and file.samefile(out):
        raise OutputError(f"cannot write {out}: it is what --file reads; name another --out.")


@app.command()
def check(
    model: Annotated[
        str | None, typer.Argument(help="Hub name, folder or GGUF file; the demo model if left out.")
    ] = None,
) -> None:
    """Proves that every activation point of a model means what its name says; exits with 1 if one does not."""
    with _stages("importing torch and transformers", total=2) as step:
        from .model.load import load

        step("loading and certifying the model")
        hooked = load(model)
    _print_certificate(Console(), hooked, hooked.certificate)
    if not hooked.certificate.ok:
        raise typer.Exit(1)


def main() -> None:
    """The entry point: a user's mistake is one line on stderr and exit status 2, Ctrl-C one line and 130."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a user must know is in the output
            app()
    except AttnmechError as error:
        Console(stderr=True).print(f"[red]error:[/red] {_plain(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except (Interrupted, KeyboardInterrupt) as stop:
        said = "; ".join(("interrupted", *map(str, stop.args)))
        Console(stderr=True).print(_plain(said), soft_wrap=True, highlight=False)
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


def _numbers(option: str, given: str | None) -> list[int] | None:
    """Whole numbers between commas."""
    if given is None:
        return None
    try:
        return [int(each) for each in given.split(",")]
    except ValueError:
        raise InputError(f"{option} takes whole numbers between commas, such as 0,5,11; got {given}.") from None


def _own_paragraph() -> str:
    from .demo.text import PARAGRAPH

    return PARAGRAPH


@contextmanager
def _stages(first: str, total: int) -> Iterator["Step"]:
    """A progress bar on stderr that names the current stage and disappears at the end."""
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


def _print_report(console: Console, model: "HookedModel", report: "Report") -> None:
    """What the page finds, and its terms and residuals by layer."""
    console.print(_plain(repr(model)), soft_wrap=True, highlight=False)
    for question, found in report.findings.items():
        console.print(f"[bold]{question}.[/bold] {_plain(found)}", highlight=False)
    frame = report.to_frame()
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
    for note in report.notes:
        console.print(note, highlight=False)


def _print_certificate(console: Console, model: "HookedModel", certificate: "Certificate") -> None:
    console.print(_plain(repr(model)), soft_wrap=True, highlight=False)
    for stack in model.stacks.values():
        console.print(_plain(f"built as {stack.architecture}"), soft_wrap=True, highlight=False, style="dim")
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
    if certificate.left_out:
        console.print(_plain(certificate.left_out), highlight=False)
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
    """Text with rich's markup escaped: a model's name may hold anything."""
    return text.replace("[", "\\[")
