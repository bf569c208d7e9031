"""The command line: `attnmech report`, `atlas`, `focus`, `drift`, `heads`, `embed`, `ablate`, `null`, `kv`, `check`,
`mcp`, `serve` and `engine`.

Neither torch nor transformers is imported until a command needs it.
"""

import os
import secrets
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import typer
from rich.text import Text
from typer.core import TyperGroup

from .. import __version__
from ..basics.messages import LongTextWarning
from ..errors import AttnmechError, InputError, JournalError, ModelNotFoundError
from .agents.allowed import Folders, Models
from .inputs import built_in_paragraph, job_of, numbers_of, with_images
from .options import CORPUS, ENGINE, DeviceOption, DtypeOption, MetricOption, Options, shares
from .outputs import ATLAS, FOLLOWS, KV, REPORT, TABLE
from .stages import importing, interrupt_in, stages
from .summaries import (
    atlas_summary,
    certificate_summary,
    drift_rows,
    effect_rows,
    embed_rows,
    focus_rows,
    kv_rows,
    null_rows,
    report_summary,
    type_rows,
)
from .terminal import KEYS, as_options, console


class _Commands(TyperGroup):
    """Names options in errors as commands do, and passes Ctrl-C on to `main`, where click would only exit."""

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
@shares("text", "image", *CORPUS, suffixes=REPORT, rows=32)
def report(
    options: Options,
    target_text: Annotated[
        str | None,
        typer.Option("--target-text", help="The text that the decoder of an encoder-decoder reads; if left out, the "
                     "model writes it."),
    ] = None,
    generate: Annotated[int, typer.Option("--generate", help="The model first continues each text by up to this many "
                                          "tokens.")] = 0,
    start: Annotated[int, typer.Option("--start", help="First token to run and show of a long text.")] = 0,
) -> None:  # fmt: skip
    """Writes an offline page about texts of up to 192 tokens: what each head attends to, why, and whether it matters.

    A file holds up to 12 texts, between which the page has a choice. Of a longer text, only the first 192 tokens are
    run, or the 192 tokens from --start on. For an encoder-decoder, the encoder reads the text, and the page has a
    choice of stack: encoder, decoder or cross. The table has one row per text and layer.
    """
    with job_of(options, REPORT) as job, stages("loading and certifying the model", total=7) as step:
        from ..pages.limits import MAX_TEXTS
        from ..pages.report import reports
        from ..pages.result import first_page

        texts = job.texts(MAX_TEXTS)
        hooked = job.load()
        step("decomposing the scores")
        inputs = with_images(hooked, texts[0], options.image) if options.image else texts
        made = reports(hooked, inputs, target=target_text, generate=generate, start=start, step=step)
        first = next(made)
        for page in job.outputs.begin(lambda: first_page(first)):
            step.say(f"{page} opens now; {FOLLOWS}")
        (result,) = made
        step("writing")
        job.outputs.write(result.to_frame(), {".html": result.write_html})
        job.summary = report_summary(hooked, result, job.outputs)


@app.command(
    epilog=_examples(
        "attnmech atlas --out atlas.html --overwrite",
        "attnmech atlas --model gpt2 --file corpus.jsonl --truncate --ablate 16 --out atlas",
    )
)
@shares(*CORPUS, "truncate", *ENGINE, suffixes=ATLAS, rows=15)
def atlas(
    options: Options,
    by: Annotated[
        Literal["type", "attention", "value_weighted", "update", "next_token"],
        typer.Option("--by", help="The statistic that orders a head's rows."),
    ] = "type",
    k: Annotated[int, typer.Option("-k", min=1, help="The number of example rows of each kind.")] = 10,
    ablate: Annotated[
        int, typer.Option("--ablate", min=0, help="The number of texts on which each head is ablated; 0 for none.")
    ] = 0,
) -> None:
    """Writes what every head of a model does over a corpus: examples, statistics, types, and likeness, as a page.

    A folder holds an index and a file for each layer, and opens from disk; a .html file holds everything. A journal is
    kept beside the output: if interrupted, run the same command again to resume. Without a file, 300 documents in the
    demo model's language are used.
    """
    with job_of(options, ATLAS, resumable=True) as job:
        hooked, inputs, run = job.streamed()
        from ..demo.text import documents
        from ..pages.atlas.atlas import atlas as make_atlas

        texts = documents(300) if options.file is None else inputs
        result = make_atlas(hooked, texts, by=by, k=k, ablate=ablate, **{**run, **job.run})
        with stages("writing", total=1):
            job.outputs.write(result.to_frame(), {".html": result.write_html, "": result.write})
        job.summary = atlas_summary(hooked, result, job.outputs)


