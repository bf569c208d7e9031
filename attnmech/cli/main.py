"""The command line: `attnmech report`, `atlas`, `focus`, `drift`, `heads`, `embed`, `ablate`, `null`, `check` and
`mcp`.

Neither torch nor transformers is imported until a command needs it.
"""

import sys
import warnings
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import typer
from rich.text import Text
from typer.core import TyperGroup

from .. import __version__
from ..basics.messages import LongTextWarning
from ..errors import AttnmechError, InputError, JournalError, ModelNotFoundError
from .agents.command import mcp
from .atlas import atlas
from .certificate import certificate_summary, print_certificate
from .inputs import (
    built_in_paragraph,
    corpus_of,
    engine_of,
    numbers_of,
    require_one_source,
    streamed,
    sweep_inputs,
    texts_of,
)
from .options import (
    AddressOption,
    ColumnOption,
    CorpusOption,
    DeviceOption,
    DtypeOption,
    EngineOption,
    JsonOption,
    MemoryOption,
    MetricOption,
    ModelOption,
    OverwriteOption,
    ReportOut,
    ResultOut,
    RowsOption,
    TableOut,
    TextOption,
    TruncateOption,
    WorkersOption,
)
from .outputs import FILES, FOLLOWS, REPORT, RESULT, TABLE, Outputs, outputs_of
from .stages import interrupt_in, stages
from .summaries import (
    drift_rows,
    effect_rows,
    embed_rows,
    focus_rows,
    null_rows,
    report_summary,
    summary_of,
    type_rows,
)
from .terminal import KEYS, as_options, console, print_summary

if TYPE_CHECKING:
    from ..results.result import PagedResult


class _Commands(TyperGroup):
    """Names options in errors as commands do, and passes Ctrl-C on to `main`, which says how to resume; click would
    only exit.
    """

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        warnings.showwarning = lambda message, *_: print(f"warning: {self._said(ctx, message)}", file=sys.stderr)
        try:
            return super().invoke(ctx)
        except BaseException as error:
            if (stop := interrupt_in(error)) is not None:
                raise Interrupted(*stop.args) from stop
            if isinstance(error, AttnmechError):
                raise type(error)(self._said(ctx, error)) from error
            if isinstance(error, EOFError):  # click would print "Aborted."
                raise RuntimeError(f"a file ended too early: {error}") from error
            raise

    def _said(self, ctx: Any, message: object) -> str:
        command = self.commands.get(ctx.invoked_subcommand)
        return as_options(str(message), () if command is None else command.params)


class Interrupted(BaseException):
    """Ctrl-C, with advice for the user."""


_REFUSED: Final = (InputError, JournalError, ModelNotFoundError)
"""Errors in the user's request; all other errors mean that the work failed."""

_KEYS: Final = "\n\n".join(f"{key}: {meaning}" for key, meaning in KEYS.items())

_EXIT: Final = "Exit status: 0 done; 1 the work or a check failed; 2 the command was refused; 130 Ctrl-C."

