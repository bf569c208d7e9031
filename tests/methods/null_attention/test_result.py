"""Heads built by hand are classified correctly, and every number equals loops and ablations on the raw transformers
model."""

import itertools
import math
import statistics
from functools import cache, partial
from typing import Any, Final

import models
import pytest
import reference
import torch
import transformers
from by_hand import divergences, losses, z_changed
from torch import Tensor

import attnmech as am
from attnmech.draw.text import signed
from attnmech.errors import InputError
from attnmech.methods.null_attention.figures import VERDICT_STYLES
from attnmech.methods.null_attention.formulas import VERDICTS, value_ratio, verdict_of
from attnmech.methods.null_attention.result import INTERVENTIONS
from attnmech.methods.null_attention.sums import FACTS

F64 = torch.float64
NAN = float("nan")

# -- heads built by hand -----------------------------------------------------------------------------------------

HEADS, D_HEAD, TOKENS, SCORE = 5, 6, 11, 9.5
NULL, ACTIVE, AWAY, UNCLEAR, AIMLESS = range(HEADS)
COMMON, SOMETIMES, UNREAD = 5, 6, 13
"""Two tokens, and a direction of the stream that no logit depends on."""


def feature(number: int) -> Tensor:
    """A direction of the stream with mean zero, so that layer norms only scale it."""
    found = torch.zeros(HEADS * D_HEAD, dtype=F64)
    found[2 * number], found[2 * number + 1] = 0.5**0.5, -(0.5**0.5)
    return found


@cache
def built() -> Any:
    """One layer of GPT-2 whose MLP does almost nothing; a stream has two features: the token, and being first."""
    width = HEADS * D_HEAD
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=20, n_embd=width, n_layer=1, n_head=HEADS, bos_token_id=0, eos_token_id=0,
        layer_norm_epsilon=1e-12,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).to(F64).eval()
    first, later = feature(TOKENS), feature(TOKENS + 1)
    normed = (width / 2) ** 0.5  # the length of a feature after layer norm
    reads = {
        NULL: later,
        ACTIVE: first + 0.2 * later,
        AWAY: first + later,
        UNCLEAR: first + 0.2 * later,
        AIMLESS: first + 0.2 * later,
    }
    writes = {
        NULL: 0.5 * feature(COMMON),
        ACTIVE: feature(COMMON),
        AWAY: 0.1 * feature(COMMON),
        UNCLEAR: 1.2 * feature(SOMETIMES),
        AIMLESS: 1e-3 * feature(UNREAD),
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.ones_like(parameter) if "ln_" in name and "weight" in name else 0 * parameter)
        base = model.transformer
        base.wte.weight.copy_(torch.stack([feature(token) for token in range(TOKENS)]))
        base.wpe.weight.copy_(later.expand(20, -1))
        base.wpe.weight[0] = first
        base.h[0].mlp.c_fc.weight[:, 0] = first
        base.h[0].mlp.c_proj.weight[0] = 1e-6 * feature(UNREAD)
        attention = base.h[0].attn
        for head in range(HEADS):
            at = head * D_HEAD
            sign = -1 if head == AWAY else 1
            attention.c_attn.bias[at] = 1.0
            attention.c_attn.weight[:, width + at] = sign * SCORE * D_HEAD**0.5 / normed * first
            attention.c_attn.weight[:, 2 * width + at] = reads[head] / normed
            attention.c_proj.weight[at] = writes[head]
    return model


