"""The page's sentences about heads agree with loops over the numbers."""

import statistics
from itertools import product
from typing import Any

import numpy as np

from attnmech.draw.chart import ByChoice, Chart
from attnmech.draw.numbers import FocusNumbers, ScoreNumbers, UpdateNumbers, row_sentences
from attnmech.draw.style import MARKS
from attnmech.draw.text import percent, signed, visible_token
from attnmech.methods.focus.section import focus_sections
from attnmech.methods.scores.section import score_sections
from attnmech.methods.updates.section import update_sections

from .conftest import TOKENS, uncentred


def named(position: int) -> str:
    return f"{position} “{visible_token(TOKENS[position])}”"


def findings(sections: Any) -> dict[str, ByChoice]:
    return {section.anchor: section.finding for section in sections if isinstance(section.finding, ByChoice)}


def said(text: ByChoice, *place: int) -> str:
    return str(text.values[place])


def test_a_row_names_the_three_keys_that_it_attends_most(view: ScoreNumbers) -> None:
    told = row_sentences(view)
    for layer, head, query in product(range(2), range(3), range(7)):
        row = [float(view.pattern[layer, head, query, key]) for key in range(query + 1)]
        top = sorted(range(query + 1), key=lambda key, row=row: -row[key])[:3]
        keys = ", ".join(f"{percent(row[key])} to {named(key)}" for key in top)
        assert (
            said(told, layer, head, query) == f"Attention of query {named(query)}: {keys}{', …' if query > 2 else '.'}"
        )


def test_the_lead_of_the_likeliest_key_is_the_sum_of_its_terms_leads(view: ScoreNumbers) -> None:
    told = findings(score_sections(view, "scores", "shown"))["row-ledger"]
    for layer, head, query in product(range(2), range(3), range(7)):
        sentence = said(told, layer, head, query)
        if query == 0:
            assert sentence == f"Query {named(0)} sees {named(0)} alone, so it has no choice."
            continue
        row = view.pattern[layer, head, query]
        best, after = sorted(range(query + 1), key=lambda key, row=row: -row[key])[:2]
        key_bias, query_key = (
            float(term[best] - term[after])
            for term in (view.terms["key_bias"][layer, head, 0], view.terms["query_key"][layer, head, query])
        )
        parts = sorted([("key bias", key_bias), ("query-key", query_key)], key=lambda each: -abs(each[1]))
        leads = ", ".join(f"{name} {signed(lead, '.3f')}" for name, lead in parts if abs(lead) >= 0.0005)
        whole = float(view.scores[layer, head, query, best]) - float(view.scores[layer, head, query, after])
        assert sentence == (
            f"The score of key {named(best)} leads that of {named(after)} by {signed(whole, '.3f')}: {leads}."
        )


def test_marks_shares_and_key_terms_are_counted_and_averaged(view: ScoreNumbers) -> None:
    told = findings(score_sections(view, "scores", "shown"))
    for layer, head in product(range(2), range(3)):
        tops = [int(np.nanargmax(view.scores[layer, head, query, : query + 1])) for query in range(1, 7)]
        itself = sum(top == query for query, top in enumerate(tops, start=1))
        first = sum(top == 0 for top in tops)
        assert said(told["attention-map"], layer, head) == (
            f"Of the 6 rows with a choice, {itself} score highest at the token itself, {first} at the first token, "
            f"{6 - itself - first} at another token."
        )
        bias = view.key_terms["key_bias"][layer, head]
        spread = f"key bias by {float(max(bias)) - float(min(bias)):.2f}"
        assert (
            said(told["key-terms"], layer, head)
            == f"Between the lowest and the highest key, the score changes through {spread}."
        )
        for rank in range(5):
            rows = [query for query in range(1, 7) if query >= rank]
            shares = {
                label: [float(view.ranked_share[name][layer, head, query, rank]) for query in rows]
                for name, label in (("key_bias", "key bias"), ("query_key", "query-key"))
            }
            means = ", ".join(f"{label} {percent(statistics.fmean(share))}" for label, share in shares.items())
            sentence = said(told["score-shares"], layer, head, rank)
            assert sentence == f"Mean share at rank {rank} over {len(rows)} rows: {means}."