@app.command(
    epilog=_examples(
        'attnmech focus --text "Anna gave an old anchor to Tom." --rows 5',
        "attnmech focus --model gpt2 --file corpus.jsonl --truncate --out heads.parquet --out heads.html",
    )
)
@shares("text", "image", *CORPUS, "truncate", *ENGINE)
def focus(options: Options) -> None:
    """Writes where every head attends, over a text or a corpus of any size.

    Over a corpus, a journal is kept beside the first file: if interrupted, run the same command again to resume.
    """
    with job_of(options, resumable=options.file is not None) as job:
        hooked, inputs, run = job.streamed()
        from ..methods.focus.attention_focus import attention_focus

        result = attention_focus(hooked, inputs, **run)
        job.finish("focus", hooked, result, focus_rows(result))


@app.command(
    epilog=_examples(
        'attnmech drift --text "Anna gave an old anchor to Tom." --at resid_post',
        "attnmech drift --model gpt2 --file corpus.txt --similarity dot --out drift.csv",
    )
)
@shares("text", *CORPUS, "truncate", *ENGINE, rows=32)
def drift(
    options: Options,
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
) -> None:
    """Writes how far tokens move from their own embeddings, layer by layer.

    Over a corpus, a journal is kept beside the first file: if interrupted, run the same command again to resume.
    """
    with job_of(options, resumable=options.file is not None) as job:
        hooked, inputs, run = job.streamed()
        from ..methods.drift.result import residual_drift

        result = residual_drift(hooked, inputs, at=at, similarity=similarity, k=k, position=position, **run)
        job.finish("drift", hooked, result, drift_rows(result), result.verdicts().lead)


@app.command(
    epilog=_examples(
        "attnmech heads --model gpt2 --out heads.html", "attnmech heads --model gpt2 --file corpus.jsonl --json"
    )
)
@shares(*CORPUS, "truncate", *ENGINE, rows=15)
def heads(options: Options) -> None:
    """Finds the type of every head: previous token, induction, first token, …

    Without a file, the heads read repeated sequences of random tokens. Over a corpus, a journal is kept beside the
    first file: if interrupted, run the same command again to resume.
    """
    with job_of(options, resumable=options.file is not None) as job:
        from ..methods.head_types.head_types import head_types

        with stages("loading and certifying the model", total=2) as step:
            corpus = job.corpus()
            hooked = job.load()
            if corpus is None:
                step("finding the types of heads")
                result = head_types(hooked, **job.engine)
        if corpus is not None:
            result = head_types(hooked, corpus, truncate=options.truncate, **job.run)
        job.finish("heads", hooked, result, type_rows(result))


@app.command(
    epilog=_examples(
        "attnmech embed --model gpt2 --file corpus.txt --layers 0,5,11",
        "attnmech embed --projection pca --projection tsne --dims 3 --out embed.html",
    )
)
@shares("text", *CORPUS, "truncate")
def embed(
    options: Options,
    projection: Annotated[
        list[str] | None,
        typer.Option("--projection", help="pca (the default), tsne, umap, pacmap or opentsne; may be repeated."),
    ] = None,
    dims: Annotated[int, typer.Option("--dims", min=2, max=3, help="Dimensions of the picture.")] = 2,
    layers: Annotated[str | None, typer.Option("--layers", help="Layers, such as 0,5,11; all if left out.")] = None,
    sample: Annotated[int, typer.Option("--sample", min=1, help="Most tokens that become points.")] = 2000,
) -> None:
    """Shows the queries and keys of every head in one space, where close pairs attend to each other.

    Without a text, 64 documents in the demo model's language are used.
    """
    wanted = numbers_of("--layers", layers)
    with job_of(options) as job:
        from ..methods.head_types.head_types import head_types
        from ..methods.joint_embedding.result import joint_embedding

        with stages("loading and certifying the model", total=2) as step:
            texts = job.text_or_documents()
            inputs = job.corpus() or (iter(texts) if options.truncate else texts)
            hooked = job.load()
            step("finding the types of heads")
            types = head_types(hooked).main_types if hooked.grid is None and len(hooked.stacks) == 1 else {}
        result = joint_embedding(
            hooked, inputs, layers=wanted, projection=projection or ["pca"], dims=cast(Literal[2, 3], dims),
            sample=sample, truncate=options.truncate, progress=True,
        )  # fmt: skip
        result = replace(result, types_of_heads=tuple(types.get(head, "") for head in result.heads))
        job.finish("embed", hooked, result, embed_rows(result))