def texts_of(count: int) -> list[Tensor]:
    """Texts in which `COMMON` is frequent, and `SOMETIMES` occurs in every other text."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        ids = torch.randint(0, TOKENS - 4, (12 + number % 4,), generator=generator) + 4
        ids[ids == SOMETIMES] = SOMETIMES if number % 2 else 4
        drawn = torch.rand(len(ids), generator=generator)
        ids[drawn < 0.5] = COMMON
        if number % 2:
            ids[drawn > 0.7] = SOMETIMES
        found.append(ids[None])
    return found


@cache
def of_built(count: int = 8) -> am.results.NullAttention:
    return am.null_attention(am.load(built()), texts_of(count))


def test_heads_built_by_hand_are_told_apart() -> None:
    null = of_built()
    assert null.verdict == (("resting", "active", "not attending", "undecided", "unused"),)
    assert null.complete
    assert null.null_share.tolist() == pytest.approx([float(null.sink_mass[0, NULL]) / HEADS])


def test_of_one_text_there_is_no_verdict_but_on_heads_that_do_not_attend() -> None:
    null = of_built(1)
    assert null.verdict == (("undecided", "undecided", "not attending", "undecided", "undecided"),)
    assert null.effects["zero_value"].effect[0, ACTIVE] > 0.1
    assert null.null_share.tolist() == [0.0]


def test_bounds_move_verdicts() -> None:
    model, texts = am.load(built()), texts_of(8)
    wide = am.null_attention(model, texts, delta=5.0)
    assert wide.verdict == (("resting", "unused", "not attending", "unused", "unused"),)
    strict = am.null_attention(model, texts, least_mass=0.9999, heads=[(0, ACTIVE)])
    assert strict.verdict == (("", "not attending", "", "", ""),)
    generous = am.null_attention(model, texts, least_ratio=6.0)
    assert generous.verdict == (("resting", "subtle", "not attending", "undecided", "resting"),)


# -- against loops and ablations on the raw model -----------------------------------------------------------------

SPECIAL: Final = (0, 2)
"""The ids that the tests' tokenizer treats as special."""


