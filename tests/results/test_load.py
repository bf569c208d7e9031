"""`load_result` returns every kind of result as its own class, and explains why other files are refused."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import models
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import attnmech as am
from attnmech.errors import InputError
from attnmech.results.result import Result


def subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def test_the_class_is_the_one_that_was_saved(tmp_path: Path) -> None:
    model, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    updates = am.residual_updates(model, ids)
    for result in (am.decompose_scores(model, ids), am.attention_focus(model, ids), updates, updates.blocks):
        loaded = am.load_result(result.save(tmp_path / "result"))
        assert type(loaded) is type(result) and loaded.provenance == result.provenance
        assert loaded.to_frame().equals(result.to_frame())


def test_every_kind_that_can_be_saved_is_in_am_results() -> None:
    """Classes without subclasses are what calls and properties return; the others hold shared code."""
    for name in am.results.__all__:
        getattr(am.results, name)
    leaves = {
        kind
        for kind in subclasses(Result)
        if kind.__module__.startswith("attnmech.") and not kind.__subclasses__() and not inspect.isabstract(kind)
    }
    assert len(leaves) > 25
    assert {kind for kind in leaves if getattr(am.results, kind.__name__, None) is not kind} == set()


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    """Changed bytes stay spaces, digits and letters where they are, so that most headers stay readable."""
    path = tmp_path / "file"
    model, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    focus = am.attention_focus(model, ids)
    for save, load in (
        (focus.save, am.load_result),
        ((focus - focus).save, am.load_result),
        (am.Intervention.replace([(0, 1)], am.mean_z(model, ids)).save, am.Intervention.load),
    ):
        whole = save(path).read_bytes()
        assert load(path)
        for place in range(0, len(whole), max(1, len(whole) // 400)):
            damaged = bytearray(whole)
            damaged[place] = {0x20: 0x0A, 0x39: 0x38}.get(whole[place], whole[place] ^ 1)
            path.write_bytes(damaged)
            with pytest.raises(InputError, match=r"is damaged: its content|is not a result|hold an interv"):
                load(path)
        for content in (whole[:-8], whole + b" ", whole.replace(b'"xxh3_128":', b'"xxh3_129":')):
            path.write_bytes(content)
            with pytest.raises(InputError):
                load(path)


def test_files_of_older_versions_have_no_digest(tmp_path: Path) -> None:
    path = am.attention_focus(models.hooked("gpt2"), models.token_ids("gpt2")).save(tmp_path / "file")
    with safe_open(path, framework="pt") as file:
        header = file.metadata()["attnmech"]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    again = am.load_result(path)
    save_file(tensors, path, metadata={"attnmech": header})
    assert am.load_result(path).to_frame().equals(again.to_frame())


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(InputError, match=r"^there is no file .*file\.$"):
        am.load_result(path)
    path.write_text("no tensors")
    with pytest.raises(InputError, match="is not a result that attnmech saved"):
        am.load_result(path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(InputError, match="is not a result that attnmech saved"):
        am.load_result(path)
    am.Intervention.zero("all").save(path)
    with pytest.raises(InputError, match=r"holds an Intervention, not a result; read it with am\."):
        am.load_result(path)


@pytest.mark.parametrize("kind", ["HeadAffects", "Activations", "load", "__class__"])
def test_a_kind_that_is_no_result_is_refused(kind: str, tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "file", metadata={"attnmech": json.dumps({"kind": kind})})
    with pytest.raises(InputError, match=rf"holds '{kind}', which is not in am\.results; read it with the version"):
        am.load_result(tmp_path / "file")
