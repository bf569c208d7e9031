"""The hash of a model's weights follows their current values, whatever changed them."""

import hashlib

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from attnmech.model.parts import hashes
from attnmech.model.parts.hashes import WeightsHash, model_hash, tensors_hash


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(7, 5))
        self.b = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.c = nn.Parameter(torch.randn(4, 6).T)
        self.none = nn.Parameter(torch.zeros(0))
        self.scalar = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))


def test_every_byte_counts_and_sha256_is_computed_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model, hashed, computed = Parts(), WeightsHash(), []
    monkeypatch.setattr(hashes, "tensors_hash", lambda tensors: (computed.append(1), tensors_hash(tensors))[1])
    before = hashed.of(model)
    assert hashed.of(model) == before and len(computed) == 1
    for name, parameter in model.named_parameters():
        for place in range(parameter.numel()):
            flat = parameter.data.T if name == "c" else parameter.data
            byte = flat.view(-1).view(torch.uint8)[place * parameter.element_size() :]
            byte[0] ^= 1
            assert hashed.of(model) == WeightsHash().of(model) != before, (name, place)
            byte[0] ^= 1
    assert hashed.of(model) == before


def test_against_sha256_of_each_tensor() -> None:
    x, a = torch.arange(6.0).view(2, 3), torch.arange(3)
    one, other = (hashlib.sha256(value.numpy().tobytes()).hexdigest() for value in (x, a))
    lines = f"a torch.int64 (3,) {other}\nx torch.float32 (2, 3) {one}"
    assert tensors_hash({"x": x, "a": a}) == hashlib.sha256(lines.encode()).hexdigest()


def test_what_a_device_sums_changes_with_every_bit_and_with_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "_AT_ONCE", 3 * hashes._ROW)

    def sums(value: torch.Tensor) -> list[int]:
        return torch.cat(list(hashes._row_sums([hashes._words(value)]))).tolist()

    for value in (torch.randn(130, 100), torch.randn(5).bfloat16(), torch.randn(3, 4).double(), torch.tensor(2.0)):
        before, flat = sums(value), value.view(-1).view(torch.uint8)
        assert sums(value) == before
        for place in {0, len(flat) // 2, len(flat) - 1}:
            for bit in range(8):
                flat[place] ^= 1 << bit
                assert sums(value) != before
                flat[place] ^= 1 << bit
        if value.ndim == 2:
            assert sums(-value) != before
            assert sums(value.T) == sums(value.T.contiguous()) != before
    assert sums(torch.eye(64)) != sums(torch.eye(64).roll(1, dims=0))


def test_what_a_device_sums_is_a_product_with_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "_ROW", 8)
    random = torch.randint(-(2**62), 2**62, (8,), generator=torch.Generator().manual_seed(0)).tolist()
    words = [torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32) for count in (5, 6)]
    numbers = [*words[0].tolist(), *words[1].tolist(), *([0] * 5)]
    (found,) = hashes._row_sums(words)
    for row, value in enumerate(found.tolist()):
        exact = sum(number * times for number, times in zip(numbers[8 * row : 8 * row + 8], random, strict=True))
        assert (value - exact) % 2**64 == 0


def test_every_entry_of_a_config_that_the_model_depends_on_changes_its_hash() -> None:
    config = LlamaConfig()
    before = model_hash(config, "")
    for name in ("max_position_embeddings", "num_attention_heads", "rms_norm_eps", "vocab_size"):
        value = getattr(config, name)
        setattr(config, name, 2 * value)
        assert model_hash(config, "") != before, name
        setattr(config, name, value)
    config._name_or_path = "elsewhere"
    assert model_hash(config, "") == before != model_hash(config, "other weights")
