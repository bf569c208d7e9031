"""The tools: each asks one question of a model and answers with an `Answer`.

The SDK reads names, types and descriptions of the arguments from the signatures, and shows the docstrings to agents.
"""

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Annotated, Any, Final, Literal, TypeAlias

from anyio import from_thread
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, ImageContent, TextContent
from pydantic import Field

from ...errors import AttnmechError
from ...runs.progress import watched
from ..inputs import built_in_paragraph, with_images
from ..outputs import REPORT, Outputs
from ..outputs import RESULT as SUFFIXES
from ..summaries import (
    certificate_summary,
    claim_rows,
    drift_rows,
    effect_rows,
    example_rows,
    focus_rows,
    key_rows,
    null_rows,
    report_summary,
    summary_of,
    type_rows,
)
from ..terminal import Rows, Summary, as_object
from .allowed import Folders, Models
from .arguments import MOST_CHARACTERS, Answer, Edit, Head, Index, Method, Metric, Prompt, TestCase, Text, Word, Words
from .asked import CORPUS, RESULT, Asked, shares

MAX_ANSWER: Final = 60_000
"""The largest number of characters of an answer without its picture."""
_PATIENCE: Final = 0.1
"""The seconds between two looks at whether a waiting call was cancelled."""

_MOST_TOKENS: Final = 1000
"""The most tokens of a text in which a score is explained: the scores of all its pairs are held."""
_READ_BY_DEFAULT: Final = {
    "focus": "a built-in paragraph was read",
    "drift": "a built-in paragraph was read",
    "ablate": "64 documents in the demo model's language were read",
    "null": "64 documents in the demo model's language were read",
}
"""What a tool reads if a call names no texts."""

_FEW: Final[dict[str, Any]] = {
    "annotation": Annotated[int, Field(ge=1, le=512, description="The documents read from the file.")],
    "default": 64,
}
"""The documents of a sweep, which runs once for each head."""

Answered: TypeAlias = Annotated[CallToolResult, Answer]


