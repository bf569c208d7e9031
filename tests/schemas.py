"""The JSON schemas of docs/schema, for tests of what attnmech writes."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from jsonschema import Draft202012Validator

FOLDER = Path(__file__).parents[1] / "docs" / "schema"


@cache
def script() -> ModuleType:
    from comparing import module_of  # loads the package, which `conftest.py` must not do before it is checked

    return module_of(FOLDER / "make.py", "make_schemas")


@cache
def schema(name: str) -> Draft202012Validator:
    """The validator of a schema by its file's name."""
    written = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(written)
    return Draft202012Validator(written)


def strict(text: str) -> Any:
    """The value of JSON text without NaN and infinities, which the standard does not have."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def checked(write: Callable[..., Path]) -> Callable[..., Path]:
    """`write_tensors`, which first validates the header of a result of a kind in the stored schema."""

    def checking(path: Any, tensors: Any, header: Any) -> Path:
        written = strict(json.dumps(header))
        if header.get("kind") in schema("result").schema["properties"]["kind"]["enum"]:
            schema("result").validate(written)
        return write(path, tensors, header)

    return checking


def are_sentences(findings: list[str]) -> bool:
    """Whether every finding is a sentence, without the name of a class before it."""
    return bool(findings) and all(
        re.fullmatch(r"(?![A-Za-z]+\()[A-Z0-9].*\.", finding, re.DOTALL) for finding in findings
    )
