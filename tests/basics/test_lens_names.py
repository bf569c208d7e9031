"""Errors about TransformerLens's names give attnmech's names, and these names exist."""

import re
import subprocess
import sys

import pytest
import torch

import attnmech as am
from attnmech.basics.lens_names import OF_CACHE, OF_MODEL, OF_PACKAGE, OTHERS
from attnmech.errors import InputError

TEXT = "Anna gave an old anchor to Tom. Anna"


@pytest.fixture(scope="module")
def model() -> am.HookedModel:
    return am.load()


@pytest.mark.parametrize("name", sorted(OF_MODEL))
def test_a_name_of_a_model(model: am.HookedModel, name: str) -> None:
    with pytest.raises(AttributeError, match=f"TransformerLens's `{name}` is ") as raised:
        getattr(model, name)
    assert "model." in str(raised.value) or "am." in str(raised.value) or "not needed" in str(raised.value) or (
        "to_frame" in str(raised.value)
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(OF_CACHE))
def test_a_name_of_a_cache(model: am.HookedModel, name: str) -> None:
    if name in ("items", "keys"):
        assert not hasattr(am.results.Activations, name)
    with pytest.raises(AttributeError, match=f"TransformerLens's `{name}` is "):
        getattr(model.run(TEXT), name)


@pytest.mark.parametrize("name", sorted(OF_PACKAGE))
def test_a_name_of_the_package(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'attnmech' has no '{name}'; TransformerLens's `{name}` is "):
        getattr(am, name)


def test_other_names_that_people_try(model: am.HookedModel) -> None:
    acts, result = model.run(TEXT), am.ablate_heads(model, TEXT, [(0, 1)])
    owners = {"attnmech": am, "HookedModel": model, "Intervention": am.Intervention, "Activations": acts}
    owners["View"] = acts.show("logits")
    for owner, names in OTHERS.items():
        for name in names:
            with pytest.raises(AttributeError, match=f"has no '{name}'; `{name}` is `"):
                getattr(owners.get(owner, result), name)
    with pytest.raises(AttributeError, match="has no 'compare_models'; try `compare`"):
        _ = am.compare_models
    with pytest.raises(AttributeError, match=re.escape("a point is an entry: acts['pattern']")):
        _ = acts.pattern


def test_no_name_of_ours_is_in_the_way() -> None:
    assert not [name for name in OF_MODEL if hasattr(am.HookedModel, name)]
    assert not [name for name in OF_PACKAGE if name in am.__all__]


def test_what_is_advised_works(model: am.HookedModel) -> None:
    """Python can evaluate the expression with which each hint begins."""
    acts = model.run(TEXT, points=["pattern", "result", "z"])
    names = {
        "am": am, "model": model, "acts": acts, "text": TEXT, "texts": [TEXT, "Tom lost it."], "ids": [100, 101],
        "id": 100, "token": " Tom", "layer": 0, "f": lambda value: value,
        "clean": "Anna sang to Tom", "corrupted": "Emma sang to Tom", "heads": [(3, 1)],
        "vector": torch.ones(model.d_model),
    }  # fmt: skip
    tried = 0
    others = {line for owner, names in OTHERS.items() if owner != "result" for line in names.values()}
    for instead in [*OF_MODEL.values(), *OF_CACHE.values(), *others]:
        for code in re.findall(r"`([^`]+)`", instead):
            if any(
                part in code for part in ("am.load(", "[...]", "with model", "hf_model", "am.path_patch", "acts = ")
            ):
                continue
            if not code.startswith(("model", "am", "acts")):
                continue
            eval(code, names)
            tried += 1
    assert tried > 40


def test_a_model_is_run_by_name(model: am.HookedModel) -> None:
    with pytest.raises(
        TypeError, match=re.escape("model.run(text).logits gives the logits, model.loss(text) the loss.")
    ):
        model(TEXT)


def test_a_hook_of_transformer_lens_is_refused_before_it_runs(model: am.HookedModel) -> None:
    def zeroed(value: torch.Tensor, hook: object) -> torch.Tensor:
        return value * 0

    says = re.escape(
        "with the signature (value: torch.Tensor, hook: object) -> torch.Tensor. TransformerLens's hooks take"
    )
    with pytest.raises(InputError, match=says), model.hooks({("z", 2): zeroed}):
        pass
    with model.hooks({("z", 2): lambda value, factor=2.0: value * factor, ("z", 1): torch.relu}):
        model.run(TEXT)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("HookedTransformer", 'TransformerLens\'s `HookedTransformer` is `am.load("gpt2")`'),
        ("nonsense", "cannot import name 'nonsense' from 'attnmech'"),
    ],
)
def test_an_import_says_what_to_write(name: str, message: str) -> None:
    """In a separate process: checked annotations put a frame between the import and the package."""
    script = [sys.executable, "-c", f"from attnmech import {name}"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ImportError: ") and message in done.stderr
