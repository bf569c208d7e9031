"""The sections of a page about one head's scores: figures 1 to 3, the ledger of a row, views of its attention."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Float, Int

from ...basics.nouns import counted
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

MAPS: Final = {f"attention_map{'' if measure == 'score' else f'_{measure}'}": measure for measure in MEASURES}
"""What the cells of each map of a head show."""
LEDGERS: Final = {f"row_ledger{'' if name == 'zero' else f'_{name}'}": name for name in REFERENCES}
"""The reference that is subtracted from the terms in each ledger of a row."""

MEASURE: Final = Choice(
    "measure",
    "Cells show",
    tuple(MEASURES),
    ("the score", "the score minus its row's highest", "the probability"),
    in_calls=tuple(MAPS),
)
AGAINST: Final = Choice(
    "against",
    "Terms shown",
    tuple(REFERENCES),
    ("minus the row's mean", "as computed", "minus the runner-up's"),
    in_calls=tuple(LEDGERS),
)

WEIGHT: Final = Choice(
    "weight",
    "Attention shown",
    ("p", "value"),
    ("probability p", "value-weighted"),
    in_calls=("None", '"value"'),
    everywhere=True,
)

SMALLEST_LEAD: Final = 0.0005  # the smallest lead listed; a smaller one would print as 0.000


def score_sections(
    view: ScoreNumbers, call: str, shown: str, overview: str = "", other: ScoreNumbers | None = None
) -> list[Section]:
    """Figures 1 to 3 of every head.

    Args:
        view: the numbers.
        call: the Python expression for the decomposition, such as "split".
        shown: the Python expression that shows its attention, with `{figure}` for the name of the view and `{weight}`
            for the weighting.
        overview: a sentence about all heads together.
        other: the same scores, split at the model's own biases; the reader then chooses between the two splits, and the
            choice replaces `{split}` in `call`.

    """
    nouns, tokens, keys, heads = view.nouns, view.tokens, view.keys or None, view.scores.shape[1]
    splits = _Splits((view,) if other is None else (view, other))

    def plotted(figure: str, *options: str) -> str:
        return f'{call}.plot("{figure}", layer={{layer}}, head={{head}}{"".join(f", {choice}" for choice in options)})'

    weighted = view.value_norms is not None
    shown = shown.replace("{weight}", "{weight}" if weighted else "None")
    attention = attention_chart(view.scores, view.pattern, view.value_norms, tokens=tokens, keys=keys, nouns=nouns)
    in_view = shown.replace("{figure}", "attention_pattern").replace("{weight}", '"value"')
    measure = replace(
        MEASURE,
        values=(*MEASURE.values, VALUE),
        words=(*MEASURE.words, "the value-weighted share"),
        in_calls=(*map(plotted, MAPS), in_view),
    )
    one_text = nouns.keys is None or nouns.rows
    lines = f"Lines between {nouns.tokens}" if one_text else f"Lines from {nouns.tokens} to {nouns.of_keys.tokens}"
    ledger = [_ledger(splits, plotted("{against}", "query={query}"))] if view.terms else []
    split = Choice(
        "split",
        "Scores split at",
        ("means", "biases"),
        (f"the {nouns.text}'s means", "the model's biases"),
        in_calls=('"mean"', "None"),
        everywhere=True,
    )
    charts = [attention, *(figure for part in ledger for figure in part.figures.values() if isinstance(figure, Chart))]
    rounded = max(map(error_of, charts))
    exact = f"off by at most {bound(rounded)}" if rounded else "exact"
    return [
        Section(
            name="all-heads",
            contents="All heads",
            heading="All heads at a glance",
            finding=overview or f"{counted(len(view.layers) * heads, noun='head')}.",
            reading="One small map per head, one row of maps per layer. Queries run down, keys across; darker cells "
            "have more attention. Click a map, or move to it with the arrow keys and press Enter, to show "
            f"its head on the rest of the page.{f' {VALUE_WEIGHTED.reading.strip()}' if weighted else ''}",
            caveat="Shades follow the square root of the weights, which keeps small weights visible: a map looks "
            "fuller than its attention is.",
            figures={"model-view": OfPattern("model")},
            tab="look",
            choices=(WEIGHT,) if weighted else (),
        ),
        Section(
            contents="Attention map",
            heading="Attention map",
            numbered=True,
            finding=_about_rows(view),
            reading=f"One row for each {nouns.query_token}, one column for each {nouns.key_token}. A mark shows the "
            "highest score of its row; the frame shows the selected query. Click a row to select another.",
            caveat=f"A row with one visible key{'' if keys else ' (row 0 of a causal model)'} has no choice: it is "
            "neither marked nor counted. Hidden keys are blank. A high score says where the head attends, not that the "
            "model's output depends on it: attention is not explanation.",
            figures={"attention-map": attention},
            tab="look",
            call="{measure}" if weighted else plotted("{measure}"),  # noqa: RUF027 - the page fills it
            choices=(measure if weighted else MEASURE,),
            rounding=f"scores and their terms are {exact}; shares are off by at most 8e-06",
        ),
        *ledger,
        Section(
            contents=lines,
            heading=lines,
            reading="Queries on the left, keys on the right; stronger lines carry more attention. Hover over a "
            f"{nouns.any_token} to see only its lines; click to keep them. Hiding a {nouns.any_token} "
            "redistributes its weight to the others in proportion.",
            caveat=f"After a {nouns.any_token} is hidden, the rest may be a small part of the head's attention; the "
            "sentence above the lines says how much attention is hidden.",
            figures={"sentence-view": OfPattern("sentence")},
            tab="look",
            name="sentence",
            call=shown.replace("{figure}", "sentence"),
        ),
        Section(
            contents=f"{nouns.token.capitalize()} graph",
            heading=f"{nouns.token.capitalize()} graph",
            reading="An arrow points from a query to each key that receives more than the threshold; wider arrows "
            "carry more weight.",
            caveat="The threshold hides weights: many small ones can add up to more than one large one.",
            figures={"token-graph": OfPattern("token_graph")},
            tab="look",
            call=shown.replace("{figure}", "token_graph"),
        ),
        Section(
            name="score-shares",
            contents="What scores are made of",
            tab="why",
            heading="What the scores are made of",
            numbered=True,
            finding=_about_shares(splits),
            reading="For each query, the key at the selected rank (0 is the highest score), and the share of each term "
            "in that key's score.",
            caveat="Each term is first shifted by its smallest value in the row, because a constant along a row "
            "changes nothing after the softmax. These smallest values may lie at different keys, so a share is "
            "relative to each term's own minimum, not to any one key. Rows with a single key, or with too few keys "
            "for the rank, are left out. The triangle shows three terms relative to their sum; a corner marked “not "
            "in this model” stays empty.",
            figures={
                "share-triangle": triangle_chart(
                    splits.stacked("ranked_share"), view.ranked_key, tokens, keys, nouns=nouns
                ),
                "share-bars": bars_chart(splits.stacked("ranked_share"), view.ranked_key, tokens, keys, nouns=nouns),
            },
            call=f'{call}.show("score_shares", layer={{layer}}, head={{head}})',
            choices=(
                Choice("rank", "Rank", tuple(range(view.ranked_key.shape[3])), everywhere=True),
                *([] if other is None else [split]),
            ),
        ),
        Section(
            contents="Terms of the key",
            tab="why",
            heading="The key's terms for the last query" if view.key_terms_of_last else "The terms of the key alone",
            numbered=True,
            finding=_about_key_terms(splits),
            reading="What each key's score gains or loses for the last query: from its distance (position), and from "
            "the key itself, whatever the query holds (key bias)."
            if view.key_terms_of_last
            else "What each key's score gains or loses from these terms, the same for every query.",
            caveat="Each line is shown minus its mean over the keys. Adding a constant to the scores of all keys "
            "changes nothing after the softmax, so only the trend matters.",
            figures={"key-terms": key_terms_chart(splits.stacked("key_terms", np.nan), view.key_tokens, nouns=nouns)},
            call=plotted("key_terms"),
        ),
    ]


@dataclass(frozen=True)
class _Splits:
    """The numbers of one or two splits of the same scores; with two splits, arrays begin with an axis "split"."""

    views: tuple[ScoreNumbers, ...]

    def stacked(self, name: str, missing: float = 0.0) -> dict[str, np.ndarray]:
        """The terms, shares ("ranked_share") or terms of the key; `missing` in a split that lacks a term."""
        splits: list[Mapping[str, np.ndarray]] = [getattr(view, name) for view in self.views]
        if len(splits) == 1:
            return dict(splits[0])
        arrays = {}
        for term in dict.fromkeys(term for terms in splits for term in terms):
            shape = np.broadcast_shapes(*(terms[term].shape for terms in splits if term in terms))
            there = (terms.get(term, np.full((), missing, np.float32)) for terms in splits)
            arrays[term] = np.stack([np.broadcast_to(array, shape) for array in there])
        return arrays

    def texts(self, over: tuple[str, ...], shape: tuple[int, ...], text: Callable[..., str]) -> ByChoice:
        """A sentence for every choice, and for every split if there are two."""
        several = len(self.views) > 1
        return ByChoice.texts(
            ("split", *over) if several else over, (len(self.views), *shape) if several else shape, text
        )


def _ledger(splits: _Splits, call: str) -> Section:
    view = splits.views[0]
    return Section(
        contents="One row as a sum",
        tab="why",
        heading="One row as a sum",
        finding=_about_leads(splits),
        reading=ROW_READING,
        caveat="A term with one value at every key of the row changes no probability, however long its bar is as "
        "computed; minus the row's mean or the runner-up's terms, it vanishes. The hover box gives the terms as "
        "computed.",
        figures={
            "row-ledger": ledger_chart(
                splits.stacked("terms"),
                view.scores,
                view.pattern,
                view.tokens,
                keys=view.keys or None,
                nouns=view.nouns,
            )
        },
        call=call,
        choices=(AGAINST,),
    )


def _about_rows(view: ScoreNumbers) -> ByChoice:
    marks, nouns = marks_of(highest_key(view.scores), len(view.keys) or None), view.nouns

    def finding(layer: int, head: int) -> str:
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

    return ByChoice.texts(("layer", "head"), view.scores.shape[:2], finding)


def _about_leads(splits: _Splits) -> ByChoice:
    view = splits.views[0]
    order = likeliest(view.scores, view.pattern)[..., :2]
    count = np.isfinite(view.scores).sum(axis=-1)

    def lead(values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "*split layer head query"]:
        two = along_keys(of_every_cell(values, view.scores), order).astype(np.float64)
        return two[..., 0] - two[..., -1]

    by, by_term = lead(view.scores), {name: lead(term) for name, term in splits.stacked("terms").items()}

    def finding(*place: int) -> str:
        row = place[-3:]
        best, *after = order[row].tolist()
        if count[row] < 2:
            return f"Query {view.named_token(row[2])} sees {view.named_key(best)} alone, so it has no choice."
        terms = {name: float(term[place]) for name, term in by_term.items()}
        named = sorted((-abs(lead), name) for name, lead in terms.items() if abs(lead) >= SMALLEST_LEAD)
        leads = ", ".join(f"{term_style(name).label} {signed(terms[name], '.3f')}" for _, name in named)
        return (
            f"The score of key {view.named_key(best)} leads that of {view.named_key(after[0])} by "
            f"{signed(float(by[row]), '.3f')}{': ' if leads else ''}{leads}."
        )

    return splits.texts(("layer", "head", "query"), view.scores.shape[:3], finding)


def _about_shares(splits: _Splits) -> ByChoice:
    shape = (*splits.views[0].scores.shape[:2], splits.views[0].ranked_key.shape[3])
    by_view = []
    for view in splits.views:
        counted = {name: np.isfinite(share).sum(axis=2) for name, share in view.ranked_share.items()}
        mean = {name: np.nansum(share, axis=2) / counted[name].clip(1) for name, share in view.ranked_share.items()}
        rows: Int[np.ndarray, "layer head rank"] = next(iter(counted.values()))
        by_view.append((rows, mean))

    def finding(*place: int) -> str:
        rows, mean = by_view[place[0] if len(place) > 3 else 0]
        at = place[-3:]
        if not rows[at]:
            return f"No row has a share to show at rank {at[2]}."
        means = ", ".join(f"{term_style(name).label} {percent(float(values[at]))}" for name, values in mean.items())
        return f"Mean share at rank {at[2]} over {rows[at]} rows: {means}."

    return splits.texts(("layer", "head", "rank"), shape, finding)


def _about_key_terms(splits: _Splits) -> ByChoice | str:
    if not any(view.key_terms for view in splits.views):
        return ""

    def finding(*place: int) -> str:
        view, place = splits.views[place[0] if len(place) > 2 else 0], place[-2:]
        if not view.key_terms:
            return "No term depends on the key alone when scores are split at the model's biases."
        spreads = (
            f"{term_style(name).label} by {np.nanmax(term[place]) - np.nanmin(term[place]):.2f}"
            for name, term in view.key_terms.items()
        )
        return f"Between the lowest and the highest key, the score changes through {', '.join(spreads)}."

    return splits.texts(("layer", "head"), splits.views[0].scores.shape[:2], finding)
