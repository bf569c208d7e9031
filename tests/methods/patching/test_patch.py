"""Patching equals patching by hand on the raw transformers model, and restores the clean run when it should."""

from pathlib import Path
from typing import Any

import models
import naive
import pytest
import torch
from by_hand import columns, logit_differences, losses, output_changed, point_changed, z_changed
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError
from attnmech.runs import reference

FAMILIES = ["gpt2", "llama", "bert", "bloom"]
ANSWERS, AGAINST = torch.tensor([5, 9, 11]), torch.tensor([7, 4, 30])
JUDGED: dict[str, Any] = {"answers": ANSWERS, "against": AGAINST}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pair(name: str) -> tuple[Tensor, Tensor]:
    """Clean and corrupted prompts that differ at tokens 2 and 5."""
    clean = models.token_ids(name)
    corrupted = clean.clone()
    corrupted[:, [2, 5]] = models.token_ids(name, seed=8)[:, [2, 5]]
    return clean, corrupted


def seen(plain: Any, ids: Tensor, at: str, layer: int) -> Tensor:
    """The raw model's value at a point."""
    kept: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value.clone())
        return value

    with torch.no_grad(), z_changed(plain, layer, keep) if at == "z" else point_changed(plain, at, layer, keep):
        plain(ids)
    return kept[0]


