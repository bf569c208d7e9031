"""Scores by wavelength, position kernels and single dimensions, against loops over planes."""

import math
from typing import Any

import centred
import models
import pytest
import torch
from centred import F32, F64, dtype_of
from comparing import close, refuses
from torch import Tensor

import attnmech as am
from attnmech.methods.scores.wavelengths import UNROTATED, band_names


def ids_of(name: str, batch: int = 2, length: int = 8, seed: int = 4) -> Tensor:
    return torch.randint(3, 40, (batch, length), generator=torch.Generator().manual_seed(seed))


def planes_of(name: str, layer: int, d_head: int) -> list[tuple[int, int, float]]:
    """The pairs of dimensions that rotate together, each with its wavelength."""
    theta = 10_000.0 if name in ("llama", "gptj", "gpt_neox", "qwen3_bias", "gemma2") else centred.theta_of(name, layer)
    turned = {"gptj": 4, "gpt_neox": 2}.get(name, d_head)
    if (name, layer) == ("llama4_text", 3):
        return []
    pairs = name in ("gptj", "cohere", "llama4_text")
    return [
        (*((2 * p, 2 * p + 1) if pairs else (p, p + turned // 2)), 2 * math.pi * theta ** (2 * p / turned))
        for p in range(turned // 2)
    ]


@pytest.mark.parametrize(
    ("name", "centre"),
    [("gpt_neox", "mean"), ("gemma2", "mean"), ("gpt_oss_yarn", "mean"), ("llama4_text", "mean"), ("qwen3_bias", None)],
)
def test_bands_add_up_to_the_scores(name: str, centre: Any) -> None:
    dtype = dtype_of(name)
    model, ids = centred.hooked(name, dtype), ids_of(name)
    split = am.decompose_scores(model, ids, centre=centre)
    bands = split.by_wavelength([10.0, 200.0])
    assert set(bands) <= {*band_names((10.0, 200.0)), "softcap"} and ("softcap" in bands) == (name == "gemma2")
    whole = sum(bands[band] for band in bands)
    for layer in range(model.n_layers):
        close(whole[:, layer], split.parts[layer].total(), 1e-12 if dtype == F64 else 1e-5)
    sums = torch.stack(list(bands.variance_shares.values())).sum(dim=0)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-10 if dtype == F64 else 1e-5)
    assert repr(bands).startswith(f"Wavelengths({', '.join(bands)}; layers [0")


@pytest.mark.core
@pytest.mark.parametrize("name", ["llama", "gptj", "gpt_neox", "gemma3", "cohere"])
def test_a_band_is_the_sum_over_its_planes(name: str) -> None:
    dtype = dtype_of(name)
    model, ids = centred.hooked(name, dtype), ids_of(name)
    split = am.decompose_scores(model, ids)
    bands = split.by_wavelength([10.0, 200.0])
    names = band_names((10.0, 200.0))
    for layer in range(2):
        parts = centred.split_of(name, model, ids, layer)
        d_head, heads, kv = parts.q.shape[3], parts.q.shape[2], parts.k.shape[2]
        planes = planes_of(name, layer, d_head)
        expected = {each: torch.zeros(2, heads, 8, 8, dtype=dtype) for each in names}
        still = set(range(d_head)) - {d for one, other, _ in planes for d in (one, other)}
        for head in range(heads):
            q, k = parts.q[:, :, head], parts.k[:, :, head // (heads // kv)]
            for one, other, wave in planes:
                angle_q, angle_k = torch.atan2(q[..., other], q[..., one]), torch.atan2(k[..., other], k[..., one])
                size_q, size_k = q[..., [one, other]].norm(dim=-1), k[..., [one, other]].norm(dim=-1)
                band = names[0 if wave < 10 else 1 if wave < 200 else 2]
                for i in range(8):
                    for j in range(8):
                        phase = angle_q[:, i] - angle_k[:, j] + 2 * math.pi / wave * (i - j)
                        expected[band][:, head, i, j] += parts.scale * size_q[:, i] * size_k[:, j] * phase.cos()
            rest = sorted(still)
            expected[UNROTATED][:, head] = parts.scale * q[..., rest] @ k[..., rest].mT
        for band in bands:
            size = float(split.largest[layer].max())
            close(bands[band][:, layer], expected[band], 1e-6 if dtype == F64 else 1e-4, size)
        for band in set(names) - set(bands):
            assert not expected[band].any()


def test_a_layer_that_does_not_turn_is_a_band_of_its_own() -> None:
    model, ids = centred.hooked("llama4_text", F32), ids_of("llama4_text")
    bands = am.decompose_scores(model, ids).by_wavelength()
    whole = bands[UNROTATED]
    assert not whole[:, :3].any() and float(whole[:, 3].abs().max()) > 0.1
    assert not bands["under 8 tokens"][:, 3].any()


def test_bands_of_padded_texts_do_not_see_the_padding() -> None:
    model, right = models.hooked("llama", F64), models.padded("llama")
    shifts = (7 - right["attention_mask"].sum(dim=1)).tolist()
    left = {
        name: torch.stack([row.roll(by) for row, by in zip(value, shifts, strict=True)])
        for name, value in right.items()
    }
    bands, moved = (am.decompose_scores(model, inputs, centre="mean").by_wavelength([50.0]) for inputs in (right, left))
    assert list(bands) == ["under 50 tokens", "50 tokens and more"]
    for name, value in bands.variance_shares.items():
        # transformers computes rotary angles in float32, from the start of the padding.
        torch.testing.assert_close(moved.variance_shares[name], value, rtol=0, atol=1e-5)
    frame = bands.variance_shares.to_frame()
    assert len(frame) == 12 and list(frame.columns) == ["layer", "head", *bands]


def test_edges_and_models_that_have_no_bands() -> None:
    split = am.decompose_scores(models.hooked("llama"), ids_of("llama"))
    assert list(split.by_wavelength([])) == ["rotated"]
    bands = ["under 8 tokens", "8 to 64 tokens", "512 to 4096 tokens", "4096 tokens and more"]
    assert list(split.by_wavelength()) == bands
    assert split.by_wavelength().plot().data
    bad: list[tuple[Any, str]] = [
        (lambda: split.by_wavelength([8.0, 8.0]), "`edges` must be strictly increasing"),
        (lambda: split.by_wavelength([64.0, 8.0]), "`edges` must be strictly increasing"),
        (lambda: split.by_wavelength([0.0]), "`edges` must be"),
        (lambda: split.by_wavelength([math.nan]), "`edges` must be"),
        (am.decompose_scores(models.hooked("llama"), ids_of("llama", 1, 1)).by_wavelength, "give a longer text"),
        (lambda: am.decompose_scores(models.hooked("gpt2"), ids_of("gpt2")).by_wavelength(), "does not rotate"),
        (lambda: split.by_wavelength()["position"], "have no term 'position'"),
    ]
    for call, said in bad:
        with pytest.raises(am.AttnmechError, match=said):
            call()


@pytest.mark.parametrize("name", ["gptj", "gpt_neox", "gemma3", "gemma2"])
def test_a_kernel_is_a_sum_of_waves(name: str) -> None:
    dtype = dtype_of(name)
    model, ids = centred.hooked(name, dtype), ids_of(name)
    means = am.mean_qk(model, ids_of(name, 4, 8, seed=9))
    kernel = am.decompose_scores(model, ids, centre=means).position_kernel(text=1, edges=[10.0, 200.0])
    names = band_names((10.0, 200.0))
    assert kernel.distances.tolist() == list(range(8))
    scale = centred.scale_of(name)
    group = means.query_sums.shape[2] // means.key_sums.shape[2]
    for layer in range(2):
        for head in range(model.n_heads):
            q, k = means.mean_query[layer, 0, head], means.mean_key[layer, 0, head // group]
            waves = {each: [0.0] * 8 for each in names}
            for one, other, wave in planes_of(name, layer, len(q)):
                size = scale * math.hypot(q[one], q[other]) * math.hypot(k[one], k[other])
                phase = math.atan2(q[other], q[one]) - math.atan2(k[other], k[one])
                band = names[0 if wave < 10 else 1 if wave < 200 else 2]
                for distance in range(8):
                    turned = math.cos(2 * math.pi / wave * distance + phase) - math.cos(phase)
                    waves[band][distance] += size * turned
            total = [sum(waves[each][distance] for each in names) for distance in range(8)]
            tolerance = 1e-6 if dtype == F64 else 1e-5
            close(kernel.values[layer, head].double(), torch.tensor(total).double(), tolerance, 1.0)
            for each, value in kernel.bands.items():
                close(value[layer, head].double(), torch.tensor(waves[each]).double(), tolerance, 1.0)
    frame = kernel.to_frame()
    assert len(frame) == model.n_layers * model.n_heads * 8
    assert list(frame.columns[:4]) == ["layer", "head", "distance", "position"]
    assert len(kernel.plot(1, 0).data) >= 1 + len(kernel.bands)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_kernel_is_that_of_the_text_without_its_padding(side: str) -> None:
    model, inputs = models.hooked("llama", F64), models.padded("llama", side)
    kernel = am.decompose_scores(model, inputs, centre="mean").position_kernel(1)
    alone = inputs["input_ids"][1, inputs["attention_mask"][1].bool()][None]
    expected = am.decompose_scores(model, alone, centre="mean").position_kernel()
    assert kernel.distances.tolist() == list(range(5))
    close(kernel.values, expected.values, 1e-6)


@pytest.mark.parametrize("centre", [None, "mean"])
def test_the_kernel_of_alibi_is_the_line_of_its_slope(centre: Any) -> None:
    model = models.hooked("bloom4", F64)
    kernel = am.decompose_scores(model, ids_of("bloom4"), centre=centre).position_kernel()
    assert not kernel.bands
    for head, slope in enumerate((0.25, 0.0625, 0.015625, 0.00390625)):
        expected = [-slope * distance for distance in range(8)]
        assert kernel.values[1, head].tolist() == pytest.approx(expected, abs=1e-6)


def bucket(distance: int, both_ways: bool) -> int:
    """T5's bucket of a key `distance` tokens before the query (after it where negative): 8 buckets, up to 6 tokens."""
    buckets, start = 8, 0
    if both_ways:
        buckets //= 2
        start = buckets if distance < 0 else 0
        distance = abs(distance)
    distance = max(distance, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    far = exact + int(math.log(distance / exact) / math.log(6 / exact) * (buckets - exact))
    return start + min(far, buckets - 1)


@pytest.mark.parametrize("centre", [None, "mean"])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_the_kernel_of_t5_is_its_buckets(stack: str, centre: Any) -> None:
    model, inputs = models.hooked("t5", F64), models.inputs_of("t5")
    kernel = am.decompose_scores(model, inputs, stack=stack, centre=centre).position_kernel()
    raw = getattr(models.plain("t5", F64), stack)
    learned = raw.block[0].layer[0].SelfAttention.relative_attention_bias.weight.detach()
    both_ways = stack == "encoder"
    assert kernel.distances.tolist() == (list(range(-6, 7)) if both_ways else list(range(5)))
    for layer in range(len(kernel.layers)):
        expected = torch.stack(
            [learned[bucket(distance, both_ways)] - learned[0] for distance in kernel.distances.tolist()], dim=1
        )
        close(kernel.values[layer], expected, 1e-12)


def test_kernels_that_there_are_not() -> None:
    ids = models.token_ids("llama", 52, 5)
    by_position = am.decompose_scores(models.hooked("llama"), ids, centre="position")
    bad: list[tuple[Any, str]] = [
        (by_position.position_kernel, "with means by position.*not on their distance"),
        (am.decompose_scores(models.hooked("llama"), ids[:2]).position_kernel, "have no position term; split them"),
        (lambda: by_position.position_kernel(52), r"`text` must be from 0 to 51 \(52 texts were run\)"),
        (
            am.decompose_scores(models.hooked("t5"), models.inputs_of("t5"), stack="cross").position_kernel,
            "cross-attention has no distance",
        ),
    ]
    for call, said in bad:
        refuses(said, call)
    kernel = am.decompose_scores(models.hooked("gpt2"), ids_of("gpt2"), centre="mean").position_kernel()
    assert not kernel.values.any() and not kernel.bands
    refuses("one of the layers decomposed", kernel.plot, 3, 0)
    refuses("`head` must be from 0 to 4", kernel.plot, 0, 5)


@pytest.mark.parametrize(
    ("name", "centre"), [("llama", "mean"), ("gptj", None), ("bloom", "mean"), ("gemma2", "mean"), ("gpt2", None)]
)
def test_dimensions_of_a_pair_add_up_to_its_score(name: str, centre: Any) -> None:
    model, inputs = models.hooked(name, F64), models.padded("gptj", "left")
    native = am.decompose_scores(model, inputs)
    split = am.decompose_scores(model, inputs, centre=centre)
    points = ("q_rot", "k_rot") if name in ("llama", "gptj", "gemma2") else ("q", "k")
    acts = model.run(inputs, points=points)
    q, k = (acts[point, 1] for point in points)
    group = q.shape[2] // k.shape[2]
    for head, query, key in ((0, 6, 4), (model.n_heads - 1, 5, 5)):
        frame = split.dimensions(1, head, query, key, text=1)
        expected = sum(
            value[:, 1].expand(3, model.n_heads, 7, 7)[1, head, query, key]
            for name_, value in native.terms.items()
            if name_ not in ("mask", "softcap", "position")
        )
        assert float(frame["product"].sum()) == pytest.approx(float(expected), abs=1e-11)
        scale = centred.scale_of(name)
        torch.testing.assert_close(
            torch.tensor(frame["product"].to_numpy()), torch.tensor((scale * frame["query"] * frame["key"]).to_numpy())
        )
        close(torch.tensor(frame["query"].to_numpy()), q[1, query, head], 1e-12)
        close(torch.tensor(frame["key"].to_numpy()), k[1, key, head // group], 1e-12)
        turns = [math.inf] * len(frame)
        if name in ("llama", "gptj", "gemma2"):
            for one, other, wave in planes_of(name, 1, len(frame)):
                turns[one] = turns[other] = wave
        assert frame.wavelength.tolist() == pytest.approx(turns, rel=1e-5)


def test_dimensions_out_of_range() -> None:
    split = am.decompose_scores(models.hooked("llama"), ids_of("llama"), layers=[1])
    bad: list[tuple[tuple[int, ...], str]] = [
        ((0, 0, 1, 1), "one of the layers decomposed"),
        ((1, 6, 1, 1), "`head` must be from 0 to 5"),
        ((1, 0, 8, 1), "`query` must be from 0 to 7"),
        ((1, 0, 1, -1), "`key` must be from 0 to 7"),
        ((1, 0, 1, 1, 2), "`text` must be from 0 to 1"),
    ]
    for arguments, said in bad:
        refuses(said, split.dimensions, *arguments)


def test_the_figure_of_dimensions_is_of_the_texts_own_tokens() -> None:
    model, inputs = models.hooked("llama"), models.padded("llama", "left")
    split = am.decompose_scores(model, inputs)
    figure = split.plot("dimensions", layer=1, head=3, query=4, key=2, text=1)
    product = split.dimensions(1, 3, 6, 4, text=1)["product"]
    told = f"{float(product.sum()):+.3f}".replace("-", "−")
    assert told in figure.layout.title.text and figure.layout.title.text.startswith("L1H3: query")
