"""A model is proven once; whatever its checks depend on is part of what a certificate is found by."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import merged
import models
import pytest
import torch

import attnmech as am
from attnmech.errors import CertificateError, InputError
from attnmech.model.proof import certify, remembered

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(remembered.FOLDER, str(tmp_path / "certificates"))
    return tmp_path / "certificates"


def is_proven(model: Any, **options: Any) -> bool:
    """Whether a load made the proof, rather than finding an earlier one."""
    return am.load(model, **options).certificate.proven_on == ""


@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama", "bert", "t5", "vit"])
def test_a_second_load_has_the_certificate_of_the_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = am.load(models.fresh(name)).certificate
    with monkeypatch.context() as patched:
        patched.delattr(certify.Statements, "of_model")
        second = am.load(models.fresh(name)).certificate
    assert first.proven_on == "" and second.proven_on > "2026"
    assert (second.checks, second.lens, second.edited) == (first.checks, first.lens, first.edited)
    assert second.weights == first.weights and second.verdict == first.verdict


def changed_weight(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] += 1e-6


def changed_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 1.001
    model.model.rotary_emb.original_inv_freq *= 1.001


def other_eps(model: Any) -> None:
    model.config.rms_norm_eps *= 2


def own_eps(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon *= 2


def other_function(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()


def hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda *_: None)


def own_method(model: Any) -> None:
    layer = model.model.layers[0]
    layer.forward = layer.forward


def own_class(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("Mine", (type(mlp),), {})


def training(model: Any) -> None:
    model.model.layers[0].train()


@pytest.mark.parametrize(
    "change",
    [changed_weight, changed_buffer, other_eps, own_eps, other_function, hook, own_method, own_class, training],
)
def test_a_changed_model_is_proven(change: Callable[[Any], None]) -> None:
    assert is_proven(models.fresh("llama"))
    model = models.fresh("llama")
    change(model)
    assert is_proven(model)
    assert not is_proven(models.fresh("llama"))


def test_another_precision_is_proven() -> None:
    assert is_proven(models.fresh("llama"))
    assert is_proven(models.fresh("llama"), dtype=torch.float64)
    assert not is_proven(models.fresh("llama"), dtype=torch.float64)


def test_a_patched_class_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_proven(models.fresh("gpt2"))
    kind = type(models.fresh("gpt2").transformer.h[0].mlp)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, states: forward(self, states))
    assert is_proven(models.fresh("gpt2"))


def test_other_source_of_attnmech_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_proven(models.fresh("gpt2"))
    monkeypatch.setattr(remembered, "_source", lambda: "edited")
    assert is_proven(models.fresh("gpt2"))


def test_the_output_is_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_proven(models.fresh("gpt2"))
    output = certify.Statements.output
    monkeypatch.setattr(certify.Statements, "output", lambda self, batch: output(self, batch) + 0.01)
    assert is_proven(models.fresh("gpt2"))


def test_a_damaged_entry_is_made_again(folder: Path) -> None:
    assert is_proven(models.fresh("gpt2"))
    (entry,) = folder.iterdir()
    written = entry.read_bytes()
    for place in range(0, len(written), len(written) // 9):
        entry.write_bytes(written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :])
        assert is_proven(models.fresh("gpt2"))
        assert not is_proven(models.fresh("gpt2"))
    entry.write_bytes(b"")
    assert is_proven(models.fresh("gpt2"))


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.write_text("a file")
    assert is_proven(models.fresh("gpt2"))
    assert is_proven(models.fresh("gpt2"))


def test_the_proof_is_made_where_it_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_proven(models.fresh("gpt2"))
    assert is_proven(models.fresh("gpt2"), certify="again")
    assert is_proven(models.fresh("gpt2"), certify="full")
    monkeypatch.setenv(remembered.FOLDER, "")
    assert is_proven(models.fresh("gpt2"))
    assert len(list(folder.iterdir())) == 1


def test_how_pictures_are_merged_is_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text, plain = merged.inputs_of(merged.DEEP, 0, 9), merged.model_of("qwen3_vl", merged.DEEP)
    logits = am.load(plain).run(text).logits
    for again in (False, True):
        second = am.load(plain, certify="again" if again else "short")
        with monkeypatch.context() as patched:
            if not again:
                patched.delattr(certify.Statements, "of_model")
            torch.testing.assert_close(second.run(text).logits, logits)
        assert bool(second.prove_merged.certificates[-1].proven_on) != again  # type: ignore[attr-defined]
        assert "pictures after L0" in am.decompose_by_source(second, text).sources
        with pytest.raises(InputError, match="mm_token_type_ids"):
            second.run({name: value for name, value in text.items() if name != "mm_token_type_ids"})
    wrong = am.load(plain)
    wrong.base.register_forward_pre_hook(
        lambda _, args, inputs: (args, inputs | {"pixel_values": 0 * inputs["pixel_values"]}), with_kwargs=True
    )
    with pytest.raises(CertificateError, match="is not proven"):
        wrong.run(text)
