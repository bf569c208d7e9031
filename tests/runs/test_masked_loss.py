"""The loss of a masked language model by hand: mask tokens, run transformers' model, take their −ln p."""

from pathlib import Path
from typing import Any

import models
import pytest
import tiny
import torch
import transformers
from by_hand import block_of, plan_of, z_changed
from caching import cached
from comparing import refuses
from tokenizers import processors
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

import attnmech as am
from attnmech.batch import Batch
from attnmech.interventions import Values
from attnmech.model.parts.modules import submodule
from attnmech.model.run.loss import MaskedCopies

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MASK = SPECIAL.index("[MASK]")
NOUNS = tuple(f"word{number}" for number in range(38))
TEXTS = [
    " ".join(NOUNS[place % 38] for place in range(3, 3 + 5 * 4, 5)),
    " ".join(NOUNS[place % 38] for place in range(1, 1 + 7 * 15, 7)),
    " ".join(NOUNS[place % 38] for place in range(2, 2 + 9 * 11, 9)),
]
"""Texts of 4, 15 and 11 words."""


def tokenizer() -> Any:
    made = models.tokenizer(words=(*SPECIAL, *NOUNS))
    made.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"})
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


MAKERS = {
    "bert": models.bert,
    "roberta": lambda: models.roberta(heads=4, d_head=5, layers=3),
    "deberta_v2": models.deberta_v2,
    **{kind: lambda kind=kind: _masked(kind) for kind in ("distilbert", "electra", "albert", "modernbert")},
}


def _masked(kind: str) -> Any:
    made = getattr(transformers, MODEL_FOR_MASKED_LM_MAPPING_NAMES[kind])
    return made._from_config(tiny.config_of(kind), dtype=torch.float32)


def plain_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    made = models.randomised(MAKERS[name](), dtype=dtype)
    made.set_attn_implementation("eager")
    return made


@cached
def loaded(name: str, dtype: torch.dtype = torch.float32) -> am.HookedModel:
    return am.load(plain_of(name, dtype), tokenizer=tokenizer())


def copies(model: am.HookedModel, text: str) -> MaskedCopies:
    return MaskedCopies.of(model.encode(text), MASK)


