"""The sampled tokens and pairs, against loops."""

import models
import pytest
import torch
from models import hooked

from attnmech.methods.joint_embedding import token_pairs
from attnmech.methods.joint_embedding.token_pairs import Pairs, Tokens, sampled, visible_pairs


def mask_of(name: str, given: object) -> tuple[object, object]:
    """A batch and the mask of its first layer."""
    model, found = hooked(name), []
    batch = model.encode(given)
    model.forward(batch, rows=[lambda block: found.append(block.mask)])
    return batch, found[0]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bloom", "bert", "mistral"])
def test_the_pairs_are_those_that_a_loop_finds(name: str, side: str) -> None:
    batch, mask = mask_of(name, models.padded(name, side))
    tokens = Tokens.of(batch)
    visible = mask.visible(range(7))
    expected = [
        (n, m)
        for n in range(len(tokens))
        for m in range(len(tokens))
        if tokens.text[n] == tokens.text[m] and visible[tokens.text[n], 0, tokens.position[n], tokens.position[m]]
    ]
    pairs = visible_pairs(tokens, mask, seed=0)
    assert pairs.whole and list(zip(pairs.query.tolist(), pairs.key.tolist(), strict=True)) == expected
    some = tokens.chosen(torch.tensor([0, 2, 3, 9, 14]))
    chosen = visible_pairs(some, mask, seed=0)
    inside = [(a, b) for a, b in expected if a in (0, 2, 3, 9, 14) and b in (0, 2, 3, 9, 14)]
    order = {place: n for n, place in enumerate((0, 2, 3, 9, 14))}
    assert list(zip(chosen.query.tolist(), chosen.key.tolist(), strict=True)) == [
        (order[a], order[b]) for a, b in inside
    ]


@pytest.mark.parametrize("cells", [10**6, 50])
def test_products_are_dot_products(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_pairs, "CELLS", cells)
    batch, mask = mask_of("bloom", models.padded("bloom"))
    pairs: Pairs = visible_pairs(Tokens.of(batch), mask, seed=0)
    assert pairs.whole == (cells > 50) and len(pairs) > 5
    q, k = (torch.randn(15, 4, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (0, 1))
    expected = [float(q[i] @ k[j]) for i, j in zip(pairs.query.tolist(), pairs.key.tolist(), strict=True)]
    assert pairs.products(q, k).tolist() == pytest.approx(expected)


def test_a_token_is_drawn_by_its_text_and_place_alone() -> None:
    batch, _ = mask_of("gpt2", models.padded("gpt2"))
    tokens, documents = Tokens.of(batch), torch.tensor([4, 9, 2])
    found = sampled(tokens, documents, 6, seed=1)
    assert len(found) == 6 and found.tolist() == sorted(set(found.tolist()))
    cells = {(int(documents[tokens.text[n]]), int(tokens.position[n])) for n in found.tolist()}
    other_order = torch.tensor([2, 0, 1])
    moved = Tokens.of(batch.texts(other_order))
    again = sampled(moved, documents[other_order], 6, seed=1)
    assert cells == {(int(documents[other_order][moved.text[n]]), int(moved.position[n])) for n in again.tolist()}
    assert sampled(tokens, documents, 100, seed=1).tolist() == list(range(15))
