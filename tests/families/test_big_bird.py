"""BigBird: full attention is read and certified; sparse attention is refused, whatever the config says."""

from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from torch import Tensor

import attnmech as am
from attnmech.errors import UnsupportedModelError

LAYERS, HEADS, D_HEAD = 2, 3, 7


def big_bird(attention_type: str = "original_full", kind: str = "ForMaskedLM", **options: Any) -> Any:
    """Sparse attention would see 4 · (5 + 2) = 28 tokens."""
    config = transformers.BigBirdConfig(
        vocab_size=43, hidden_size=HEADS * D_HEAD, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=26, max_position_embeddings=64, block_size=4, num_random_blocks=1,
        attention_type=attention_type, **options,
    )  # fmt: skip
    return models.randomised(getattr(transformers, f"BigBird{kind}")(config))


def texts(length: int = 41) -> dict[str, Tensor]:
    """Texts longer than the reach of sparse attention; the second is padded."""
    real = torch.ones(2, length, dtype=torch.long)
    real[1, length - 6 :] = 0
    ids = torch.randint(3, 43, (2, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": real}


def outputs(model: Any, length: int = 41) -> Any:
    with torch.no_grad():
        return model(**texts(length), output_attentions=True)


@pytest.mark.parametrize("options", [{}, {"kind": "ForCausalLM", "is_decoder": True}])
def test_full_attention_against_transformers(options: dict[str, Any]) -> None:
    """Logits and patterns, and logits with each head's columns of W_O zeroed."""
    model = am.load(big_bird(**options))
    assert model.certificate.ok, model.certificate
    assert model.causal == bool(options)
    plain, real = big_bird(**options), texts()["attention_mask"].bool()
    ours, theirs = model.run(texts(), ["logits", "pattern"]), outputs(plain)
    torch.testing.assert_close(ours.logits[real], theirs.logits[real], atol=3e-5, rtol=1e-4)
    for layer, pattern in enumerate(theirs.attentions):
        keep = real[:, None, :, None].expand_as(pattern)
        torch.testing.assert_close(ours["pattern", layer][keep], pattern[keep], atol=1e-5, rtol=1e-4)
    for layer, head in ((0, 1), (1, 2)):
        changed = big_bird(**options)
        columns = slice(D_HEAD * head, D_HEAD * (head + 1))
        changed.bert.encoder.layer[layer].attention.output.dense.weight.data[:, columns] = 0
        with model.intervene(am.Intervention.zero([(layer, head)])):
            logits = model.run(texts()).logits
        torch.testing.assert_close(logits[real], outputs(changed).logits[real], atol=3e-5, rtol=1e-4)


def test_sparse_attention_is_refused(tmp_path: Path) -> None:
    model = big_bird("block_sparse")
    assert model.bert.attention_type == "block_sparse"
    with pytest.raises(UnsupportedModelError, match="attention is sparse") as caught:
        am.load(model)
    assert "BigBirdForMaskedLM.from_pretrained(folder, attention_type='original_full')" in str(caught.value)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="attention is sparse"):
        am.load(tmp_path)
    # The remedy in the message.
    full = transformers.BigBirdForMaskedLM.from_pretrained(tmp_path, attention_type="original_full")
    found = am.load(full.eval())
    assert found.certificate.ok
    torch.testing.assert_close(found.run(texts()).logits[0], outputs(big_bird()).logits[0], atol=3e-5, rtol=1e-4)


def test_what_counts_is_what_runs_and_not_the_config() -> None:
    """On the first short text, transformers replaces sparse attention with full attention, permanently."""
    switched = big_bird("block_sparse")
    outputs(switched, length=20)
    assert switched.config.attention_type == "block_sparse" and switched.bert.attention_type == "original_full"
    found = am.load(switched)
    assert found.certificate.ok
    torch.testing.assert_close(found.run(texts()).logits[0], outputs(switched).logits[0], atol=3e-5, rtol=1e-4)
    back = big_bird("original_full")
    back.bert.set_attention_type("block_sparse")
    assert back.config.attention_type == "original_full"
    with pytest.raises(UnsupportedModelError, match="attention is sparse"):
        am.load(back)
