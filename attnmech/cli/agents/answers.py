"""Defines the JSON object that `--json` prints and that tools answer; docs/schema/answer.json is its schema."""

from typing import Literal, TypeAlias

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
        "report", "atlas", "focus", "drift", "heads", "embed", "ablate", "null", "check", "explain", "patch", "confirm",
        "search",
    ] = Field(description="What was asked.")  # fmt: skip
    model: str = Field(description="The model, its sizes and its certificate in one line.")
    certificate: Proof
    findings: list[str] = Field(description="Sentences, the most important first.")
    notes: list[str] = Field(description="What was cut or left out.")
    table: Table
    files: list[str] = Field(description="The absolute paths of the files written.")
    ok: bool | None = Field(None, description=KEYS["ok"])
    points: list[Point] | None = Field(None, description=KEYS["points"])


def schema() -> dict[str, object]:
    """The JSON schema of an answer."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:attnmech:answer:{VERSION}",
        **Answer.model_json_schema(),
    }
