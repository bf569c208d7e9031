"""Attention focus against loops over the patterns that plain transformers returns."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import reference
import torch
from comparing import message_of as refused
from comparing import refuses
from torch import Tensor

import attnmech as am
from attnmech.errors import MissingPointError
from attnmech.maths.focus import STATISTICS
from attnmech.model.attention import attend as attention
from attnmech.runs.token_types import TOKEN_TYPES

LAST = 3
NAMES = ("bloom", "gpt2", "llama", "bert", "gemma2", "falcon_rotary_serial", "opt", "mpt3", "gpt_oss", "roberta")


def patterns(name: str, dtype: torch.dtype, inputs: dict[str, Tensor]) -> list[Tensor]:
    model = models.in_attention(models.fresh(name, dtype), "eager")
    with torch.no_grad():
        return [each.double() for each in model(**inputs, output_attentions=True).attentions]


def by_hand(pattern: Tensor, visible: Tensor, mask: Tensor, *, first_row: bool = False) -> dict[str, list[float]]:
    """Every statistic of each head of one layer, row by row; pattern `[batch head query key]`."""
    heads = pattern.shape[1]
    found: dict[str, list[float]] = {name: [] for name in STATISTICS}
    for h in range(heads):
        rows: dict[str, list[float]] = {name: [] for name in STATISTICS}
        for b in range(len(pattern)):
            begin = next(i for i in range(mask.shape[1]) if mask[b, i])
            for i in range(pattern.shape[2]):
                if not mask[b, i] or (i == begin and not first_row):
                    continue
                seen = [j for j in range(pattern.shape[3]) if visible[b, 0, i, j]]
                p = {j: float(pattern[b, h, i, j]) for j in seen}
                ordered = sorted(p.values(), reverse=True)
                top = max(seen, key=lambda j: p[j])
                if len(seen) > 1:
                    rows["tied_top"].append(float(ordered[0] == ordered[1]))
                    rows["concentration"].append(ordered[0] - ordered[1])
                    rows["distance"].append(sum(p[j] * abs(i - j) for j in seen))
                for key, place in (("self", i), ("first", begin), ("previous", i - 1)):
                    if place in seen:
                        rows[f"{key}_mass"].append(p[place])
                        if len(seen) > 1:
                            rows[f"{key}_top"].append(float(top == place))
                others = [j for j in seen if j not in (i, begin, i - 1)]
                if others:
                    rows["elsewhere_top"].append(float(top in others))
                recent = [j for j in seen if i - LAST < j <= i]
                if len(recent) < len(seen):
                    rows["last_mass"].append(sum(p[j] for j in recent))
                entropy = -sum(x * math.log(x) for x in p.values() if x > 0)
                rows["entropy"].append(entropy)
                if len(seen) > 1:
                    rows["normalised_entropy"].append(entropy / math.log(len(seen)))
        for name, values in rows.items():
            found[name].append(sum(values) / len(values) if values else math.nan)
    return found


def require_as_by_hand(focus: am.results.AttentionFocus, expected: list[dict[str, list[float]]], close: float) -> None:
    for place, layer in enumerate(expected):
        for name, values in layer.items():
            found = focus[name].mean[place]
            wanted = torch.tensor(values, dtype=torch.float64)
            assert torch.allclose(found, wanted, rtol=0, atol=close, equal_nan=True), (name, place, found, wanted)


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "side", "dtype"),
    [
        *((name, ("right", "left")[place % 2], torch.float32) for place, name in enumerate(NAMES)),
        *((name, "right", torch.float32) for name in ("gpt2", "bert")), ("gpt_oss", "left", torch.float32),
        *((name, "", torch.float64) for name in ("llama", "bert", "gemma2")),
    ],
)  # fmt: skip
def test_every_statistic_is_that_of_a_loop(name: str, side: str, dtype: torch.dtype) -> None:
    inputs = models.padded(name, side, batch=3, length=11)
    if not side:  # in float64 transformers' eager attention gives NaN on rows that see padding alone
        inputs["attention_mask"][:] = 1
    model = models.plain(name)
    # Even in float64, transformers computes the softmax in float32.
    close = 1e-5 if dtype == torch.float32 else 1e-6
    mask = inputs["attention_mask"].bool()
    expected = [
        by_hand(pattern, reference.visible(model, mask, layer), mask)
        for layer, pattern in enumerate(patterns(name, dtype, inputs))
    ]
    require_as_by_hand(am.attention_focus(models.hooked(name, dtype), inputs, last=LAST), expected, close)


@pytest.mark.parametrize(("name", "rows"), [("bloom", 3), ("bert", 11), ("gemma2", 7)])
def test_blocks_that_do_not_divide_the_text(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = models.token_ids(name, batch=2, length=19)
    hooked = models.hooked(name)
    whole = am.attention_focus(hooked, ids)
    monkeypatch.setattr(attention._Layer, "blocks", lambda layer: _in_steps(layer.q.shape[2], rows))
    blocks = am.attention_focus(hooked, ids)
    for key in ("sums", "counts", "distance", "received", "uniform", "seen", "by_type", "sink_rate", "values"):
        assert torch.allclose(whole.state[key].double(), blocks.state[key].double(), atol=1e-5), key
    for key in ("valid", "top_key", "sinks", "samples", "classes"):
        assert torch.equal(whole.state[key], blocks.state[key]), key


def _in_steps(length: int, step: int) -> list[range]:
    return [range(start, min(length, start + step)) for start in range(0, length, step)]


@pytest.mark.parametrize("name", ["bloom", "bert"])
def test_what_keys_receive(name: str) -> None:
    """Attention by position and by distance, over all rows but the first of each text."""
    inputs = models.padded(name, batch=3, length=9)
    mask = inputs["attention_mask"].bool()
    focus = am.attention_focus(models.hooked(name), inputs)
    place = torch.arange(9)
    far = (place[:, None] - place).abs()
    for layer, pattern in enumerate(patterns(name, torch.float32, inputs)):
        counted = reference.visible(models.plain(name), mask, layer)[:, 0] & mask[..., None] & (place > 0)[:, None]
        for head in range(pattern.shape[1]):
            p = pattern[:, head] * counted
            received = p.sum(dim=(0, 1)) / counted.sum(dim=(0, 1))
            torch.testing.assert_close(focus.received[layer, head], received, rtol=0, atol=1e-6, equal_nan=True)
            shares = torch.stack([p[:, far == distance].sum() for distance in range(9)]) / p.sum()
            torch.testing.assert_close(focus.distance_histogram[layer, head], shares, rtol=0, atol=1e-6)


def test_sink_rate_after_gu() -> None:
    """α_k = mean over i ≥ k of p_ik, by text, layer and head, and the share of α_k above 0.3."""
    ids = models.token_ids("bloom", batch=4, length=6)
    focus = am.attention_focus(models.hooked("bloom"), ids)
    pattern = torch.stack(patterns("bloom", torch.float32, {"input_ids": ids}))
    for k in range(6):
        alphas = pattern[..., k:, k].mean(dim=-1)  # [layer text head]
        torch.testing.assert_close(focus.sink_rate[..., k].double(), alphas.mean(dim=1), rtol=0, atol=1e-6)
        assert focus.sink_share(k) == pytest.approx(float((alphas > 0.3).double().mean()))


def edited(hooked: am.HookedModel, ids: Tensor, make: Any, **options: Any) -> am.results.AttentionFocus:
    with hooked.hooks({"pattern": make}):
        return am.attention_focus(hooked, ids, **options)


@pytest.mark.core
def test_a_uniform_causal_head() -> None:
    length = 50

    def uniform(pattern: Tensor) -> Tensor:
        rows = torch.ones(pattern.shape[-1], pattern.shape[-1]).tril()
        return (rows / rows.sum(-1, keepdim=True)).expand_as(pattern)

    focus = edited(models.hooked("bloom"), models.token_ids("bloom", batch=2, length=length), uniform)
    harmonic, entropy = (sum(map(of, range(1, length + 1))) / length for of in (lambda i: 1 / i, math.log))
    assert torch.allclose(focus.bos_mass, torch.tensor(harmonic, dtype=torch.float64))
    assert torch.allclose(focus.where(first_row=True).entropy, torch.tensor(entropy, dtype=torch.float64))
    assert (focus.tied_top == 1).all() and (focus.self_top == 0).all() and (focus.first_top == 0).all()
    assert torch.allclose(focus.received_by_type[:, 0], focus.expected_by_type, atol=1e-6)


def test_cross_attention_has_no_self() -> None:
    inputs = models.inputs_of("t5")
    pattern = models.hooked("t5").run(inputs, points=["cross.pattern"])["cross.pattern", 2][:, :, 1:].double()
    focus = am.attention_focus(models.hooked("t5"), inputs, stack="cross")
    assert torch.allclose(focus.first_mass[2], pattern[..., 0].mean(dim=(0, 2)), atol=1e-5)
    ordered = pattern.sort(dim=-1, descending=True).values
    assert torch.allclose(focus.concentration[2], (ordered[..., 0] - ordered[..., 1]).mean(dim=(0, 2)), atol=1e-5)
    for name in ("self_top", "previous_mass", "distance", "last_mass", "elsewhere_top"):
        assert focus[name].mean.isnan().all()


def test_special_tokens_are_a_class_of_rows() -> None:
    hooked = am.load(models.fresh("bloom"), tokenizer=models.tokenizer(adds_bos=True))
    ids = torch.tensor([[2, 4, 0, 5, 6], [2, 7, 8, 1, 9]])  # [PAD] as an ordinary token; [UNK] is a word
    focus = am.attention_focus(hooked, ids)
    entropy, ordinary = focus.by_row("entropy"), torch.tensor([[0, 1, 0, 1, 1], [0, 1, 1, 1, 1]]).bool()
    assert torch.allclose(focus.where(special=False).entropy, entropy[:, :, ordinary].mean(-1).double(), atol=1e-6)


@pytest.mark.parametrize(
    ("first", "itself", "expected"),
    [(0.96, 0.0, "dead"), (0.6, 0.0, "sink"), (0.1, 0.9, "low entropy"), (0.4, 0.6, ""), (0.4, 0.0, "")],
)
def test_collapse_classes(first: float, itself: float, expected: str) -> None:
    """The rest of the mass is spread over the other keys."""

    def make(pattern: Tensor) -> Tensor:
        length = pattern.shape[-1]
        made = torch.full_like(pattern, (1 - first - itself) / (length - 1))
        made[..., 0] = first
        return made + itself * torch.eye(length)

    focus = edited(models.hooked("bloom"), models.token_ids("bloom", batch=1, length=200), make)
    assert set(sum(focus.collapse, ())) == {expected}


def test_where_leaves_out_rows_afterwards() -> None:
    ids = models.token_ids("bert", batch=2, length=8)
    focus = am.attention_focus(models.hooked("bert"), ids, last=LAST)
    whole = torch.ones(2, 8, dtype=torch.bool)
    visible = reference.visible(models.plain("bert"), whole)
    found = patterns("bert", torch.float32, {"input_ids": ids})
    every = [by_hand(pattern, visible, whole, first_row=True) for pattern in found]
    require_as_by_hand(focus.where(first_row=True), every, 1e-5)

    rows = torch.zeros(2, 8, dtype=torch.bool)
    rows[0, 3] = rows[1, 5] = True
    some = focus.where(rows=rows)
    entropy = focus.by_row("entropy")
    assert torch.allclose(some.entropy, ((entropy[:, :, 0, 3] + entropy[:, :, 1, 5]) / 2).double(), atol=1e-6)
    assert some["entropy"].interval()[0].isnan().all()  # of two texts
    refuses("neither a choice of `rows` nor", lambda: some.received, error=MissingPointError)


def test_token_types() -> None:
    model = models.demo()
    focus = am.attention_focus(model, "Anna sang, and 7 keys (old) fell.")
    received, expected = focus.received_by_type, focus.expected_by_type
    assert received.shape[-1] == len(TOKEN_TYPES)
    assert torch.allclose(received.sum(-1), torch.ones(1, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(expected.sum(-1), torch.ones(1, dtype=torch.float64), atol=1e-6)
    place = {name: n for n, name in enumerate(TOKEN_TYPES)}
    batch = model.encode("Anna sang, and 7 keys (old) fell.")
    comma = batch.tokens[0].index(",")
    uniform = sum(1 / (i + 1) for i in range(comma, len(batch.tokens[0])) if i) / (len(batch.tokens[0]) - 1)
    assert float(expected[0, place["comma"]]) == pytest.approx(uniform)
    pattern = model.run(batch, points=["pattern"])["pattern", 2][0]
    assert float(received[2, 1, place["comma"]]) == pytest.approx(float(pattern[1, 1:, comma].mean()), abs=1e-6)
    assert float(received[2, 1, place["first token"]]) == pytest.approx(float(pattern[1, 1:, 0].mean()), abs=1e-6)


def test_figures_and_page(tmp_path: Path) -> None:
    texts = ["Anna sang of shells.", "Tom gave an old anchor to Clara.", "The keys are here."]
    focus = am.attention_focus(models.demo(), texts)
    for name, statistic in (
        ("self_focus", "self_top"),
        ("first_focus", "first_top"),
        ("concentration", "concentration"),
    ):
        drawn = sorted(value for trace in focus.plot(name).data for value in trace.y if value is not None)
        assert set(np.round(drawn, 5)) == set(np.round(focus[statistic].mean.flatten().tolist(), 5))
    refuses("`figure` must be one of self_focus", focus.plot, "sharpness")
    page = focus.write_html(tmp_path / "focus.html").read_text(encoding="utf-8")
    assert "Figure 3. How concentrated attention is" in page and "3 texts" in page
    assert page.count('<script type="text/plain"') == 3  # plotly, the views and the map of heads, for three figures


def focus_of(documents: Iterable[Any], k: int = 0, n: int = 1, **options: Any) -> am.results.AttentionFocus:
    hooked, given = models.hooked("bloom"), iter(list(documents))
    found: am.results.AttentionFocus = am.attention_focus(hooked, given, shard=(k, n), **options)
    return found


def some_documents(count: int = 12) -> list[Tensor]:
    return [torch.arange(3, 6 + number % 5) + number for number in range(count)]


def test_a_document_counts_once_in_a_merged_result(tmp_path: Path) -> None:
    texts = some_documents()
    whole, half, other, quarter = (focus_of(texts, *shard) for shard in ((0, 1), (0, 2), (1, 2), (2, 4)))
    for twice in (lambda: half.merged(half), lambda: half.merged(other, half), lambda: whole.merged(other)):
        assert "only disjoint shards" in refused(twice)
    assert "can be merged; (0, 2) and (2, 4) share documents." in refused(lambda: half.merged(quarter))
    assert "(0, 2) and (2, 3)" in refused(lambda: half.merged(focus_of(texts, 2, 3)))
    merged = other.merged(quarter)
    assert merged.provenance.options["shard"] == [[1, 2], [2, 4]]
    assert "(2, 4) and (0, 2)" in refused(lambda: merged.merged(half))
    rest = am.load_result(focus_of(texts, 0, 4).save(tmp_path / "rest.safetensors"))
    everything = merged.merged(rest)
    assert everything.documents == 12
    assert all(map(torch.allclose, everything["entropy"].interval(), whole["entropy"].interval()))
    assert "only disjoint shards" in refused(lambda: everything.merged(rest))
    of_list = am.attention_focus(models.hooked("bloom"), texts[:2])
    assert "results that keep rows cannot be merged" in refused(lambda: whole.merged(of_list))
    one_layer = focus_of(texts, 1, 2, layers=[1])
    assert "must have the same model, layers, options" in refused(lambda: half.merged(one_layer))


def test_parts_of_two_corpora_are_not_merged(tmp_path: Path) -> None:
    texts = some_documents()
    half = focus_of(texts, 0, 2)
    changed = [*texts[:4], texts[4] + 1, *texts[5:]]
    for corpus in (changed, texts[:-1], texts[::-1], [*texts, texts[0]]):
        other = focus_of(corpus, 1, 2)
        assert "shards of the same corpus can be merged; got two" in refused(lambda other=other: half.merged(other))
    # The same token ids, in any form.
    padded = {"input_ids": torch.stack([texts[0], texts[5]]), "attention_mask": torch.ones(2, len(texts[0]))}
    mine = [padded, texts[1], texts[2]]
    yours = [texts[0], texts[5].numpy(), [texts[1], texts[2]]]
    assert focus_of(mine, 0, 2).merged(focus_of(yours, 1, 2)).documents == 4
    # A file of texts, then changed.
    model, path = am.load(models.fresh("bloom"), tokenizer=models.tokenizer()), tmp_path / "corpus.txt"
    parts = []
    for last in ("the dog and the keys", "the dog and a cabinet"):
        path.write_text(f"the keys\na dog\nthe cabinet\n{last}\n")
        parts.append([am.attention_focus(model, am.Corpus(path), shard=(k, 2)) for k in range(2)])
    assert parts[0][0].merged(parts[0][1]).documents == 4
    assert "got two, with the SHA-256" in refused(lambda: parts[0][0].merged(parts[1][1]))


def test_a_result_that_does_not_know_its_corpus_is_not_merged() -> None:
    half, other = (focus_of(some_documents(), k, 2) for k in range(2))
    options = {name: value for name, value in half.provenance.options.items() if name != "corpus"}
    old = replace(half, provenance=replace(half.provenance, options=options))
    for merge in (lambda: old.merged(other), lambda: other.merged(old)):
        assert "saved by a version that did not record the corpus. Measure it again." in refused(merge)


def test_the_lead_counts_heads_that_look_at_the_first_token_equally_often() -> None:
    focus = am.attention_focus(models.hooked("gpt2"), models.token_ids("gpt2", 1, 2))
    tied = (focus.first_top == 1).nonzero().tolist()
    assert 1 < len(tied) < 15 and tied[0] == [0, 0]
    assert f"; L0H0 and {len(tied) - 1} others attend to the first token most often (" in focus.lead


def test_texts_of_one_token_have_a_sentence_instead_of_nan() -> None:
    model, texts = models.hooked("gpt2"), [torch.tensor([3]), torch.tensor([4])]
    focus, updates = am.attention_focus(model, texts), am.residual_updates(model, texts)
    assert focus.lead == "On 2 texts, no token after the first sees two keys, so where heads attend is not measured."
    assert updates.lead == "There is no token after the first, so updates are not measured."
    short = torch.tensor([[3, 4]])  # has no pair of ordinary tokens
    printed = [focus, updates, am.residual_drift(model, short, k=5), am.ov_tokens(model, short, k=3)]
    assert not any("nan" in repr(result) or "1 tokens" in repr(result) for result in printed)
    assert set(sum(focus.collapse, ())) == {"not measured"}
    # A decoder's first token still chooses among the tokens of the encoder.
    inputs = {"input_ids": torch.tensor([[3, 5, 8, 2]]), "decoder_input_ids": torch.tensor([[0]])}
    crossed = am.attention_focus(models.hooked("t5"), inputs, stack="cross")
    assert "not measured" not in set(sum(crossed.collapse, ()))
