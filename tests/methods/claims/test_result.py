"""Claims about sets of heads: planted circuits, every number by hand, false positives, sentences, bad input."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import models
import naive
import planted
import pytest
import torch
from comparing import refuses
from scipy.stats import t as student_t
from scipy.stats import ttest_1samp
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError
from attnmech.methods.claims.p_values import added_by_each, least_p, rank_p, strength
from attnmech.methods.claims.set_effects import same_shape
from attnmech.methods.claims.tasks import group_means
from attnmech.runs.haystacks import Haystacks
from attnmech.runs.journal import Journal

PAIR = [(0, 2), (2, 5)]


@cache
def model_of(kind: str, name: str) -> am.HookedModel:
    made: am.HookedModel = getattr(planted, kind)(name)
    return made


@cache
def claim_of(
    kind: str, name: str, heads: tuple[tuple[int, int], ...], metric: str = "", **options: Any
) -> am.results.HeadClaim:
    return am.confirm_heads(model_of(kind, name), list(heads), planted.cued(metric=metric), **options)


# -- planted circuits ------------------------------------------------------------------------------------------------

PLANTED: dict[str, tuple[Callable[[], am.HookedModel], Callable[[], am.Task], Any, list[Any]]] = {
    "in series": (lambda: model_of("and_pair", "gpt2"), planted.cued, PAIR, [[(0, 2), (2, 4)]]),
    "an answer beside a sink": (
        lambda: model_of("lookup", "llama"), planted.cued, [(1, 3)], [[(1, 6)], [(0, 0)], [(2, 7)]]
    ),
    "induction": (planted.induction, planted.repeats, [(0, 1), (1, 3)], [[(0, 1), (1, 2)]]),
    "duplicates": (planted.duplicate, planted.duplicates, [(3, 2)], []),
}  # fmt: skip
"""Models with planted heads, their tasks, the heads, and sets with decoys."""


@pytest.mark.parametrize("name", PLANTED)
def test_planted_heads_are_found_and_confirmed_and_decoys_are_not(name: str) -> None:
    make, task, heads, decoys = PLANTED[name]
    model = make()
    claim = am.confirm_heads(model, lambda half: half.strongest(len(heads)), task())
    assert claim.heads == tuple(heads) and claim.chosen_by_rule and claim.verdict == "confirmed"
    # Sets with one of the heads in series also break the circuit, so these heads need not be the strongest set.
    assert (claim.p_each if len(heads) > 1 else claim.p) == claim.least_p
    assert bool(claim._sharing[claim.as_strong].all())
    assert claim.wider == (len(heads) == 1)
    if name == "induction":
        assert float(claim.restored.mean) == pytest.approx(1.0, abs=0.2)
    for each in decoys:
        decoy = am.confirm_heads(model, each, task())
        assert decoy.verdict != "confirmed"
        assert len(each) == 1 or f"L{each[1][0]}H{each[1][1]} does not clearly contribute to this effect" in decoy.lead


def test_heads_that_back_each_other_up_are_confirmed() -> None:
    claim = claim_of("or_pair", "bloom", tuple(PAIR))
    assert claim.verdict == "confirmed" and claim.p == claim.p_each == claim.least_p == 1 / 64
    by_accuracy = claim_of("or_pair", "bloom", tuple(PAIR), "accuracy")
    assert by_accuracy.p == 1 / 64 and by_accuracy.effect < -0.4
    for decoys in ([(0, 2), (2, 4)], [(0, 1), (2, 4)]):
        assert claim_of("or_pair", "bloom", tuple(decoys)).verdict != "confirmed"


# -- every number, by hand -------------------------------------------------------------------------------------------


@pytest.mark.core
def test_every_number_of_a_claim_by_hand() -> None:
    model, task = model_of("and_pair", "gpt2"), planted.cued(seed=3)
    further = planted.cued(6, 2, seed=9)
    texts = torch.randint(10, 40, (3, 6), generator=torch.Generator().manual_seed(0))
    claim = am.confirm_heads(model, PAIR, task, others=[further], general=texts, seed=5)
    half = task.halves(5)[1]
    assert claim.groups == half.groups and not {*claim.groups} & {*claim.discovery_groups}
    assert len(claim.groups) == 6 and {*claim.groups, *claim.discovery_groups} == {*task.groups}

    def by_hand(heads: Any, of: am.Task = half) -> list[float]:
        """The metric in each group."""
        found: dict[str, list[float]] = {}
        with model.intervene(*([am.Intervention.zero(list(heads))] if heads else [])):
            ran = model.run([torch.tensor(case.prompt) for case in of.cases]).logits.double()
        for case, rows in zip(of.cases, ran, strict=True):
            logits = rows[len(case.prompt) - 1]
            found.setdefault(case.group, []).append(float(logits[case.answer] - logits[case.against]))  # type: ignore[index]
        return [sum(some) / len(some) for some in found.values()]

    sets = [tuple(PAIR), *(((0, a), (2, b)) for a, b in itertools.product(range(8), range(8)) if (a, b) != (2, 5))]
    assert [tuple(map(tuple, each)) for each in claim.sets.tolist()] == sets
    clean = by_hand([])
    single = {head: by_hand([head]) for head in itertools.product((0, 2), range(8))}
    harm = {each: [c - w for c, w in zip(clean, by_hand(each), strict=True)] for each in sets}
    limit = student_t.ppf(0.999, 5)

    def strong(values: list[float]) -> float:
        mean = sum(values) / len(values)
        error = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))
        return limit + mean if mean / error > limit else mean / error

    tested = strong(harm[sets[0]])
    assert claim.p == sum(strong(harm[each]) >= tested * (1 - 1e-4) for each in sets) / 64
    low, high = naive.t_interval([-x for x in harm[sets[0]]])
    assert claim.effect == pytest.approx(-sum(harm[sets[0]]) / 6, rel=1e-5)
    assert tuple(map(float, claim.interval())) == pytest.approx((low, high), rel=1e-4)

    def adds(each: Any) -> list[list[float]]:
        found = []
        for head, other in (each, each[::-1]):
            alone = [c - w for c, w in zip(clean, single[head], strict=True)]
            rest = [c - w for c, w in zip(clean, single[other], strict=True)]
            found.append([(a + s - r) / 2 for a, s, r in zip(alone, harm[each], rest, strict=True)])
        return found

    by_head = claim.by_head()
    assert list(zip(by_head.layer, by_head["head"], strict=True)) == PAIR
    for row, head, values in zip(by_head.itertuples(), PAIR, adds(sets[0]), strict=True):
        alone = [c - w for c, w in zip(clean, single[head], strict=True)]
        last = [2 * both - one for both, one in zip(values, alone, strict=True)]
        for name, expected in (("adds", values), ("removed_first", alone), ("removed_last", last)):
            ends = getattr(row, f"{name}_low"), getattr(row, f"{name}_high")
            assert getattr(row, name) == pytest.approx(sum(expected) / 6, rel=1e-4, abs=1e-5), (head, name)
            assert ends == pytest.approx(naive.t_interval(expected), rel=1e-3, abs=1e-4), (head, name)

    needed, least = [[min(map(strong, adds(each))) for each in some] for some in (sets, sets[:1])]
    share = sum(each >= least[0] - 1e-4 * abs(least[0]) for each in needed) / 64
    of_t_test = max(float(ttest_1samp(values, 0, alternative="greater").pvalue) for values in adds(sets[0]))
    assert claim.p_each == pytest.approx(max(share, of_t_test)) and share == 1 / 64
    torch.testing.assert_close(
        claim.general[0], losses(model, texts, PAIR) - losses(model, texts, []), atol=1e-5, rtol=1e-4
    )  # type: ignore[index]
    gap = (claim.general.mean(dim=1) - claim.general[0].mean()).abs()  # type: ignore[union-attr]
    assert {*claim._matched.tolist()} == {*gap[1:].argsort()[:20].add(1).tolist()}
    moved = [w - c for w, c in zip(by_hand(PAIR, further), by_hand([], further), strict=True)]
    assert claim.others[0].effect.tolist() == pytest.approx(moved, abs=1e-4)
    every = [(layer, head) for layer in range(3) for head in range(8)]
    nothing, only = by_hand(every), by_hand([head for head in every if head not in PAIR])
    restored = sum(o - n for o, n in zip(only, nothing, strict=True)) / sum(
        c - n for c, n in zip(clean, nothing, strict=True)
    )
    assert float(claim.restored.mean) == pytest.approx(restored, rel=1e-4)
    frame = claim.to_frame()
    assert list(frame.heads[:2]) == ["L0H2 L2H5", "L0H0 L2H0"] and frame.tested.sum() == 1 and len(frame) == 64
    assert frame.as_strong.mean() == claim.p and frame.matched.sum() == 20


def losses(model: am.HookedModel, ids: Tensor, heads: Any) -> Tensor:
    with model.intervene(*([am.Intervention.zero(heads)] if heads else [])):
        logits = model.run(ids).logits.double()
    return torch.stack([torch.nn.functional.cross_entropy(x[:-1], y[1:]) for x, y in zip(logits, ids, strict=True)])


@pytest.mark.parametrize("method", ["mean", "resample"])
def test_heads_are_removed_as_by_ablate_heads(method: str) -> None:
    model, task = model_of("and_pair", "gpt2"), planted.cued(8, 2)
    confirming = task.halves()[1]
    claim = am.confirm_heads(model, [(0, 2), (1, 1)], task, method=method)
    prompts, finding = ([torch.tensor(case.prompt) for case in half.cases] for half in (confirming, task.halves()[0]))
    reference = {"reference": iter(finding)} if method == "mean" else {}
    effects = am.ablate_heads(
        model, iter(prompts), [(0, 2)], method, "logit_difference", answers=confirming.answers,
        against=confirming.against, **reference,
    )  # fmt: skip
    torch.testing.assert_close(claim.after_alone[0, 0], effects.after[0, 2], rtol=1e-4, atol=1e-4)


DIRECTIONS = {layer: torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(layer)) for layer in (0, 1, 2)}
METHODS: dict[str, Callable[[Any], am.Intervention]] = {
    "scale": lambda heads: am.Intervention.scale("query_key", heads=heads),
    "add": lambda heads: am.Intervention.add("z", {n: DIRECTIONS[n] for n in (0, 2)}, heads=heads, factor=2.0),
    "reweight": lambda heads: am.Intervention.reweight(heads, "first", 0.25),
}


@pytest.mark.parametrize("name", METHODS)
def test_sets_are_changed_as_by_an_intervention_on_their_heads(name: str) -> None:
    """Every set of the null, its heads alone, and all other heads of the layers with values."""
    model, task, method = model_of("and_pair", "gpt2"), planted.cued(8, 1), METHODS[name]("all")
    claim = am.confirm_heads(model, PAIR, task, method=method, sets=20)
    assert {layer for layer, _ in claim.sets.flatten(0, 1).tolist()} == {0, 2}
    assert claim.method == str(method).replace("all heads", "each head")
    assert claim.lead.startswith(f"Changing L0H2 and L2H5 ({claim.method}) ") and "without" not in claim.lead

    def by_hand(heads: Any) -> list[float]:
        with model.intervene(METHODS[name](heads)):
            lasts = [(model.run(torch.tensor([case.prompt])).logits[0, -1], case) for case in task.halves()[1].cases]
        return [float(last[case.answer] - last[case.against]) for last, case in lasts]  # type: ignore[index]

    for number in (0, 3, 19):
        heads = [tuple(head) for head in claim.sets[number].tolist()]
        assert claim.after[number].tolist() == pytest.approx(by_hand(heads), abs=1e-4)
        for place, head in enumerate(heads):
            assert claim.after_alone[number, place].tolist() == pytest.approx(by_hand([head]), abs=1e-4)
    every = [(layer, head) for layer in ((0, 2) if name == "add" else (0, 1, 2)) for head in range(8)]
    assert claim.after_all.tolist() == pytest.approx(by_hand(every), abs=1e-4)


# -- false positives -------------------------------------------------------------------------------------------------

RUNS, ALPHAS = 400, (0.01, 0.05, 0.1)


@cache
def effects() -> tuple[list[Any], Tensor, Tensor]:
    """The change of every case's metric without each pair (of a head in layer 0 and one in 2) and without each head."""
    claim = am.confirm_heads(
        model_of("and_pair", "bloom"), PAIR, planted.cued(20, 3), discovery=[((1, 12, 7), 5, 6, "apart")]
    )
    pairs = [tuple(map(tuple, each)) for each in claim.sets.tolist()]
    return pairs, claim.before - claim.after, claim.before - claim.after_alone


