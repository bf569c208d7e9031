"""One offline HTML page about one text: figures 1 to 3 for every layer, head and rank, and whatever else is given.

The page loads nothing: the scripts, the numbers and the style all stand in the one file, compressed, and its content
security policy lets no other script run and no request leave. The figures are those of `attnmech.draw.scores`,
`ledger`, `focus` and `updates`, made for the first layer and head; page.js puts the chosen head's numbers into them,
when they come into sight.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from string import Template
from typing import Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float

from attnmech.draw import scripts
from attnmech.draw.embed import View
from attnmech.draw.figure_page import provenance_html
from attnmech.draw.focus import concentration, first_focus, self_focus
from attnmech.draw.ledger import row_ledger
from attnmech.draw.packing import pack_keys, pack_logarithms, pack_values, precision_of, rounding_error
from attnmech.draw.page_sections import (
    EXPECTED,
    SCORES,
    UPDATES,
    PageSection,
    contents_html,
    focus_sections,
    section_html,
)
from attnmech.draw.scores import attention_map, key_terms, share_bars, share_triangle
from attnmech.draw.style import MARKS, term_style
from attnmech.draw.text import bound, html_text, json_for_script, token_labels, visible_token, with_minus_signs
from attnmech.draw.token_weights import unattended
from attnmech.draw.updates import (
    AXIS_TITLES,
    magnitude_by_position,
    magnitude_histograms,
    orientation_by_magnitude,
    orientation_histograms,
)
from attnmech.draw.view import FOCUS_NUMBERS, Fact, FocusView, HeadMap, ScoreView, Side, UpdateView
from attnmech.errors import InputError

SIDES: Final[tuple[Side, ...]] = ("query", "target")

SINK: Final = 1e-3
"""Where a row's probabilities fall short of 1 by more than this, a sink takes the rest."""

STATUS_WORDS: Final = {"ok": "✓ ok", "warn": "! caveat", "fail": "✗ fails"}
"""A check's outcome, readable without its colour."""


def render_page(
    *,
    title: str,
    lead: str,
    view: ScoreView,
    facts: Sequence[Fact],
    checks: Sequence[Fact],
    provenance: Mapping[str, str],
    calls: Mapping[str, str],
    focus: FocusView | None = None,
    updates: UpdateView | None = None,
    maps: Sequence[HeadMap] = (),
    reasons: Sequence[Sequence[Sequence[str]]] = (),
    expected: View | None = None,
    brief: Mapping[str, str] | None = None,
    start: tuple[int, int, int] | None = None,
) -> str:
    """The whole page as HTML.

    Args:
        title: the page's heading.
        lead: one sentence below it.
        view: the numbers of the figures.
        facts: what is known of the model and the run, such as layers, heads, the largest residual.
        checks: the certificate's checks, with their status.
        provenance: what the numbers came from: model, weights' hash, versions, options.
        calls: the Python calls that make the figures again: of "scores", "ledger" (one row), "view" (the views of
            attention), "focus" and "updates", and the "setup" that stands before them. Where one holds `{figure}`,
            `{layer}`, `{head}`, `{rank}`, `{query}` or `{side}`, the page puts the figure's name and what is chosen.
        focus: the numbers of figures 4 to 6, for the layers of `view` and perhaps others; without it, no such figures.
        updates: the numbers of figures 7 to 10, for the tokens and at least the layers of `view`.
        maps: further figures of layers × heads.
        reasons: for each layer of `view`, head and query, one line that says why the head looks where it looks.
        expected: what the model predicts at each token, a view of CircuitsVis.
        brief: what was found, in a sentence for each question.
        start: the layer, head and query that the page begins with; else the first head and the last token.

    Returns:
        HTML to be written as UTF-8; it opens from a file without a network.

    """
    updates = updates and _of_shown_layers(updates, view)
    if focus is not None:
        _require_heads("focus", focus.layers, focus.self_top.shape[1], view)
    pattern = pack_logarithms(view.pattern)
    sections = _sections(view, focus, updates, maps, expected)
    carried = [scripts.views(), scripts.plotly(), *([] if expected is None else expected.libraries)]
    data = _page_data(view, focus, updates, calls, maps, reasons)
    data |= {
        "pattern": pattern,
        "scripts": {each.label: each.name for each in carried},
        "expected": None if expected is None else expected.data,
        "start": None if start is None else dict(zip(("layer", "head", "query"), start, strict=True)),
    }
    rest = unattended(view.pattern)
    if rest.max() > SINK:
        data["rest"] = pack_logarithms(rest)
    script = scripts.package_text("page.js")
    return Template(scripts.package_text("page.html")).substitute(
        policy=scripts.content_policy(scripts.boot(), script, *(each.text for each in carried)),
        style=scripts.package_text("page.css") + _mark_colours(),
        title=html_text(title),
        lead=html_text(with_minus_signs(lead)),
        brief=provenance_html({name: with_minus_signs(found) for name, found in (brief or {}).items()}),
        notes="".join(f"<li>{html_text(note)}</li>" for note in view.notes),
        contents=contents_html(
            [
                ("text", "The text"),
                *((section.name, section.contents) for section in sections),
                ("run", "Model and run"),
                ("checks", "Checks"),
                ("provenance", "Provenance"),
            ]
        ),
        sections="".join(section_html(section) for section in sections),
        precision=html_text(f"{_precision_sentence(view, updates)} {precision_of(pattern)}"),
        setup=_setup_html(calls.get("setup", "")),
        facts=_table(facts, empty="No facts were given."),
        checks=_table(checks, empty="No checks were run."),
        provenance=provenance_html(provenance),
        carriers=scripts.carriers(carried),
        data=json_for_script(data),
        boot=scripts.boot(),
        script=script,
    )