app = typer.Typer(
    name="attnmech",
    cls=_Commands,
    help="Where each head attends, why, what it writes, and whether that matters.",
    epilog=f"--json prints one object with these keys:\n\n{_KEYS}\n\n{_EXIT}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _examples(*commands: str) -> str:
    """Formats the examples below a command's help, one per line."""
    return "\n\n".join(("Examples:", *commands))


def _print_version(asked: bool) -> bool:
    if asked:
        print(f"attnmech {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Where each head attends, why, what it writes, and whether that matters."""


@app.command(
    epilog=_examples(
        'attnmech report --text "Anna gave an old anchor to Tom." --out page.html',
        "attnmech report --model gpt2 --file texts.txt --out page.html --out terms.csv",
    )
)
def report(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    column: ColumnOption = None,
    target_text: Annotated[
        str | None,
        typer.Option("--target-text", help="The text that the decoder of an encoder-decoder reads; if left out, the "
                     "model writes it."),
    ] = None,
    start: Annotated[int, typer.Option("--start", help="First token to run and show of a long text.")] = 0,
    out: ReportOut = FILES["report"],
    overwrite: OverwriteOption = False,
    rows: RowsOption = 32,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Writes an offline page about texts of up to 192 tokens: what each head attends to, why, and whether it matters.

    A file holds up to 12 texts, between which the page has a choice. Of a longer text, only the first 192 tokens are
    run, or the 192 tokens from --start on. For an encoder-decoder, the encoder reads the text, and the page has a
    choice of stack: encoder, decoder or cross. The table has one row per text and layer.
    """
    require_one_source(text, file)
    with (
        outputs_of(out, REPORT, overwrite=overwrite, source=file) as outputs,
        stages("importing torch and transformers", total=8) as step,
    ):
        from ..model.files.load import load
        from ..pages.limits import MAX_TEXTS
        from ..pages.report import reports
        from ..pages.result import first_page

        texts = texts_of(file, column, MAX_TEXTS) or [built_in_paragraph() if text is None else text]
        step("loading and certifying the model")
        hooked = load(model, device=device, dtype=dtype)
        step("decomposing the scores")
        made = reports(hooked, texts, target=target_text, start=start, step=step)
        first = next(made)
        for page in outputs.begin(lambda: first_page(first)):
            step.say(f"{page} opens now; {FOLLOWS}")
        (result,) = made
        step("writing")
        outputs.write(result.to_frame(), {".html": result.write_html})
    print_summary(report_summary(hooked, result, outputs), rows=rows, as_json=as_json)


app.command(
    epilog=_examples(
        "attnmech atlas --out atlas.html --overwrite",
        "attnmech atlas --model gpt2 --file corpus.jsonl --truncate --ablate 16 --out atlas",
    )
)(atlas)


@app.command(
    epilog=_examples(
        'attnmech focus --text "Anna gave an old anchor to Tom." --rows 5',
        "attnmech focus --model gpt2 --file corpus.jsonl --truncate --out heads.parquet --out heads.html",
    )
)
def focus(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    column: ColumnOption = None,
    truncate: TruncateOption = False,
    out: ResultOut = FILES["focus"],
    overwrite: OverwriteOption = False,
    rows: RowsOption = 10,
    as_json: JsonOption = False,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Writes where every head attends, over a text or a corpus of any size.

    Over a corpus, a journal is kept beside the first file: if interrupted, run the same command again to resume.
    """
    require_one_source(text, file)
    with (
        outputs_of(out, RESULT, overwrite=overwrite, source=file, resumable=file is not None) as outputs,
        engine_of(engine, address, workers) as run_on,
    ):
        hooked, inputs, run = streamed(model, device, dtype, text, file, column, outputs, truncate, run_on)
        from ..methods.focus.attention_focus import attention_focus

        result = attention_focus(hooked, inputs, **run)
        _write(outputs, result)
    shown = focus_rows(result)
    print_summary(summary_of("focus", hooked, result, outputs, shown), rows=rows, as_json=as_json)


@app.command(
    epilog=_examples(
        'attnmech drift --text "Anna gave an old anchor to Tom." --at resid_post',
        "attnmech drift --model gpt2 --file corpus.txt --similarity dot --out drift.csv",
    )
)
def drift(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    column: ColumnOption = None,
    truncate: TruncateOption = False,
    at: Annotated[
        Literal["resid_mid", "resid_post"],
        typer.Option("--at", help="The stream after a layer's attention, or after its MLP."),
    ] = "resid_mid",
    similarity: Annotated[
        Literal["cosine", "centred cosine", "dot"],
        typer.Option("--similarity", help="How a token's stream is compared with the embeddings."),
    ] = "cosine",
    k: Annotated[int, typer.Option("-k", min=1, help="The number of nearest tokens compared between layers.")] = 100,
    position: Annotated[
        bool, typer.Option("--position", help="Add each token's position embedding to the vocabulary.")
    ] = False,
    out: ResultOut = FILES["drift"],
    overwrite: OverwriteOption = False,
    rows: RowsOption = 32,
    as_json: JsonOption = False,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Writes how far tokens move from their own embeddings, layer by layer.

    Over a corpus, a journal is kept beside the first file: if interrupted, run the same command again to resume.
    """
    require_one_source(text, file)
    with (
        outputs_of(out, RESULT, overwrite=overwrite, source=file, resumable=file is not None) as outputs,
        engine_of(engine, address, workers) as run_on,
    ):
        hooked, inputs, run = streamed(model, device, dtype, text, file, column, outputs, truncate, run_on)
        from ..methods.drift.result import residual_drift

        result = residual_drift(hooked, inputs, at=at, similarity=similarity, k=k, position=position, **run)
        _write(outputs, result)
    shown = drift_rows(result)
    summary = summary_of("drift", hooked, result, outputs, shown, result.verdicts().lead)
    print_summary(summary, rows=rows, as_json=as_json)


@app.command(
    epilog=_examples(
        "attnmech heads --model gpt2 --out heads.html", "attnmech heads --model gpt2 --file corpus.jsonl --json"
    )
)
def heads(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    file: CorpusOption = None,
    column: ColumnOption = None,
    truncate: TruncateOption = False,
    out: ResultOut = FILES["heads"],
    overwrite: OverwriteOption = False,
    rows: RowsOption = 15,
    as_json: JsonOption = False,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Finds the type of every head: previous token, induction, first token, …

    Without a file, the heads read repeated sequences of random tokens. Over a corpus, a journal is kept beside the
    first file: if interrupted, run the same command again to resume.
    """
    with (
        outputs_of(out, RESULT, overwrite=overwrite, source=file, resumable=file is not None) as outputs,
        engine_of(engine, address, workers) as run_on,
    ):
        with stages("importing torch and transformers", total=3) as step:
            from ..methods.head_types.head_types import head_types
            from ..model.files.load import load

            step("loading and certifying the model")
            corpus = corpus_of(file, column)
            hooked = load(model, device=device, dtype=dtype)
            if corpus is None:
                step("finding the types of heads")
                result = head_types(hooked, **run_on)
        if corpus is not None:
            result = head_types(hooked, corpus, truncate=truncate, journal=outputs.journal, progress=True, **run_on)
        _write(outputs, result)
    shown = type_rows(result)
    print_summary(summary_of("heads", hooked, result, outputs, shown), rows=rows, as_json=as_json)


@app.command(
    epilog=_examples(
        "attnmech embed --model gpt2 --file corpus.txt --layers 0,5,11",
        "attnmech embed --projection pca --projection tsne --dims 3 --out embed.html",
    )
)
def embed(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    column: ColumnOption = None,
    truncate: TruncateOption = False,
    projection: Annotated[
        list[str] | None,
        typer.Option("--projection", help="pca (the default), tsne, umap, pacmap or opentsne; may be repeated."),
    ] = None,
    dims: Annotated[int, typer.Option("--dims", min=2, max=3, help="Dimensions of the picture.")] = 2,
    layers: Annotated[str | None, typer.Option("--layers", help="Layers, such as 0,5,11; all if left out.")] = None,
    sample: Annotated[int, typer.Option("--sample", min=1, help="Most tokens that become points.")] = 2000,
    out: ResultOut = FILES["embed"],
    overwrite: OverwriteOption = False,
    rows: RowsOption = 10,
    as_json: JsonOption = False,
) -> None:
    """Shows the queries and keys of every head in one space, where close pairs attend to each other.

    Without a text, 64 documents in the demo model's language are used.
    """
    require_one_source(text, file)
    wanted = numbers_of("--layers", layers)
    with outputs_of(out, RESULT, overwrite=overwrite, source=file) as outputs:
        with stages("importing torch and transformers", total=3) as step:
            from ..demo.text import documents
            from ..methods.head_types.head_types import head_types
            from ..methods.joint_embedding.result import joint_embedding
            from ..model.files.load import load

            step("loading and certifying the model")
            texts = [text] if text is not None else documents(64)
            inputs = corpus_of(file, column) or (iter(texts) if truncate else texts)
            hooked = load(model, device=device, dtype=dtype)
            step("finding the types of heads")
            types = head_types(hooked).main_types if hooked.grid is None and len(hooked.stacks) == 1 else {}
        result = joint_embedding(
            hooked, inputs, layers=wanted, projection=projection or ["pca"], dims=cast(Literal[2, 3], dims),
            sample=sample, truncate=truncate, progress=True,
        ).with_types(types)  # fmt: skip
        _write(outputs, result)
    shown = embed_rows(result)
    print_summary(summary_of("embed", hooked, result, outputs, shown), rows=rows, as_json=as_json)


@app.command(
    epilog=_examples(
        "attnmech ablate --model gpt2 --file corpus.txt --method mean --rows 20",
        'attnmech ablate --text "Anna gave an old anchor to Tom." --metric kl --json',
    )
)
def ablate(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    column: ColumnOption = None,
    method: Annotated[
        Literal["zero", "mean", "resample"],
        typer.Option("--method", help="What replaces a head's z: 0, its mean over the texts, or another text's z."),
    ] = "zero",
    metric: MetricOption = "loss",
    out: ResultOut = FILES["ablate"],
    overwrite: OverwriteOption = False,
    rows: RowsOption = 10,
    as_json: JsonOption = False,
    memory: MemoryOption = 1.0,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Writes how much the loss changes when each head is ablated.

    A journal is kept beside the first file until the end: if interrupted, run the same command again to resume.
    Without a text, 64 documents in the demo model's language are used.
    """
    require_one_source(text, file)
    with (
        outputs_of(out, RESULT, overwrite=overwrite, source=file, resumable=True) as outputs,
        engine_of(engine, address, workers) as run_on,
    ):
        hooked, texts = sweep_inputs(model, device, dtype, text, file, column)
        from ..methods.ablation.heads import ablate_heads

        result = ablate_heads(
            hooked, texts, method=method, metric=metric, reference=texts if method == "mean" else None, memory=memory,
            journal=outputs.journal, progress=True, **run_on,
        )  # fmt: skip
        _write(outputs, result)
    shown = effect_rows(result)
    print_summary(summary_of("ablate", hooked, result, outputs, shown), rows=rows, as_json=as_json)


@app.command(
    epilog=_examples(
        "attnmech null --model gpt2 --file corpus.txt --out null.csv",
        "attnmech null --sink most_attended --delta 0.02 --rows 20",
    )
)
def null(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    text: TextOption = None,
    file: CorpusOption = None,
    column: ColumnOption = None,
    sink: Annotated[
        Literal["first", "most_attended", "special"],
        typer.Option("--sink", help="Where heads may rest: the first token, the most attended, or special tokens."),
    ] = "first",
    delta: Annotated[float, typer.Option("--delta", help="Effects within ±delta nats count as zero.")] = 0.01,
    metric: MetricOption = "loss",
    out: ResultOut = FILES["null"],
    overwrite: OverwriteOption = False,
    rows: RowsOption = 10,
    as_json: JsonOption = False,
    memory: MemoryOption = 1.0,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Finds, by interventions, the heads that rest on one token without effect.

    A journal is kept beside the first file until the end: if interrupted, run the same command again to resume.
    Without a text, 64 documents in the demo model's language are used.
    """
    require_one_source(text, file)
    with (
        outputs_of(out, RESULT, overwrite=overwrite, source=file, resumable=True) as outputs,
        engine_of(engine, address, workers) as run_on,
    ):
        hooked, texts = sweep_inputs(model, device, dtype, text, file, column)
        from ..methods.null_attention.result import null_attention

        result = null_attention(
            hooked, texts, sink=sink, delta=delta, metric=metric, memory=memory, journal=outputs.journal,
            progress=True, **run_on,
        )  # fmt: skip
        _write(outputs, result)
    shown = null_rows(result)
    print_summary(summary_of("null", hooked, result, outputs, shown), rows=rows, as_json=as_json)


@app.command(
    epilog=_examples("attnmech check --model gpt2", "attnmech check --model ./my-model --out checks.csv --json")
)
def check(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    full: Annotated[
        bool, typer.Option("--full", help="Try edits in every layer, and compare every layer on longer texts.")
    ] = False,
    out: TableOut = FILES["check"],
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Proves that every activation point of a model means what its name says; exits with 1 if a check fails."""
    with (
        outputs_of(out, TABLE, overwrite=overwrite) as outputs,
        stages("importing torch and transformers", total=2) as step,
    ):
        from ..model.files.load import load

        step("loading and certifying the model")
        hooked = load(model, device=device, dtype=dtype, certify="full" if full else "again")
        outputs.write(hooked.certificate.to_frame())
    if as_json:
        print_summary(certificate_summary(hooked, hooked.certificate, outputs.names), rows=0, as_json=True)
    else:
        print_certificate(hooked, hooked.certificate, outputs.names)
    if not hooked.certificate.ok:
        raise typer.Exit(1)


app.command(
    epilog=_examples(
        "attnmech mcp --model gpt2 --folder ./texts",
        "attnmech mcp --http 8765",
    )
)(mcp)


def main() -> None:
    """The entry point. An error or Ctrl-C prints one line on stderr, and sets the exit status."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the output already says what else a user must know
            warnings.simplefilter("always", LongTextWarning)
            _run()
    except AttnmechError as error:
        console(stderr=True).print(Text.assemble(("error:", "red"), f" {error}"), soft_wrap=True)
        sys.exit(2 if isinstance(error, _REFUSED) else 1)
    except OSError as error:  # stdout on a full disk, a folder that disappeared
        place = "" if error.filename is None else f"{error.filename}: "
        console(stderr=True).print(
            Text.assemble(("error:", "red"), f" {place}{error.strerror or error}."), soft_wrap=True
        )
        sys.exit(1)
    except (Interrupted, KeyboardInterrupt) as stop:
        console(stderr=True).print("; ".join(("interrupted", *map(str, stop.args))), soft_wrap=True)
        sys.exit(130)


def _run() -> None:
    try:
        app()
    except SystemExit as stop:
        if stop.code == 130:  # click's answer to Ctrl-C while it reads the arguments
            raise Interrupted from None
        raise


def _write(outputs: Outputs, result: "PagedResult") -> None:
    outputs.write(result.by_head(), {".html": result.write_html, ".safetensors": result.save})