def require_at_most_the_nominal_rate(found: list[tuple[float, float]]) -> None:
    for values, alpha in itertools.product(zip(*found, strict=True), ALPHAS):
        share = sum(p <= alpha + 1e-9 for p in values) / RUNS
        assert share <= alpha + 2 * math.sqrt(alpha * (1 - alpha) / RUNS), (share, alpha)


def p_values(pairs: list[Any], harm: Tensor, alone: Tensor, tested: int) -> tuple[float, float]:
    """p and p_each of one of the sets, given each group's harm."""
    order = [tested, *(number for number in range(len(pairs)) if number != tested)]
    harm, alone = harm[order], alone[order]
    each = strength(added_by_each(harm, alone, alone.flip(1))).amin(dim=1)
    return rank_p(strength(harm)), max(rank_p(each), least_p(added_by_each(harm, alone, alone.flip(1))[0]))


def test_random_sets_are_rarely_confirmed() -> None:
    pairs, harm, alone = effects()
    rng, found = Random(0), []
    for _ in range(RUNS):
        groups = rng.sample(range(20), 8)
        of_group, of_alone = (each.unflatten(-1, (20, -1)).mean(dim=-1)[..., groups] for each in (harm, alone))
        found.append(p_values(pairs, of_group, of_alone, rng.randrange(len(pairs))))
    require_at_most_the_nominal_rate(found)


