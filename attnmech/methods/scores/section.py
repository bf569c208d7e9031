"""What a page says about the scores of the chosen head: figures 1 to 3, the ledger of a row, views of its attention."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Float, Int

from ...basics.nouns import Nouns
from ...draw.attention_maps import MEASURES, VALUE, attention_chart, highest_key
from ...draw.carried import error_of
from ...draw.chart import ByChoice, Chart
from ...draw.ledger import REFERENCES, ROW_READING, along_keys, ledger_chart, likeliest, of_every_cell
from ...draw.numbers import ScoreNumbers
from ...draw.patterns import VALUE_WEIGHTED
from ...draw.section import Choice, OfPattern, Section
from ...draw.style import marks_of, term_style
from ...draw.text import bound, percent, signed
from .figures import bars_chart, key_terms_chart, triangle_chart

MEASURE: Final = Choice(
    "measure", "Cells show", tuple(MEASURES), ("the score", "the score minus its row's highest", "the probability")
)
AGAINST: Final = Choice(
    "against", "Terms are drawn", tuple(REFERENCES), ("as they are", "minus the row's mean", "minus the runner-up's")
)

WEIGHT: Final = Choice(
    "weight",
    "Attention shown",
    ("p", "value"),
    ("probability p", "value-weighted"),
    in_calls=("None", '"value"'),
    everywhere=True,
)

SMALLEST_LEAD: Final = 0.0005
"""A term whose lead would be written as 0.000 is not named."""


def score_sections(
    view: ScoreNumbers, call: str, shown: str, overview: str = "", other: ScoreNumbers | None = None
) -> list[Section]:
    """Figures 1 to 3 of every head.

    Args:
        view: the numbers.
        call: the Python that gives the decomposition, such as "split".
        shown: the Python that shows its attention as a view, named where `{figure}` stands; `{weight}` where the view
            says how it is weighted.
        overview: what was found about all heads together.
        other: the same scores, split at the model's own biases; the reader then chooses between the two, and `{split}`
            in `call` stands for where they are split.

    """
    nouns, tokens, keys, heads = view.nouns, view.tokens, view.keys or None, view.scores.shape[1]
    splits = _Splits((view,) if other is None else (view, other))

    def plotted(figure: str, *options: str) -> str:
        return f'{call}.plot("{figure}", layer={{layer}}, head={{head}}{"".join(f", {each}" for each in options)})'

    weighted = view.value_norms is not None
    shown = shown.replace("{weight}", "{weight}" if weighted else "None")
    attention = attention_chart(view.scores, view.pattern, view.value_norms, tokens=tokens, keys=keys, nouns=nouns)
    measured = plotted("attention_map", 'measure="{measure}"')
    in_view = shown.replace("{figure}", "attention_pattern").replace("{weight}", '"value"')
    measure = replace(
        MEASURE,
        values=(*MEASURE.values, VALUE),
        words=(*MEASURE.words, "the value-weighted share"),
        in_calls=(*(measured.replace("{measure}", each) for each in MEASURES), in_view),
    )
    lines = (
        f"Lines between {nouns.tokens}" if nouns.keys is None else f"Lines from {nouns.tokens} to {nouns.keys.tokens}"
    )
    ledger = [_ledger(splits, plotted("row_ledger", "query={query}", 'against="{against}"'))] if view.terms else []
    rounded = max(error_of(each) for each in (attention, *(chart for each in ledger for chart in _charts(each))))
    exact = f"off by at most {bound(rounded)}" if rounded else "exact"
    return [
        Section(
            name="all-heads",
            contents="All heads",
            heading="All heads at a glance",
            finding=overview or f"{len(view.layers) * heads} heads.",
            reading="One small map for each head, one row for each layer: queries down, keys across, the deeper the "
            "more attention. Click one to choose the head that the rest of the page shows, or go there with the arrow "
            f"keys and press Enter.{f' {VALUE_WEIGHTED.reading.strip()}' if weighted else ''}",
            caveat="Shades follow the square root of a weight, so that small ones stay visible: a map looks "
            "fuller than its attention is.",
            figures={"model-view": OfPattern("model")},
            choices=(WEIGHT,) if weighted else (),
        ),
        Section(
            contents="1 Attention map",
            heading="Figure 1. Attention map",
            finding=_about_rows(view),
            reading=f"One row for each {nouns.query_token}, one column for each {nouns.key_token}. The mark is "
            "the highest score of its row; the frame is the chosen query: click a row to choose another.",
            caveat=f"A row with one visible key{'' if keys else ' (row 0 of a causal model)'} has no choice: it is "
            "neither marked nor counted. Hidden keys are blank. A high score says where the head looks, not that the "
            "model's output depends on it: attention is not explanation.",
            figures={"attention-map": attention},
            call="{measure}" if weighted else measured,
            choices=(measure if weighted else MEASURE,),
            rounding=f"scores and their terms are {exact}, shares off by at most 8e-06",
        ),
        *ledger,
        Section(
            contents=lines,
            heading=lines,
            reading="Queries on the left, keys on the right; the stronger a line, the more attention. Point at "
            f"a {nouns.any_token} for its lines alone, click to keep them. When a {nouns.any_token} is hidden, its "
            "weight goes to the others in proportion.",
            caveat=f"What remains when a {nouns.any_token} is hidden may be a small part of the head's attention: the "
            "sentence above the lines says how much the hidden one had.",
            figures={"sentence-view": OfPattern("sentence")},
            name="sentence",
            call=shown.replace("{figure}", "sentence"),
        ),
        Section(
            contents=f"{nouns.token.capitalize()} graph",
            heading=f"{nouns.token.capitalize()} graph",
            reading="An arrow goes from a query to each key that it gives more than the threshold; width is weight.",
            caveat="A threshold hides as much as it shows: many small weights can carry more than one large one.",
            figures={"token-graph": OfPattern("token_graph")},
            call=shown.replace("{figure}", "token_graph"),
        ),
        Section(
            name="score-shares",
            contents="2 What scores are made of",
            heading="Figure 2. What the scores are made of",
            finding=_about_shares(splits),
            reading="For each query, the key whose score has the chosen rank (0 is the highest), and the share that "
            "each term has in that score.",
            caveat="Each term is first shifted by its smallest value in the row, since a constant along a row changes "
            "nothing after the softmax; these lowest values may be at different keys, so that a share is of what "
            "lifts the key above each term's own lowest value, not above any one key. Rows with one key, or with fewer "
            "keys than the rank asks for, are left out. The triangle shows three terms relative to their sum; a corner "
            "marked “not in this model” stays empty.",
            figures={
                "share-triangle": triangle_chart(splits.shares, view.ranked_key, tokens, keys, nouns=nouns),
                "share-bars": bars_chart(splits.shares, view.ranked_key, tokens, keys, nouns=nouns),
            },
            call=plotted("score_shares", "rank={rank}"),
            choices=(
                Choice("rank", "Rank", tuple(range(view.ranked_key.shape[3])), everywhere=True),
                *([] if other is None else [_split(nouns)]),
            ),
        ),
        Section(
            contents="3 Terms of the key",
            heading="Figure 3. "
            + ("The key's terms, seen from the last query" if view.key_terms_of_last else "The terms of the key alone"),
            finding=_about_key_terms(splits),
            reading="What each key gains or loses, as the last query sees it: from its distance (position), and from "
            "what it is, whatever the query holds (key bias)."
            if view.key_terms_of_last
            else "What each key gains or loses from these terms, the same for every query.",
            caveat="Each line is shown minus its mean over the keys: adding a constant to all keys changes nothing "
            "after the softmax, so only the trend matters.",
            figures={"key-terms": key_terms_chart(splits.key_terms, view.key_tokens, nouns=nouns)},
            call=plotted("key_terms"),
        ),
    ]


def _split(nouns: Nouns) -> Choice:
    return Choice(
        "split",
        "Scores split at",
        ("means", "biases"),
        (f"the {nouns.text}'s means", "the model's biases"),
        in_calls=('"mean"', "None"),
        everywhere=True,
    )


@dataclass(frozen=True)
class _Splits:
    """The numbers of one or two splits of the same scores; arrays of two have an axis "split" in front."""

    views: tuple[ScoreNumbers, ...]

    @property
    def view(self) -> ScoreNumbers:
        """The split that the page begins with."""
        return self.views[0]

    @property
    def terms(self) -> Mapping[str, Float[np.ndarray, "*split layer head query_or_1 key_or_1"]]:
        """Every term; 0 in a split that lacks it."""
        return self._stacked([view.terms for view in self.views], 0.0)

    @property
    def shares(self) -> Mapping[str, Float[np.ndarray, "*split layer head query rank"]]:
        """The share of every term; 0 in a split that lacks it."""
        return self._stacked([view.ranked_share for view in self.views], 0.0)

    @property
    def key_terms(self) -> Mapping[str, Float[np.ndarray, "*split layer head key"]]:
        """The terms of the key; NaN in a split that lacks one."""
        return self._stacked([view.key_terms for view in self.views], np.nan)

    def _stacked(self, each: Sequence[Mapping[str, np.ndarray]], missing: float) -> dict[str, np.ndarray]:
        if len(each) == 1:
            return dict(each[0])
        found = {}
        for name in dict.fromkeys(name for terms in each for name in terms):
            shape = np.broadcast_shapes(*(terms[name].shape for terms in each if name in terms))
            there = (terms.get(name, np.full((), missing, np.float32)) for terms in each)
            found[name] = np.stack([np.broadcast_to(array, shape) for array in there])
        return found

    def texts(self, over: tuple[str, ...], shape: tuple[int, ...], text: Callable[..., str]) -> ByChoice:
        """A text for every choice, and for every split if there are two."""
        several = len(self.views) > 1
        return ByChoice.texts(
            ("split", *over) if several else over, (len(self.views), *shape) if several else shape, text
        )


def _ledger(splits: _Splits, call: str) -> Section:
    view = splits.view
    return Section(
        contents="One row as a sum",
        heading="One row as a sum",
        finding=_about_leads(splits),
        reading=ROW_READING,
        caveat="A term that is the same at every key of the row changes no probability, however long its bar: drawn "
        "minus the row's mean or minus the runner-up's, it vanishes. The hover box has the terms as the model computes "
        "them.",
        figures={
            "row-ledger": ledger_chart(
                splits.terms, view.scores, view.pattern, view.tokens, keys=view.keys or None, nouns=view.nouns
            )
        },
        call=call,
        choices=(AGAINST,),
    )


def _charts(section: Section) -> list[Chart]:
    return [each for each in section.figures.values() if isinstance(each, Chart)]


def _about_rows(view: ScoreNumbers) -> ByChoice:
    marks, nouns = marks_of(highest_key(view.scores), len(view.keys) or None), view.nouns

    def told(layer: int, head: int) -> str:
        counts = [int((marks[layer, head] == code).sum()) for code in range(3)]
        if view.crosses:
            first, last, other = counts
            return (
                f"Of the {sum(counts)} rows with a choice, {first} score highest at the first {nouns.key_token}, "
                f"{last} at the last, {other} at another."
            )
        itself, first, other = counts
        return (
            f"Of the {itself + first + other} rows with a choice, {itself} score highest at the {nouns.token} "
            f"itself, {first} at the {nouns.first}, {other} at another {nouns.token}."
        )

    return ByChoice.texts(("layer", "head"), view.scores.shape[:2], told)


def _about_leads(splits: _Splits) -> ByChoice:
    """By how much the likeliest key's score leads the next one's, term by term."""
    view = splits.view
    order = likeliest(view.scores, view.pattern)[..., :2]
    count = np.isfinite(view.scores).sum(axis=-1)

    def lead(values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "*split layer head query"]:
        two = along_keys(of_every_cell(values, view.scores), order).astype(np.float64)
        return two[..., 0] - two[..., -1]

    by, by_term = lead(view.scores), {name: lead(term) for name, term in splits.terms.items()}

    def told(*place: int) -> str:
        row = place[-3:]
        best, *after = order[row].tolist()
        if count[row] < 2:
            return f"Query {view.named_token(row[2])} sees {view.named_key(best)} alone: it has no choice."
        leads = _leads({name: float(term[place]) for name, term in by_term.items()})
        return (
            f"The score of key {view.named_key(best)} leads that of {view.named_key(after[0])} by "
            f"{signed(float(by[row]), '.3f')}{': ' if leads else ''}{leads}."
        )

    return splits.texts(("layer", "head", "query"), view.scores.shape[:3], told)


def _leads(terms: Mapping[str, float]) -> str:
    """The lead that each term gives the first key of two, the largest in size first."""
    named = sorted((-abs(lead), name) for name, lead in terms.items() if abs(lead) >= SMALLEST_LEAD)
    return ", ".join(f"{term_style(name).label} {signed(terms[name], '.3f')}" for _, name in named)


def _about_shares(splits: _Splits) -> ByChoice:
    shape = (*splits.view.scores.shape[:2], splits.view.ranked_key.shape[3])
    found = []
    for view in splits.views:
        counted = {name: np.isfinite(share).sum(axis=2) for name, share in view.ranked_share.items()}
        mean = {name: np.nansum(share, axis=2) / counted[name].clip(1) for name, share in view.ranked_share.items()}
        rows: Int[np.ndarray, "layer head rank"] = next(iter(counted.values()))
        found.append((rows, mean))

    def told(*place: int) -> str:
        rows, mean = found[place[0] if len(place) > 3 else 0]
        at = place[-3:]
        if not rows[at]:
            return f"No row has a share to show at rank {at[2]}."
        means = ", ".join(f"{term_style(name).label} {percent(float(values[at]))}" for name, values in mean.items())
        return f"Mean share at rank {at[2]} over {rows[at]} rows: {means}."

    return splits.texts(("layer", "head", "rank"), shape, told)


def _about_key_terms(splits: _Splits) -> ByChoice | str:
    if not any(view.key_terms for view in splits.views):
        return ""

    def told(*place: int) -> str:
        view, place = splits.views[place[0] if len(place) > 2 else 0], place[-2:]
        if not view.key_terms:
            return "Split at the model's biases, no term depends on the key alone."
        spreads = (
            f"{term_style(name).label} by {np.nanmax(term[place]) - np.nanmin(term[place]):.2f}"
            for name, term in view.key_terms.items()
        )
        return f"From the lowest to the highest key, the score changes: {', '.join(spreads)}."

    return splits.texts(("layer", "head"), splits.view.scores.shape[:2], told)
