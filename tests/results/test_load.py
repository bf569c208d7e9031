"""`load_result` returns every kind of result as its own class, and explains why other files are refused."""

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import models
import pytest
import torch
from comparing import refuses
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import attnmech as am
from attnmech.errors import InputError
from attnmech.results.result import Result


def subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


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
    path = tmp_path / "file.safetensors"
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
            refuses(r"is damaged: its content|is not a result|hold an interv", load, path)
        for content in (whole[:-8], whole + b" ", whole.replace(b'"xxh3_128":', b'"xxh3_129":')):
            path.write_bytes(content)
            with pytest.raises(InputError):
                load(path)


def test_files_of_older_versions_have_no_digest(tmp_path: Path) -> None:
    path = am.attention_focus(models.hooked("gpt2"), models.token_ids("gpt2")).save(tmp_path / "file.safetensors")
    again = am.load_result(path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()["attnmech"]
    save_file(load_file(path), path, metadata={"attnmech": header})
    assert am.load_result(path).to_frame().equals(again.to_frame())


def of_kind(name: str) -> Callable[[Path], object]:
    header = {"attnmech": json.dumps({"kind": name})}
    return lambda path: save_file({"x": torch.zeros(2)}, path, metadata=header)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, r"^there is no file .*file\.safetensors\.$"),
        (lambda path: path.write_text("no tensors"), "is not a result that attnmech saved"),
        (lambda path: save_file({"x": torch.zeros(2)}, path), "is not a result that attnmech saved"),
        (am.Intervention.zero("all").save, r"holds an Intervention, not a result; read it with am\."),
        *((of_kind(kind), rf"holds '{kind}', which is not in am\.results; read it with the version")
          for kind in ("HeadAffects", "load", "__class__")),
    ],
)  # fmt: skip
def test_other_files_are_refused(write: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    write(tmp_path / "file.safetensors")
    refuses(message, am.load_result, tmp_path / "file.safetensors")


@pytest.fixture(scope="module")
def split() -> am.results.ScoreDecomposition:
    return am.decompose_scores(models.hooked("bloom"), models.token_ids("bloom"))


def test_provenance_comes_back(split: am.results.ScoreDecomposition, tmp_path: Path) -> None:
    loaded = am.load_result(split.save(tmp_path / "scores.safetensors"))
    assert loaded.provenance == split.provenance
    assert loaded.provenance.weights == models.hooked("bloom").weights_hash
    assert set(loaded.provenance.versions) == {"attnmech", "torch", "transformers", "transformer-lens", "python"}


def test_a_file_holds_no_tensor_twice(split: am.results.ScoreDecomposition, tmp_path: Path) -> None:
    with safe_open(split.save(tmp_path / "scores.safetensors"), framework="pt") as file:
        same = json.loads(file.metadata()["attnmech"])["same_as"]
        names = set(file.keys())
    assert same["parts.1.visible"] == "parts.0.visible"
    assert not names & set(same)