def test_sets_chosen_by_a_rule_on_shuffled_answers_are_rarely_confirmed() -> None:
    """Shuffled answers flip the sign of a case's effects at random; the strongest heads of one half are tested on the
    other."""
    pairs, harm, alone = effects()
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(RUNS):
        sign = torch.randint(0, 2, (harm.shape[-1],), generator=generator) * 2 - 1
        groups = torch.randperm(20, generator=generator)
        of_group, of_alone = ((each * sign).unflatten(-1, (20, -1)).mean(dim=-1) for each in (harm, alone))
        strongest = of_alone[..., groups[:10]].mean(dim=-1).sum(dim=1).argmax()
        half = of_group[:, groups[10:]], of_alone[..., groups[10:]]
        found.append(p_values(pairs, *half, int(strongest)))
    require_at_most_the_nominal_rate(found)


# -- sets of a shape -------------------------------------------------------------------------------------------------


def test_the_null_is_every_set_of_the_shape() -> None:
    shape = same_shape([(0, 1), (0, 3), (2, 2)], range(3), 5, 1000)
    wanted = {
        (*one, other)
        for one in itertools.combinations([(0, h) for h in range(5)], 2)
        for other in [(2, h) for h in range(5)]
    }
    assert {*shape.sets} == wanted and len(shape.sets) == shape.possible == 50
    assert shape.sets[0] == ((0, 1), (0, 3), (2, 2)) and not shape.wider
    wide = same_shape([(0, 1), (2, 0)], range(4), 3, 1000)
    assert wide.wider and len({*wide.sets}) == wide.possible == 6 * 9
    drawn = same_shape([(0, 1), (1, 3), (2, 2)], range(3), 8, 100, seed=4)
    assert len({*drawn.sets}) == 100 and drawn.possible == 512
    assert drawn == same_shape([(0, 1), (1, 3), (2, 2)], range(3), 8, 100, seed=4)
    assert all([layer for layer, _ in each] == [0, 1, 2] for each in drawn.sets)
    # Drawn sets are equally likely: χ² of 34 degrees of freedom.
    counts: dict[Any, int] = {}
    for seed in range(300):
        for each in same_shape([(0, 0), (1, 0)], range(2), 6, 21, seed).sets[1:]:
            counts[each] = counts.get(each, 0) + 1
    expected = 300 * 20 / 35
    assert len(counts) == 35 and sum((n - expected) ** 2 / expected for n in counts.values()) < 60


