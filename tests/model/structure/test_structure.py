"""Reading a structure: columns, rotation, norms, mask; and structures that cannot be read."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import tiny
import torch
from torch import Tensor

import attnmech as am
from attnmech.batch import Batch
from attnmech.errors import UnsupportedModelError
from attnmech.model.parts.gates import Gate
from attnmech.model.parts.mask import rule_of
from attnmech.model.parts.position import (
    FORMS,
    HALVES,
    HALVES_BACK,
    HALVES_ONCE,
    PAIRS,
    PAIRS_BY_HALVES,
    PAIRS_ONCE,
    Rotary,
)
from attnmech.model.parts.weights import Columns, select
from attnmech.model.structure.traced import columns_of, factor_of


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- columns and factors -------------------------------------------------------------------------------------


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


def test_a_source_without_columns_has_none() -> None:
    assert columns_of(random(40, 3), random(40, 0), 1e-6) is None


def test_the_factor_is_the_best_one() -> None:
    value, noise = random(50), random(50, seed=1)
    noise = noise - value * (noise @ value) / (value @ value)
    assert factor_of(-1.5 * value + noise, value) == pytest.approx(-1.5, rel=1e-5)


# -- columns of projections ----------------------------------------------------------------------------------


def test_columns_split_by_head() -> None:
    """Two projections: one with permuted queries and keys, one with values and other columns."""
    first, second = random(2, 3, 9), random(2, 3, 5, seed=1)
    q, k, v = (8, 1, 2, 0, 5, 4), (3, 7, 6), (4, 0, 2)
    layout = Columns(("qk", "qk", "vx"), (q, k, v))
    assert layout.paths == ("qk", "vx")
    assert layout.taken("qk") == {"q": q, "k": k}
    assert layout.taken("vx") == {"v": v}
    found = layout.split([first, second], 2, 1, rest="batch position")
    assert [each.shape for each in found] == [(2, 3, 2, 3), (2, 3, 1, 3), (2, 3, 1, 3)]
    for head in range(2):
        for place in range(3):
            assert torch.equal(found[0][..., head, place], first[..., q[3 * head + place]])
            assert torch.equal(found[1][..., 0, place], first[..., k[place]])
            assert torch.equal(found[2][..., 0, place], second[..., v[place]])


def test_columns_side_by_side_are_a_view() -> None:
    value = random(3, 8)
    beside, apart = select(value, (2, 3, 4)), select(value, (2, 4, 3))
    assert beside.data_ptr() == value[:, 2:].data_ptr()
    assert torch.equal(apart, value[:, [2, 4, 3]])


# -- rotation ------------------------------------------------------------------------------------------------


def turned(x: Tensor, angles: Tensor, *, pairs: bool, first: int = 0) -> Tensor:
    """Dimensions (2i, 2i + 1), or (i, i + width/2), as complex numbers times exp(i angle), one by one."""
    out, half = x.clone(), angles.shape[-1]
    for position in range(x.shape[0]):
        for pair in range(half):
            one, other = (2 * pair, 2 * pair + 1) if pairs else (pair, pair + half)
            number = complex(x[position, first + one], x[position, first + other])
            angle = float(angles[position, pair])
            number *= complex(torch.cos(torch.tensor(angle).double()), torch.sin(torch.tensor(angle).double()))
            out[position, first + one], out[position, first + other] = number.real, number.imag
    return out


ANGLES = random(6, 3, seed=4).double()
TABLES: list[tuple[Rotary, Callable[[Tensor], Tensor], bool, int]] = [
    # the form of rotation, the layout of its tables, whether pairs are adjacent, and the sign
    (HALVES, lambda angle: torch.cat((angle, angle), -1), False, 1),
    (HALVES_ONCE, lambda angle: angle, False, 1),
    (HALVES_BACK, lambda angle: torch.cat((angle, angle), -1), False, -1),
    (PAIRS, lambda angle: angle.repeat_interleave(2, -1), True, 1),
    (PAIRS_ONCE, lambda angle: angle, True, 1),
    (PAIRS_BY_HALVES, lambda angle: torch.cat((angle, angle), -1), True, 1),
]


def test_every_form_is_tried_here() -> None:
    assert {form.rotate for form in FORMS} == {rotary.rotate for rotary, *_ in TABLES}


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(("rotary", "spread", "pairs", "sign"), TABLES)
def test_a_form_turns_complex_numbers(
    rotary: Rotary, spread: Callable[[Tensor], Tensor], pairs: bool, sign: int, first: int
) -> None:
    x, table = random(6, 10, seed=5).double(), spread(ANGLES)
    form = Rotary(rotary.rotate, rotary.spread, share=0.6, first=first)
    found = form(x, table.cos(), table.sin())
    assert form.width(table.shape[-1]) == 6
    torch.testing.assert_close(found, turned(x, sign * ANGLES, pairs=pairs, first=first))
    assert torch.equal(found[:, :first], x[:, :first]) and torch.equal(found[:, first + 6 :], x[:, first + 6 :])


# -- norms and gates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["sigmoid", "silu", "softplus"])
def test_a_gate_is_a_function_of_columns_by_head(function: str) -> None:
    output, columns = random(2, 5, 9), (8, 0, 3, 4, 1, 7)
    found = Gate("q_proj", columns, function).of(output, 2)
    assert found.shape == (2, 5, 2, 3)
    formula = {"sigmoid": lambda x: 1 / (1 + (-x).exp()), "silu": lambda x: x / (1 + (-x).exp()),
               "softplus": lambda x: (1 + x.exp()).log()}[function]  # fmt: skip
    for head in range(2):
        for place in range(3):
            torch.testing.assert_close(found[..., head, place], formula(output[..., columns[3 * head + place]]))


# -- masks ---------------------------------------------------------------------------------------------------

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


# -- unreadable structures -----------------------------------------------------------------------------------


def test_clipped_queries_and_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds even if the certificate's probes are never clipped."""
    monkeypatch.setattr(tiny, "_own", lambda kind, size: {"clip_qkv": 900.0})
    with pytest.raises(UnsupportedModelError, match="clip_qkv"):
        am.load(tiny.model_of("olmo"))


def test_a_model_without_an_embedding_is_refused() -> None:
    model = tiny.model_of("arcee")
    model.get_input_embeddings = lambda: SimpleNamespace()
    with pytest.raises(UnsupportedModelError, match="it has no token embedding"):
        am.load(model)


def test_an_error_of_the_model_is_what_is_told() -> None:
    model = tiny.model_of("arcee")

    def broken(x: Tensor) -> Tensor:
        raise ValueError("no such thing")

    model.model.layers[1].mlp.forward = broken
    with pytest.raises(am.AttnmechError, match="no such thing"):
        am.load(model)
