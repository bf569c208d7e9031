"""One offline HTML page with figures 1 to 3 for every layer, head and rank of one text.

The page loads nothing: plotly.js, the numbers, the style and the script all stand in the one file, and its content
security policy lets no other script run and no request leave. The figures are those of `attnmech.draw.scores`,
made for the first layer and head; page.js puts the chosen head's numbers into them.
"""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from string import Template
from typing import Final

import plotly.graph_objects as go  # type: ignore[import-untyped]
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from attnmech.draw.packing import pack_keys, pack_values, rounding_error
from attnmech.draw.scores import attention_map, key_terms, share_bars, share_triangle
from attnmech.draw.style import MARKS, term_style
from attnmech.draw.text import html_text, json_for_script, token_labels, visible_token
from attnmech.draw.view import Fact, ScoreView

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
    call: str,
) -> str:
    """The whole page as HTML.

    Args:
        title: the page's heading.
        lead: one sentence below it.
        view: the numbers of the figures.
        facts: what is known of the model and the run, such as layers, heads, the largest residual.
        checks: the certificate's checks, with their status.
        provenance: what the numbers came from: model, weights' hash, versions, options.
        call: the Python call that makes a figure again. Where it holds `{figure}`, `{layer}`, `{head}` or `{rank}`,
            the page puts the figure's name ("attention_map", "score_shares", "key_terms") and the chosen numbers.

    Returns:
        HTML to be written as UTF-8; it opens from a file without a network.

    """
    plotly, script = get_plotlyjs(), _package_text("page.js")
    return Template(_package_text("page.html")).substitute(
        policy=_content_policy(plotly, script),
        style=_package_text("page.css") + _mark_colours(),
        title=html_text(title),
        lead=html_text(lead),
        notes="".join(f"<li>{html_text(note)}</li>" for note in view.notes),
        precision=html_text(_precision_sentence(view)),
        facts=_table(facts, empty="No facts were given."),
        checks=_table(checks, empty="No checks were run."),
        provenance="".join(
            f"<div><dt>{html_text(name)}</dt><dd>{html_text(value)}</dd></div>" for name, value in provenance.items()
        ),
        plotly=plotly,
        data=json_for_script(_page_data(view, call)),
        script=script,
    )


def _page_data(view: ScoreView, call: str) -> dict[str, object]:
    """What page.js reads."""
    return {
        "tokens": [visible_token(token) for token in view.tokens],
        "labels": token_labels(view.tokens),
        "layers": list(view.layers),
        "heads": view.scores.shape[1],
        "ranks": view.ranked_key.shape[3],
        "scores": pack_values(view.scores),
        "pattern": pack_values(view.pattern),
        "ranked_key": pack_keys(view.ranked_key),
        "ranked_share": {name: pack_values(share) for name, share in view.ranked_share.items()},
        "key_terms": {name: pack_values(term) for name, term in view.key_terms.items()},
        "term_labels": {name: term_style(name).label for name in (*view.ranked_share, *view.key_terms)},
        "mark_signs": {mark: style.sign for mark, style in MARKS.items()},
        "figures": {name: json.loads(figure.to_json()) for name, figure in _figures(view).items()},
        "call": call,
    }


def _figures(view: ScoreView) -> dict[str, go.Figure]:
    """The page's figures by the id of their element, with the numbers of the first layer and head."""
    shares = {name: share[0, 0, :, 0] for name, share in view.ranked_share.items()}
    keys = view.ranked_key[0, 0, :, 0]
    return {
        "attention-map": attention_map(view.scores[0, 0], view.tokens, outlined=0),
        "share-triangle": share_triangle(shares, keys, view.tokens),
        "share-bars": share_bars(shares, keys, view.tokens, outlined=0),
        "key-terms": key_terms({name: term[0, 0] for name, term in view.key_terms.items()}, view.tokens),
    }


def _precision_sentence(view: ScoreView) -> str:
    """How exact the page's numbers are, in the units of the figures."""
    return (
        "The numbers on this page have 16 bits each, scaled within their head: scores are off by at most "
        f"{rounding_error(view.scores):.1g}, probabilities and shares by at most 8e-06. The marks are exact."
    )


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


def _content_policy(*scripts: str) -> str:
    """A content security policy under which these scripts alone may run and nothing may be fetched."""
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _package_text(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