def test_ties_count_and_size_decides_among_consistent_effects() -> None:
    same = torch.tensor([[1.0, 1.1, 0.9, 1.0, 1.0]] * 3 + [[0.0] * 5]).double()
    assert rank_p(strength(same)) == 0.75
    # A hundredth of the effect, equally consistent: t is the same.
    assert rank_p(strength(torch.stack([same[0], same[0] / 100]))) == 0.5
    assert rank_p(strength(torch.stack([same[0] / 100, same[0]]))) == 1.0
    values = torch.randn(3, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    of_t_tests = [float(ttest_1samp(each, 0, alternative="greater").pvalue) for each in values]
    assert least_p(values) == pytest.approx(max(of_t_tests))


# -- what it says ----------------------------------------------------------------------------------------------------


def test_the_sentence_says_what_the_numbers_say() -> None:
    claim = claim_of("or_pair", "bloom", tuple(PAIR))
    low, high = map(float, claim.interval())
    assert claim.lead.startswith(
        f"Removing L0H2 and L2H5 lowers the logit difference on cued answers by {-claim.effect:.2g} logits "
        f"({-high:.2g} to {-low:.2g} over 6 groups), more than all 63 other sets in these layers (p = 0.016, the "
        "smallest possible). Every head contributes, L"
    )
    assert "All heads of none of the 63 other sets contribute as much (p = 0.016)." in claim.lead
    decoys = (claim_of("lookup", "gpt2", ((0, head),)) for head in range(8))
    idle = next(each for each in decoys if each.interval()[0] <= 0 <= each.interval()[1])
    assert "has no clear effect on cued answers: " in idle.lead and " of 23 other heads in any layer hurt" in idle.lead
    assert "controls also come from other layers because this layer has fewer than 20 heads" in idle.lead
    opposing = claim_of("or_pair", "bloom", ((1, 6),))
    assert "raises the logit difference" in opposing.lead and opposing.lead.endswith(
        "the model does better without it."
    )
    assert opposing.verdict == "not confirmed"
    series = claim_of("and_pair", "bloom", tuple(PAIR))
    stronger = int(series.as_strong.sum()) - 1
    assert series.p == (1 + stronger) / 64 and f"(p = {series.p:.2g}" in series.lead
    shares = (
        f", but {stronger} of 63 other sets in these layers hurt at least as much, and all of them share a head with "
    )
    assert (shares in series.lead) is (series.p > 0.05)


def test_losses_rise() -> None:
    model = model_of("lookup", "gpt2")
    cases = [((*case.prompt, case.answer), case.group) for case in planted.cued().cases]
    claim = am.confirm_heads(model, [(1, 3)], cases)
    assert claim.metric == "loss" and not claim.higher_is_better and "nats" in claim.lead
    prompts = tuple((case.prompt, case.group) for case in planted.cued().cases)
    own = am.Task(
        "last logits",
        prompts,  # type: ignore[arg-type]
        lambda logits, batch: -logits[range(len(logits)), batch.lengths - 1][:, planted.ANSWERS].amax(dim=1),
        higher_is_better=False,
    )
    claim = am.confirm_heads(model, [(1, 3)], own)
    assert claim.metric == "metric" and claim.effect > 0
    assert "raises the metric on last logits by" in claim.lead and " other heads in any layer hurt at" in claim.lead


def test_its_page(tmp_path: Path) -> None:
    claim = am.confirm_heads(
        model_of("and_pair", "llama"), PAIR, planted.cued(), others=[planted.cued(6, 2, seed=7)],
        general=torch.randint(10, 40, (2, 5)), sets=30,
    )  # fmt: skip
    assert len(claim.sets) == 30 and claim.possible == 64 and "drawn from the 63 in these layers" in claim.lead
    assert claim.provenance.options["heads"] == [[0, 2], [2, 5]]
    page = claim.write_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Against other sets" in page and "Head by head" in page


# -- tasks and halves ------------------------------------------------------------------------------------------------


def test_a_rule_sees_the_discovery_half_alone() -> None:
    seen: list[Any] = []

    def rule(half: Any) -> list[tuple[int, int]]:
        seen.append(half)
        return [(0, 2)]

    claim = am.confirm_heads(model_of("and_pair", "gpt2"), rule, planted.cued(16, 2))
    (half,) = seen
    assert half.task.groups == claim.discovery_groups and not {*half.task.groups} & {*claim.groups}
    reached = repr([half.task, half.measuring.removal.reference, vars(half.measuring).keys()])
    assert not [group for group in claim.groups if repr(group) in reached]
    assert claim.provenance.options["rule"] == "rule"


def test_halves_depend_on_the_seed_and_keep_groups_whole() -> None:
    task = planted.cued(13, 3)
    splits = {task.halves(seed)[1].groups for seed in range(8)}
    assert len(splits) > 1
    for seed in range(8):
        one, other = task.halves(seed)
        assert len(one.groups) == 6 and len(other.groups) == 7 and not {*one.groups} & {*other.groups}
        assert len(one.cases) + len(other.cases) == len(task.cases)
    values = torch.arange(len(task.cases)).double()
    for group, mean in zip(task.groups, group_means(values, task.group_of).tolist(), strict=True):
        numbers = [number for number, case in enumerate(task.cases) if case.group == group]
        assert mean == pytest.approx(sum(numbers) / len(numbers))


@pytest.mark.parametrize("name", ["copying", "agreement", "gender", "recipient"])
def test_the_demo_models_tasks_are_single_tokens_that_it_gets_right(name: str) -> None:
    model, task = models.demo(), am.Task.of_demo(name, per_template=2)
    right = 0
    for case in task.cases:
        for word in (case.answer, case.against):
            assert len(model.tokenizer(word, add_special_tokens=False)["input_ids"]) == 1
        last = model.run(case.prompt).logits[0, -1]  # type: ignore[arg-type]
        one, other = (model.tokenizer.convert_tokens_to_ids(word) for word in (case.answer, case.against))
        right += bool(last[one] > last[other])
    assert right / len(task.cases) >= 0.85
    assert len({case.prompt for case in task.cases}) == len(task.cases)


# -- bad input -------------------------------------------------------------------------------------------------------

CASE = ((1, 12, 7), 5, 6)


def claimed(heads: Any = PAIR, task: Any = None, **options: Any) -> Any:
    return am.confirm_heads(model_of("and_pair", "gpt2"), heads, planted.cued() if task is None else task, **options)


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: claimed(task=planted.cued(4)), "a claim needs at least 6"),
    (lambda: claimed(discovery=planted.cued()), "the group 'fillers 0' is in both halves"),
    (
        lambda: claimed(task=[am.Case((1, 12), 5, 6, "y")], discovery=[am.Case((1, 12), 5, 6, "x")]),
        "the prompt (1, 12) is in two groups, 'x' and 'y'",
    ),
    (
        lambda: am.confirm_heads(
            am.load(models.fresh("gpt2"), tokenizer=models.tokenizer()), [(0, 1)],
            [am.Case("the keys" + " " * number + " to", " are", " the", str(number)) for number in range(12)],
        ),
        "(the same tokens as 'the keys to') is in two groups, ",
    ),
    (lambda: claimed([(0, 9)]), "`head` must be from 0 to 7"),
    (lambda: claimed([]), "at least one head"),
    (lambda: claimed("all"), "got a string"),
    (lambda: claimed(sets=5), "`sets` must be"),
    (lambda: claimed(method="swap"), "`method` must be"),
    (lambda: claimed(method=am.Intervention.zero([(0, 2)])), 'it must act in heads="all"'),
    (lambda: claimed(method=am.Intervention.stream("attn_out", [0])), 'it must act in heads="all"'),
    (
        lambda: am.confirm_heads(
            models.hooked("llama"), [(0, 1)], planted.cued(8, 1),
            method=am.Intervention.add("v", {0: torch.ones(1, 1, 2, 4)}, heads="all"),
        ),
        "heads share k and v, so v of one head cannot be changed; use an inter",
    ),
    (lambda: claimed(reference="x"), '`reference` is for'),
    (lambda: claimed([divmod(place, 8) for place in range(24)]), "to compare with: `heads` has 24 heads"),
    (lambda: claimed(task="no such task"), "the demo model's tasks are"),
    (lambda: claimed(task=[("a text",)]), "a case must be"),
    (lambda: claimed(task=[(*CASE, "")]), "a case needs a `group`"),
    (lambda: am.Task("t", ((*CASE, "x"), ((1, 13), " a", " b", "y"))), "`answer` must be text in all cases"),
    (lambda: am.Task("t", ()), "has no cases"),
    (lambda: am.Task("t", ((*CASE, "x"),), metric="perplexity"), "`metric` must be one of"),
    (lambda: am.Task("t", ((*CASE, "x"),), metric=lambda logits, batch: logits), "needs higher_is_better"),
    (lambda: am.Task.of_retrieval(models.demo(), 0), "`context` must be a whole number, 1 or more; got 0"),
    (lambda: am.Task.of_retrieval(models.demo(), 20), " tokens or more"),
    (lambda: am.Task("t", [am.Case((1, 2), (3, "x"), None, "a")]), "must be a text or a list of token ids"),
    (lambda: am.Task.of_demo("recipient", templates=9), "`templates` must be a whole number, 1 to 7"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD)))