def _page_data(
    view: ScoreView,
    focus: FocusView | None,
    updates: UpdateView | None,
    calls: Mapping[str, str],
    maps: Sequence[HeadMap],
    reasons: Sequence[Sequence[Sequence[str]]],
) -> dict[str, object]:
    """What page.js reads."""
    figures = _score_figures(view) | _focus_figures(focus, view) | _update_figures(updates)
    figures |= {each.name: each.figure for each in maps}
    return {
        "tokens": [visible_token(token) for token in view.tokens],
        "labels": token_labels(view.tokens),
        "layers": list(view.layers),
        "heads": view.scores.shape[1],
        "ranks": view.ranked_key.shape[3],
        "scores": pack_values(view.scores),
        "special": list(view.special) or [False] * len(view.tokens),
        "terms": {name: pack_values(term) for name, term in view.terms.items()},
        "term_shapes": {name: list(term.shape[2:]) for name, term in view.terms.items()},
        "ranked_key": pack_keys(view.ranked_key),
        "ranked_share": {name: pack_values(share) for name, share in view.ranked_share.items()},
        "key_terms": {name: pack_values(term) for name, term in view.key_terms.items()},
        "term_labels": {name: term_style(name).label for name in (*view.ranked_share, *view.key_terms, *view.terms)},
        "mark_labels": {mark: style.label for mark, style in MARKS.items()},
        "mark_signs": {mark: style.sign for mark, style in MARKS.items()},
        "focus": focus and _focus_data(focus),
        "updates": updates and _update_data(updates),
        "maps": {each.name: list(each.layers) for each in maps},
        "reasons": reasons,
        "figures": {name: json.loads(figure.to_json()) for name, figure in figures.items()},
        "calls": calls,
    }


def _focus_data(focus: FocusView) -> dict[str, object]:
    return {
        "layers": list(focus.layers),
        "numbers": {name: pack_values(getattr(focus, name)) for name in FOCUS_NUMBERS},  # exact: one a head
    }


