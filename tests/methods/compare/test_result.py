"""Differences by head between two models, and between two prompts: against subtraction by hand, and permuted heads."""

from collections.abc import Callable
from typing import Any

import maps
import models
import naive
import numpy as np
import pytest
import torch
import transformers
from scipy.spatial.distance import jensenshannon
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as models_of_tokens
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError

NAMES = ["gpt2", "llama", "bert", "bloom"]


def ids_of(name: str, count: int = 6) -> Tensor:
    return models.token_ids(name, batch=count, length=7)


@pytest.mark.core
@pytest.mark.parametrize("name", NAMES)
def test_differences_are_those_of_the_results_paired(name: str) -> None:
    one, other = models.hooked(name), am.load(models.fresh(name, seed=4))
    ids = ids_of(name)
    found = am.compare(one, other, ids, am.attention_focus, statistic="entropy")
    mine, yours = (am.attention_focus(model, ids).to_frame() for model in (one, other))
    for number, column in enumerate(found.statistics):
        wanted = torch.tensor((yours[column] - mine[column]).to_numpy()).reshape(found.difference.shape[1:])
        torch.testing.assert_close(found.difference[number], wanted, equal_nan=True, rtol=1e-9, atol=1e-12)
    per_text = [
        [am.attention_focus(model, row[None])["entropy"].mean for row in ids] for model in (one, other)
    ]  # fmt: skip
    place = found.statistics.index("entropy")
    values = [float(b[1, 2] - a[1, 2]) for a, b in zip(*per_text, strict=True)]
    low, high = naive.t_interval(values)
    assert (float(found.low[place, 1, 2]), float(found.high[place, 1, 2])) == pytest.approx((low, high), rel=1e-4)


ORDER = {0: [3, 0, 4, 1, 2], 2: [1, 0, 2, 4, 3]}


def permuted(model: am.HookedModel, seed: int = 0) -> am.HookedModel:
    """The same weights with permuted heads: head h is the model's head ORDER[layer][h]."""
    found = am.load(models.fresh("gpt2", seed=seed))
    with torch.no_grad():
        for layer, order in ORDER.items():
            old, new = model.weights(layer), found.weights(layer)
            for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V"):
                getattr(new, name).copy_(getattr(old, name)[order])
    return found


@pytest.mark.parametrize("method", [am.attention_focus, am.residual_updates, am.ablate_heads])
def test_a_permutation_of_heads_is_found_and_undone(method: Any) -> None:
    model = models.hooked("gpt2")
    other = permuted(model)
    raw = am.compare(model, other, ids_of("gpt2"), method)
    inverse = {layer: [order.index(head) for head in range(5)] for layer, order in ORDER.items()}
    wanted = [inverse.get(layer, list(range(5))) for layer in range(3)]
    assert raw.matching.tolist() == wanted and "are permuted" in raw.lead and "match=True undoes it" in raw.lead
    assert float(raw.difference.nan_to_num().abs().max()) > 1e-3
    itself = am.compare(model, model, ids_of("gpt2"), method)
    known = ~itself.difference.isnan()
    assert bool(known.any()) and bool((itself.difference[known] == 0).all()) and itself.moved == ()
    assert itself.divergence.diagonal(dim1=-2, dim2=-1).abs().max() < 1e-6
    named = f"the second {model.name} against the first {model.name}"
    assert itself.lead == f"On 6 texts, {named}: {itself.shown.replace('_', ' ')} is the same in every head."
    undone = am.compare(model, other, ids_of("gpt2"), method, match=True)
    assert (
        float(undone.difference.nan_to_num().abs().max()) < 1e-4
        and "this comparison undoes the permutation" in undone.lead
    )
    assert undone.to_frame().pattern_divergence.max() < 1e-5
    if method is am.attention_focus:
        some = am.compare(model, other, ids_of("gpt2"), method, match=True, layers=[2]).difference
        assert float(some[:, 2].nan_to_num().abs().max()) < 1e-4 and bool(some[:, :2].isnan().all())


