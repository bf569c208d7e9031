"""The types of the tools' arguments and answers, with the bounds and descriptions that agents see.

An answer is the object that `--json` prints; docs/schema/answer.json is its schema.
"""

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from ..terminal import KEYS, VERSION

Cell: TypeAlias = bool | int | float | str | None


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True)


class Proof(_Entry):
    """The state of the model's certificate."""

    ok: bool = Field(description="Whether every check of the model holds.")
    verdict: str = Field(description="The outcome of the checks in one sentence.")


class Table(_Entry):
    """Rows, the most important first."""

    title: str = Field(description="What the rows are, and how they are sorted.")
    units: dict[str, str] = Field(description="The units of columns.")
    rows: list[dict[str, Cell | list[Cell]]] = Field(description="The values by column; null for a missing number.")
    rows_in_all: int = Field(ge=0, description="The number of rows before any were left out.")


class Point(_Entry):
    """An activation point of the model."""

    point: str = Field(description="Its name.")
    shape: str
    meaning: str
    absent: str | None = Field(description="Why this model does not have it.")
    refused: str | None = Field(description="Why its values are not trusted.")


class Answer(_Entry):
    """What a command or a tool found."""

    version: Literal[1] = Field(description="The version of this schema.")
    command: Literal[
        "report", "atlas", "focus", "drift", "heads", "embed", "ablate", "null", "kv", "check", "explain", "patch",
        "confirm", "search", "predict", "generate", "compare",
    ] = Field(description="What was asked.")  # fmt: skip
    model: str = Field(description="The model, its sizes and its certificate in one line.")
    certificate: Proof
    findings: list[str] = Field(description="Sentences, the most important first.")
    notes: list[str] = Field(description="What was cut or left out.")
    table: Table
    files: list[str] = Field(description="The absolute paths of the files written.")
    ok: bool | None = Field(None, description=KEYS["ok"])
    points: list[Point] | None = Field(None, description=KEYS["points"])
    next: list[dict[str, str | float]] | None = Field(
        None, description="The most probable next tokens; `other` is the probability with edits or after `other`."
    )
    python: str | None = Field(None, description="Python that makes the edits, and compares the answers.")


def schema() -> dict[str, object]:
    """The JSON schema of an answer."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:attnmech:answer:{VERSION}",
        **Answer.model_json_schema(),
    }


ModelName = Annotated[str | None, Field(description="A model that this server offers; the first if left out.")]
MOST_CHARACTERS: Final = 20_000
"""The longest text; documents of a corpus are cut to it."""
Text = Annotated[str, Field(max_length=MOST_CHARACTERS)]
Texts = Annotated[list[Text] | None, Field(min_length=1, max_length=64, description="The texts to read.")]
Images = Annotated[
    list[Annotated[str, Field(max_length=4096)]] | None,
    Field(
        min_length=1,
        max_length=16,
        description="Pictures in an allowed folder, for a model of text and images: one text then reads them where it "
        "has their marks, or after them.",
    ),
]
CorpusFile = Annotated[
    str | None,
    Field(
        max_length=4096,
        description="Instead of texts: a file in an allowed folder, with one document per line (.txt), texts or "
        "objects in JSON (.jsonl, .json), or a table (.csv, .tsv, .parquet).",
    ),
]
Column = Annotated[
    str | None,
    Field(
        max_length=200,
        description="The column or JSON key of the texts in the file; by default text, or the only one of strings.",
    ),
]
Documents = Annotated[int, Field(ge=1, le=10_000, description="The number of documents read from the file.")]
RowLimit = Annotated[int, Field(ge=1, le=200, description="The largest number of rows in the answer.")]
Out = Annotated[
    list[Annotated[str, Field(max_length=4096)]] | None,
    Field(
        max_length=4,
        description="Files to write in an allowed folder, by suffix: .html (page), .csv or .parquet (table), "
        ".safetensors (result for Python). Existing files are not replaced.",
    ),
]
Picture = Annotated[bool, Field(description="Whether to return the figure as a PNG too.")]
Index = Annotated[int, Field(ge=0, le=1_000_000)]
Prompt = Annotated[str, Field(min_length=1, max_length=4000)]
Word = Annotated[str, Field(max_length=200)]
Words = Annotated[list[Word] | None, Field(min_length=1, max_length=64)]
Metric = Literal["loss", "kl", "logit_difference", "accuracy"]
Method = Annotated[
    Literal["zero", "mean", "resample"],
    Field(description="What replaces a head's z: 0, its mean over the texts, or another text's z."),
]


class Head(BaseModel):
    """A head by its layer and its number in the layer, both from 0."""

    layer: Index
    head: Index


class HeadEdit(Head):
    """A head, and what happens to it."""

    way: Literal["zero", "mean", "first", "patch"] = Field(
        description="z becomes 0, its mean over the text, or (patch) that of the other prompt; first: the head attends "
        "to the first token alone."
    )


class Edit(BaseModel):
    """Edits of heads, all at once; the answer compares the runs with and without them."""

    model_config = ConfigDict(extra="forbid")
    heads: list[HeadEdit] = Field(min_length=1, max_length=64)
    prompt: str = Field("", max_length=4000, description="Of patches: the other prompt, with as many tokens.")
    position: Index | None = Field(None, description="Of patches: the only token changed; all if left out.")
    stack: Word = Field("", description="Of a model with several stacks: that of the heads.")


class TestCase(BaseModel):
    """One text of a task."""

    __test__ = False

    prompt: Text
    answer: Annotated[str | None, Field(max_length=200, description="The right next token, with its space.")] = None
    against: Annotated[str | None, Field(max_length=200, description="The token compared with the answer.")] = None
    group: Annotated[str, Field(max_length=200, description="The template of the text. At least six are needed.")]