def judged(plain: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return logit_differences(plain(ids).logits, ANSWERS, AGAINST)


@pytest.mark.core
@pytest.mark.parametrize("positions", [None, [1, 5]])
def test_each_head_equals_the_raw_model(family: str, positions: list[int] | None) -> None:
    hooked, plain = models.hooked(family), models.plain(family)
    clean, corrupted = pair(family)
    found = am.patch(hooked, clean, corrupted, positions=positions, **JUDGED)
    assert isinstance(found, am.results.PatchEffects) and isinstance(found, am.results.HeadEffects)
    rows = list(range(7)) if positions is None else positions
    before, whole = judged(plain, corrupted), judged(plain, clean)
    torch.testing.assert_close(found.before, before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.clean, whole, rtol=1e-4, atol=1e-5)
    for layer in range(hooked.n_layers):
        theirs = seen(plain, clean, "z", layer)
        for head in range(hooked.n_heads):

            def patched(z: Tensor, theirs: Tensor = theirs, head: int = head) -> Tensor:
                z[:, rows, head] = theirs[:, rows, head]
                return z

            with z_changed(plain, layer, patched):
                after = judged(plain, corrupted)
            torch.testing.assert_close(found.after[layer, head], after, rtol=1e-4, atol=1e-5)
            share = (after.mean() - before.mean()) / (whole.mean() - before.mean())
            torch.testing.assert_close(found.recovered[layer, head], share, rtol=1e-3, atol=1e-4)


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


def projected(plain: Any, name: str, ids: Tensor, point: str, layer: int, head: int) -> Tensor:
    """q, k or v of a head (or kv head), from the raw model's projection."""
    path, chosen = columns(name, point, head, plain)
    kept: list[Tensor] = []
    with torch.no_grad(), output_changed(plain, layer, path, lambda now: kept.append(now[..., chosen])):
        plain(ids)
    return kept[0]


@pytest.mark.parametrize(
    ("name", "at", "positions"),
    [
        ("gpt2", "q", None), ("gpt2", "k", [1, -2]), ("gpt2", "v", None), ("gpt2", "pattern", [1, -2]),
        ("llama", "q", [1, -2]), ("llama", "k", [1, -2]), ("llama", "v", None), ("llama", "pattern", None),
        ("bloom", "q", [1, -2]), ("bloom", "v", [1, -2]), ("gpt_neox", "k", None), ("gpt_neox", "q", None),
        ("qwen3", "q", None), ("qwen3", "k", [1, -2]),
    ],
)  # fmt: skip
def test_each_head_of_a_projection_or_pattern_equals_the_raw_model(name: str, at: str, positions: Any) -> None:
    hooked, plain = models.hooked(name), models.plain(name)
    clean, corrupted = (ids.clamp(max=42) for ids in pair(name))
    found = am.patch(hooked, clean, corrupted, at=at, positions=positions, **JUDGED)
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
                    theirs = plain(clean, output_attentions=True).attentions[layer][:, head]
                read = theirs @ projected(plain, name, corrupted, "v", layer, head // shared)

                def patched(z: Tensor, read: Tensor = read, head: int = head) -> Tensor:
                    z[:, rows, head] = read[:, rows]
                    return z

                changed = z_changed(plain, layer, patched)
            else:
                path, chosen = columns(name, at, head, plain)
                value = projected(plain, name, clean, at, layer, head)

                def put(now: Tensor, value: Tensor = value, chosen: slice = chosen) -> Tensor:
                    part = now[..., chosen]
                    part[:, rows] = value[:, rows]
                    return now

                changed = output_changed(plain, layer, path, put)
            with changed:
                after = judged(plain, corrupted)
            torch.testing.assert_close(found.after[layer, head], after, rtol=1e-4, atol=2e-5)
    assert float(found.effect.abs().max()) > 1e-4


def test_kv_heads_are_named_as_such(tmp_path: Path) -> None:
    found = am.patch(models.hooked("llama"), *pair("llama"), at="k", heads=[(1, 1)], **JUDGED)
    assert isinstance(found, am.results.KVPatchEffects) and found.swept.nonzero().tolist() == [[1, 1]]
    assert list(found.to_frame().columns)[:2] == ["layer", "kv_head"]
    assert "Patching k at 1 kv head on 3 pairs: kv head 1 of layer 1 has" in repr(found)
    again = am.load_result(found.save(tmp_path / "k"))
    assert again.to_frame().equals(found.to_frame())
    assert found.plot().layout.xaxis.title.text == "kv head"


def test_positions_from_the_end_and_patterns_of_several_lengths() -> None:
    hooked = models.hooked("llama")
    clean = [models.token_ids("llama", 1, length, seed=length)[0] for length in (9, 4, 6)]
    corrupted = [ids.roll(2) for ids in clean]
    for at in ("z", "pattern"):
        found = am.patch(hooked, iter(clean), iter(corrupted), at=at, positions="last", **JUDGED)
        for place, (one, other) in enumerate(zip(clean, corrupted, strict=True)):
            alone = am.patch(
                hooked, one[None], other[None], at=at, positions=[len(one) - 1],
                answers=ANSWERS[place : place + 1], against=AGAINST[place : place + 1],
            )  # fmt: skip
            torch.testing.assert_close(found.after[..., place], alone.after[..., 0], rtol=1e-4, atol=1e-5)
    last = am.patch(hooked, *pair("llama"), at="resid_post", positions="last", **JUDGED)
    assert last.to_frame()["position"].tolist() == [6, 6]


def test_patterns_that_would_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_BYTES", 2**10)
    with pytest.raises(InputError, match="the patterns of 3 texts of up to 7 tokens in 3 layers would take"):
        am.patch(models.hooked("gpt2"), *pair("gpt2"), at="pattern", **JUDGED)


def test_all_of_the_stream_of_layer_0_is_the_clean_run(family: str) -> None:
    """If the prompts differ at one token, patching its position in layer 0 restores everything."""
    hooked = models.hooked(family)
    clean = models.token_ids(family)
    corrupted = clean.clone()
    corrupted[:, 3] = torch.tensor([17, 20, 33])
    found = am.patch(hooked, clean, corrupted, at="resid_pre", **JUDGED)
    torch.testing.assert_close(found.after[0, 3], found.clean, rtol=1e-5, atol=1e-5)
    assert float(found.recovered[0, 3]) == pytest.approx(1, abs=1e-4)
    others = [0, 1, 2, 4, 5, 6]
    assert float(found.per_text[0, others].abs().max()) < 1e-5
    heads = am.patch(hooked, clean, corrupted, positions=[0, 1, 2], layers=[0], **JUDGED)
    if hooked.causal:
        assert float(heads.per_text[0].abs().max()) < 1e-5


def test_pairs_of_several_lengths_and_parts_of_the_model() -> None:
    hooked = models.hooked("llama")
    clean = [models.token_ids("llama", 1, length, seed=length)[0] for length in (9, 4, 6)]
    corrupted = [ids.roll(2) for ids in clean]
    found = am.patch(hooked, iter(clean), iter(corrupted), heads=[(1, 4), (0, 2)], **JUDGED)
    assert found.swept.nonzero().tolist() == [[0, 2], [1, 4]]
    for place, (one, other) in enumerate(zip(clean, corrupted, strict=True)):
        alone = am.patch(
            hooked, one[None], other[None], answers=ANSWERS[place : place + 1], against=AGAINST[place : place + 1]
        )
        torch.testing.assert_close(found.after[0, 2, place], alone.after[0, 2, 0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.after[1, 4, place], alone.after[1, 4, 0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.clean[place], alone.clean[0], rtol=1e-4, atol=1e-5)
    some = am.patch(hooked, *pair("llama"), at="mlp_out", layers=[1], positions=[6, 2], **JUDGED)
    whole = am.patch(hooked, *pair("llama"), at="mlp_out", **JUDGED)
    assert some.layers == (1,) and some.to_frame()["position"].tolist() == [2, 6]
    torch.testing.assert_close(some.after[0, [2, 6]], whole.after[1, [2, 6]], rtol=1e-5, atol=1e-6)
    assert some.after[0, 0].isnan().all()


def test_left_padding_is_as_it_was_given() -> None:
    hooked = models.hooked("bloom")
    given = models.padded("bloom", side="left")
    other = {**given, "input_ids": given["input_ids"].roll(1, dims=0)}
    found = am.patch(hooked, given, other, **JUDGED)
    for row, length in enumerate((7, 5, 3)):
        ids = [each["input_ids"][row, 7 - length :][None] for each in (given, other)]
        alone = am.patch(hooked, *ids, answers=ANSWERS[row : row + 1], against=AGAINST[row : row + 1])
        torch.testing.assert_close(found.after[:, :, row], alone.after[:, :, 0], rtol=1e-4, atol=1e-5)
    wrong = models.padded("bloom", side="right")
    with pytest.raises(InputError, match=r"pair 1 starts at 2 \(clean\) and 0 \(corrupted\)"):
        am.patch(hooked, given, wrong, **JUDGED)


def test_the_decoder_of_t5() -> None:
    hooked = models.hooked("t5")
    clean = {"input_ids": models.token_ids("t5"), "decoder_input_ids": models.token_ids("t5", length=5, seed=2)}
    corrupted = {**clean, "input_ids": models.token_ids("t5", seed=4)}
    found = am.patch(hooked, clean, corrupted, heads=[(0, 1), (2, 3)], **JUDGED)
    z = hooked.run(clean, points=["decoder.z"])["decoder.z", 2]
    with hooked.intervene(am.Intervention.replace([(2, 3)], {2: z}, stack="decoder")):
        after = logit_differences(hooked.run(corrupted).logits, ANSWERS, AGAINST)
    torch.testing.assert_close(found.after[2, 3], after, rtol=1e-4, atol=1e-5)
    assert len(found.tokens[0]) == 5


def test_shares_and_their_intervals() -> None:
    generator = torch.Generator().manual_seed(0)
    clean, corrupted = (torch.randint(3, 50, (23, 6), generator=generator) for _ in range(2))
    answers, against = torch.randint(3, 50, (2, 23), generator=generator)
    found = am.patch(models.hooked("gpt2"), clean, corrupted, answers=answers, against=against)
    low, high = found.recovered_interval()
    for layer, head in ((0, 3), (2, 1)):
        wanted = naive.t_interval(
            (found.after[layer, head] - found.before).tolist(), (found.clean - found.before).tolist()
        )
        assert (float(low[layer, head]), float(high[layer, head])) == pytest.approx(wanted, rel=1e-6)
    frame = found.to_frame()
    assert list(frame.columns)[-4:] == ["clean", "recovered", "recovered_low", "recovered_high"]
    row = frame[(frame["layer"] == 2) & (frame["head"] == 1)].iloc[0]
    assert row["recovered"] == pytest.approx(float(found.recovered[2, 1]))
    assert row["recovered_low"] == float(low[2, 1])


def test_no_share_where_there_is_none() -> None:
    hooked, plain = models.hooked("gpt2"), models.plain("gpt2")
    clean, corrupted = pair("gpt2")
    with pytest.raises(InputError, match="those of pair 0 are the same, so patching changes nothing"):
        am.patch(hooked, clean, clean, at="attn_out", **JUDGED)
    same = am.patch(hooked, clean, corrupted, at="attn_out", metric=lambda logits, batch: 0 * logits[:, 0, 0] + 1)
    assert same.recovered.isnan().all()
    assert all(end.isnan().all() for end in same.recovered_interval())
    assert "the clean and the corrupted prompts give the same metric" in repr(same)
    loss = am.patch(hooked, clean, corrupted, metric="loss")
    assert loss.recovered.isnan().all() and not loss.effect.isnan().any()
    assert loss.not_recoverable is not None and "different next tokens" in loss.not_recoverable
    theirs = seen(plain, clean, "z", 1)

    def patched(z: Tensor) -> Tensor:
        z[:, :, 2] = theirs[:, :, 2]
        return z

    with torch.no_grad(), z_changed(plain, 1, patched):
        after = losses(plain(corrupted).logits, corrupted, [7] * 3)
    torch.testing.assert_close(loss.after[1, 2], after, rtol=1e-4, atol=1e-5)


def test_saved_drawn_and_written(tmp_path: Path) -> None:
    hooked = am.load(models.fresh("gpt2"), tokenizer=models.tokenizer(words=(*models.WORDS, "&")))
    texts = ["the keys to the cabinet", "a dog to the cabinet"], ["the & to the cabinet", "a dog to a dog"]
    options: dict[str, Any] = {"answers": [" are", " are"], "against": [" here", " here"]}
    for at in ("z", "resid_pre"):
        found = am.patch(hooked, *texts, at=at, **options)
        again = am.load_result(found.save(tmp_path / f"{at}.safetensors"))
        assert again.to_frame().equals(found.to_frame()) and repr(again) == repr(found)
        assert "has the largest effect" in found.write_html(tmp_path / f"{at}.html").read_text(encoding="utf-8")
    assert isinstance(found, am.results.PositionEffects)
    figure = found.plot("recovered")
    (trace,) = figure.data
    assert list(figure.layout.xaxis.ticktext)[:2] == ["0 the", "1 keys→&amp;"]
    torch.testing.assert_close(torch.tensor(trace.z), found.recovered)
    assert "position 1 keys→&amp;" in trace.text[0][1]
    assert "layer 2, " in trace.text[2][1]
    assert repr(found).startswith("PositionEffects(Patching resid_pre at 15 positions on 2 pairs: position ")
    with pytest.raises(InputError, match=r"`level` must be a finite number above 0 and below 1; got 2.0"):
        found.recovered_interval(2.0)
    with pytest.raises(InputError, match='`quantity` must be "effect" or "recovered"'):
        found.plot("share")


def test_a_function_of_ones_own_and_a_journal(tmp_path: Path) -> None:
    hooked = models.hooked("bert")
    clean, corrupted = pair("bert")

    def own(logits: Tensor, batch: am.reducers.Batch) -> Tensor:
        assert batch.answers is not None
        return logits[:, -1].gather(1, batch.answers[:, None])[:, 0]

    found = am.patch(hooked, clean, corrupted, metric=own, answers=ANSWERS, journal=tmp_path / "journal")
    expected = models.plain("bert")(clean).logits[:, -1].gather(1, ANSWERS[:, None])[:, 0]
    torch.testing.assert_close(found.clean, expected.double(), rtol=1e-4, atol=1e-5)
    assert found.metric == "own" and not (tmp_path / "journal").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"at": "scores"},
            "`at` must be one of z, q, k, v, pattern, resid_pre, .*; got 'scores'",
        ),
        (
            {"at": "v", "heads": [(0, 9)]},
            r"`heads` must be from 0 to 4 \(at='v' is indexed by kv head; each layer has 5\)",
        ),
        ({"positions": [-8]}, r"`positions` must be from -7 to 6 \(the shortest prompt has 7 tokens\); got -8"),
        ({"positions": "first"}, '`positions` must be "last" or a list of positions'),
        ({"at": "mlp_out", "heads": [(0, 1)]}, "mlp_out has no heads. Use `layers` and `positions`"),
        ({"heads": [(0, 9)]}, "`head` must be from 0 to 4"),
        ({"layers": [4]}, "`layer` must be from 0 to 2"),
        ({"positions": [7]}, r"`positions` must be from -7 to 6 \(the shortest prompt has 7 tokens\); got 7"),
        ({"positions": []}, "at least one position"),
        ({"metric": "kl"}, "not the closeness to the clean run"),
        ({"answers": None, "against": None}, "needs `answers`"),
        ({"answers": [3, 4]}, "one token per text, .*; got 2 for 3 texts"),
    ],
)
def test_bad_input(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        am.patch(models.hooked("gpt2"), *pair("gpt2"), **{**JUDGED, **options})


def test_prompts_that_are_no_pairs() -> None:
    hooked = am.load(models.fresh("gpt2"), tokenizer=models.tokenizer())
    options: dict[str, Any] = {"answers": ["are", "are"], "against": ["here", "here"]}
    clean = ["the keys to the cabinet", "a dog"]
    with pytest.raises(InputError, match=r"pair 1 has 2 clean, \['a', 'dog'\], and 3 corrupted, \['a', 'a', 'dog'\]"):
        am.patch(hooked, clean, ["the dog to the cabinet", "a a dog"], **options)
    with pytest.raises(InputError, match="got 2 clean and 1 corrupted"):
        am.patch(hooked, clean, ["the dog to the cabinet"], **options)
    with pytest.raises(InputError, match="must have the same length; pair 0 has 5 tokens, pair 1 has 2"):
        am.patch(hooked, clean, ["the dog to the cabinet", "a a"], at="resid_pre", **options)
