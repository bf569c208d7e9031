"""BigBird: sparse attention is refused, whatever the config says; full attention is read like any other."""

from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from torch import Tensor

import attnmech as am
from attnmech.errors import UnsupportedModelError


def big_bird(attention_type: str = "original_full") -> Any:
    return models.randomised(models.big_bird(attention_type=attention_type))


def texts(length: int = 41) -> dict[str, Tensor]:
    """Texts longer than the reach of sparse attention; the second is padded."""
    real = torch.ones(2, length, dtype=torch.long)
    real[1, length - 6 :] = 0
    ids = torch.randint(3, 43, (2, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": real}


def outputs(model: Any, length: int = 41) -> Any:
    with torch.no_grad():
        return model(**texts(length))


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
