"""The command line: `attnmech report`, `focus`, `drift`, `heads`, `embed`, `ablate`, `null` and `check`.

Neither torch nor transformers is imported until a command needs it.
"""

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console
from typer.core import TyperGroup

from .. import __version__
from ..errors import AttnmechError
from .certificate import certificate_said, print_certificate
from .inputs import engine_of, numbers_of, own_paragraph, streamed, sweep_inputs, text_of
from .options import (
    AddressOption,
    CorpusOption,
    EngineOption,
    FileOption,
    JsonOption,
    MemoryOption,
    ModelOption,
    OutOption,
    OverwriteOption,
    RowsOption,
    TableOption,
    TextOption,
    WorkersOption,
)
from .outputs import Outputs, check_apart, outputs_of
from .stages import stages
from .terminal import Column, Rows, Said, columns_of, plain, say

if TYPE_CHECKING:
    from ..model.run.hooked import HookedModel
    from ..pages.result import Report
    from ..results.result import PagedResult


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
    check_apart(file, out)
    wanted = text_of(text, file)
    with stages("importing torch and transformers", total=4) as step:
        from ..model.files.load import load
        from ..pages.report import report as make_report

        step("loading and certifying the model")
        hooked = load(model)
        step("decomposing the scores")
        made = make_report(hooked, wanted if wanted is not None else own_paragraph(), target=target, start=start)
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
    with outputs_of(text, file, out, overwrite) as outputs, engine_of(engine, address, workers) as where:
        hooked, given, options = streamed(model, text, file, outputs, truncate, where)
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
    with outputs_of(text, file, out, overwrite) as outputs, engine_of(engine, address, workers) as where:
        hooked, given, options = streamed(model, text, file, outputs, truncate, where)
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
    with outputs_of(None, file, out, overwrite) as outputs, engine_of(engine, address, workers) as where:
        if file is None:
            outputs.require_no_journal()
        with stages("importing torch and transformers", total=3) as step:
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
    wanted = numbers_of("--layers", layers)
    with outputs_of(text, file, out, overwrite) as outputs:
        outputs.require_no_journal()
        with stages("importing torch and transformers", total=3) as step:
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
    with outputs_of(text, file, out, overwrite) as outputs, engine_of(engine, address, workers) as where:
        hooked, texts = sweep_inputs(model, text, file)
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
    with outputs_of(text, file, out, overwrite) as outputs, engine_of(engine, address, workers) as where:
        hooked, texts = sweep_inputs(model, text, file)
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


def _said(model: "HookedModel", found: "PagedResult", outputs: Outputs, shown: Rows, *further: str) -> Said:
    """What a command says of a result: its sentence, its table, what was cut, and where the files are."""
    cut, of = getattr(found, "truncated", 0), getattr(found, "documents", 0)  # of a sweep, no text is cut
    of = of if isinstance(of, int) else len(of)
    notes = [f"{cut} of {of} texts were cut to the model's length."] if cut else []
    intervals = str(shown.frame.attrs.get("intervals", ""))
    return Said(
        repr(model), repr(found), shown, further, notes + [intervals] * bool(intervals),
        tuple(str(path.resolve()) for path in (outputs.table, outputs.page)),
    )  # fmt: skip


@app.command(epilog=_examples("attnmech check gpt2", "attnmech check ./my-model --json"))
def check(
    model: Annotated[
        str | None, typer.Argument(help="Hub name, folder or GGUF file; the demo model if left out.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Proves that every activation point of a model means what its name says; exits with 1 if one does not."""
    with stages("importing torch and transformers", total=2) as step:
        from ..model.files.load import load

        step("loading and certifying the model")
        hooked = load(model)
    if as_json:
        say(certificate_said(hooked, hooked.certificate), rows=len(hooked.certificate.checks), as_json=True)
    else:
        print_certificate(Console(), hooked, hooked.certificate)
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