@app.command(
    epilog=_examples(
        "attnmech ablate --model gpt2 --file corpus.txt --method mean --rows 20",
        'attnmech ablate --text "Anna gave an old anchor to Tom." --metric kl --json',
    )
)
@shares("text", *CORPUS, "memory", *ENGINE)
def ablate(
    options: Options,
    method: Annotated[
        Literal["zero", "mean", "resample"],
        typer.Option("--method", help="What replaces a head's z: 0, its mean over the texts, or another text's z."),
    ] = "zero",
    metric: MetricOption = "loss",
) -> None:
    """Writes how much the loss changes when each head is ablated.

    A journal is kept beside the first file until the end: if interrupted, run the same command again to resume.
    Without a text, 64 documents in the demo model's language are used.
    """
    with job_of(options, resumable=True) as job:
        hooked, texts, run = job.swept()
        from ..methods.ablation.heads import ablate_heads

        reference = texts if method == "mean" else None
        result = ablate_heads(hooked, texts, method=method, metric=metric, reference=reference, **run)
        job.finish("ablate", hooked, result, effect_rows(result))


@app.command(
    epilog=_examples(
        "attnmech null --model gpt2 --file corpus.txt --out null.csv",
        "attnmech null --sink most_attended --delta 0.02 --rows 20",
    )
)
@shares("text", *CORPUS, "memory", *ENGINE)
def null(
    options: Options,
    sink: Annotated[
        Literal["first", "most_attended", "special"],
        typer.Option("--sink", help="Where heads may rest: the first token, the most attended, or special tokens."),
    ] = "first",
    delta: Annotated[float, typer.Option("--delta", help="Effects within ±delta nats count as zero.")] = 0.01,
    metric: MetricOption = "loss",
) -> None:
    """Finds, by interventions, the heads that rest on one token without effect.

    A journal is kept beside the first file until the end: if interrupted, run the same command again to resume.
    Without a text, 64 documents in the demo model's language are used.
    """
    with job_of(options, resumable=True) as job:
        hooked, texts, run = job.swept()
        from ..methods.null_attention.result import null_attention

        result = null_attention(hooked, texts, sink=sink, delta=delta, metric=metric, **run)
        job.finish("null", hooked, result, null_rows(result))


@app.command(
    epilog=_examples(
        "attnmech kv --model gpt2 --file corpus.txt --last 128 --out patterns",
        "attnmech kv --last 8 --context 64 --rows 20",
    )
)
@shares(*CORPUS, "memory", *ENGINE, suffixes=KV)
def kv(
    options: Options,
    first: Annotated[int, typer.Option("--first", help="The number of keys kept at the beginning of a text.")] = 4,
    last: Annotated[int, typer.Option("--last", help="The number of keys kept up to the row's own.")] = 256,
    context: Annotated[
        int | None, typer.Option("--context", help="The length of the texts with needles; by default 4 × kept keys.")
    ] = None,
) -> None:
    """Scores kv heads for caches: which can see the first and the last keys alone, and at which cost.

    A folder also holds the files that DuoAttention, kvpress, Retrieval_Head and SparseMM load. A journal is kept beside
    the output: if interrupted, run the same command again to resume. Without a file, 64 documents in the demo model's
    language are used.
    """
    with job_of(options, KV, resumable=True) as job:
        hooked, texts, run = job.swept()
        from ..methods.kv_scores.result import kv_scores

        result = kv_scores(hooked, texts, first=first, last=last, context=context, **run)
        job.finish("kv", hooked, result, kv_rows(result))


@app.command(
    epilog=_examples("attnmech check --model gpt2", "attnmech check --model ./my-model --out checks.csv --json")
)
@shares(suffixes=TABLE, rows=None)
def check(
    options: Options,
    full: Annotated[
        bool, typer.Option("--full", help="Try edits in every layer, and compare every layer on longer texts.")
    ] = False,
) -> None:
    """Proves that every activation point of a model means what its name says; exits with 1 if a check fails."""
    with job_of(options, TABLE) as job, stages("loading and certifying the model", total=1):
        hooked = job.load(certify="full" if full else "again")
        job.outputs.write(hooked.certificate.to_frame())
        job.summary = certificate_summary(hooked, job.outputs.names)
    if not hooked.certificate.ok:
        raise typer.Exit(1)


TOKEN: Final = "ATTNMECH_MCP_TOKEN"
"""The environment variable with the token of the HTTP server."""