class Tools:
    """The tools, over the models and the folders that the user allows. One call runs at a time; others wait."""

    def __init__(self, models: Models, folders: Folders) -> None:
        self.models, self.folders, self._running = models, folders, Lock()

    @property
    def all(self) -> "Sequence[Callable[..., CallToolResult]]":
        """The tools in the order in which an agent may need them."""
        return (
            self.load_model, self.report, self.predict, self.generate, self.compare_prompts, self.head_types,
            self.attention_focus, self.explain_score, self.search_examples, self.ablate_heads, self.patch_heads,
            self.confirm_heads, self.null_attention, self.residual_drift,
        )  # fmt: skip

    @shares(rows={"default": 50})
    def load_model(self, hooked: Any, asked: Asked) -> Answered:
        """Load a model and prove what its activation points mean.

        The answer lists every check, and every activation point with its shape. Results on points of failed checks are
        refused. The numbers of layers and heads are in `model`.
        """
        return _answer(certificate_summary(hooked), asked.rows)

    @shares("images")
    def report(
        self,
        hooked: Any,
        asked: Asked,
        texts: Annotated[list[Text], Field(min_length=1, max_length=12)],
        out: Annotated[
            list[Annotated[str, Field(max_length=4096)]],
            Field(min_length=1, max_length=4, description="Files to write in an allowed folder: .html for the page, "
                  ".csv or .parquet for the table."),
        ],
    ) -> Answered:  # fmt: skip
        """Write an offline page about up to 12 texts: what each head attends to, why, and whether it matters.

        Of a long text, the first 192 tokens are run. The findings answer one question each.
        """
        from ...pages.report import report

        outputs = self.outputs(out, REPORT)
        result = report(hooked, texts if asked.images is None else self._pictured(hooked, texts, asked.images))
        self._write(outputs, result, result.to_frame())
        return _answer(report_summary(hooked, result, outputs), asked.rows)

    @shares()
    def predict(self, hooked: Any, asked: Asked, text: Prompt, edits: Edit | None = None) -> Answered:
        """Predict the next token of a text, and the loss of every token, with and without edits of heads.

        The table has the tokens of the text, or those that an encoder-decoder writes.
        """
        from .prompts import predicted

        return _answer(predicted(hooked, text, edits), asked.rows)

    @shares()
    def generate(
        self, hooked: Any, asked: Asked, prompt: Prompt,
        max_new_tokens: Annotated[int, Field(ge=1, le=200, description="The largest number of new tokens.")] = 20,
        edits: Edit | None = None,
    ) -> Answered:  # fmt: skip
        """Continue a prompt with the most probable tokens, with and without edits of heads.

        `parting` is the number of the first token that differs, from 0, or -1. p_plain_edited is the probability there
        of the plain answer's token in the edited run; the other columns are named alike.
        """
        from .prompts import generated

        return _answer(generated(hooked, prompt, max_new_tokens, edits), asked.rows)

    @shares()
    def compare_prompts(self, hooked: Any, asked: Asked, prompt: Prompt, other: Prompt) -> Answered:
        """Compare the next tokens after two prompts and, if they have the same length, attention from the last token.

        `shift` is the share of a head's attention that differs; `key` is the position of its most attended token.
        """
        from .prompts import compared_prompts

        return _answer(compared_prompts(hooked, prompt, other), asked.rows)

    @shares(*CORPUS, *RESULT)
    def head_types(self, hooked: Any, asked: Asked) -> Answered:
        """Find the type of every head: previous token, duplicate token, induction, first token, …

        Without a file, the heads read repeated sequences of random tokens. A type is claimed if its score, a mean
        attention, is above its baseline by an interval that holds for all heads together.
        """
        from ...methods.head_types.head_types import head_types

        corpus = self._inputs(asked)
        result = head_types(hooked) if corpus is None else head_types(hooked, iter(corpus), truncate=True)
        return self._answer("heads", hooked, result, type_rows(result), asked)

    @shares("texts", *CORPUS, "images", *RESULT)
    def attention_focus(self, hooked: Any, asked: Asked) -> Answered:
        """Measure where every head attends: first token, previous token, itself, how far, how concentrated.

        Without texts or a file, a built-in paragraph is read.
        """
        from ...methods.focus.attention_focus import attention_focus

        inputs = self._inputs(asked)
        if asked.images is None:
            texts = [built_in_paragraph()] if inputs is None else inputs
            result = attention_focus(hooked, iter(texts), truncate=True)
        else:
            result = attention_focus(hooked, self._pictured(hooked, inputs, asked.images))
        return self._answer("focus", hooked, result, focus_rows(result), asked, named=inputs is not None)

    @shares("picture")
    def explain_score(
        self,
        hooked: Any,
        asked: Asked,
        text: Text,
        layer: Index,
        head: Index,
        query: Annotated[
            int | None, Field(ge=0, le=1_000_000, description="The position of the query; the last token if left out.")
        ] = None,
        key: Annotated[
            int | None, Field(ge=0, le=1_000_000, description="The position of the key; the most attended if left out.")
        ] = None,
    ) -> Answered:
        """Explain why a head attends from one token to another: the score as an exact sum of its terms.

        The table has a row for each visible key with its position, its token, its attention, its score, and the terms
        that add up to the score. The most attended keys come first. The finding is about the chosen key.
        """
        from ...methods.scores.decompose_scores import decompose_scores

        count = int(hooked.encode(text).lengths.max())
        if count > _MOST_TOKENS:
            raise ToolError(f"a score is explained in texts of at most {_MOST_TOKENS:,} tokens; this has {count:,}.")
        result = decompose_scores(hooked, text, layers=[layer])
        place = len(result.tokens[0]) - 1 if query is None else query
        finding = f"{result.explain(layer, head, place, key)}."
        shown = key_rows(result, head, place)

        def draw(path: Path) -> Path:
            drawn: Path = result.save_figure(path, "row_ledger", layer=layer, head=head, query=place)
            return drawn

        return _answer(Summary("explain", hooked, [finding], shown), asked.rows, draw if asked.picture else None)

    @shares("column", "documents")
    def search_examples(
        self,
        hooked: Any,
        asked: Asked,
        token: Annotated[str, Field(min_length=1, max_length=200, description="The token, with or without its space.")],
        file: Annotated[str, Field(max_length=4096, description="The corpus: a file in an allowed folder.")],
        at: Annotated[Literal["key", "query"], Field(description="Whether heads attend to the token or from it.")] = (
            "key"
        ),
        by: Annotated[
            Literal["attention", "value_weighted", "update", "next_token"],
            Field(description="The statistic that orders a head's rows."),
        ] = "attention",
    ) -> Answered:
        """Find heads that attend to a token, or from it, in the strongest rows of a corpus.

        Of every head, the ten strongest rows of the corpus are searched. The key of a row is the most attended one,
        apart from the first token and the query itself; `key_weight` is its attention. Strong rows are extremes; they
        do not show what a head does elsewhere.
        """
        from ...methods.examples.result import examples

        corpus = self.corpus(file, asked.column, asked.documents)
        result = examples(hooked, iter(corpus), by=by, truncate=True)
        shown, finding = example_rows(result, token, at)
        return _answer(summary_of("search", hooked, result, asked.outputs, shown, finding), asked.rows)

    @shares("texts", *CORPUS, *RESULT, documents=_FEW)
    def ablate_heads(
        self,
        hooked: Any,
        asked: Asked,
        answers: Annotated[Words, Field(description="The right next token of each text, with its space.")] = None,
        against: Annotated[Words, Field(description="The token compared with each answer.")] = None,
        heads: Annotated[
            list[Head] | None, Field(min_length=1, max_length=64, description="The heads; all if left out.")
        ] = None,
        method: Method = "zero",
        metric: Annotated[
            Metric, Field(description='"logit_difference" needs answers and against, "accuracy" needs answers.')
        ] = "loss",
    ) -> Answered:
        """Ablate every head alone, and measure how much the metric changes: after minus before.

        Intervals are over texts and need at least five. Without texts or a file, 64 documents in the demo model's
        language are read.
        """
        from ...demo.text import documents
        from ...methods.ablation.heads import ablate_heads

        inputs = self._inputs(asked)
        texts = documents(64) if inputs is None else inputs
        result = ablate_heads(
            hooked, texts, heads=_pairs(heads), method=method, metric=metric, answers=answers, against=against,
            reference=texts if method == "mean" else None,
        )  # fmt: skip
        return self._answer("ablate", hooked, result, effect_rows(result), asked, named=inputs is not None)

    @shares(*RESULT)
    def patch_heads(
        self,
        hooked: Any,
        asked: Asked,
        clean: Annotated[list[Text], Field(min_length=1, max_length=64, description="The prompts.")],
        corrupted: Annotated[
            list[Text],
            Field(min_length=1, max_length=64, description="For each prompt one with as many tokens, in which the "
                  "answer differs."),
        ],
        answers: Annotated[
            list[Word],
            Field(min_length=1, max_length=64, description="The right next token of each prompt, with its space."),
        ],
        against: Annotated[
            list[Word], Field(min_length=1, max_length=64, description="The token compared with each answer.")
        ],
        at: Annotated[
            Literal["z", "q", "k", "v", "pattern"], Field(description="The activation that is patched.")
        ] = "z",
    ) -> Answered:  # fmt: skip
        """Patch each head's activation of clean prompts into corrupted ones, and measure the logit difference.

        Where query heads share keys and values, k and v are patched by kv head, and rows have `kv_head`.
        `recovered` is the share of the gap between the clean and the corrupted run that one head restores.
        """
        from ...methods.patching.patch import patch

        result = patch(hooked, clean, corrupted, answers=answers, against=against, at=at)
        return self._answer("patch", hooked, result, effect_rows(result), asked)

    @shares(*RESULT)
    def confirm_heads(
        self,
        hooked: Any,
        asked: Asked,
        heads: Annotated[
            list[Head], Field(min_length=1, max_length=16, description="The heads, chosen on other texts.")
        ],
        cases: Annotated[
            list[TestCase] | None,
            Field(min_length=6, max_length=512, description="The texts of the task. With answers and against, the "
                  "metric is the logit difference; with answers, accuracy; with neither, the loss."),
        ] = None,
        task: Annotated[
            Literal["copying", "agreement", "gender", "recipient", "retrieval"] | None,
            Field(description='Instead of cases: a task of the demo model, or "retrieval" of needles from random '
                  "tokens, for any decoder."),
        ] = None,
        method: Method = "zero",
        sets: Annotated[int, Field(ge=20, le=2000, description="The largest number of control sets.")] = 200,
    ) -> Answered:  # fmt: skip
        """Test whether removing heads together hurts a task more than removing other heads of the same layers.

        The verdict is "confirmed" if the effect and the contribution of each head exclude 0 and no more than 1 in 20
        control sets is as strong. The table has the contribution of each head.
        """
        if (cases is None) == (task is None):
            raise ToolError("expected `cases` or `task`; give one of them.")
        from ...methods.claims.result import confirm_heads
        from ...methods.claims.tasks import Case, Task

        chosen: Any = Task.of_retrieval(hooked, 64) if task == "retrieval" else task
        if cases is not None:
            chosen = [Case(case.prompt, case.answer, case.against, case.group) for case in cases]
        result = confirm_heads(hooked, _pairs(heads), chosen, method=method, sets=sets)
        further = (f"Verdict: {result.verdict}.", *result.findings.values())
        return self._answer("confirm", hooked, result, claim_rows(result), asked, *further)

    @shares("texts", *CORPUS, *RESULT, documents=_FEW)
    def null_attention(
        self,
        hooked: Any,
        asked: Asked,
        sink: Annotated[
            Literal["first", "most_attended", "special"],
            Field(description="Where heads may rest: the first token, the most attended, or special tokens."),
        ] = "first",
        delta: Annotated[float, Field(gt=0, le=10, description="Effects within ±delta nats count as zero.")] = 0.01,
    ) -> Answered:
        """Find, by interventions, the heads that rest on one token without effect on the loss.

        Without texts or a file, 64 documents in the demo model's language are read.
        """
        from ...demo.text import documents
        from ...methods.null_attention.result import null_attention

        inputs = self._inputs(asked)
        result = null_attention(hooked, documents(64) if inputs is None else inputs, sink=sink, delta=delta)
        return self._answer("null", hooked, result, null_rows(result), asked, named=inputs is not None)

    @shares("texts", *CORPUS, *RESULT, rows={"default": 50})
    def residual_drift(
        self,
        hooked: Any,
        asked: Asked,
        k: Annotated[int, Field(ge=1, le=1000, description="The number of nearest tokens compared.")] = 100,
    ) -> Answered:
        """Measure how far tokens move from their own embeddings, layer by layer.

        Without texts or a file, a built-in paragraph is read.
        """
        from ...methods.drift.result import residual_drift

        inputs = self._inputs(asked)
        result = residual_drift(hooked, iter([built_in_paragraph()] if inputs is None else inputs), k=k, truncate=True)
        lead = result.verdicts().lead
        return self._answer("drift", hooked, result, drift_rows(result), asked, lead, named=inputs is not None)

    @contextmanager
    def work(self, ctx: Context, model: str | None) -> Iterator[Any]:
        """Yields the model once no other call runs; reports progress, and ends the work if the call is cancelled."""
        steps = 0

        def report(message: str) -> None:
            nonlocal steps
            steps += 1
            from_thread.check_cancelled()
            from_thread.run(ctx.report_progress, steps, None, message)

        def watch(kind: str, done: int, total: int | None) -> None:
            report(f"{kind}: {done:,}" + ("" if total is None else f" of {total:,}"))

        while not self._running.acquire(timeout=_PATIENCE):
            from_thread.check_cancelled()
        try:
            report("loading and certifying the model")
            hooked = self.models.load(model)
            report("measuring")
            with watched(watch):
                yield hooked
        except AttnmechError as error:
            raise ToolError(str(error)) from error
        finally:
            self._running.release()

    def outputs(self, names: Sequence[str] | None, suffixes: Sequence[str] = SUFFIXES) -> Outputs:
        """The files of a call; raises `ToolError` for one that cannot be written."""
        try:
            outputs = Outputs([self.folders.file(name) for name in names or ()])
            for path in outputs.paths:
                if path.exists():
                    raise ToolError(f"{path} exists; name another file in `out`.")
            outputs.check(suffixes, source=None)
        except AttnmechError as error:
            raise ToolError(str(error)) from error
        return outputs

    def corpus(self, file: str, column: str | None, count: int) -> list[str]:
        """The first documents of a file, each cut to the length that a text may have."""
        from ...runs.corpus import Corpus

        return [text[:MOST_CHARACTERS] for text in islice(Corpus(self.folders.file(file), column=column), count)]

    def _inputs(self, asked: Asked) -> list[str] | None:
        if asked.texts is not None and asked.file is not None:
            raise ToolError("expected `texts` or `file`; got both. Leave one out.")
        return asked.texts if asked.file is None else self.corpus(asked.file, asked.column, asked.documents)

    def _pictured(self, hooked: Any, texts: Sequence[str] | None, images: Sequence[str]) -> Any:
        if texts is None or len(texts) != 1:
            raise ToolError(f"`images` belong to one text; got {len(texts or ())}.")
        return with_images(hooked, texts[0], [self.folders.file(image) for image in images])

    def _write(self, outputs: Outputs, result: Any, table: Any, **others: Any) -> None:
        """Writes the files of a call if their places are still free and still in the folders."""
        for path in outputs.paths:
            if self.folders.file(str(path)) != path or path.exists():
                raise ToolError(f"{path} has changed since the call began; name another file in `out`.")
        outputs.write(table, {".html": result.write_html, **others})

    def _answer(
        self, command: str, hooked: Any, result: Any, shown: Rows, asked: Asked, *further: str, named: bool = True
    ) -> CallToolResult:
        self._write(asked.outputs, result, result.by_head(), **{".safetensors": result.save})
        summary = summary_of(command, hooked, result, asked.outputs, shown, *further)
        if not named:
            summary = replace(summary, notes=[*summary.notes, f"No texts were named: {_READ_BY_DEFAULT[command]}."])
        return _answer(summary, asked.rows, result.save_figure if asked.picture else None)