def judged(metric: str, logits: Tensor, clean: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """The mean loss of the next token, or the mean KL from the clean output, text by text."""
    found = []
    for n, real in enumerate(mask.bool()):
        now, length = logits[n, real][None], [int(real.sum())]
        of_text = losses(now, ids[n, real][None], length) if metric == "loss" else None
        found.append(divergences(now, clean[n, real][None], length) if of_text is None else of_text)
    return torch.cat(found)


def sink_of(sink: str, p: Tensor, ids: list[int], real: list[int]) -> list[int]:
    if sink == "first":
        return real[:1]
    if sink == "special":
        return [i for i in real if ids[i] in SPECIAL]
    got = {j: sum(float(p[i, j]) for i in real if i != j) for j in real}
    return [max(got, key=lambda j: got[j])]


def by_hand(plain: Any, ids: Tensor, mask: Tensor, sink: str, metric: str) -> tuple[Tensor, Tensor, Tensor]:
    """The facts, and the metric before and after each change, by loops over raw patterns, values and weights."""
    given = {"input_ids": ids, "attention_mask": mask.long()}
    texts = len(ids)
    causal = reference.family(plain) not in reference.ENCODERS
    with torch.no_grad():
        clean = plain(**given, output_attentions=True, output_hidden_states=True)
        layers, heads = len(clean.attentions), clean.attentions[0].shape[1]
        facts = torch.full((len(FACTS), layers, heads, texts), NAN, dtype=F64)
        after = torch.full((len(INTERVENTIONS), layers, heads, texts), NAN, dtype=F64)
        for layer, head in itertools.product(range(layers), range(heads)):
            w = reference.layer_weights(plain, layer)
            x = clean.hidden_states[layer]
            kv = head // (heads // len(w.W_V))
            v = reference.project(reference.attention_input(plain, layer, x), w.W_V, w.b_V)[:, :, kv].double()
            p = clean.attentions[layer][:, head].double()
            written = v @ w.W_O[head].double()
            sinks, others = [], []
            for n in range(texts):
                real = mask[n].nonzero()[:, 0].tolist()
                sinks.append(sink_of(sink, p[n], ids[n].tolist(), real))
                others.append([i for i in real if i not in sinks[n]])
                norm = {j: float(written[n, j].norm()) for j in real}
                got = {s: sum(float(p[n, i, s]) for i in others[n]) for s in sinks[n]}
                total = sum(got.values())
                wrote = sum(got[s] * norm[s] for s in sinks[n]) / total if total else norm[sinks[n][0]]
                at, elsewhere = [], []
                for i in others[n]:
                    seen = [j for j in real if not causal or j <= i]
                    u = sum((p[n, i, j] * written[n, j] for j in seen), torch.zeros(written.shape[-1], dtype=F64))
                    size = float(u.norm() / x[n, i].double().norm())
                    if len(seen) > 1:
                        (at if max(seen, key=lambda j: float(p[n, i, j])) in sinks[n] else elsewhere).append(size)
                mass, ratio = total / len(others[n]), wrote / statistics.median(norm[j] for j in others[n])
                sizes = (statistics.mean(some) if some else NAN for some in (at, elsewhere))
                facts[:, layer, head, n] = torch.tensor([mass, ratio, *sizes])
            mean = torch.stack([v[n, j] for n in range(texts) for j in others[n]]).mean(dim=0)
            for place, name in enumerate(INTERVENTIONS):
                pattern, value = p.clone(), v.clone()
                for n in range(texts):
                    rest = [j for j in range(ids.shape[1]) if j not in sinks[n]]
                    if name == "remove":
                        pattern[n, :, sinks[n]] = 0
                        for i in range(ids.shape[1]):
                            if pattern[n, i].sum() > 0:
                                pattern[n, i] /= pattern[n, i].sum()
                    elif name == "only_sink":
                        value[n, rest] = 0
                    else:
                        value[n, sinks[n]] = mean if name == "mean_value" else 0.0
                z = (pattern @ value).to(x.dtype)[:, :, None]
                with z_changed(plain, layer, partial(torch.index_copy, dim=2, index=torch.tensor([head]), source=z)):
                    now = plain(**given).logits
                after[place, layer, head] = judged(metric, now, clean.logits, ids, mask)
    return facts, judged(metric, clean.logits, clean.logits, ids, mask), after


@cache
def with_tokenizer(name: str) -> am.HookedModel:
    return am.load(models.fresh(name), tokenizer=models.tokenizer(has_bos=True))


@pytest.mark.parametrize(
    ("name", "sink", "side"),
    [
        ("gpt2", "first", "right"),
        ("gpt2", "first", "left"),
        ("gpt2", "special", "right"),
        ("llama", "first", "right"),
        ("llama", "most_attended", "right"),
        ("bert", "most_attended", "left"),
        ("bert", "special", "right"),
    ],
)
def test_every_number_equals_the_raw_model(name: str, sink: str, side: str) -> None:
    inputs = models.padded(name, side)
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    if sink == "special":
        ids[:, 0], ids[0, 4], ids[1, 3] = 2, 1, 2
    model = with_tokenizer(name) if sink == "special" else models.hooked(name)
    metric = "loss" if model.causal else "kl"
    facts, before, after = by_hand(models.plain(name), ids, mask, sink, metric)
    null = am.null_attention(model, inputs, sink=sink, metric=metric, delta=0.05)
    assert not (null.sinks & ~mask).any()
    torch.testing.assert_close(null.facts, facts, rtol=2e-4, atol=1e-6, equal_nan=True)
    for place, effects in enumerate(null.effects.values()):
        torch.testing.assert_close(effects.before, before, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(effects.after, after[place], rtol=2e-4, atol=2e-5)
    for fact, value in zip(FACTS, facts.nanmean(dim=-1), strict=True):
        torch.testing.assert_close(getattr(null, fact), value, rtol=2e-4, atol=1e-6, equal_nan=True)
    both = facts[2] - facts[3]
    torch.testing.assert_close(null.update_difference, both.nanmean(dim=-1), rtol=1e-3, atol=1e-5, equal_nan=True)
    low, high = null["update_difference"].interval()
    five = (~both.isnan()).sum(dim=-1) >= 5
    assert (low.isnan() == ~five).all()
    assert (low[five] <= null.update_difference[five] + 1e-9).all()
    assert (null.update_difference[five] <= high[five] + 1e-9).all()


def test_a_head_whose_values_are_scaled_by_a_norm_before_the_stream() -> None:
    """Gemma 2: the norm's weight changes what is written, so it is part of the ratio and of the update."""
    model, ids = models.hooked("gemma2"), models.token_ids("gemma2")
    null = am.null_attention(model, ids, heads=[(1, 3)])
    updates = am.residual_updates(model, ids)
    by_row = updates.by_row("magnitude")[1, 3]
    at_first = (updates.top_key[1, 3] == 0) & (torch.arange(7) > 0)
    elsewhere = updates.top_key[1, 3] > 0
    for where, found in ((at_first, null.update_at_sink), (elsewhere, null.update_elsewhere)):
        means = torch.stack([row[chosen].mean() for row, chosen in zip(by_row, where, strict=True)])
        assert float(found[1, 3]) == pytest.approx(float(means.nanmean()), rel=1e-5)
    gamma = models.plain("gemma2").model.layers[1].post_attention_layernorm.weight.detach()
    acts = model.run(ids, points=["v"], layers=[1])
    written = (acts["v", 1][:, :, 3 // 3] @ model.weights(1).W_O[3].detach() * (1 + gamma)).norm(dim=-1)
    ratios = [float(row[0]) / statistics.median(row[1:].tolist()) for row in written]
    assert float(null.value_ratio[1, 3]) == pytest.approx(statistics.mean(ratios), rel=1e-5)


def test_the_mean_may_be_that_of_other_texts() -> None:
    model, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    other = models.token_ids("gpt2", batch=4, length=5, seed=9)
    own = am.null_attention(model, ids, heads=[(1, 2)])
    theirs = am.null_attention(model, ids, heads=[(1, 2)], reference=other)
    mean = model.run(other, points=["v"], layers=[1])["v", 1][:, 1:, 2].mean(dim=(0, 1))
    values = {1: torch.zeros(1, 1, 5, 4)}
    values[1][0, 0, 2] = mean
    with model.intervene(am.Intervention.replace_values([(1, 2)], "first", values)):
        logits = model.run(ids).logits
    after = judged("loss", logits, logits, ids, torch.ones_like(ids))
    torch.testing.assert_close(theirs.effects["mean_value"].after[1, 2], after, rtol=1e-5, atol=1e-6)
    for name in ("remove", "zero_value", "only_sink"):
        assert torch.equal(own.effects[name].after[1, 2], theirs.effects[name].after[1, 2])
    assert not torch.equal(own.effects["mean_value"].after[1, 2], theirs.effects["mean_value"].after[1, 2])


# -- what can be chosen, shown and kept ---------------------------------------------------------------------------


def test_some_heads_only() -> None:
    model, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    whole = am.null_attention(model, ids)
    some = am.null_attention(model, ids, heads=[(2, 1), (0, 3)])
    assert some.layers == (0, 2)
    assert some.to_frame()[["layer", "head"]].to_numpy().tolist() == [[0, 3], [2, 1]]
    judged = [(layer, head) for layer in range(3) for head in range(5) if some.verdict[layer][head]]
    assert judged == [(0, 3), (2, 1)] and some.null_share.isnan().all() and some.sink_mass[0, 0].isnan()
    torch.testing.assert_close(some.sink_mass[2, 1], whole.sink_mass[2, 1])
    torch.testing.assert_close(some.effects["remove"].after[0, 3], whole.effects["remove"].after[0, 3])


def test_only_heads_that_attend_are_changed_where_one_asks_for_that() -> None:
    model, texts = am.load(built()), texts_of(8)
    whole, some = am.null_attention(model, texts), am.null_attention(model, texts, heads="attending")
    assert some.verdict == whole.verdict
    assert torch.equal(some.null_share, whole.null_share)
    torch.testing.assert_close(some.facts, whole.facts, equal_nan=True, rtol=0, atol=0)
    attending = [head != AWAY for head in range(HEADS)]
    for name, effects in some.effects.items():
        assert effects.swept.bool().tolist() == [attending]
        assert effects.effect[0, AWAY].isnan()
        assert torch.equal(effects.effect[0, attending], whole.effects[name].effect[0, attending])
    assert len(some.to_frame()) == HEADS


def test_where_no_head_attends_the_one_that_does_most_is_changed() -> None:
    model, ids = models.hooked("gpt2"), models.token_ids("gpt2", batch=5)
    found = am.null_attention(model, ids, heads="attending", least_mass=2.0)
    assert {name for row in found.verdict for name in row} == {"not attending"}
    assert found.layers == (0, 1, 2)
    (place,) = found.effects["remove"].swept.nonzero().tolist()
    assert float(found.sink_mass[tuple(place)]) == float(found.sink_mass.max())


def test_what_it_says_of_itself() -> None:
    null = of_built()
    assert null.to_frame()["verdict"].tolist() == list(null.verdict[0])
    page = null.to_html()
    assert "1 resting, 1 active, 1 unused, 0 subtle, 1 undecided, 1 not attending" in page
    assert "not attending</td>" in page and "value changes the metric by more than 0.01" in page
    assert repr(null) == (
        "NullAttention(Verdicts on 5 heads and the first token (8 texts; effects within ±0.01 nats of loss count as "
        "zero): 1 resting, 1 active, 1 unused, 0 subtle, 1 undecided, 1 not attending; about 1,957 texts would decide "
        "the undecided head.)"
    )


def test_the_map_shows_verdicts_as_colours_and_letters_with_numbers() -> None:
    assert tuple(VERDICT_STYLES) == tuple(VERDICTS)
    assert len({letter for letter, _ in VERDICT_STYLES.values()}) == len(VERDICTS)
    null = of_built()
    (cells,) = null.plot().data
    assert list(cells.text[0]) == ["R", "A", "·", "?", "U"]
    assert list(cells.z[0]) == [0, 1, 5, 4, 2]
    assert cells.y[0] == f"0 · {100 * float(null.null_share[0]):.0f}\u00a0%"
    low, high = null.effects["remove"].interval()
    assert "L0H1: active" in cells.hovertext[0][1]
    assert f"sink mass: {float(null.sink_mass[0, 1]):.3g}" in cells.hovertext[0][1]
    ends = " to ".join(signed(float(end[0, 1]), ".3g") for end in (low, high))
    assert f"({ends})" in cells.hovertext[0][1]
    assert list(cells.customdata[0][1]) == [0, 1]
    some = am.null_attention(models.hooked("gpt2"), models.token_ids("gpt2"), heads=[(1, 2)]).plot().data[0]
    assert list(some.text[0]) == ["", "", some.text[0][2], "", ""]
    assert some.z[0][0] is None
    assert some.hovertext[0][0] == "L1H0<br>not measured"
    assert some.y[0] == "1"


# -- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sink": "last"}, r'`sink` must be one of "first" \(the first token\), .*; got \'last\''),
        ({"sink": "special"}, 'sink="special" needs a tokenizer with special tokens'),
        ({"delta": 0.0}, "`delta` must be a finite number above 0; got 0.0"),
        ({"least_mass": 0.0}, "`least_mass` must be a finite number above 0"),
        ({"least_ratio": math.inf}, "`least_ratio` must be a finite number above 0"),
        ({"heads": [(0, 9)]}, "`head` must be from 0 to 4"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        am.null_attention(models.hooked("gpt2"), models.token_ids("gpt2"), **options)


def test_a_text_without_a_special_token_is_named() -> None:
    ids = models.token_ids("gpt2")
    ids[0, 3] = 2
    with pytest.raises(InputError, match="needs a special token in every text; text 1 has none"):
        am.null_attention(with_tokenizer("gpt2"), ids, sink="special")


def test_texts_of_the_sink_alone_have_no_mean_value() -> None:
    with pytest.raises(InputError, match="must have tokens other than the sink"):
        am.null_attention(models.hooked("bert"), torch.tensor([[5], [7]]), metric="kl")


# -- the rule, case by case ------------------------------------------------------------------------------------


BOUNDS = {"delta": 0.1, "least_mass": 0.3, "least_ratio": 0.5}


@pytest.mark.core
@pytest.mark.parametrize(
    ("mass", "ratio", "low", "high", "verdict"),
    [
        (0.29, 0.1, NAN, NAN, "not attending"),
        (0.3, 0.1, -0.1, 0.1, "resting"),
        (0.9, 0.1, NAN, NAN, "undecided"),
        (0.9, NAN, -0.01, 0.01, "undecided"),
        (NAN, 0.1, -0.01, 0.01, "undecided"),
        (0.9, 0.5, 0.2, 0.3, "active"),
        (0.9, 0.5, -0.3, -0.2, "active"),
        (0.9, 0.5, -0.1, 0.1, "unused"),
        (0.9, 0.49, 0.1, 0.3, "undecided"),
        (0.9, 0.49, 0.11, 0.3, "subtle"),
        (0.9, float("inf"), 0.2, 0.3, "active"),
    ],
)
def test_bounds_and_unknown_numbers(mass: float, ratio: float, low: float, high: float, verdict: str) -> None:
    assert verdict_of(mass, ratio, low, high, **BOUNDS) == verdict


def test_a_sink_that_writes_nothing_has_the_ratio_zero_even_where_nobody_writes() -> None:
    sink = torch.tensor([[[True, False, False]]])
    received = torch.ones(1, 1, 3)
    silent = value_ratio(torch.tensor([[[0.0, 0.0, 0.0]]]), received, sink, ~sink)
    alone = value_ratio(torch.tensor([[[2.0, 0.0, 0.0]]]), received, sink, ~sink)
    assert (silent.item(), alone.item()) == (0.0, torch.inf)


def test_a_sink_that_nobody_attends_has_the_plain_mean_of_its_tokens() -> None:
    sink = torch.tensor([[[True, True, False, False]]])
    found = value_ratio(torch.tensor([[[1.0, 3.0, 4.0, 6.0]]]), torch.zeros(1, 1, 4), sink, ~sink)
    assert found.item() == pytest.approx(2 / 5)