@app.command(epilog=_examples("attnmech mcp --model gpt2 --folder ./texts", "attnmech mcp --http 8765"))
def mcp(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="A model that agents may load: hub name, folder or GGUF file; may be repeated. The demo model (demo) "
            "if left out.",
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    folder: Annotated[
        list[Path] | None,
        typer.Option("--folder", help="A folder in which agents may read and write files; may be repeated."),
    ] = None,
    http: Annotated[
        int | None,
        typer.Option(
            "--http", min=1, max=65535, help="Serve HTTP on this port of 127.0.0.1 instead of stdin and stdout."
        ),
    ] = None,
) -> None:
    r"""Serves attnmech to agents over the Model Context Protocol (pip install "attnmech\[mcp]").

    Agents can load the models that you name, and read and write files in the folders that you name; no code of theirs
    is run. Over HTTP, they must send a token: that of the environment variable ATTNMECH_MCP_TOKEN, or one that is
    printed at the start.
    """
    models, folders = Models(model or (), device, dtype), Folders(folder or ())
    try:
        with importing():
            from .agents.server import HOST, serve_http, serve_stdio
            from .agents.tools import Tools
    except ImportError as error:
        raise InputError('to serve agents: pip install "attnmech[mcp]".') from error
    tools = Tools(models, folders)
    if http is None:
        serve_stdio(tools)
        return
    token = os.environ.get(TOKEN)
    if not token:
        token = secrets.token_urlsafe(24)
        console(stderr=True).print(f"token: {token}", soft_wrap=True)
    console(stderr=True).print(f"serving http://{HOST}:{http}/mcp", soft_wrap=True)
    serve_http(tools, http, token)


@app.command(epilog=_examples("attnmech serve", 'attnmech serve --model gpt2 --text "The keys to the cabinet"'))
def serve(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Hub name, folder or GGUF file; the demo model if left out.")
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    text: Annotated[str | None, typer.Option("--text", "-t", help="The text that the page reads first.")] = None,
    host: Annotated[str, typer.Option("--host", help="The address to serve on; by default this machine only.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0 for a free one.")] = 8766,
) -> None:
    r"""Serves the report as a page that answers: type a text, switch heads off (pip install "attnmech\[mcp]").

    The page shows what the model then writes, the probabilities of its next token and the loss of every token, beside
    those without the edit. Whoever has the printed address may ask; its token is new at every start.
    """
    try:
        with importing():
            from ..live.server import serve as serve_page
            from ..live.session import Session
    except ImportError as error:
        raise InputError('to serve a page: pip install "attnmech[mcp]".') from error
    from ..model.files.load import load

    with stages("loading and certifying the model", total=1):
        hooked = load(model, device=device, dtype=dtype)
    session = Session(hooked, built_in_paragraph() if text is None else text)
    say = console(stderr=True).print
    serve_page(session, secrets.token_urlsafe(24), host, port, lambda url: say(f"serving {url}", soft_wrap=True))


@app.command(
    epilog=_examples(
        "attnmech engine http://127.0.0.1:8000 --start",
        "attnmech engine http://127.0.0.1:8000 --take seen.safetensors --stop",
    )
)
def engine(
    url: Annotated[str, typer.Argument(help="The address of a vLLM server, such as http://127.0.0.1:8000.")],
    start: Annotated[bool, typer.Option("--start", help="Begin to measure.")] = False,
    take: Annotated[
        Path | None, typer.Option(help="Write what the requests so far have shown to this .safetensors file.")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End measuring, after --take.")] = False,
    last: Annotated[int, typer.Option("--last", min=1, help="The number of keys that last_mass adds up.")] = 8,
) -> None:
    """Measures the heads of a model that vLLM serves, while it serves.

    The server runs with VLLM_PLUGINS=attnmech and --worker-extension-cls attnmech.engines.vllm.Heads; its --api-key is
    read from the environment variable VLLM_API_KEY. In Python, am.engine_statistics(file) reads the statistics.
    """
    from ..engines import http

    if not (start or take or stop):
        raise InputError("one of `start`, `take` and `stop` must be given.")
    key, out = os.environ.get("VLLM_API_KEY"), console()
    if start:
        http.post(url, "start", key=key, last=last)
        out.print(f"measuring at {url}")
    if take is not None:
        from ..served import engine_statistics

        statistics = engine_statistics(http.take(url, take, key=key))
        out.print(f"{statistics.lead}\nwrote {take}")
    if stop:
        http.post(url, "stop", key=key)
        out.print("stopped")


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