def _update_data(updates: UpdateView) -> dict[str, object]:
    return {
        "attended": pack_keys(updates.attended),
        "sides": {
            side: {
                "log_magnitude": pack_values(_log10(updates.magnitude_of(side))),
                "orientation": pack_values(updates.orientation_of(side)),
                "log_range": _log_range(updates.magnitude_of(side)),
                "titles": AXIS_TITLES[side],
            }
            for side in SIDES
        },
    }


def _score_figures(view: ScoreView) -> dict[str, go.Figure]:
    """The figures of the scores by the id of their element, with the numbers of the first layer and head."""
    shares = {name: share[0, 0, :, 0] for name, share in view.ranked_share.items()}
    keys = view.ranked_key[0, 0, :, 0]
    return {
        "attention-map": attention_map(view.scores[0, 0], view.tokens, outlined=0),
        "share-triangle": share_triangle(shares, keys, view.tokens),
        "share-bars": share_bars(shares, keys, view.tokens, outlined=0),
        "key-terms": key_terms({name: term[0, 0] for name, term in view.key_terms.items()}, view.tokens),
    } | _ledger_figure(view)


def _ledger_figure(view: ScoreView) -> dict[str, go.Figure]:
    """The ledger of the last row."""
    if not view.terms:
        return {}
    last = len(view.tokens) - 1
    row = (0, 0, last)
    terms = view.terms_of_row(*row)
    return {"row-ledger": row_ledger(terms, view.scores[row], view.pattern[row], view.tokens, query=last)}


def _focus_figures(focus: FocusView | None, view: ScoreView) -> dict[str, go.Figure]:
    """Figures 4 to 6, whole; only their ring moves."""
    if focus is None:
        return {}
    first = (view.layers[0], 0)
    return {
        "self-focus": self_focus(focus, chosen=first),
        "first-focus": first_focus(focus, chosen=first),
        "concentration": concentration(focus, chosen=first),
    }


def _update_figures(updates: UpdateView | None) -> dict[str, go.Figure]:
    """Figures 7 to 10 of a text without tokens: page.js puts every point in, and the file stays small."""
    if updates is None:
        return {}
    heads = updates.magnitude.shape[1]
    none, no_key = np.empty((heads, 0)), np.empty((heads, 0), dtype=np.int64)
    position = magnitude_by_position(none, no_key, (), side="query", head=0)
    return {
        "magnitude": magnitude_histograms(none, side="query", head=0),
        "orientation": orientation_histograms(none, side="query", head=0),
        "orientation-by-magnitude": orientation_by_magnitude(none, none, no_key, (), side="query", head=0),
        "magnitude-by-position": position.update_xaxes(range=[-1, len(updates.tokens)]),
    }


def _of_shown_layers(updates: UpdateView, view: ScoreView) -> UpdateView:
    """The updates of the page's layers, in their order."""
    if updates.tokens != view.tokens:
        raise InputError("`updates` must be of the page's text; its tokens are others. Run both on one input.")
    _require_heads("updates", updates.layers, updates.magnitude.shape[1], view)
    shown = [updates.layers.index(layer) for layer in view.layers]
    return UpdateView(
        tokens=view.tokens,
        layers=view.layers,
        magnitude=updates.magnitude[shown],
        orientation=updates.orientation[shown],
        target_magnitude=updates.target_magnitude[shown],
        target_orientation=updates.target_orientation[shown],
        attended=updates.attended[shown],
    )


def _require_heads(name: str, layers: Sequence[int], heads: int, view: ScoreView) -> None:
    """That every head of the page has its numbers."""
    if not set(view.layers) <= set(layers) or heads != view.scores.shape[1]:
        raise InputError(
            f"`{name}` must hold the page's layers {list(view.layers)} with {view.scores.shape[1]} heads each; "
            f"got layers {list(layers)} with {heads}. Run both on one model."
        )