def _answer(summary: Summary, rows: int, draw: "Callable[[Path], Path] | None" = None) -> CallToolResult:
    """An answer of bounded size, with a picture that `draw` writes: long sentences are cut, and rows left out."""
    pictures: list[ImageContent] = []
    notes = list(summary.notes)
    if draw is not None:
        try:
            with TemporaryDirectory() as folder:
                data = base64.b64encode(draw(Path(folder) / "figure.png").read_bytes()).decode("ascii")
            pictures.append(ImageContent(type="image", data=data, mime_type="image/png"))
        except AttnmechError as error:
            notes.append(f"No picture: {error}")
    summary = replace(summary, findings=_shortened(summary.findings), notes=_shortened(notes))
    answer = as_object(summary, rows)
    text = json.dumps(answer, ensure_ascii=False, allow_nan=False)
    while len(text) > MAX_ANSWER and (kept := len(answer["table"]["rows"])):
        answer = as_object(summary, kept // 2)
        text = json.dumps(answer, ensure_ascii=False, allow_nan=False)
    if len(text) > MAX_ANSWER:
        raise ToolError(f"the answer has more than {MAX_ANSWER:,} characters; name fewer files or texts.")
    return CallToolResult(content=[TextContent(type="text", text=text), *pictures], structured_content=answer)


def _shortened(sentences: Sequence[str]) -> list[str]:
    return [text if len(text) <= 2000 else f"{text[:1999]}…" for text in sentences[:12]]


def _pairs(heads: Sequence[Head] | None) -> Any:
    return "all" if heads is None else [(head.layer, head.head) for head in heads]
