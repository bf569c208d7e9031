"""The types of the tools' arguments, with the bounds and descriptions that agents see."""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field

ModelName = Annotated[str | None, Field(description="A model that this server offers; the first if left out.")]
MOST_CHARACTERS: Final = 20_000
"""The longest text; documents of a corpus are cut to it."""
Text = Annotated[str, Field(max_length=MOST_CHARACTERS)]
Texts = Annotated[list[Text] | None, Field(min_length=1, max_length=64, description="The texts to read.")]
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


class TestCase(BaseModel):
    """One text of a task."""

    __test__ = False

    prompt: Text
    answer: Annotated[str | None, Field(max_length=200, description="The right next token, with its space.")] = None
    against: Annotated[str | None, Field(max_length=200, description="The token compared with the answer.")] = None
    group: Annotated[str, Field(max_length=200, description="The template of the text. At least six are needed.")]