@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_told(number: int) -> None:
    call, told = BAD[number]
    with pytest.raises(InputError) as caught:
        call()
    assert told in str(caught.value), str(caught.value)


def test_answers_of_several_tokens_are_scored_as_a_sum() -> None:
    model, things = models.demo(), ("shells", "boats", "waves", "owls", "lamps", "drums")
    cases = [
        am.Case(f"Anna sang of {one} and {other}, of {one}", f" and {other}.", group=one)
        for one in things
        for other in things[:3]
        if one != other
    ]
    task = am.Task("the refrain", cases, "log_probability")
    claim = am.confirm_heads(model, [(2, 6)], task, discovery=None)
    confirming = task.halves()[1]
    tokenizer = model.tokenizer
    for case, before in zip(confirming.cases, claim.before.tolist(), strict=True):
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(case.prompt + case.answer)["input_ids"]]])
        ids = ids[:, 1:] if int(ids[0, 1]) == tokenizer.bos_token_id else ids
        with torch.no_grad():
            found = model.plain(ids).logits[0].double().log_softmax(dim=-1)
        assert before == pytest.approx(sum(float(found[place - 1, ids[0, place]]) for place in (-3, -2, -1)), abs=1e-4)
    assert "log probability of the answer on the refrain" in claim.lead
    refuses('metric="log_probability"', am.confirm_heads, model, [(2, 6)], replace(task, metric="accuracy"))
    refuses("scores an answer alone", am.Task, "compared", [("a", " b", " c", "x")], "log_probability")


