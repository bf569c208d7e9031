"""Patching equals patching by hand on the raw transformers model, and restores the clean run when it should."""

from typing import Any

import models
import pytest
import torch
from by_hand import JUDGED, columns, logit_differences, output_changed, pair, point_changed, seen, z_changed
from comparing import refuses
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError
from attnmech.runs import reference


def judged(plain: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return logit_differences(plain(ids).logits, **JUDGED)


@pytest.mark.parametrize(
    ("family", "at"),
    [
        *(("gpt2", at) for at in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")),
        ("llama", "resid_mid"), ("llama", "mlp_out"), ("bert", "resid_mid"), ("bert", "resid_post"),
        ("bert", "attn_out"), ("bloom", "resid_pre"), ("bloom", "attn_out"),
    ],
)  # fmt: skip
def test_each_position_equals_the_raw_model(family: str, at: str) -> None:
    hooked, plain = models.hooked(family), models.plain(family)
    clean, corrupted = pair(family)
    found = am.patch(hooked, clean, corrupted, at=at, **JUDGED)
    assert isinstance(found, am.results.PositionEffects)
    before = judged(plain, corrupted)
    for layer in range(hooked.n_layers):
        theirs = seen(plain, clean, at, layer)
        for position in (0, 2, 5, 6):

            def patched(value: Tensor, theirs: Tensor = theirs, position: int = position) -> Tensor:
                value[:, position] = theirs[:, position]
                return value

            with point_changed(plain, at, layer, patched):
                after = judged(plain, corrupted)
            torch.testing.assert_close(found.after[layer, position], after, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.per_text, found.after - before, rtol=1e-4, atol=1e-5)
    some = am.patch(hooked, clean, corrupted, at=at, layers=[1], positions="last", **JUDGED)
    torch.testing.assert_close(some.after[0, 6], found.after[1, 6], rtol=1e-4, atol=1e-5)
    assert some.layers == (1,) and some.to_frame()["position"].tolist() == [6]


def projected(plain: Any, name: str, ids: Tensor, point: str, layer: int, head: int) -> Tensor:
    """q, k or v of a head (or kv head), from the raw model's projection."""
    path, chosen = columns(name, point, head, plain)
    kept: list[Tensor] = []
    with torch.no_grad(), output_changed(plain, layer, path, lambda now: kept.append(now[..., chosen])):
        plain(ids)
    return kept[0]


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "at", "positions"),
    [
        ("gpt2", "z", None), ("llama", "z", [1, -2]), ("bert", "z", None), ("bloom", "z", [1, -2]),
        ("gpt2", "q", None), ("gpt2", "k", [1, -2]), ("gpt2", "v", None), ("gpt2", "pattern", [1, -2]),
        ("llama", "q", [1, -2]), ("llama", "k", [1, -2]), ("llama", "v", None), ("llama", "pattern", None),
        ("bloom", "q", [1, -2]), ("gpt_neox", "k", None), ("qwen3", "q", None), ("qwen3", "k", [1, -2]),
    ],
)  # fmt: skip
def test_each_head_equals_the_raw_model(name: str, at: str, positions: Any) -> None:
    hooked, plain = models.hooked(name), models.plain(name)
    clean, corrupted = (ids.clamp(max=42) for ids in pair(name))
    found = am.patch(hooked, clean, corrupted, at=at, positions=positions, **JUDGED)
    before, whole = judged(plain, corrupted), judged(plain, clean)
    torch.testing.assert_close(found.before, before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.clean, whole, rtol=1e-4, atol=1e-5)
    rows = list(range(7)) if positions is None else [1, 5]
    by_kv_head = at in ("k", "v") and hooked.n_kv_heads < hooked.n_heads
    assert type(found) is (am.results.KVPatchEffects if by_kv_head else am.results.PatchEffects)
    count = hooked.n_kv_heads if at in ("k", "v") else hooked.n_heads
    assert found.after.shape == (hooked.n_layers, count, 3) and found.complete
    shared = hooked.n_heads // hooked.n_kv_heads
    for layer in range(hooked.n_layers):
        for head in range(count):
            if at == "pattern":
                with torch.no_grad():
                    weights = plain(clean, output_attentions=True).attentions[layer][:, head]
                value, chosen = weights @ projected(plain, name, corrupted, "v", layer, head // shared), head
            elif at == "z":
                value, chosen = seen(plain, clean, "z", layer)[:, :, head], head
            else:
                path, chosen = columns(name, at, head, plain)
                value = projected(plain, name, clean, at, layer, head)

            def put(now: Tensor, value: Tensor = value, chosen: Any = chosen) -> Tensor:
                now[:, :, chosen][:, rows] = value[:, rows]
                return now

            with z_changed(plain, layer, put) if at in ("z", "pattern") else output_changed(plain, layer, path, put):
                after = judged(plain, corrupted)
            torch.testing.assert_close(found.after[layer, head], after, rtol=1e-4, atol=2e-5)
            share = (after.mean() - before.mean()) / (whole.mean() - before.mean())
            torch.testing.assert_close(found.recovered[layer, head], share, rtol=1e-3, atol=2e-4)
    assert float(found.effect.abs().max()) > 1e-4


def test_kv_heads_are_named_as_such() -> None:
    found = am.patch(models.hooked("llama"), *pair("llama"), at="k", heads=[(1, 1)], **JUDGED)
    assert isinstance(found, am.results.KVPatchEffects) and found.swept.nonzero().tolist() == [[1, 1]]
    assert "Patching k at 1 kv head on 3 pairs: kv head 1 of layer 1 has" in repr(found)
    assert found.plot().layout.xaxis.title.text == "kv head"


def test_the_decoder_of_t5() -> None:
    hooked = models.hooked("t5")
    clean = {"input_ids": models.token_ids("t5"), "decoder_input_ids": models.token_ids("t5", length=5, seed=2)}
    corrupted = {**clean, "input_ids": models.token_ids("t5", seed=4)}
    found = am.patch(hooked, clean, corrupted, heads=[(0, 1), (2, 3)], **JUDGED)
    z = hooked.run(clean, points=["decoder.z"])["decoder.z", 2]
    with hooked.intervene(am.Intervention.replace([(2, 3)], {2: z}, stack="decoder")):
        after = logit_differences(hooked.run(corrupted).logits, **JUDGED)
    torch.testing.assert_close(found.after[2, 3], after, rtol=1e-4, atol=1e-5)
    assert len(found.tokens[0]) == 5


def test_no_share_where_there_is_none() -> None:
    hooked, (clean, corrupted) = models.hooked("gpt2"), pair("gpt2")
    with pytest.raises(InputError, match="those of pair 0 are the same, so patching changes nothing"):
        am.patch(hooked, clean, clean, at="attn_out", **JUDGED)
    same = am.patch(hooked, clean, corrupted, at="attn_out", metric=lambda logits, batch: 0 * logits[:, 0, 0] + 1)
    assert same.recovered.isnan().all()
    assert all(end.isnan().all() for end in same["recovered"].interval())
    assert "the clean and the corrupted prompts give the same metric" in repr(same)
    loss = am.patch(hooked, clean, corrupted, metric="loss")
    assert loss.recovered.isnan().all() and not loss.effect.isnan().any()
    assert loss.not_recoverable is not None and "different next tokens" in loss.not_recoverable


def test_positions_are_shown_with_their_tokens() -> None:
    hooked = am.load(models.fresh("gpt2"), tokenizer=models.tokenizer(words=(*models.WORDS, "&")))
    texts = ["the keys to the cabinet", "a dog to the cabinet"], ["the & to the cabinet", "a dog to a dog"]
    found = am.patch(hooked, *texts, at="resid_pre", answers=[" are", " are"], against=[" here", " here"])
    figure = found.plot("recovered")
    (trace,) = figure.data
    assert list(figure.layout.xaxis.ticktext)[:2] == ["0 the", "1 keys→&amp;"]
    assert "position 1 keys→&amp;" in trace.text[0][1] and "layer 2, " in trace.text[2][1]
    assert repr(found).startswith("PositionEffects(Patching resid_pre at 15 positions on 2 pairs: position ")
    refuses("`figure` must be one of effect, recovered", found.plot, "share")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"at": "scores"}, "`at` must be one of z, q, k, v, pattern, resid_pre, .*; got 'scores'"),
        ({"at": "v", "heads": [(0, 9)]}, r"`heads` must be from 0 to 4 \(at='v' is indexed by kv head; each layer"),
        ({"positions": [-8]}, r"`positions` must be from -7 to 6 \(the shortest prompt has 7 tokens\); got -8"),
        ({"positions": "first"}, '`positions` must be "last" or a list of positions'),
        ({"at": "mlp_out", "heads": [(0, 1)]}, "mlp_out has no heads. Use `layers` and `positions`"),
        ({"positions": []}, "at least one position"),
        ({"metric": "kl"}, "not the closeness to the clean run"),
        ({"answers": None, "against": None}, "needs `answers`"),
        ({"at": "pattern"}, "the patterns of 3 texts of up to 7 tokens in 3 layers would take"),
    ],
)
def test_bad_input(options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_BYTES", 2**10)
    refuses(said, am.patch, models.hooked("gpt2"), *pair("gpt2"), **{**JUDGED, **options})


def test_prompts_that_are_no_pairs() -> None:
    hooked = am.load(models.fresh("gpt2"), tokenizer=models.tokenizer())
    options: dict[str, Any] = {"answers": ["are", "are"], "against": ["here", "here"]}
    clean = ["the keys to the cabinet", "a dog"]
    with pytest.raises(InputError, match=r"pair 1 has 2 clean, \['a', 'dog'\], and 3 corrupted, \['a', 'a', 'dog'\]"):
        am.patch(hooked, clean, ["the dog to the cabinet", "a a dog"], **options)
    refuses("got 2 clean and 1 corrupted", am.patch, hooked, clean, ["the dog to the cabinet"], **options)
    with pytest.raises(InputError, match="must have the same length; pair 0 has 5 tokens, pair 1 has 2"):
        am.patch(hooked, clean, ["the dog to the cabinet", "a a"], at="resid_pre", **options)
    with pytest.raises(InputError, match=r"pair 1 starts at 2 \(clean\) and 0 \(corrupted\)"):
        am.patch(models.hooked("bloom"), *(models.padded("bloom", side=side) for side in ("left", "right")), **JUDGED)
