"""The JSON schemas of docs/schema refuse what attnmech does not write. That they fit what it writes is checked by all
tests that save a result (conftest.py), by those of the command line, and by those of the tools for agents.
"""

import json
from pathlib import Path
from typing import Any

import models
import pytest
from safetensors import safe_open
from schemas import schema, script

import attnmech as am

TEXTS = ["Anna sang of shells.", "Tom gave an old anchor to Clara."]


def test_the_schemas_are_what_the_script_makes() -> None:
    """A kind of result that is newer than the file joins it when the script is run, at the latest for a release."""
    assert schema("answer").schema == script().SCHEMAS["answer"]()
    stored, kinds = schema("result").schema, script().saved_kinds()
    known = stored["properties"]["kind"]["enum"]
    assert stored == script().result_schema({name: kinds[name] for name in known})
    assert {"HeadEffects", "HeadClaim", "QKDirections", "MeanQK"} <= set(known)
    for name in ("answer", "result"):
        assert schema(name).schema["$id"] == f"urn:attnmech:{name}:1"


def header_of(result: Any, path: Path) -> dict[str, Any]:
    with safe_open(result.save(path), framework="pt") as file:
        header: dict[str, Any] = json.loads(file.metadata()["attnmech"])
        return header


def test_damaged_headers_do_not_fit(tmp_path: Path) -> None:
    model, known = models.demo(), schema("result")
    one, other = (am.ablate_heads(model, TEXTS[:count], heads=[(0, 1)]) for count in (2, 1))
    header = header_of(one, tmp_path / "one.safetensors")
    assert known.is_valid(header) and header["version"] == 1
    facts, origin = header["facts"], header["provenance"]
    damaged = [
        *({key: value for key, value in header.items() if key != left} for left in header),
        *(header | {key: 7} for key in ("kind", "facts", "provenance", "same_as")),
        header | {"version": 2},
        header | {"kind": "HeadClaim"},
        *(header | {"facts": {key: value for key, value in facts.items() if key != left}} for left in facts),
        *(header | {"facts": facts | {key: {"a": 0}}} for key in facts),
        header | {"facts": facts | {"more": 1}},
        *(header | {"provenance": {key: value for key, value in origin.items() if key != left}} for left in origin),
    ]
    assert len(damaged) > 30 and not any(map(known.is_valid, damaged))
    difference = header_of(one - other, tmp_path / "difference.safetensors")
    assert known.is_valid(difference) and "facts" not in difference
    assert not known.is_valid(difference | {"difference": difference["difference"][:1]})
    difference["difference"][1]["facts"]["layers"] = "all"
    assert not known.is_valid(difference)


def test_damaged_answers_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    known = schema("answer")
    answer = {
        "version": 1, "command": "focus", "model": "demo", "certificate": {"ok": True, "verdict": "certified"},
        "findings": [], "notes": [], "files": [],
        "table": {"title": "Heads", "units": {"p": "mean"}, "rows": [{"layer": 0, "p": None}], "rows_in_all": 1},
    }  # fmt: skip
    assert known.is_valid(answer) and known.is_valid(answer | {"more": "keys may be added"})
    damaged = [
        *({key: value for key, value in answer.items() if key != left} for left in answer),
        *(answer | {key: {"a": []}} for key in answer),
        answer | {"version": 2},
        answer | {"table": answer["table"] | {"rows": [{"layer": {"a": 1}}]}},
    ]
    assert not any(map(known.is_valid, damaged))


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    from attnmech.results.tensor_file import read_tensors, write_tensors

    path = am.attention_focus(models.demo(), TEXTS[0]).save(tmp_path / "focus.safetensors")
    tensors, header = read_tensors(path)
    assert repr(am.load_result(write_tensors(path, tensors, {k: v for k, v in header.items() if k != "version"})))
    write_tensors(path, tensors, header | {"version": 2})
    with pytest.raises(am.errors.InputError, match=r"has the file version 2; this attnmech reads version 1\. Read it"):
        am.load_result(path)