# -- retrieval -------------------------------------------------------------------------------------------------------


def test_the_heads_that_retrieve_are_confirmed_on_other_needles() -> None:
    """ln p of each needle by hand, with and without the heads that `am.head_types` finds on other texts."""
    model, context = models.demo(), 70
    claims = am.head_types(model, context=context).to_frame().query("type == 'retrieval'")
    heads = list(zip(claims.layer.tolist(), claims["head"].tolist(), strict=True))
    task, finding = am.Task.of_retrieval(model, context), am.Task.of_retrieval(model, context, seed=0)
    assert len(task.groups) == 24
    task = task.only(task.groups[::3])
    claim = am.confirm_heads(model, heads, task, discovery=finding, sets=20)
    assert claim.p == claim.least_p == 1 / 20 and not claim._idle and claim.groups == task.groups
    assert "the log probability of the answer on retrieval from 70 tokens" in claim.lead
    zeroed = {("z", 2): lambda z: z.index_fill(2, torch.tensor([head for _, head in heads]), 0.0)}
    for case, before, after in zip(task.cases, claim.before.tolist(), claim.after[0].tolist(), strict=True):
        prompt, answer = case.prompt, case.answer
        assert len(prompt) + len(answer) == context and len(answer) == 8
        needle = [place for place in range(len(prompt) - 4) if prompt[place : place + 4] == prompt[-4:]]
        assert len(needle) == 1 and prompt[needle[0] + 4 : needle[0] + 12] == answer
        for hooks, measured in (({}, before), (zeroed, after)):
            with model.hooks(hooks):
                logits = model.run(torch.tensor([[*prompt, *answer]])).logits[0].double().log_softmax(dim=-1)
            by_hand = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None]).sum()
            assert measured == pytest.approx(float(by_hand), abs=1e-3)
    assert not {case.prompt for case in task.cases} & {case.prompt for case in finding.cases}
    texts = [torch.tensor([[*case.prompt, *case.answer]]) for case in finding.cases]
    assert all(map(torch.equal, texts, Haystacks.of(model, context, seed=0)))


