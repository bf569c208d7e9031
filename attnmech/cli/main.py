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

from .. import __version__
from ..errors import AttnmechError, InputError, JournalError, OutputError
from .terminal import Column, Rows, Said, columns_of, plain, say

if TYPE_CHECKING:
    from ..model.parts.certificate import Certificate
    from ..model.run.hooked import HookedModel
    from ..pages.report import Report
    from ..results import PagedResult


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
RowsOption = Annotated[
    int, typer.Option("--rows", min=0, help="How many rows of the table are printed; 0 for none. JSON has them all.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
EngineOption = Annotated[
    Literal["local", "ray"], typer.Option("--engine", help="Where it runs: in this process, or by Ray's workers.")
]
AddressOption = Annotated[
    str | None,
    typer.Option("--address", help="A Ray cluster: auto, host:port or ray://host:port; this machine if left out."),
]
WorkersOption = Annotated[int | None, typer.Option("--workers", help="How many workers; as many as fit if left out.")]
MemoryOption = Annotated[float, typer.Option(help="Extra memory that the sweep may use, in GB.")]

LAYER, HEAD = Column("layer"), Column("head")


def _examples(*commands: str) -> str:
    """Examples below a command's help, each on a line."""
    return "\n\n".join(("Examples:", *commands))


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


@app.command(
    epilog=_examples(
        'attnmech report --text "Anna gave an old anchor to Tom." --out page.html',
        "attnmech report --model gpt2 --file chapter.txt --start 200 --out page.html",
    )
)
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
    rows: RowsOption = 32,
    as_json: JsonOption = False,
) -> None:
    """Writes one offline page about one text of up to 192 tokens: every attention score as a sum of its terms.

    Of a longer text, only 192 tokens are run and shown: the first ones, or those from --start on. Of an
    encoder-decoder, --text is the encoder's, and the page has a choice of stack: encoder, decoder or cross.
    """
    from ..basics.files import check_writable

    check_writable(out)
    _check_apart(file, out)
    wanted = _text(text, file)
    with _stages("importing torch and transformers", total=4) as step:
        from ..model.files.load import load
        from ..pages.report import report as make_report

        step("loading and certifying the model")
        hooked = load(model)
        step("decomposing the scores")
        made = make_report(hooked, wanted if wanted is not None else _own_paragraph(), target=target, start=start)
        step("writing the page")
        made.save(out)
    say(_report_said(hooked, made, out), rows=rows, as_json=as_json)


@app.command(
    epilog=_examples(
        'attnmech focus --text "Anna gave an old anchor to Tom." --rows 5',
        "attnmech focus --model gpt2 --file corpus.jsonl --truncate --out heads.parquet",
    )
)
def focus(
    model: ModelOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    out: TableOption = Path("focus.csv"),
    overwrite: OverwriteOption = False,
    truncate: Annotated[bool, typer.Option(help="Cut documents that are longer than the model allows.")] = False,
    rows: RowsOption = 10,
    as_json: JsonOption = False,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Writes where every head looks, over a text or a corpus of any size, as a table and a page.

    Over a corpus, a journal is kept beside the table: if interrupted, run the same command again to resume.
    """
    with _outputs(text, file, out, overwrite) as outputs, _engine(engine, address, workers) as where:
        hooked, given, options = _streamed(model, text, file, outputs, truncate, where)
        from ..methods.focus.attention_focus import attention_focus

        found = attention_focus(hooked, given, **options)
        outputs.write(found)
    shown = Rows(
        "Heads by how often they look at the first token",
        found.to_frame().sort_values("first_top", ascending=False),
        (LAYER, HEAD, *columns_of(found.STATISTICS.printed)),
    )
    say(_said(hooked, found, outputs, shown), rows=rows, as_json=as_json)


@app.command(
    epilog=_examples(
        'attnmech drift --text "Anna gave an old anchor to Tom." --at resid_post',
        "attnmech drift --model gpt2 --file corpus.txt --metric dot --out drift.csv",
    )
)
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
    rows: RowsOption = 32,
    as_json: JsonOption = False,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Writes how far tokens move from their own embeddings, layer by layer, as a table and a page.

    Over a corpus, a journal is kept beside the table: if interrupted, run the same command again to resume.
    """
    with _outputs(text, file, out, overwrite) as outputs, _engine(engine, address, workers) as where:
        hooked, given, options = _streamed(model, text, file, outputs, truncate, where)
        from ..methods.drift.result import residual_drift

        found = residual_drift(hooked, given, at=at, metric=metric, k=k, position=position, **options)
        outputs.write(found)
    shown = Rows(
        "Tokens against their own embeddings, layer by layer",
        found.to_frame(),
        (
            LAYER,
            *columns_of(found.STATISTICS[name] for name in (metric.replace(" ", "_"), "rank", "churn")),
            Column("anisotropy", unit="mean cosine"),
        ),
    )
    say(_said(hooked, found, outputs, shown, found.verdicts().lead), rows=rows, as_json=as_json)


@app.command(
    epilog=_examples(
        "attnmech heads --model gpt2 --out heads.csv", "attnmech heads --model gpt2 --file corpus.jsonl --json"
    )
)
def heads(
    model: ModelOption = None,
    file: CorpusOption = None,
    out: TableOption = Path("heads.csv"),
    overwrite: OverwriteOption = False,
    truncate: Annotated[bool, typer.Option(help="Cut documents that are longer than the model allows.")] = False,
    rows: RowsOption = 15,
    as_json: JsonOption = False,
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
            from ..methods.head_types.head_types import head_types
            from ..model.files.load import load
            from ..runs.corpus import Corpus

            step("loading and certifying the model")
            corpus = None if file is None else Corpus(file)
            hooked = load(model)
            if corpus is None:
                step("looking at the heads")
                found = head_types(hooked, **where)
        if corpus is not None:
            found = head_types(hooked, corpus, truncate=truncate, journal=outputs.journal, progress=True, **where)
        outputs.write(found)
    shown = Rows(
        "Claimed types of heads, the highest score first",
        found.to_frame(),
        (
            LAYER, HEAD, Column("type"), Column("score", unit="mean p"), Column("baseline", unit="mean p"),
            Column("score_low", "low", "95 %"), Column("score_high", "high", "95 %"),
        ),
    )  # fmt: skip
    say(_said(hooked, found, outputs, shown), rows=rows, as_json=as_json)


@app.command(
    epilog=_examples(
        "attnmech embed --model gpt2 --file corpus.txt --layers 0,5,11",
        "attnmech embed --projection pca --projection tsne --dims 3 --out embed.csv",
    )
)
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
    rows: RowsOption = 10,
    as_json: JsonOption = False,
) -> None:
    """Shows queries and keys of all heads in one space, near where attended to; writes a table and a page.

    Without a text, 64 documents in the demo model's language are used.
    """
    wanted = _numbers("--layers", layers)
    with _outputs(text, file, out, overwrite) as outputs:
        outputs.require_no_journal()
        with _stages("importing torch and transformers", total=3) as step:
            from ..demo.text import documents
            from ..methods.head_types.head_types import head_types
            from ..methods.joint_embedding.result import joint_embedding
            from ..model.files.load import load
            from ..runs.corpus import Corpus

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
    shown = Rows(
        "Heads whose distances say most of their scores: correlation closest to −1 first",
        found.to_frame().sort_values("correlation"),
        (LAYER, HEAD, *columns_of(found.STATISTICS.printed), Column("disparity", unit="‖k‖ / ‖q‖")),
    )
    say(_said(hooked, found, outputs, shown), rows=rows, as_json=as_json)


@app.command(
    epilog=_examples(
        "attnmech ablate --model gpt2 --file corpus.txt --method mean --rows 20",
        'attnmech ablate --text "Anna gave an old anchor to Tom." --metric kl --json',
    )
)
def ablate(
    model: ModelOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    out: TableOption = Path("ablation.csv"),
    overwrite: OverwriteOption = False,
    method: Annotated[str, typer.Option(help="zero, mean (over the texts themselves) or resample.")] = "zero",
    metric: Annotated[str, typer.Option(help="loss or kl.")] = "loss",
    memory: MemoryOption = 1.0,
    rows: RowsOption = 10,
    as_json: JsonOption = False,
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
        from ..methods.ablation.heads import ablate_heads

        found = ablate_heads(
            hooked, texts, method=method, metric=metric, reference=texts if method == "mean" else None, memory=memory,
            journal=outputs.journal, progress=True, **where,
        )  # fmt: skip
        outputs.write(found)
    shown = Rows(
        "Heads by the size of their effect, clear ones first",
        found.strongest(max(1, len(found.to_frame()))),
        (
            LAYER, HEAD, Column("effect", unit=f"nats of {metric}"), Column("effect_low", "low", "95 %"),
            Column("effect_high", "high", "95 %"), Column("clear"), Column("one_text", "one text", "> half"),
        ),
    )  # fmt: skip
    say(_said(hooked, found, outputs, shown), rows=rows, as_json=as_json)


@app.command(
    epilog=_examples(
        "attnmech null --model gpt2 --file corpus.txt --out null.csv",
        "attnmech null --target most_attended --delta 0.02 --rows 20",
    )
)
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
    rows: RowsOption = 10,
    as_json: JsonOption = False,
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
        from ..methods.null_attention.result import null_attention

        found = null_attention(
            hooked, texts, target=target, delta=delta, metric=metric, memory=memory, journal=outputs.journal,
            progress=True, **where,
        )  # fmt: skip
        outputs.write(found)
    shown = Rows(
        "Heads by their attention to the target",
        found.to_frame().sort_values("sink_mass", ascending=False),
        (
            LAYER, HEAD, Column("sink_mass", unit="mean p"), Column("value_ratio", unit="of the median"),
            Column("remove", unit=f"nats of {metric}"), Column("zero_value", unit=f"nats of {metric}"),
            Column("verdict"),
        ),
    )  # fmt: skip
    say(_said(hooked, found, outputs, shown), rows=rows, as_json=as_json)


def _streamed(
    model: str | None, text: str | None, file: Path | None, outputs: "Outputs", truncate: bool, where: dict[str, Any]
) -> tuple["HookedModel", Any, dict[str, Any]]:
    """The model, a text or a corpus, and how a corpus is run: with a journal and a bar."""
    if file is None:
        outputs.require_no_journal()
    with _stages("importing torch and transformers", total=2) as step:
        from ..model.files.load import load
        from ..runs.corpus import Corpus

        step("loading and certifying the model")
        corpus = None if file is None else Corpus(file)
        hooked = load(model)
    if corpus is None:
        return hooked, text if text is not None else _own_paragraph(), {}
    return hooked, corpus, {"truncate": truncate, "journal": outputs.journal, "progress": True, **where}


def _sweep_inputs(model: str | None, text: str | None, file: Path | None) -> tuple["HookedModel", list[str]]:
    """The model and the texts of a sweep."""
    with _stages("importing torch and transformers", total=2) as step:
        from ..demo.text import documents
        from ..model.files.load import load
        from ..runs.corpus import Corpus

        texts = list(Corpus(file)) if file is not None else [text] if text is not None else documents(64)
        step("loading and certifying the model")
        return load(model), texts


def _said(model: "HookedModel", found: "PagedResult", outputs: "Outputs", shown: Rows, *further: str) -> Said:
    """What a command says of a result: its sentence, its table, what was cut, and where the files are."""
    cut, of = getattr(found, "truncated", 0), getattr(found, "documents", 0)  # of a sweep, no text is cut
    of = of if isinstance(of, int) else len(of)
    notes = [f"{cut} of {of} texts were cut to the model's length."] if cut else []
    intervals = str(shown.frame.attrs.get("intervals", ""))
    return Said(
        repr(model), repr(found), shown, further, notes + [intervals] * bool(intervals),
        tuple(str(path.resolve()) for path in (outputs.table, outputs.page)),
    )  # fmt: skip


class Outputs:
    """Where a command's table, its page and, until both are written, its journal go."""

    def __init__(self, table: Path) -> None:
        self.table, self.page = table, table.with_suffix(".html")
        self.journal = table.with_name(f"{table.name}.journal")

    def check(self, overwrite: bool) -> None:
        """Raises `OutputError` for what cannot be written, and for what an earlier run wrote.

        Where there is a journal, this run resumes the one that was to write them.
        """
        from ..basics.files import check_writable
        from .tables import check_table

        check_table(self.table)
        check_writable(self.page)
        self.require_free(overwrite)

    def require_free(self, overwrite: bool) -> None:
        """Raises `OutputError` for what an earlier run wrote."""
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
        from .tables import write_table_and_page

        write_table_and_page(found, self.table, self.page)


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
            from ..runs.journal import kept

        with kept(outputs.journal):
            # Another command may have written them since they were checked.
            outputs.require_free(overwrite)
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
    from ..distributed.engine import Ray

    with Ray(address, workers=workers) as found:
        yield {"engine": found}


def _check_apart(file: Path | None, out: Path) -> None:
    """Raises `OutputError` where a command would write over what it reads."""
    if file is not None and file.exists() and out.exists() and file.samefile(out):
        raise OutputError(f"cannot write {out}: it is what --file reads; name another --out.")


@app.command(epilog=_examples("attnmech check gpt2", "attnmech check ./my-model --json"))
def check(
    model: Annotated[
        str | None, typer.Argument(help="Hub name, folder or GGUF file; the demo model if left out.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Proves that every activation point of a model means what its name says; exits with 1 if one does not."""
    with _stages("importing torch and transformers", total=2) as step:
        from ..model.files.load import load

        step("loading and certifying the model")
        hooked = load(model)
    if as_json:
        say(_certificate_said(hooked, hooked.certificate), rows=len(hooked.certificate.checks), as_json=True)
    else:
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
        Console(stderr=True).print(f"[red]error:[/red] {plain(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except (Interrupted, KeyboardInterrupt) as stop:
        said = "; ".join(("interrupted", *map(str, stop.args)))
        Console(stderr=True).print(plain(said), soft_wrap=True, highlight=False)
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
    from ..demo.text import PARAGRAPH

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


def _report_said(model: "HookedModel", report: "Report", out: Path) -> Said:
    """What the page finds, and its terms and residuals by layer."""
    first, *others = (f"{question}. {found}" for question, found in report.findings.items())
    names = map(str, report.to_frame().filter(like="_share"))
    shares = [Column(name, name.removesuffix("_share"), "share") for name in names]
    shown = Rows(
        "Mean share of each term in a row's highest score; largest residual",
        report.to_frame(),
        (LAYER, *shares, Column("residual", unit="of a score")),
    )
    notes = (*report.notes, f"The page has {out.stat().st_size / 1e6:.1f} MB and opens offline.")
    return Said(repr(model), first, shown, others, notes, (str(out.resolve()),))


def _certificate_said(model: "HookedModel", certificate: "Certificate") -> Said:
    shown = Rows("Checks", certificate.to_frame(), tuple(map(Column, certificate.to_frame().columns)))
    points = [
        {"point": each.name, "shape": each.shape, "meaning": each.meaning, "absent": each.absent,
         "refused": certificate.refused.get(each.name)}
        for each in model.points.values()
    ]  # fmt: skip
    notes = (certificate.left_out,) if certificate.left_out else ()
    return Said(repr(model), certificate.verdict, shown, (), notes, more={"ok": certificate.ok, "points": points})


def _print_certificate(console: Console, model: "HookedModel", certificate: "Certificate") -> None:
    console.print(plain(repr(model)), soft_wrap=True, highlight=False)
    for stack in model.stacks.values():
        console.print(plain(f"built as {stack.architecture}"), soft_wrap=True, highlight=False, style="dim")
    table = Table(
        title=f"every layer checked; edits tried in layers {', '.join(map(str, certificate.edited))}",
        title_justify="left",
    )
    for column in ("check", "", "statement", "evidence"):
        table.add_column(column, overflow="fold")
    for item in certificate.checks:
        style = {"holds": "green", "differs": "yellow", "FAILS": "bold red"}.get(item.status, "dim")
        table.add_row(item.name, f"[{style}]{item.status}[/{style}]", plain(item.statement), plain(item.evidence))
    console.print(table)
    if certificate.left_out:
        console.print(plain(certificate.left_out), highlight=False)
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
        points.add_row(point.name, plain(point.shape), plain(about_point if refused is None else f"REFUSED: {refused}"))
    console.print(points)
    console.print(plain(certificate.verdict), style="green" if certificate.ok else "bold red", highlight=False)
