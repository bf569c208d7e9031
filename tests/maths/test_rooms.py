"""Memory is used again only where nobody holds what was there."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import Tensor

import attnmech as am
from attnmech.maths import rooms
from attnmech.maths.rooms import Rooms
from attnmech.model import attention, running
from attnmech.model.observed import LayerEnd, RowBlock

LIKE = torch.zeros(1, dtype=torch.float64)


def test_a_room_that_nobody_holds_is_used_again() -> None:
    here = Rooms(24, LIKE)
    place = here.take(2, 3, 4).data_ptr()
    assert here.take(5).data_ptr() == place
    assert here.take(24).dtype == torch.float64


@pytest.mark.parametrize(
    "holds",
    [
        lambda taken: taken,
        lambda taken: taken[1:, 2],
        lambda taken: taken.numpy(),
        lambda taken: taken.flatten().numpy()[3:],
        lambda taken: {"deep": [taken.T.detach()]},
    ],
)
def test_a_room_that_somebody_holds_is_left(holds: Callable[[Tensor], Any]) -> None:
    here = Rooms(24, LIKE)
    held = holds(here.take(4, 6))
    first = here.take(4, 6)
    first.fill_(1.0)
    other = here.take(4, 6)
    assert other.data_ptr() != first.data_ptr()
    del held
    assert here.take(24).data_ptr() not in (first.data_ptr(), other.data_ptr())


def test_what_needs_more_room_is_given_it_from_then_on() -> None:
    here = Rooms(5, LIKE)
    small = here.take(5)
    place = here.take(2, 3).data_ptr()
    assert place != small.data_ptr()
    for size in (6, 5):
        found = here.take(size).data_ptr()
        assert found == place
    assert here.take(1).untyped_storage().nbytes() == 6 * 8


def test_where_torch_does_not_say_who_holds_a_room_it_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "_holders", None)
    here = Rooms(8, LIKE)
    first = here.take(8).fill_(3.0)
    assert here.take(8).data_ptr() != first.data_ptr()


@pytest.mark.parametrize("name", ["bloom", "llama", "mistral", "gpt_oss"])
def test_blocks_that_an_observer_keeps_stay_as_they_were(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = models.hooked(name), models.token_ids(name, 2, 40)
    whole = model.run(ids, points=["pattern", "scores"])
    monkeypatch.setattr(attention, "_BLOCK_BYTES", 1)
    kept: list[RowBlock] = []
    model.forward(model.encode(ids), rows=[kept.append])
    assert len(kept) > 2 * model.n_layers
    for block in kept:
        rows, width = slice(block.rows.start, block.rows.stop), block.pattern.shape[-1]
        expected = whole["pattern", block.layer][:, :, rows]
        torch.testing.assert_close(block.pattern, expected[..., :width], atol=1e-6, rtol=0)
        assert not expected[..., width:].any()
        torch.testing.assert_close(block.scores, whole["scores", block.layer][:, :, rows, :width], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_points_that_an_observer_keeps_stay_as_they_were(dtype: torch.dtype) -> None:
    model, ids = am.load(models.fresh("gpt2", dtype)), models.token_ids("gpt2", 2, 11)
    names = ["resid_pre", "z", "attn_out", "mlp_out"]
    captured = model.run(ids, points=names)
    kept: list[tuple[int, dict[str, Tensor]]] = []

    def keep(end: LayerEnd) -> None:
        kept.append((end.layer, {name: end[name] for name in names}))

    layers = list(range(model.n_layers))
    model.forward(model.encode(ids), ends=[keep], passing=model.points.resolve(names, layers))
    assert [layer for layer, _ in kept] == layers
    for layer, points in kept:
        for name, value in points.items():
            assert torch.equal(value, captured[name, layer])


def test_a_pass_takes_two_rooms_for_each_of_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block before is still there while the next is computed; the certificate keeps small patterns for a while."""
    made: list[Rooms] = []

    class Counted(Rooms):
        def __init__(self, cells: int, like: Tensor) -> None:
            super().__init__(cells, like)
            made.append(self)

    monkeypatch.setattr(attention, "Rooms", Counted)
    monkeypatch.setattr(attention, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(running, "_SMALL_BYTES", 0)
    am.attention_focus(models.hooked("bloom"), models.token_ids("bloom", 1, 100))
    assert made
    assert all(len(each._rooms) <= 4 for each in made)
