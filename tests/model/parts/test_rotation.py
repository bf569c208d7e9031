"""Inverse rotations in every form, and wavelengths read from their tables."""

import math

import centred
import models
import pytest
import reference
import torch
from torch import Tensor

import attnmech as am
from attnmech.model.parts.position import FORMS, PAIRS_ONCE, Rotary, Rotation, rotary_tables

F64 = torch.float64
ONCE = ("rotate_halves_once", "rotate_pairs_once")


def tables(form: Rotary, places: Tensor, turned: int, theta: float, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine as a form's family stores them, `[1 1 position width]`."""
    angle = places.double()[:, None] * theta ** (-torch.arange(0, turned, 2, dtype=F64) / turned)
    return form.spread(angle.cos() * size)[None, None], form.spread(angle.sin() * size)[None, None]


@pytest.mark.parametrize("size", [1.0, 1.37])
@pytest.mark.parametrize("turned", [10, 6])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_turned_and_turned_back_is_as_before(form: Rotary, turned: int, size: float) -> None:
    rotation = Rotation(form, *tables(form, torch.arange(7), turned, 50.0, size))
    x = torch.randn(2, 3, 7, 10, dtype=F64, generator=torch.Generator().manual_seed(0))
    there = rotation(x)
    assert float((there - x)[:, :, 1:, :turned].abs().amin(dim=(0, 1)).max()) > 1e-3
    torch.testing.assert_close(rotation.back(there), x, rtol=0, atol=1e-14)
    torch.testing.assert_close(rotation(rotation.back(x)), x, rtol=0, atol=1e-14)
    # Dot products depend only on the distance.
    one, other = (rotation(value.expand(2, 3, 7, 10)) for value in (x[:, :, :1], x[:, :, 1:2]))
    products = (one @ other.mT) / 1
    torch.testing.assert_close(products[..., 3, 1], products[..., 6, 4], rtol=0, atol=1e-12)


def test_rotation_from_a_later_dimension_on_is_turned_back() -> None:
    form = Rotary(PAIRS_ONCE.rotate, PAIRS_ONCE.spread, share=0.6, first=4)
    rotation = Rotation(form, *tables(form, torch.arange(5), 6, 20.0))
    x = torch.randn(1, 2, 5, 10, dtype=F64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rotation.back(rotation(x)), x, rtol=0, atol=1e-14)
    speed = 20.0 ** (-torch.arange(0, 6, 2, dtype=F64) / 6)
    expected = [math.inf] * 4 + (2 * math.pi / speed).repeat_interleave(2).tolist()
    assert rotation.wavelengths(10).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("turned", [10, 6])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_wavelengths_are_those_of_the_base(form: Rotary, turned: int) -> None:
    found = Rotation(form, *tables(form, torch.arange(9), turned, 300.0, 1.2)).wavelengths(10)
    waves = [2 * math.pi * 300.0 ** (2 * plane / turned) for plane in range(turned // 2)]
    pairs = form.rotate.__name__.startswith("rotate_pairs")
    expected = [each for wave in waves for each in (wave, wave)] if pairs else [*waves, *waves]
    assert found.tolist() == pytest.approx([*expected, *[math.inf] * (10 - turned)], rel=1e-12)


@pytest.mark.parametrize(
    "places",
    [
        [0, 0, 0, 1, 2, 3, 4],  # padding on the left that stays in place
        [1, 1, 1, 0, 1, 2, 3],  # and one step ahead
        [3, 4, 5, 6, 7, 8, 9],
        [0, 1, 2, 3, 0, 1, 2],  # two texts in one row
        [0, 1, 2, 9, 10, 11, 12],  # a gap
        [0, 1, 0, 0, 0, 0, 0],
    ],
)
def test_wavelengths_do_not_depend_on_where_tokens_stand(places: list[int]) -> None:
    form = FORMS[0]
    wanted = Rotation(form, *tables(form, torch.arange(7), 10, 500.0)).wavelengths(10)
    found = Rotation(form, *tables(form, torch.tensor(places), 10, 500.0)).wavelengths(10)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)


def test_wavelengths_are_read_off_a_text_that_moves() -> None:
    form = FORMS[0]
    one, still = (tables(form, places, 10, 500.0) for places in (torch.arange(6), torch.zeros(6)))
    wanted = Rotation(form, *one).wavelengths(10)
    both = [torch.cat(each) for each in zip(one, still, strict=True)]
    torch.testing.assert_close(Rotation(form, *both).wavelengths(10), wanted)
    assert bool(Rotation(form, *still).wavelengths(10).isnan().all())


@pytest.mark.parametrize("name", ["llama", "gptj", "gpt_neox", "gpt_oss_yarn", "gemma3", "cohere", "llama4_text"])
def test_wavelengths_of_a_model_are_those_of_its_config(name: str) -> None:
    model, ids = centred.hooked(name, torch.float32), models.token_ids("llama", 2, 9) % 40 + 3
    split = am.decompose_scores(model, ids)
    d_head = model.d_head
    turned = {"gptj": 4, "gpt_neox": 2}.get(name, d_head)
    planes = range(turned // 2)
    for layer, parts in enumerate(split.parts):
        if (name, layer) == ("llama4_text", 3):
            assert parts.wavelengths is None
            continue
        if name == "gpt_oss_yarn":
            # Fast planes keep their frequency; slow ones have it divided by the factor.
            matrices = [reference._yarn(place, d_head, models.YARN, F64) for place in (0, 1)]
            angles = [math.atan2(matrices[1][p, p + d_head // 2], matrices[1][p, p]) for p in planes]
            waves = [2 * math.pi / angle for angle in angles]
            assert waves[-1] / (2 * math.pi * 150.0 ** (6 / 8)) == pytest.approx(4.0, rel=1e-3)
        else:
            theta = 10_000.0 if name in ("llama", "gptj", "gpt_neox") else centred.theta_of(name, layer)
            waves = [2 * math.pi * theta ** (2 * plane / turned) for plane in planes]
        pairs = name in ("gptj", "cohere", "llama4_text")
        expected = [each for wave in waves for each in (wave, wave)] if pairs else [*waves, *waves]
        assert parts.wavelengths is not None
        assert parts.wavelengths.tolist() == pytest.approx([*expected, *[math.inf] * (d_head - turned)], rel=1e-4)


def test_tables_are_made_on_the_device_of_their_positions() -> None:
    tables = rotary_tables({"rope_theta": 300.0}, 10, torch.arange(7, device="meta"))
    assert tables is not None and [table.device.type for table in tables] == ["meta", "meta"]