def test_focus_names_the_highest_head_and_counts_those_with_half(focus: FocusNumbers) -> None:
    told = findings(focus_sections(focus, "focus", [2, 5]))
    for name, values in (("first-focus", focus.first_top), ("concentration", focus.concentration)):
        write = percent if name == "first-focus" else "{:.3f}".format
        layer, head = divmod(int(np.nanargmax(values)), 3)
        many = sum(float(value) >= 0.5 for value in values.flat)
        sentence = said(told[name], 1, 2)
        assert sentence.startswith(f"L5H2: {write(float(values[2, 2]))}. Highest: {write(float(values.max()))}, ")
        assert f"L{focus.layers[layer]}H{head}. Heads " in sentence and sentence.endswith(f": {many} of 12.")
    assert said(told["self-focus"], 1, 1).startswith("L5H1: undefined. ")


def test_updates_tell_medians_signs_and_the_largest(updates: UpdateNumbers) -> None:
    told = findings(update_sections(updates, "updates"))
    for side, layer, head in product(range(2), range(3), range(3)):
        magnitude = updates.magnitude[side, layer, head]
        orientation = updates.orientation[side, layer, head]
        sizes = [float(value) for value in magnitude if value > 0]
        cosines = [float(value) for value in orientation if np.isfinite(value)]
        name = f"L{updates.layers[layer]}H{head}"
        assert said(told["magnitude"], side, layer, head) == (
            f"{name}: median {statistics.median(sizes):.2g} over {len(sizes)} tokens, from {min(sizes):.2g} to "
            f"{max(sizes):.2g}."
        )
        assert said(told["orientation"], side, layer, head) == (
            f"{name}: median {signed(statistics.median(cosines), '.3f')}; {sum(each < 0 for each in cosines)} of "
            f"{len(cosines)} updates point against the stream (below 0)."
        )
        largest = max(range(7), key=lambda token, row=magnitude: np.nan_to_num(row)[token])
        assert said(told["orientation-by-magnitude"], side, layer, head) == (
            f"{name} is largest at token {named(largest)}: magnitude {float(magnitude[largest]):.2g}, orientation "
            f"{signed(float(orientation[largest]), '.3f')}."
        )


def test_magnitudes_are_told_by_where_heads_attend_most(updates: UpdateNumbers) -> None:
    told = findings(update_sections(updates, "updates"))["magnitude-by-position"]
    for side, layer in product(range(2), range(3)):
        found: dict[str, list[float]] = {mark: [] for mark in MARKS}
        for head, query in product(range(3), range(7)):
            key = updates.attended[layer, head, query]
            size = float(updates.magnitude[side, layer, head, query])
            if key >= 0 and size > 0:
                found["self" if key == query else "first" if key == 0 else "other"].append(size)
        parts = [
            f"{statistics.median(sizes):.2g} for {MARKS[mark].label} ({len(sizes)})"
            for mark, sizes in found.items()
            if sizes
        ]
        assert said(told, side, layer).endswith(
            f"the key with the highest attention (number of points): {', '.join(parts)}."
        )


def test_two_splits_of_the_same_scores_are_a_choice(view: ScoreNumbers) -> None:
    """With one split selected, every number and sentence equals that of a page with this split alone."""
    other = uncentred(view)
    both = {section.anchor: section for section in score_sections(view, "call({split})", "shown", other=other)}
    for split, alone in enumerate((view, other)):
        for section in score_sections(alone, "call", "shown"):
            together = both[section.anchor]
            for place in np.ndindex(2, 3, len(TOKENS), 3, 5):
                chosen = dict(zip(("layer", "head", "query", "against", "rank"), place, strict=True))
                chosen |= {"split": split, "measure": 0}
                for text, whole in ((section.finding, together.finding), (section.reading, together.reading)):
                    if isinstance(text, ByChoice) and isinstance(whole, ByChoice):
                        assert whole.at(chosen) == text.at(chosen)
            for name, chart in section.figures.items():
                if not isinstance(chart, Chart):
                    continue
                chosen = {"layer": 1, "head": 2, "query": 5, "against": 2, "rank": 1, "measure": 0, "split": split}
                figure, whole_figure = chart.figure(**chosen), together.figures[name].figure(**chosen)
                drawn = {trace.meta: trace for trace in whole_figure.data}
                for trace in figure.data:
                    for axis in ("x", "y", "a", "b", "c"):
                        numbers = getattr(trace, axis, None)
                        if numbers is not None:
                            np.testing.assert_equal(list(getattr(drawn[trace.meta], axis)), list(numbers))
    assert "{split}" in both["score-shares"].call