# -- directions and weights ------------------------------------------------------------------------------------------


def test_it_resumes_from_its_journal_and_no_other_direction_does(tmp_path: Path, monkeypatch: Any) -> None:
    model, task, path = model_of("and_pair", "gpt2"), planted.cued(8, 1), tmp_path / "claim.journal"
    texts = torch.randint(10, 40, (2, 5), generator=torch.Generator().manual_seed(2))

    def claim(values: Any, factor: float, **options: Any) -> am.results.HeadClaim:
        method = am.Intervention.add("z", values, heads="all", factor=factor)
        return am.confirm_heads(model, PAIR, task, method=method, sets=20, general=texts, **options)

    values, written, entries = {layer: DIRECTIONS[layer] for layer in (0, 2)}, Journal.write, []

    def interrupted(*arguments: Any) -> None:
        written(*arguments)
        entries.append(1)
        if len(entries) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        claim(values, 1.0, journal=path)
    for other, factor in (({0: DIRECTIONS[1], 2: DIRECTIONS[2]}, 1.0), (values, 2.0)):
        refuses("is the journal of another run", claim, other, factor, journal=path, error=am.errors.JournalError)
    found, whole = claim(values, 1.0, journal=path), claim(values, 1.0)
    assert torch.equal(found.after, whole.after) and torch.equal(found.general, whole.general)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_model_with_few_heads_cannot_confirm() -> None:
    """The planted head of two layers with eight heads is the strongest of 16 sets: p is 1/16 at best."""
    claim = am.confirm_heads(planted.lookup("two layers"), [(1, 3)], planted.cued())
    assert len(claim.sets) == 16 and claim.p == claim.least_p == 1 / 16
    assert claim.verdict == "cannot be confirmed" and claim.lead.count("cannot") == 1
    assert ", more than all 15 other heads in any layer (p = 0.062, the smallest possible; " in claim.lead
    assert "among 16 sets of this shape, p is 0.062 or more, and p ≤ 0.05 needs at least 20" in claim.lead
