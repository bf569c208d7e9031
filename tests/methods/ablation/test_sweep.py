"""Sweeps over interventions and over sets of heads equal the same changes made by hand on the raw transformers
model."""

from typing import Any

import models
import pytest
import torch
from by_hand import divergences, losses, point_changed, seen, z_changed, zeroed
from counting import counted_passes
from torch import Tensor

import attnmech as am
from attnmech.draw.text import signed
from attnmech.errors import InputError

CHANGE = am.Intervention
ONE: dict[str, Any] = {"heads": [(0, 1)]}


def loss_of(plain: Any, ids: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return losses(plain(ids, **options).logits, ids, [ids.shape[1]] * len(ids))


@pytest.mark.core
@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "gpt_neox", "gemma2"])
def test_every_row_equals_the_raw_model(family: str) -> None:
    hooked, plain, ids = models.hooked(family), models.plain(family), models.token_ids(family)
    changes = [
        [CHANGE.zero([(0, 1)]), CHANGE.zero([(1, 2), (1, 0)])],
        CHANGE.attend([(0, 2)], "uniform"),
        CHANGE.stream("attn_out", [1], {1: torch.full((1, 1, hooked.d_model), 0.3)}, positions=[2, 4]),
    ]
    found = am.sweep(hooked, ids, changes)
    torch.testing.assert_close(found.before, loss_of(plain, ids), rtol=1e-4, atol=1e-5)
    with z_changed(plain, 0, zeroed(1)), z_changed(plain, 1, lambda z: zeroed(0)(zeroed(2)(z))):
        torch.testing.assert_close(found.after[0], loss_of(plain, ids), rtol=1e-4, atol=1e-5)
    v = hooked.run(ids, points=[("v", 0)])["v", 0].repeat_interleave(hooked.n_heads // hooked.n_kv_heads, dim=2)
    even = v.cumsum(dim=1) / torch.arange(1, ids.shape[1] + 1)[None, :, None, None]

    def attends_evenly(z: Tensor) -> Tensor:
        z[..., 2, :] = even[..., 2, :]
        return z

    if family != "gemma2":  # a model whose layer 0 sees only a window
        with z_changed(plain, 0, attends_evenly):
            torch.testing.assert_close(found.after[1], loss_of(plain, ids), rtol=1e-4, atol=1e-5)

    def at_two_places(value: Tensor) -> Tensor:
        value[:, [2, 4]] = 0.3
        return value

    with point_changed(plain, "attn_out", 1, at_two_places):
        torch.testing.assert_close(found.after[2], loss_of(plain, ids), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.effect, (found.after - found.before).mean(dim=1))
    assert float(found.effect.abs().min()) > 1e-4
    assert found.names[0] == "z of L0H1 becomes 0; z of L1H0, L1H2 becomes 0" and found.complete
    assert found.rows_without_keys.tolist() == [0, 0, 0]


@pytest.mark.parametrize("later", ["recompute", "frozen"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_without_a_key_are_counted_and_attend_to_nothing(side: str, later: str) -> None:
    hooked = models.hooked("bloom")
    given = models.padded("bloom", side=side)
    changes = [
        CHANGE.remove_keys([(1, 2), (0, 1)], "first"),
        CHANGE.cut((0, 3), (0, 3), [(0, 1), (1, 0), (1, 2)]),
        CHANGE.zero([(0, 1)]),
        [CHANGE.remove_keys([(0, 1)], "first"), CHANGE.attend([(0, 1)], "first")],
    ]
    found = am.sweep(hooked, given, changes, later=later)
    # The first row of each of three texts in two heads; three rows of each in three heads.
    assert found.rows_without_keys.tolist() == [6, 27, 0, 0]
    if later == "recompute":
        alone = am.sweep(hooked, given, [CHANGE.cut((0, 3), (0, 3), [(1, 2)])])
        z = hooked.run(given, points=[("z", 1)])["z", 1]
        begins = [0, 0, 0] if side == "right" else [0, 2, 4]
        with hooked.intervene(CHANGE.cut((0, 3), (0, 3), [(1, 2)])):
            now = hooked.run(given, points=[("z", 1)])["z", 1]
        for row, begin in enumerate(begins):
            assert not now[row, begin : begin + 3, 2].any() and z[row, begin : begin + 3, 2].any()
        assert alone.rows_without_keys.tolist() == [9]
        assert "it leaves 9 rows of attention without a key" in repr(alone)
    assert "2 of them leave rows of attention without a key" in repr(found)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_sets_equal_the_raw_model(family: str) -> None:
    hooked, plain, ids = models.hooked(family), models.plain(family), models.token_ids(family)
    reference = ids.flip(0).roll(1, dims=1)
    one, other = [(0, 1), (1, 2), (0, 0)], [(1, 1)]
    zero = am.ablate_set(hooked, ids, {"three": one, "one": other})
    mean = am.ablate_set(hooked, ids, one, "mean", reference=reference)
    means = {layer: seen(plain, reference, "z", layer).mean(dim=(0, 1)) for layer in (0, 1)}

    def replaced(layer: int, by: dict[int, Tensor] | None) -> Any:
        def change(z: Tensor) -> Tensor:
            for at, head in one:
                if at == layer:
                    z[..., head, :] = 0 if by is None else by[layer][head]
            return z

        return change

    for found, by in ((zero, None), (mean, means)):
        with z_changed(plain, 0, replaced(0, by)), z_changed(plain, 1, replaced(1, by)):
            torch.testing.assert_close(found.after[0], loss_of(plain, ids), rtol=1e-4, atol=1e-5)
    with z_changed(plain, 1, zeroed(1)):
        torch.testing.assert_close(zero.after[1], loss_of(plain, ids), rtol=1e-4, atol=1e-5)
    assert zero.names == ("three", "one") and mean.names == ("L0H0 + L0H1 + L1H2",)
    assert zero.interventions[0] == ("z of L0H0, L0H1, L1H2 becomes 0",)
    assert len(mean.interventions[0]) == 2


def test_sets_by_an_intervention_are_rows_of_a_sweep() -> None:
    hooked, ids = models.hooked("llama"), models.token_ids("llama")
    chosen = [(0, 1), (1, 3)]
    even = am.ablate_set(hooked, ids, chosen, CHANGE.attend("all", "uniform", positions=[3, 5]))
    swept = am.sweep(hooked, ids, [CHANGE.attend(chosen, "uniform", positions=[3, 5])])
    assert torch.equal(even.after, swept.after) and even.interventions == swept.interventions
    whole = am.ablate_set(hooked, ids, "all", CHANGE.remove_keys("all", "first"))
    assert whole.names == ("all heads",) and whole.rows_without_keys.tolist() == [3 * 2 * 6]
    resampled = am.ablate_set(hooked, ids, chosen, "resample", seed=3)
    alone = am.ablate_heads(hooked, ids, chosen[1:], "resample", seed=3)
    of_one = am.ablate_set(hooked, ids, chosen[1:], "resample", seed=3)
    torch.testing.assert_close(of_one.after[0], alone.after[1, 3], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(resampled.after[0], of_one.after[0])


@pytest.mark.parametrize(
    "template",
    [
        CHANGE.attend("all", "uniform"),
        CHANGE.scale("query_key", 0.5),
        CHANGE.zero_values("all", "first"),
        CHANGE.remove_keys("all", [1], positions=[4]),
        CHANGE.zero("all", positions=[2]),
    ],
)
def test_a_template_is_applied_to_each_head_alone(template: am.Intervention) -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    found = am.ablate_heads(hooked, ids, [(0, 3), (2, 1)], template)
    for layer, head in ((0, 3), (2, 1)):
        with hooked.intervene(am.Intervention(template.edit, ((layer, head),), positions=template.positions)):
            expected = losses(hooked.run(ids).logits, ids, [7] * 3)
        torch.testing.assert_close(found.after[layer, head], expected, rtol=1e-4, atol=1e-5)
    assert int(found.swept.sum()) == 2 and found.method == str(template).replace("all heads", "each head")
    assert repr(found).startswith(f"HeadEffects(2 heads changed ({found.method}), one at a time, on 3 texts: ")


def test_names_are_text_in_tables_figures_and_pages() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2", batch=6)
    named = {"<b>both</b>": [CHANGE.zero([(0, 1)]), CHANGE.zero([(2, 2)])], "first row": CHANGE.zero([(0, 0)])}
    found = am.sweep(hooked, ids, named)
    assert found.to_frame()["intervention"].tolist() == list(named)
    (marks,) = found.plot().data
    assert list(marks.x) == found.effect.tolist()
    assert found.plot().layout.yaxis.ticktext[0] == "&lt;b&gt;both&lt;/b&gt;" and "<b>both" not in found.to_html()
    with pytest.raises(InputError, match="must have the same interventions"):
        found - am.sweep(hooked, ids, [CHANGE.zero([(0, 1)]), CHANGE.zero([(0, 0)])])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "options", "said"),
    [
        (am.sweep, {"interventions": []}, "must hold at least one am.Intervention; got none"),
        (am.sweep, {"interventions": CHANGE.zero("all")}, "must be a list of am.Intervention, such as .*; got Interv"),
        (am.sweep, {"interventions": "zero"}, "must be a list of am.Intervention"),
        (
            am.sweep,
            {"interventions": [CHANGE.zero("all"), (0, 1)]},
            r"`interventions`\[1\] must be an am.Intervention or",
        ),
        (am.sweep, {"interventions": {"a": ["zero"]}}, r"`interventions`\['a'\] must be .*; got \['zero'\]"),
        (am.sweep, {"interventions": [[]]}, r"`interventions`\[0\] must hold at least one"),
        (am.sweep, {"interventions": {2: CHANGE.zero("all")}}, "`interventions` must have strings as names; got 2"),
        (am.sweep, {"interventions": [CHANGE.zero([(0, 9)])]}, "`head` must be from 0 to 4"),
        (am.ablate_set, {"heads": {}}, "at least one set of heads"),
        (am.ablate_set, {"heads": {"a": []}}, "at least one head"),
        (am.ablate_set, {"heads": {1: [(0, 1)]}}, "`heads` must have strings as names of its sets; got 1"),
        (am.ablate_set, ONE | {"method": "drop"}, "`method` must be one of zero, mean, resample"),
        (am.ablate_set, ONE | {"method": CHANGE.zero([(0, 2)])}, 'must act in heads="all"'),
        (am.ablate_set, ONE | {"method": CHANGE.stream("mlp_out", [0])}, 'must act in heads="all"'),
        (am.ablate_set, ONE | {"method": CHANGE.zero("all"), "reference": [[5, 6]]}, '`reference` needs method="mean"'),
        (am.ablate_set, ONE | {"method": "mean"}, "needs `reference`"),
        (am.ablate_heads, {"method": CHANGE.zero("all"), "draws": 2}, 'needs method="resample"; got 2 with an interv'),
        (am.ablate_pairs, {"pairs": "all"}, "pairs=\"all\" with `heads`, .*; got pairs='all' without `heads`"),
        (am.ablate_pairs, {"pairs": "some", "heads": [(0, 1), (0, 2)]}, "got pairs='some'"),
        (am.ablate_pairs, {"pairs": [((0, 1), (0, 2))], "heads": "all"}, '`heads` is for pairs="all"'),
        (am.ablate_pairs, ONE | {"pairs": "all"}, "pairs need two heads or more; `heads` names only L0H1"),
        (am.ablate_pairs, {"pairs": "all", "heads": [(0, 1), (0, 9)]}, "`head` must be from 0 to 4"),
        (am.ablate_pairs, {"pairs": []}, "at least one pair"),
        (am.ablate_pairs, {"pairs": [(0, 1)]}, "must be a list of pairs of heads"),
        (am.ablate_pairs, {"pairs": [((0, 1), (1, 2), (0, 0))]}, "must be a list of pairs of heads"),
        (am.ablate_pairs, {"pairs": [((0, 1), (0, 1))]}, "a pair needs two heads; got L0H1 twice"),
        (am.ablate_pairs, {"pairs": [((0, 5), (1, 1))]}, "`head` must be from 0 to 4"),
    ],
)
def test_bad_input(call: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        call(models.hooked("gpt2"), models.token_ids("gpt2"), **options)


def test_a_template_in_the_wrong_stack_is_refused() -> None:
    method = CHANGE.zero("all", stack="encoder")
    with pytest.raises(InputError, match="must act in the stack 'decoder', where heads are ablated, or in its cross"):
        am.ablate_heads(models.hooked("t5"), models.token_ids("t5"), method=method)


PAIRS = [((0, 1), (1, 2)), ((1, 0), (1, 2)), ((1, 2), (0, 0))]


@pytest.mark.core
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "bloom"])
def test_zeroing_pairs_equals_the_raw_model(family: str) -> None:
    hooked, plain, ids = models.hooked(family), models.plain(family), models.token_ids(family)
    metric = "loss" if hooked.causal else "kl"
    found = am.ablate_pairs(hooked, ids, PAIRS, metric=metric)
    with torch.no_grad():
        clean = plain(ids).logits

        def judged() -> Tensor:
            logits = plain(ids).logits
            return losses(logits, ids, [7] * 3) if metric == "loss" else divergences(logits, clean, [7] * 3)

        before = judged()
        for number, ((layer, head), (other_layer, other)) in enumerate(PAIRS):
            with z_changed(plain, layer, zeroed(head)):
                one = judged()
                with z_changed(plain, other_layer, zeroed(other)):
                    both = judged()
            with z_changed(plain, other_layer, zeroed(other)):
                second = judged()
            for name, after in (("both", both), ("one", one), ("other", second)):
                torch.testing.assert_close(found[name].per_text[number], after - before, rtol=1e-3, atol=2e-5)
            interaction = (both - before) - (one - before) - (second - before)
            torch.testing.assert_close(found["interaction"].per_text[number], interaction, rtol=1e-3, atol=4e-5)
            assert float(found.interaction[number]) == pytest.approx(float(interaction.mean()), rel=1e-3, abs=4e-5)
    assert float(found.interaction.abs().max()) > 1e-3


@pytest.mark.parametrize("method", ["mean", "resample"])
def test_singles_are_those_of_the_sweep(method: Any) -> None:
    hooked, ids = models.hooked("llama"), models.token_ids("llama")
    options: dict[str, Any] = {"reference": ids.flip(0).roll(1, dims=1)} if method == "mean" else {"seed": 4}
    found = am.ablate_pairs(hooked, ids, [((0, 5), (1, 3))], method, **options)
    singles = am.ablate_heads(hooked, ids, [(0, 5), (1, 3)], method, **options)
    torch.testing.assert_close(found.after_one[0], singles.after[0, 5], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.after_other[0], singles.after[1, 3], rtol=1e-5, atol=1e-6)
    swapped = am.ablate_pairs(hooked, ids, [((1, 3), (0, 5))], method, **options)
    torch.testing.assert_close(swapped.after_both, found.after_both, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(swapped.one, found.other, rtol=1e-5, atol=1e-6)


def test_all_pairs_of_a_list_are_those_named() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    found = am.ablate_pairs(hooked, ids, "all", heads=[(1, 2), (0, 1), (2, 4)])
    named = [((0, 1), (1, 2)), ((0, 1), (2, 4)), ((1, 2), (2, 4))]
    assert found.pairs == tuple(named)
    torch.testing.assert_close(found.after_both, am.ablate_pairs(hooked, ids, named).after_both)
    assert len(am.ablate_pairs(models.hooked("bloom"), models.token_ids("bloom"), "all", heads="all").pairs) == 15


def test_a_head_of_several_pairs_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = counted_passes(monkeypatch)
    am.ablate_pairs(models.hooked("gpt2"), models.token_ids("gpt2"), PAIRS)
    assert sum(measured) == 4 + 3


def test_what_it_says_and_draws() -> None:
    ids = torch.randint(3, 50, (30, 9), generator=torch.Generator().manual_seed(0))
    found = am.ablate_pairs(models.hooked("gpt2"), ids, PAIRS)
    top = int(found.interaction.abs().argmax())
    names = " + ".join(f"L{layer}H{head}" for layer, head in PAIRS[top])
    clear = f"{int(found.clear.sum())} of 3 pairs have a clear interaction; the largest is that of {names}, "
    assert f"Zero ablation of 3 pairs of heads on 30 texts: {clear}" in repr(found) and found.clear[top]
    ends = " to ".join(signed(float(end[top]), ".3g") for end in found.simultaneous())
    assert f"{int(found.agreeing[top])} of 30 texts (95 % interval, corrected for 3 pairs: {ends})" in repr(found)
    both, alone, interaction = found.plot().data
    assert list(both.x) == found.both.tolist() and list(interaction.x) == found.interaction.tolist()
    torch.testing.assert_close(torch.tensor(list(alone.x)), found.one + found.other)
    torch.testing.assert_close(torch.tensor(list(interaction.error_x.array)), found.interval()[1] - found.interaction)
