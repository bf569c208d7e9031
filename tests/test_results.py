"""All results: files are written whole or not at all, and are read back without a model."""

import json
from pathlib import Path

import models
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import attnmech as am
from attnmech.basics.files import check_writable, writing
from attnmech.errors import InputError, OutputError


@pytest.fixture(scope="module")
def split() -> am.results.ScoreDecomposition:
    return am.decompose_scores(models.hooked("bloom"), models.token_ids("bloom"))


def test_provenance_comes_back(split: am.results.ScoreDecomposition, tmp_path: Path) -> None:
    path = split.save(tmp_path / "scores.safetensors")
    loaded = am.load_result(path)
    assert loaded.provenance == split.provenance
    assert loaded.provenance.weights == models.hooked("bloom").weights_hash
    assert set(loaded.provenance.versions) == {"attnmech", "torch", "transformers", "transformer-lens", "python"}


def test_a_file_holds_no_tensor_twice(split: am.results.ScoreDecomposition, tmp_path: Path) -> None:
    path = split.save(tmp_path / "scores.safetensors")
    with safe_open(path, framework="pt") as file:
        same = json.loads(file.metadata()["attnmech"])["same_as"]
        names = set(file.keys())
    assert same["parts.1.visible"] == "parts.0.visible"
    assert not names & set(same)


def test_what_is_no_result_is_refused(split: am.results.ScoreDecomposition, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        am.load_result(tmp_path / "nothing")
    other = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(2)}, other)
    with pytest.raises(InputError, match="is not a result that attnmech saved"):
        am.load_result(other)
    text = tmp_path / "text"
    text.write_text("no tensors")
    with pytest.raises(InputError, match="is not a result that attnmech saved"):
        am.load_result(text)


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    target = tmp_path / "result"
    target.write_text("before")

    def fail_half_way() -> None:
        with writing(target) as draft:
            draft.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]
    with writing(target) as draft:
        draft.write_text("after")
    assert target.read_text() == "after"


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="it is a folder"):
        check_writable(tmp_path)
    with pytest.raises(OutputError, match="there is no folder"):
        check_writable(tmp_path / "a" / "b")
    with pytest.raises(OutputError, match="cannot write"):
        check_writable(Path("/proc/result"))
    assert list(tmp_path.iterdir()) == []