def test_aligned_prompts_are_compared_pair_by_pair() -> None:
    model, ids = models.hooked("llama"), ids_of("llama")
    changed = ids.clone()
    changed[:, 4] = (ids[:, 4] + 7) % 40 + 3
    found = am.compare(ids, changed, model=model, method=am.attention_focus, statistic="concentration")
    place = found.statistics.index("concentration")
    pairs = [
        [float(am.attention_focus(model, row[None])["concentration"].mean[1, 3]) for row in side]
        for side in (ids, changed)
    ]
    low, high = naive.t_interval([b - a for a, b in zip(*pairs, strict=True)])
    assert (float(found.low[place, 1, 3]), float(found.high[place, 1, 3])) == pytest.approx((low, high), rel=1e-4)
    # Nothing before the change can differ; the first row has no choice and does not count.
    assert bool(found.by_position[..., 0].isnan().all())
    assert float(found.by_position[..., 1:4].abs().max()) < 1e-6 and float(found.by_position[..., 4:].min()) > 1e-8
    assert found.provenance.inputs.count("−") == 1 and found.moved == ()


def jensen_shannon(p: Tensor, q: Tensor, rows: list[tuple[int, int]]) -> float:
    """The mean divergence of two heads' patterns `[text row key]` over rows (text, row)."""
    total = 0.0
    for a, b in ((p[at].double(), q[at].double()) for at in rows):
        total += sum(float(torch.xlogy(x, 2 * x / (a + b)).nan_to_num().sum()) / 2 for x in (a, b))
    return total / len(rows)


@pytest.mark.parametrize(
    ("name", "stack", "method"),
    [("llama", None, am.attention_focus), ("t5", None, am.head_importance)]
    + [("t5", stack, am.attention_focus) for stack in ("encoder", "decoder", "cross")],
)
def test_patterns_and_numbers_of_a_stack_are_compared(name: str, stack: str | None, method: Any) -> None:
    """The decoder of an encoder-decoder, or another of its stacks."""
    one, other = models.hooked(name), am.load(models.fresh(name, seed=4))
    inputs, options = models.inputs_of(name), {} if stack is None else {"stack": stack}
    found = am.compare(one, other, inputs, method, **options)
    decoder = stack or ("decoder" if name == "t5" else "")
    point, last = f"{decoder}.pattern".lstrip("."), one.stack(decoder or None).layers[-1]
    p, q = (model.run(inputs, points=[point])[point, last] for model in (one, other))
    lengths = [5, 5, 5] if decoder in ("decoder", "cross") else inputs["attention_mask"].sum(dim=1).tolist()
    causal = decoder in ("decoder", "")
    rows = [(text, row) for text, length in enumerate(lengths) for row in range(causal, length)]
    assert found.divergence.shape == (last + 1, one.stack(decoder or None).n_heads, p.shape[1])
    assert float(found.divergence[last, 1, 3]) == pytest.approx(jensen_shannon(p[:, 1], q[:, 3], rows), rel=1e-4)
    means = [method(model, inputs, **options).by_head()[found.shown] for model in (one, other)]
    wanted = torch.tensor((means[1] - means[0]).to_numpy()).reshape(last + 1, -1)
    torch.testing.assert_close(found.difference[found.statistics.index(found.shown)].double(), wanted.double())
    assert "changes most in L" in found.lead


def split_at(mark: str) -> Any:
    """A tokenizer that makes one token of each piece between two marks."""
    words = ["[UNK]", "a", "b", "c", "d", "a-b-c", "d a b", "b c", "b-c"]
    raw = Tokenizer(models_of_tokens.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Split(mark, "removed")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]")


def test_texts_are_paired_by_identity_and_not_by_length() -> None:
    """Two texts have 1 and 3 tokens for one model, 3 and 1 for the other; sorted by length, they seem to align."""
    one, other = (
        am.load(models.fresh("gpt2", seed=seed), tokenizer=split_at(mark)) for seed, mark in ((0, " "), (4, "-"))
    )
    texts = ["a-b-c", "d a b"]
    assert [model.encode(texts).lengths.tolist() for model in (one, other)] == [[1, 3], [3, 1]]
    with pytest.raises(InputError, match=r"the same number of tokens.*texts of \[1, 3\] and of \[3, 1\] tokens"):
        am.compare(one, other, texts, am.attention_focus)
    ids = ids_of("gpt2")
    with pytest.raises(InputError, match=r"texts of \[5, 7\] and of \[7, 5\] tokens"):
        am.compare([ids[0, :5], ids[1]], [ids[2], ids[3, :5]], model=one, method=am.attention_focus)


