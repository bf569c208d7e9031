"""XLNet's content stream: its terms from the raw weights, pair by pair, and refused options."""

from typing import Any

import models
import pytest
import torch
from comparing import close
from torch import Tensor

import attnmech as am
from attnmech.model.attention.relative_positions import XLNetCore

F32, F64 = torch.float32, torch.float64
TOLERANCE = {F32: 2e-5, F64: 1e-6}
"""Sinusoids are float32 in every precision."""


def terms_of(plain: Any, layer: int, x: Tensor) -> dict[str, Tensor]:
    """The terms `[batch head query key]` of the attention's input, by the formulas of Dai et al. 2019."""
    w = plain.transformer.layer[layer].rel_attn
    batch, length, d_model = x.shape
    heads, d = w.q.shape[1:]
    names = ("query_key", "key_bias", "content_to_position", "position")
    found = {name: torch.zeros(batch, heads, length, length, dtype=x.dtype) for name in names}
    clamp = plain.config.clamp_len
    for h in range(heads):
        W_Q, W_K, R, u, v = w.q[:, h], w.k[:, h], w.r[:, h], w.r_w_bias[h], w.r_r_bias[h]
        for i in range(length):
            for j in range(length):
                distance = i - j if clamp <= 0 else max(-clamp, min(clamp, i - j))
                angle = [distance / 10_000 ** (2 * n / d_model) for n in range(d_model // 2)]
                wave = torch.tensor(angle, dtype=F64)
                r = torch.cat((wave.sin(), wave.cos())).to(x.dtype) @ R
                q, k = x[:, i] @ W_Q, x[:, j] @ W_K
                for name, value in zip(names, ((q * k).sum(-1), k @ u, q @ r, (v @ r).expand(batch)), strict=True):
                    found[name][:, h, i, j] = value / d**0.5
    return {name: value.detach() for name, value in found.items()}


@pytest.mark.parametrize(("clamp", "dtype"), [(-1, F32), (3, F64)])
def test_every_term_is_what_the_raw_weights_give(clamp: int, dtype: torch.dtype) -> None:
    plain = models.randomised(models.xlnet(clamp_len=clamp), dtype=dtype)
    hooked, inputs = am.load(plain), models.padded("xlnet")
    assert hooked.certificate.ok, repr(hooked.certificate)
    assert {"relative positions", "attentions", "streams", "padding", "middle"} <= {
        check.name for check in hooked.certificate.checks if check.passed
    }
    split, acts = am.decompose_scores(hooked, inputs), hooked.run(inputs, points=["attn_in", "scores"])
    assert set(split.terms) == {"query_key", "key_bias", "position", "content_to_position", "mask"}
    for layer in range(3):
        expected = terms_of(plain, layer, acts["attn_in", layer])
        largest = float(torch.stack(list(expected.values())).sum(0).abs().max())
        for name, value in expected.items():
            ours = split.terms[name][:, layer].expand_as(value)
            assert float((ours - value).abs().max()) <= TOLERANCE[dtype] * largest
    assert float((split.residual / split.largest).max()) <= (1e-5 if dtype == F32 else 1e-12)


@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_patterns_and_streams_are_those_of_transformers(side: str) -> None:
    inputs, plain = models.padded("xlnet", side), models.plain("xlnet")
    real = inputs["attention_mask"].bool()
    acts = models.hooked("xlnet").run(inputs, points=["pattern", "resid_pre", "embed", "logits"])
    with torch.no_grad():
        theirs = plain(**inputs, output_attentions=True, output_hidden_states=True)
    close(acts.logits[real], theirs.logits[real], 2e-5)
    for layer in range(3):
        rows = real[:, None, :, None]
        close(acts["pattern", layer] * rows, theirs.attentions[layer] * rows, 2e-5)
        close(acts["resid_pre", layer][real], theirs.hidden_states[layer][real], 2e-5)
    close(acts["embed"], plain.transformer.word_embedding.weight.detach()[inputs["input_ids"]], 1e-6)


def test_a_head_without_z_and_a_hook_on_queries() -> None:
    hooked, ids = models.hooked("xlnet"), models.token_ids("xlnet")
    plain = models.fresh("xlnet")
    with torch.no_grad():
        plain.transformer.layer[1].rel_attn.o[:, 2] = 0
        with hooked.intervene(am.Intervention.zero([(1, 2)])):
            close(hooked.run(ids).logits, plain(ids).logits, 2e-5)
    plain = models.fresh("xlnet")
    with torch.no_grad():
        # q + u, the same in both products.
        attention = plain.transformer.layer[1].rel_attn
        attention.q *= 0.3
        attention.r_w_bias *= 0.3
        attention.r_r_bias += attention.r_w_bias - attention.r_w_bias / 0.3
    with hooked.hooks({("q", 1): lambda q: 0.3 * q}), torch.no_grad():
        close(hooked.run(ids).logits, plain(ids).logits, 2e-5)


def test_writers_and_means_add_up() -> None:
    hooked, inputs = models.hooked("xlnet", F64), models.padded("xlnet")
    assert float(am.decompose_by_source(hooked, inputs).residual.max()) < 1e-12
    split = am.decompose_scores(hooked, inputs, centre="mean")
    assert float((split.residual / split.largest).max()) < 1e-12
    assert {"position", "content_to_position", "key_bias", "query_bias"} < set(split.terms)


@pytest.mark.filterwarnings("ignore::attnmech.model.files.load.UnprovenWarning")
def test_the_certificate_finds_positions_that_are_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = XLNetCore._relative
    monkeypatch.setattr(
        XLNetCore, "_relative", lambda self, positions, length: made(self, positions.roll(1, 0), length)
    )
    failing = {check.name for check in am.load(models.fresh("xlnet")).certificate.failed}
    assert {"relative positions", "attentions", "transformers"} <= failing


def test_segments_are_refused() -> None:
    ids = models.token_ids("xlnet")
    with pytest.raises(am.AttnmechError, match="token_type_ids"):
        models.hooked("xlnet").run({"input_ids": ids, "token_type_ids": torch.zeros_like(ids)})
