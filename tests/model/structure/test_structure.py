"""Reading a structure: columns and masks; and structures that cannot be read."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import tiny
import torch
from comparing import refuses
from torch import Tensor

import attnmech as am
from attnmech.batch import Batch
from attnmech.errors import UnsupportedModelError
from attnmech.model.parts.mask import rule_of
from attnmech.model.parts.weights import select
from attnmech.model.structure.traced import columns_of


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("factor", [1.0, 0.25, 3.0])
def test_columns_are_found_in_any_order_and_more_than_once(factor: float) -> None:
    source, order = random(40, 9), (7, 0, 0, 3, 8)
    found = columns_of(factor * source[:, order], source, 1e-6)
    assert found is not None
    assert found[0] == order
    assert found[1] == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("one column of noise", lambda x: torch.cat((x[:, :4], random(40, 1, seed=9)), dim=1)),
        ("one column turned about", lambda x: torch.cat((x[:, :4], -x[:, 4:]), dim=1)),
        ("one column of another factor", lambda x: x * torch.tensor([1.0, 1.0, 1.0, 1.0, 1.01])),
        ("one column of zeros", lambda x: x * torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])),
        ("a little noise", lambda x: x + 0.01 * random(40, 5, seed=9)),
        ("a bias", lambda x: x + 0.1),
    ],
)
def test_what_is_no_column_is_not_taken_for_one(what: str, change: Callable[[Tensor], Tensor]) -> None:
    source = random(40, 9)
    assert columns_of(source[:, :5], source, 1e-6) is not None
    assert columns_of(change(source[:, :5]), source, 1e-6) is None


def test_columns_side_by_side_are_a_view() -> None:
    value = random(3, 8)
    beside, apart = select(value, (2, 3, 4)), select(value, (2, 4, 3))
    assert beside.data_ptr() == value[:, 2:].data_ptr()
    assert torch.equal(apart, value[:, [2, 4, 3]])


BATCH = Batch(torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.bool), (), None)
SEEN = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(3)) > 0.4


@pytest.mark.parametrize(
    "mask", [SEEN, torch.where(SEEN, 0.0, -torch.inf), torch.where(SEEN, 0.0, torch.finfo(torch.float32).min)]
)
def test_a_mask_tensor_is_a_rule(mask: Tensor) -> None:
    rule = rule_of(mask, 4, 4, BATCH)
    assert torch.equal(rule.visible(range(4)), SEEN)
    assert torch.equal(rule.visible(range(1, 3)), SEEN[:, :, 1:3])
    assert rule_of(rule, 4, 4, BATCH) is rule


def test_no_mask_hides_nothing() -> None:
    assert bool(rule_of(None, 4, 6, BATCH).visible(range(4)).all())
    assert rule_of(None, 4, 6, BATCH).visible(range(4)).shape == (2, 1, 4, 6)


@pytest.mark.parametrize("mask", [random(2, 1, 4, 4), torch.zeros(2, 3, 4, 4), torch.zeros(4, 4)])
def test_a_tensor_that_is_no_mask_is_refused(mask: Tensor) -> None:
    with pytest.raises(UnsupportedModelError, match=r"adds a tensor .* to its scores that is not a mask"):
        rule_of(mask, 4, 4, BATCH)


def test_clipped_queries_and_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds even if the certificate's probes are never clipped."""
    monkeypatch.setattr(tiny, "_own", lambda kind, size: {"clip_qkv": 900.0})
    refuses("clip_qkv", am.load, tiny.model_of("olmo"), error=UnsupportedModelError)


def test_a_model_without_an_embedding_is_refused() -> None:
    model = tiny.model_of("arcee")
    model.get_input_embeddings = lambda: SimpleNamespace()
    refuses("it has no token embedding", am.load, model, error=UnsupportedModelError)


def test_an_error_of_the_model_is_what_is_told() -> None:
    model = tiny.model_of("arcee")

    def broken(x: Tensor) -> Tensor:
        raise ValueError("no such thing")

    model.model.layers[1].mlp.forward = broken
    with pytest.raises(am.AttnmechError, match="no such thing"):
        am.load(model)