def _log10(magnitude: Float[np.ndarray, "layer head token"]) -> Float[np.ndarray, "layer head token"]:
    """The decimal logarithm; NaN for 0, which figures on a logarithmic axis leave out."""
    return np.log10(np.where(magnitude > 0, magnitude, np.nan))


def _log_range(magnitude: Float[np.ndarray, "layer head token"]) -> list[float]:
    """One range for the axes of all layers, so that layers can be compared: log10 of its ends."""
    logarithms = _log10(magnitude)
    if np.isnan(logarithms).all():
        return [-1.0, 0.0]
    return [float(np.nanmin(logarithms)) - 0.1, float(np.nanmax(logarithms)) + 0.1]


def _sections(
    view: ScoreView,
    focus: FocusView | None,
    updates: UpdateView | None,
    maps: Sequence[HeadMap],
    expected: View | None,
) -> list[PageSection]:
    """The page's sections in their order."""
    found = [section for section in SCORES if section.name != "row-ledger" or view.terms]
    if expected is not None:
        found.append(replace(EXPECTED, finding=expected.finding))
    if focus is not None:
        found += focus_sections(_rows_in_words(focus))
    if updates is not None:
        found += UPDATES
    return found + [_section_of(each) for each in maps]


def _section_of(shown: HeadMap) -> PageSection:
    return PageSection(
        name=f"map-{shown.name}",
        contents=shown.contents,
        heading=shown.heading,
        reading=f"{shown.reading} Click a cell to choose its head.",
        caveat=shown.caveat,
        figures=(shown.name,),
        finding=with_minus_signs(shown.finding),
        call=shown.call,
    )


def _setup_html(setup: str) -> str:
    return f"<p>Before the calls of this page:</p><pre><code>{html_text(setup)}</code></pre>" if setup else ""


def _rows_in_words(focus: FocusView) -> str:
    rows = f"{focus.rows[:1].upper()}{focus.rows[1:].rstrip('.')}."
    if focus.low:
        return f"{rows} The hover box gives each number's interval."
    return f"{rows} Without intervals: another text may give other numbers."


def _precision_sentence(view: ScoreView, updates: UpdateView | None) -> str:
    """How exact the page's numbers are, in the units of the figures."""
    of_scores = max(rounding_error(values) for values in (view.scores, *view.terms.values()))
    of_updates = ""
    if updates is not None:
        error = max(rounding_error(_log10(updates.magnitude_of(side))) for side in SIDES)
        of_updates = f" Update magnitudes are {_off_by(10**error - 1, ' of their value')}."
    return (
        "The numbers on this page have 16 bits each, scaled within their head: scores and their terms are "
        f"{_off_by(of_scores)}, shares off by at most 8e-06.{of_updates} "
        "The marks are exact."
    )


def _off_by(error: float, what: str = "") -> str:
    return f"off by at most {bound(error)}{what}" if error else "exact"


def _table(rows: Sequence[Fact], *, empty: str) -> str:
    """A table of facts, with a column for the status where any row has one; the sentence `empty` without rows."""
    if not rows:
        return f"<p>{html_text(empty)}</p>"
    with_status = any(row.status for row in rows)
    return f"<table><tbody>{''.join(_table_row(row, with_status) for row in rows)}</tbody></table>"


def _table_row(row: Fact, with_status: bool) -> str:
    words = STATUS_WORDS[row.status] if row.status else ""
    status = f'<td class="status {row.status or ""}">{words}</td>' if with_status else ""
    return (
        f'<tr><th scope="row">{html_text(row.label)}</th>{status}'
        f'<td class="value">{html_text(row.value)}</td>'
        f"<td>{html_text(row.detail)}</td></tr>"
    )


def _mark_colours() -> str:
    """The marks' colours as CSS variables, so that chips and figures agree."""
    return ":root{" + "".join(f"--mark-{mark}:{style.colour};" for mark, style in MARKS.items()) + "}"