def by_hand(plain: Any, masked: MaskedCopies) -> Tensor:
    """Mean of −ln p(token) over all masked tokens, one copy of one text at a time, without padding."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, hidden in zip(masked.batch.ids, masked.hidden, strict=True):
        with torch.no_grad():
            logits = plain(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).logits[0].double()
        for place, token in enumerate(hidden.tolist()):
            if token >= 0:
                assert ids[place] == MASK
                total -= logits[place, token] - logits[place].logsumexp(0)
                count += 1
    return total / count


@pytest.mark.parametrize("side", ["right", "left"])
def test_each_ordinary_token_is_masked_once(side: str) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 47, (length,), generator=generator) for length in (19, 1, 6, 80, 33)]
    rows[1][0] = 9
    width = max(map(len, rows))
    ids, mask = torch.zeros(5, width, dtype=torch.long), torch.zeros(5, width, dtype=torch.bool)
    for number, row in enumerate(rows):
        here = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[number, here], mask[number, here] = row, True
    tokens = tuple(tuple(map(str, row)) for row in ids.tolist())
    found = MaskedCopies.of(Batch(ids, mask, tokens, None, special=frozenset(range(5))), MASK)
    ordinary = mask & (ids > MASK)
    hidden = found.hidden >= 0
    times = torch.zeros(5, width, dtype=torch.long).index_add(0, found.text_of, hidden.long())
    assert torch.equal(times, ordinary.long())
    assert torch.equal(found.batch.ids, torch.where(hidden, MASK, ids[found.text_of]))
    assert torch.equal(found.hidden[hidden], ids[found.text_of][hidden])
    assert torch.equal(found.batch.mask, mask[found.text_of])
    for number, row in enumerate(rows):
        sizes = hidden[found.text_of == number].sum(dim=1)
        words = int(ordinary[number].sum())
        assert len(sizes) == min(7, words) and int(sizes.max() - sizes.min()) <= 1
        # Neither the other texts nor the padding matter.
        batch = Batch(row[None], torch.ones(1, len(row), dtype=torch.bool), (tuple(map(str, row.tolist())),), None)
        alone = MaskedCopies.of(batch.texts(torch.tensor([0])), MASK)
        if words == len(row):
            assert torch.equal(alone.hidden, found.hidden[found.text_of == number][:, mask[number]])
    # Changing one of 80 tokens changes the groups.
    other = rows[3].clone()
    other[5] = 7 + (other[5] + 1) % 40
    groups = [
        MaskedCopies.of(Batch(x[None], torch.ones(1, 80, dtype=torch.bool), (("",) * 80,), None), MASK).hidden >= 0
        for x in (rows[3], other)
    ]
    assert groups[0].shape != groups[1].shape or not torch.equal(*groups)


@pytest.mark.parametrize(("name", "dtype"), [("bert", torch.float32), ("roberta", torch.float64)])
def test_ablation_is_the_loop_with_columns_of_w_o_zeroed(name: str, dtype: torch.dtype) -> None:
    model = loaded(name, dtype)
    effects = am.ablate_heads(model, TEXTS)
    assert effects.metric == "loss" and effects.complete
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-11}
    for number, text in enumerate(TEXTS):
        masked = copies(model, text)
        torch.testing.assert_close(effects.before[number], by_hand(plain_of(name, dtype), masked), **close)
        torch.testing.assert_close(model.loss(text)[0], effects.before[number], **close)
        for layer in range(model.n_layers):
            for head in range(model.n_heads):
                plain = plain_of(name, dtype)
                weight = submodule(block_of(plain, layer), plan_of(plain).out).weight
                with torch.no_grad():
                    weight[:, head * model.d_head : (head + 1) * model.d_head] = 0
                torch.testing.assert_close(effects.after[layer, head, number], by_hand(plain, masked), **close)
    assert float(effects.effect.abs().max()) > 1e-3


@pytest.mark.parametrize("name", MAKERS)
def test_short_texts_are_masked_one_token_at_a_time(name: str) -> None:
    """Up to seven ordinary tokens: the pseudo-log-likelihood of Salazar et al. 2020, equation 1, per token."""
    model, plain = loaded(name), plain_of(name)
    ids = model.encode(TEXTS[0]).ids[0]
    expected = []
    for place in range(1, len(ids) - 1):
        masked = ids.clone()
        masked[place] = MASK
        with torch.no_grad():
            expected.append(-plain(input_ids=masked[None]).logits[0, place].double().log_softmax(0)[ids[place]])
    assert len(expected) == 4 and model.predicts == "masked token"
    found = am.ablate_heads(model, TEXTS, layers=[1])
    torch.testing.assert_close(found.before[0], torch.stack(expected).mean(), rtol=2e-5, atol=2e-5)
    for number, text in enumerate(TEXTS):
        torch.testing.assert_close(found.before[number], model.loss(text)[0], rtol=2e-5, atol=2e-5)


def test_batches_and_their_order_change_nothing() -> None:
    model = loaded("bert", torch.float64)
    whole = am.ablate_heads(model, TEXTS)
    for texts, order in (([TEXTS[2], TEXTS[0], TEXTS[1]], [2, 0, 1]), (iter(TEXTS), [0, 1, 2]), ([TEXTS[1]], [1])):
        found = am.ablate_heads(model, texts, memory=0.004)
        torch.testing.assert_close(found.before, whole.before[order], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.after, whole.after[..., order], rtol=1e-12, atol=1e-12)
        assert found.tokens == tuple(whole.tokens[place] for place in order)
    # A model without absolute positions.
    relative = loaded("deberta_v2", torch.float64)
    left = tokenizer()
    left.padding_side = "left"
    given = left(TEXTS, padding=True, return_tensors="pt")
    found = am.ablate_heads(relative, {name: given[name] for name in ("input_ids", "attention_mask")})
    torch.testing.assert_close(found.after, am.ablate_heads(relative, TEXTS).after, rtol=1e-10, atol=1e-10)


def test_every_call_measures_the_same_loss(tmp_path: Path) -> None:
    """Every effect against `model.loss` under the same interventions."""
    model = loaded("roberta", torch.float64)

    def loss(*heads: tuple[int, int]) -> Tensor:
        with model.intervene(am.Intervention.zero(list(heads))):
            return model.loss(TEXTS)

    before, close = model.loss(TEXTS), {"rtol": 1e-10, "atol": 1e-10}
    one, two = (0, 1), (2, 3)
    torch.testing.assert_close(am.ablate_set(model, TEXTS, [one, two]).per_text[0], loss(one, two) - before, **close)
    pairs = am.ablate_pairs(model, TEXTS, [(one, two)])
    torch.testing.assert_close(pairs.before, before, **close)
    swept = am.sweep(model, TEXTS, [am.Intervention.zero([one]), [am.Intervention.zero([two, one])]])
    torch.testing.assert_close(swept.after, torch.stack([loss(one), loss(one, two)]), **close)
    torch.testing.assert_close(am.ablate_heads(model, TEXTS, [two], later="frozen").before, before, **close)
    # From the second step on, passes continue from the streams of the first.
    curve = am.prune_heads(model, TEXTS, steps=3, random=1)
    for step in range(3):
        torch.testing.assert_close(curve.after[step], loss(*curve.order[: step + 1]), **close)
    cases = [(" ".join(NOUNS[(3 * n + k) % 38] for k in range(5 + n)), f"group {n}") for n in range(6)]
    claim = am.confirm_heads(model, [one], cases)
    assert claim.metric == "loss" and not claim.higher_is_better
    confirming = [text for text, group in cases if group in claim.groups]
    torch.testing.assert_close(claim.before, model.loss(confirming), **close)
    with model.intervene(am.Intervention.zero([one])):
        torch.testing.assert_close(claim.after[0], model.loss(confirming), **close)
    null = am.null_attention(model, TEXTS, sink="special", heads=[one])
    gone = am.Intervention.remove_keys([one], "special")
    with model.intervene(gone):
        assert float(model.loss(TEXTS)[0]) == pytest.approx(float(am.sweep(model, TEXTS, [gone]).after[0, 0]))
    torch.testing.assert_close(null.effects["remove"].before, before, **close)


def test_a_mask_token_is_no_special_key() -> None:
    """Removing special keys removes only CLS and SEP, by position, and not mask tokens."""
    model = loaded("bert", torch.float64)
    text = TEXTS[1]
    length = len(model.encode(text).ids[0])
    found = am.sweep(
        model,
        [text],
        [am.Intervention.remove_keys("all", "special"), am.Intervention.remove_keys("all", [0, length - 1])],
    )
    torch.testing.assert_close(found.after[0], found.after[1], rtol=1e-12, atol=1e-12)
    assert abs(float(found.effect[0])) > 1e-6


def test_values_by_text_reach_all_copies_of_their_text() -> None:
    model = loaded("bert", torch.float64)
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(3, 17, model.n_heads, model.d_head, generator=generator, dtype=torch.float64)
    swept = am.sweep(model, TEXTS, [am.Intervention.replace([(0, 2)], Values({0: z}))], memory=0.004)
    for number, text in enumerate(TEXTS):
        with model.intervene(am.Intervention.replace([(0, 2)], Values({0: z[number : number + 1]}))):
            torch.testing.assert_close(swept.after[0, number], model.loss(text)[0], rtol=1e-11, atol=1e-11)
    resampled = am.ablate_heads(model, TEXTS, [(1, 0)], "resample", reference=[TEXTS[1]])
    donor = model.run(TEXTS[1], [("z", 1)])["z", 1]
    with model.intervene(am.Intervention.replace([(1, 0)], Values({1: donor}))):
        torch.testing.assert_close(resampled.after[1, 0, 1], model.loss(TEXTS[1])[0], rtol=1e-11, atol=1e-11)


def test_shifts_are_means_over_copies() -> None:
    model = loaded("bert", torch.float64)
    found = am.ablate_heads(model, TEXTS[1:2], [(0, 1)], shifts=True)
    masked = copies(model, TEXTS[1])
    counts = (masked.hidden >= 0).sum(dim=1)
    shifts = [
        am.ablate_heads(model, ids[None], [(0, 1)], metric="kl", shifts=True).shift[0, 1]  # type: ignore[index]
        for ids in masked.batch.ids
    ]
    expected = sum(count * shift for count, shift in zip(counts, shifts, strict=True)) / counts.sum()
    assert found.shift is not None
    torch.testing.assert_close(found.shift[0, 1], expected, rtol=1e-9, atol=1e-12)


def test_importance_is_the_derivative_of_the_loss() -> None:
    """The score of "zero" is −dL/dε with a head's z multiplied by 1 + ε, by differences on transformers' model."""
    model, plain = loaded("bert", torch.float64), plain_of("bert", torch.float64)
    effects = am.ablate_heads(model, TEXTS)
    found = am.head_importance(model, TEXTS, method="zero", sweep=effects)
    assert found.rank_correlation is not None
    torch.testing.assert_close(found.before, effects.before, rtol=1e-11, atol=1e-11)
    for layer, head in ((0, 2), (1, 0)):
        for number, text in enumerate(TEXTS):
            masked, values = copies(model, text), []
            for step in (1e-5, -1e-5):

                def scaled(z: Tensor, head: int = head, step: float = step) -> Tensor:
                    z[..., head, :] *= 1 + step
                    return z

                with z_changed(plain, layer, scaled):
                    values.append(by_hand(plain, masked))
            expected = -(values[0] - values[1]) / 2e-5
            assert float(found.per_text[layer, head, number]) == pytest.approx(float(expected), abs=1e-7)
    flow = am.attention_flow(model, TEXTS[1], method="gradient")
    assert flow.head_maps is not None
    torch.testing.assert_close(-flow.head_maps.sum(dim=(-1, -2)), found.per_text[..., 1], rtol=1e-8, atol=1e-8)


def test_segments_are_cut_in_every_copy() -> None:
    model = loaded("bert", torch.float64)
    spans = [(0, 6), (6, 9), (9, len(model.encode(TEXTS[1]).ids[0]))]
    found = am.segment_effects(model, TEXTS[1], spans)
    assert found.loss is not None
    for query, key in ((2, 0), (0, 1)):
        clean = model.loss(TEXTS[1])[0]
        with model.intervene(am.Intervention.cut(spans[query], spans[key])):
            expected = model.loss(TEXTS[1])[0] - clean
        assert float(found.loss[query, key]) == pytest.approx(float(expected), abs=1e-10)
    assert "of loss per token" in found.lead and "later" not in found.lead


def test_what_cannot_be_masked_says_so() -> None:
    bare, ids = am.load(models.fresh("bert")), torch.tensor([[5, 6, 7]])
    for call in (lambda: am.ablate_heads(bare, ids), lambda: am.head_importance(bare, ids)):
        refuses(r"am\.load\(model, tokenizer=tokenizer\)", call)
    bare.config.mask_token_id = 4
    assert float(am.ablate_heads(bare, ids).before[0]) == pytest.approx(float(bare.loss(ids)[0]), abs=1e-5)
    model = loaded("bert")
    for call in (
        lambda: am.ablate_heads(model, [TEXTS[0], "[MASK]"]),
        lambda: am.head_importance(model, [TEXTS[0], "[MASK]"]),
        lambda: model.loss([TEXTS[0], "[MASK]"]),
    ):
        refuses("a token to mask, but text 1 has none", call)
    other = am.load(models.randomised(transformers.ElectraForPreTraining(tiny.config_of("electra"))))
    refuses("give a function", am.ablate_heads, other, torch.tensor([[5, 6, 7]]))


def test_patching_has_no_share_of_other_tokens() -> None:
    clean = " ".join([NOUNS[20], *TEXTS[0].split()[1:]])
    found = am.patch(loaded("bert"), [clean], [TEXTS[0]], metric="loss")
    assert found.not_recoverable == "the two runs' losses are for different masked tokens"
    torch.testing.assert_close(found.before, loaded("bert").loss(TEXTS[0]), rtol=1e-5, atol=1e-5)


def test_a_report_says_what_matters() -> None:
    report = am.report(loaded("bert"), TEXTS[1])
    assert report.effects is not None and "nats of loss" in report.findings["Which heads matter"]
    page = report.to_html()
    assert "What the model loses with each head" in page and "Blue: the loss of masked tokens rises" in page
    assert report.effects.provenance.options["masked"] == "each ordinary token once, in 7 groups"
    bare = am.report(am.load(models.fresh("bert")), torch.tensor([[5, 6, 7]]))
    assert bare.effects is None and any("needs its mask token" in note for note in bare.notes)
