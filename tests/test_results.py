"""All results: files are written whole or not at all, and are read back without a model."""

import json
from pathlib import Path

import models
import pytest
from safetensors import safe_open

import attnmech as am


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
