"""Sums by document take bounded memory, and depend only on the set of documents; layers may be added together."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import hooked, inputs_of

import attnmech as am
from attnmech.maths.groups import GROUPS, by_group, joined
from attnmech.maths.intervals import TextMeans
from attnmech.results.sentences import about_largest
from attnmech.runs import reducer
from attnmech.runs.reducer import HeldLayers

SUMMED = ("sums", "counts")


def state(documents: list[int]) -> dict[str, torch.Tensor]:
    """Sums of whole numbers, which do not depend on the order of addition."""
    numbers = torch.tensor(documents, dtype=torch.float64)
    sums = torch.stack((numbers, numbers % 7))
    return by_group({"sums": sums, "counts": torch.ones(1, len(documents)).double()}, torch.tensor(documents), SUMMED)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_up_to_256_documents_each_is_by_itself() -> None:
    documents = list(range(3, 3 + 2 * GROUPS, 2))
    found = state(documents[::-1])
    assert found["groups"].tolist() == documents and found["sums"][0].tolist() == documents
    assert found["counts"].tolist() == [[1.0] * GROUPS]


@pytest.mark.parametrize("count", [257, 1000, 20_000])
def test_beyond_them_there_are_at_most_so_many_groups(count: int) -> None:
    found = state(list(range(count)))
    assert GROUPS / 2 < len(found["groups"]) <= GROUPS
    assert float(found["counts"].sum()) == count and float(found["sums"][0].sum()) == count * (count - 1) / 2
    group, modulus = int(found["groups"][5]), int(found["modulus"])
    assert float(found["sums"][0, 5]) == sum(each for each in range(count) if each % modulus == group)


@pytest.mark.parametrize("shards", [2, 3, 7, 256])
def test_shards_in_any_order_are_the_whole(shards: int) -> None:
    whole = state(list(range(900)))
    parts = [state(list(range(shard, 900, shards))) for shard in range(shards)]
    orders = itertools.permutations(parts) if shards < 4 else (parts, parts[::-1], parts[1:] + parts[:1])
    for order in orders:
        found = order[0]
        for each in order[1:]:
            found = joined(found, each, SUMMED)
        assert same(found, whole)
    # One shard of 256 has numbers that are equal modulo 256; its documents are still distinguished.
    assert len(state(list(range(5, 5 + 256 * 300, 256)))["groups"]) > GROUPS / 2


def test_intervals_over_groups_cover() -> None:
    """Intervals over groups of 3,000 texts of very different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(40, 3000, generator=generator).exp().double() * 20
    sums = lengths * torch.randn(40, 3000, generator=generator).double()
    grouped = by_group({"sums": sums, "counts": lengths}, torch.arange(3000), SUMMED)
    low, high = TextMeans.of_ratio(grouped["sums"], grouped["counts"]).interval()
    every_low, every_high = TextMeans.of_ratio(sums, lengths).interval()
    assert 35 <= int(((low <= 0) & (high >= 0)).sum()) <= 40
    torch.testing.assert_close((high - low) / (every_high - every_low), torch.ones(40).double(), rtol=0.25, atol=0)


def test_sentences_count_texts_not_groups() -> None:
    values = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).double()
    values -= values.median(dim=-1, keepdim=True).values - 0.05
    means = TextMeans.of_values(values)
    plain, grouped = (about_largest(means, lambda place: "L0H0", things="heads", group=group) for group in (1.0, 4.0))
    needed = means.texts_needed((int(means.mean.argmax()),))
    assert needed is not None
    assert "clear effect on 256 texts" in plain and f"about {needed} texts would" in plain
    assert "clear effect on 1024 texts" in grouped and f"about {4 * needed} texts would" in grouped


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "gemma2"])
@pytest.mark.parametrize("call", [am.attention_focus, am.residual_updates])
def test_sums_do_not_depend_on_how_many_layers_are_added_together(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], name: str
) -> None:
    together = call(hooked(name), inputs_of(name))
    monkeypatch.setattr(reducer, "block_bytes", lambda device: 1)
    apart = call(hooked(name), inputs_of(name))
    assert together.state.keys() == apart.state.keys()
    for entry, value in together.state.items():
        assert torch.equal(value, apart.state[entry]), entry


def test_layers_are_held_until_the_next_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "block_bytes", lambda device: 100)
    held: HeldLayers[str, str] = HeldLayers()
    device = torch.device("cpu")
    added = [held.add("window" if layer % 2 else "whole", layer, f"of {layer}", 40, device) for layer in range(6)]
    assert added == [{}, {}, {0: "of 0", 2: "of 2"}, {1: "of 1", 3: "of 3"}, {}, {}]
    assert dict(held.rest()) == {"whole": {4: "of 4"}, "window": {5: "of 5"}}
    assert list(held.rest()) == []
