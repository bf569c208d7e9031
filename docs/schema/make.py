"""Writes the JSON schemas of attnmech's answers and files from its code: `python docs/schema/make.py`."""

import dataclasses
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import attnmech as am
from attnmech.cli.agents import arguments
from attnmech.results.result import FILE_VERSION, Result
from attnmech.results.table import TextResult

FOLDER: Final = Path(__file__).parent

PLAIN: Final = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
STRINGS: Final = {"type": "array", "items": {"type": "string"}}


def value_schema(hint: Any) -> dict[str, Any]:
    """The schema of a field by its annotation, as `attnmech/results/codec.py` writes it."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    if hint is am.results.Activations or hasattr(hint, "dim_str") or getattr(hint, "__name__", "") == "Tensor":
        return {"type": "null", "description": "a tensor of the file, under the path of this field"}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, UnionType):
        schemas = [value_schema(each) for each in inner]
        return {"anyOf": [each for n, each in enumerate(schemas) if each not in schemas[:n]]}
    if dataclasses.is_dataclass(hint):
        return fields_schema(hint)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": value_schema(inner[1])}
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return {"type": "array", "items": value_schema(inner[0])}
        return {"type": "array", "prefixItems": [value_schema(each) for each in inner], "minItems": len(inner),
                "maxItems": len(inner)}  # fmt: skip
    return {}


def fields_schema(kind: Any) -> dict[str, Any]:
    """The schema of the saved fields of a dataclass."""
    hints = get_type_hints(kind)
    saved = [each.name for each in dataclasses.fields(kind) if each.metadata.get("saved", True)]
    names = [name for name in saved if name != "provenance"]
    return {
        "type": "object",
        "properties": {name: value_schema(hints[name]) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def provenance_schema() -> dict[str, Any]:
    """The schema of the origin of a result."""
    text = {"type": "string"}
    properties = {
        "model": text, "weights": text, "inputs": text, "edits": STRINGS, "tokens": {"type": "array", "items": STRINGS},
        "options": {"type": "object"}, "versions": {"type": "object", "additionalProperties": text},
    }  # fmt: skip
    properties["copies"] = {"type": "array", "items": {"type": "integer"}}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def saved_kinds() -> dict[str, type[Result]]:
    """The classes of results whose `save` writes a file, by name."""
    named = {name: getattr(am.results, name) for name in am.results.__all__}
    return {
        name: kind
        for name, kind in sorted(named.items())
        if isinstance(kind, type) and issubclass(kind, Result) and not inspect.isabstract(kind)
    }


def result_schema(kinds: Mapping[str, type[Result]] | None = None) -> dict[str, Any]:
    """The schema of the JSON in the metadata of a result's safetensors file, under the key `attnmech`: by default, of
    results of all kinds.
    """
    kinds = saved_kinds() if kinds is None else kinds
    measured = {"facts": True, "provenance": {"$ref": "#/$defs/provenance"}}
    part = {"type": "object", "properties": measured, "required": list(measured)}
    rules = []
    for name, kind in kinds.items():
        facts = {"facts": {"$ref": f"#/$defs/{name}"}}
        parts = {"difference": {"items": {"properties": facts}}} if issubclass(kind, TextResult) else {}
        rules.append({"if": {"properties": {"kind": {"const": name}}}, "then": {"properties": facts | parts}})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:attnmech:result:{FILE_VERSION}",
        "title": "A saved result",
        "description": "The JSON under the key `attnmech` of the metadata of a safetensors file that `.save` wrote. "
        "Tensors of the file stand at the paths of the fields that are null here. Beside it, under `xxh3_128`, is the "
        "XXH3 (128 bits) of the whole file with 32 zeros in its own place; files of older versions have none.",
        "type": "object",
        "properties": {
            "version": {"const": FILE_VERSION},
            "kind": {"enum": list(kinds)},
            "same_as": {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "For each copy of a tensor, the path at which it is stored.",
            },
            **measured,
            "difference": {
                "type": "array",
                "items": part,
                "minItems": 2,
                "maxItems": 2,
                "description": "The parts of a difference; the paths of their tensors begin with 0 or 1 and a space.",
            },
        },
        "required": ["version", "kind", "same_as"],
        "oneOf": [{"required": list(measured)}, {"required": ["difference"]}],
        "allOf": rules,
        "$defs": {"provenance": provenance_schema()} | {name: fields_schema(kind) for name, kind in kinds.items()},
    }


SCHEMAS: Final = {"answer": arguments.schema, "result": result_schema}


def main() -> None:
    """Writes all schemas."""
    for name, schema in SCHEMAS.items():
        (FOLDER / f"{name}.json").write_text(
            json.dumps(schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