def test_texts_that_are_other_tokens_to_each_model_are_pairs() -> None:
    words = models.WORDS
    one = am.load(models.fresh("gpt2"), tokenizer=models.tokenizer())
    other = am.load(models.fresh("gpt2", seed=4), tokenizer=models.tokenizer(words=(*words[:2], *words[:1:-1])))
    texts = [" ".join(words[3 + (start + 2 * place) % 5] for place in range(3 + start)) for start in range(6)]
    first, second = ([model.encode(text).ids[0] for text in texts] for model in (one, other))
    assert not torch.equal(first[0], second[0])
    found = am.compare(one, other, texts, am.attention_focus, statistic="entropy")
    entropies = [
        [
            float(am.attention_focus(model, text)["entropy"].mean[2, 1]) * rows
            for text, rows in zip(ids, counts, strict=True)
        ]
        for model, ids, counts in ((one, first, range(2, 8)), (other, second, range(2, 8)))
    ]
    place = found.statistics.index("entropy")
    total = sum(b - a for a, b in zip(*entropies, strict=True)) / sum(range(2, 8))
    assert float(found.difference[place, 2, 1]) == pytest.approx(total, rel=1e-5)
    assert bool((found.low[place] < found.high[place]).all()) and "too few" not in found.lead


@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_told() -> None:
    model, ids = models.hooked("gpt2"), ids_of("gpt2")
    calls: list[tuple[Any, str]] = [
        (lambda: am.compare(model, model, ids), "`method` must be a measurement"),
        (lambda: am.compare(model, ids, method=am.attention_focus), "both be models, or both prompts"),
        (lambda: am.compare(model, model, method=am.attention_focus), "comparing two models needs `inputs`"),
        (
            lambda: am.compare(model, models.hooked("llama"), ids, am.attention_focus),
            "must have the same shape; got 3 layers",
        ),
        (lambda: am.compare(ids, ids[:, :5], model=model, method=am.attention_focus), "the same number of tokens"),
        (
            lambda: am.compare(ids, ids, model=model, method=am.attention_focus, match=True),
            "neither `inputs` nor `match`",
        ),
        (lambda: am.compare(model, model, ids[:, :1], am.attention_focus), "have one token each; pass longer texts"),
        (lambda: am.compare(ids[:, :1], ids[:, 1:2], model=model, method=am.attention_focus), "one token each"),
        (lambda: am.compare(model, model, ids, am.redundancy), "a result per head that can be subtracted"),
        (lambda: am.compare(model, model, ids, am.attention_focus, statistic="x"), "`statistic` must be one of"),
    ]
    for call, told in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert told in str(caught.value), str(caught.value)


@pytest.mark.parametrize("method", [am.attention_focus, am.residual_updates])
def test_patterns_are_compared_where_no_statistic_was_measured(method: Callable[..., Any]) -> None:
    """The only decoder token is the first row, which means leave out; its pattern is compared by hand."""
    one, other = models.hooked("t5"), am.load(models.fresh("t5", seed=4))
    texts = [torch.tensor([3, 4, 5]), torch.tensor([4, 5])]
    result, same = (am.compare(one, second, texts, method, stack="cross") for second in (other, one))
    by_hand = torch.zeros(result.matching.shape, dtype=torch.float64)
    for layer, head in np.ndindex(*by_hand.shape):
        for text in texts:
            p, q = (
                model.run(text, points=["cross.pattern"])["cross.pattern", layer][0, head, 0].double().numpy()
                for model in (one, other)
            )
            by_hand[layer, head] += jensenshannon(p, q) ** 2 / 2
    layer, head = divmod(int(by_hand.argmax()), by_hand.shape[1])
    name, most = result.shown.replace("_", " "), f"L{layer}H{head}, by {float(by_hand[layer, head]):.3g} nats"
    assert f": {name} was not measured; patterns diverge most in {most}." in result.lead
    np.testing.assert_allclose(maps.shown(result.plot()), by_hand, rtol=1e-4)
    assert same.lead.endswith(f": {name} was not measured; patterns are the same in every head.")
