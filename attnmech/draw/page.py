"""One offline HTML page about one text, for every layer and head: the sections that methods describe.

The page loads nothing: the scripts, the numbers and the style are all in the one file, compressed, and its content
security policy lets no other script run and no request leave. A figure is made once, here; page.js puts the numbers
and sentences of what is chosen into their places, when they scroll into view.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import plotly.graph_objects as go  # type: ignore[import-untyped]
from markupsafe import Markup

from attnmech.draw import scripts
from attnmech.draw.carried import Carried
from attnmech.draw.chart import ByChoice, Chart
from attnmech.draw.embed import View
from attnmech.draw.numbers import ScoreNumbers, TableRow
from attnmech.draw.packing import precision_of
from attnmech.draw.patterns import PROBABILITY, VALUE_WEIGHTED
from attnmech.draw.score_sections import row_sentences
from attnmech.draw.scores import of_heads
from attnmech.draw.section import Choice, OfPattern, Section
from attnmech.draw.style import MARKS
from attnmech.draw.templates import rendered
from attnmech.draw.text import bound, json_for_script, token_labels, visible_token
from attnmech.draw.token_weights import unattended

SINK: Final = 1e-3
"""Where a row's probabilities fall short of 1 by more than this, a sink takes the rest."""

STATUS_WORDS: Final = {"ok": "✓ ok", "warn": "! caveat", "fail": "✗ fails"}
"""A check's outcome, readable without its colour."""


def render_page(
    *,
    title: str,
    lead: str,
    view: ScoreNumbers,
    sections: Sequence[Section],
    facts: Sequence[TableRow],
    checks: Sequence[TableRow],
    provenance: Mapping[str, str],
    setup: str = "",
    reasons: Sequence[Sequence[Sequence[str]]] = (),
    brief: Mapping[str, str] | None = None,
    start: tuple[int, int, int] | None = None,
) -> str:
    """The whole page as HTML.

    Args:
        title: the page's heading.
        lead: one sentence below it.
        view: the text, and the attention of every layer and head.
        sections: what there is to say, in order; `{layer}`, `{head}`, … in their calls stand for what is chosen.
        facts: what is known of the model and the run, such as layers, heads, the largest residual.
        checks: the certificate's checks, with their status.
        provenance: what the numbers came from: model, weights' hash, versions, options.
        setup: the Python that precedes the calls.
        reasons: for each layer of `view`, head and query, one line that says why the head looks where it looks.
        brief: what was found, in a sentence for each question.
        start: the layer, head and query that the page begins with; else the first head and the last token.

    Returns:
        HTML to be written as UTF-8; it opens from a file without a network.

    """
    carried = [scripts.views(), scripts.plotly_for(_trace_types(sections)), *_libraries(sections)]
    page, boot = scripts.package_text("page.js"), f"{scripts.boot()}\n{scripts.package_text('theme.js')}"
    choices = _choices(view, sections)
    data = _data(view, sections, choices, reasons)
    first = dict(zip(("layer", "head", "query"), start or (view.layers[0], 0, len(view.tokens) - 1), strict=True))
    data |= {"start": first, "scripts": {each.label: each.name for each in carried}}
    return str(
        rendered(
            "page.html",
            policy=scripts.content_policy(boot, page, *(each.text for each in carried)),
            style=Markup(scripts.package_text("page.css") + _mark_colours()),
            title=title,
            lead=lead,
            brief=brief or {},
            notes=view.notes,
            contents=_contents(sections),
            choices=choices,
            tokens=view.tokens,
            weighted=view.value_norms is not None,
            sections=sections,
            elements=dict.fromkeys((name for each in sections for name in each.figures), ""),
            table="",
            facts=facts,
            checks=checks,
            statuses=STATUS_WORDS,
            setup=setup,
            provenance=provenance,
            precision=_precision(sections, data),
            carriers=Markup(scripts.carriers(carried)),
            data=Markup(json_for_script(data)),
            boot=Markup(boot),
            script=Markup(page),
        )
    )


def _choices(view: ScoreNumbers, sections: Sequence[Section]) -> list[Choice]:
    """All that can be chosen, in the order of an address; what only one section offers comes last."""
    offered = {choice.name: choice for section in sections for choice in section.choices}
    return [
        Choice("layer", "Layer", view.layers, everywhere=True),
        Choice("head", "Head", tuple(range(view.scores.shape[1])), everywhere=True),
        *(choice for choice in offered.values() if choice.everywhere),
        Choice("query", "Query", tuple(range(len(view.tokens)))),
        *(choice for choice in offered.values() if not choice.everywhere),
    ]


def _data(
    view: ScoreNumbers,
    sections: Sequence[Section],
    choices: Sequence[Choice],
    reasons: Sequence[Sequence[Sequence[str]]],
) -> dict[str, Any]:
    """What page.js reads."""
    store = Carried({choice.name: choice.values for choice in choices})
    drawn = {name: figure for section in sections for name, figure in section.figures.items()}
    texts = {"row-finding": row_sentences(view)}
    if reasons:
        texts["reason"] = ByChoice.texts(
            ("layer", "head", "query"), view.scores.shape[:3], lambda layer, head, query: reasons[layer][head][query]
        )
    for each in sections:
        parts = {"finding": each.finding, "reading": each.reading}
        texts |= {f"{each.anchor}-{name}": text for name, text in parts.items() if isinstance(text, ByChoice)}
    rest = unattended(view.pattern)
    return {
        "tokens": [visible_token(token) for token in view.tokens],
        "labels": token_labels(view.tokens),
        "special": list(view.special) or [False] * len(view.tokens),
        "marks": {mark: style.sign for mark, style in MARKS.items()},
        "choices": {choice.name: choice.values for choice in choices},
        "inCalls": {choice.name: choice.in_calls for choice in choices if choice.in_calls},
        "optional": [choice.name for choice in choices if not choice.everywhere and choice.name != "query"],
        "pattern": store.array(of_heads(view.pattern)),
        "rest": store.array(of_heads(rest)) if rest.max() > SINK else None,
        "norms": None if view.value_norms is None else store.array(of_heads(view.value_norms)),
        "words": [PROBABILITY.words, VALUE_WEIGHTED.words],
        "figures": {
            name: _figure(name, figure, store)
            for name, figure in drawn.items()
            if isinstance(figure, (Chart, go.Figure))
        },
        "views": {name: figure.kind for name, figure in drawn.items() if isinstance(figure, OfPattern)},
        "told": {name: figure.told for name, figure in drawn.items() if isinstance(figure, OfPattern) and figure.told},
        "others": {
            name: {"kind": figure.kind, "data": figure.data, "scripts": [each.label for each in figure.libraries]}
            for name, figure in drawn.items()
            if isinstance(figure, View)
        },
        "texts": {name: store.column(text, name) for name, text in texts.items()},
        "arrays": store.arrays,
        "tables": store.tables,
    }


def _figure(name: str, drawn: Chart | go.Figure, store: Carried) -> dict[str, Any]:
    """A figure with its slots."""
    chart = drawn if isinstance(drawn, Chart) else Chart(drawn, ())
    return {
        "figure": json.loads(chart.template.to_json()),
        "slots": [store.slot(slot, name) for slot in chart.slots],
        "follows": sorted(chart.follows),
        "clicks": {name: path.split(".") for name, path in chart.clicks.items()},
    }


def _trace_types(sections: Sequence[Section]) -> set[str]:
    """The types of all traces that plotly draws; page.js draws tables."""
    drawn = (figure for section in sections for figure in section.figures.values())
    charts = (figure.template if isinstance(figure, Chart) else figure for figure in drawn)
    return {str(trace.type) for chart in charts if isinstance(chart, go.Figure) for trace in chart.data} - {"table"}


def _libraries(sections: Sequence[Section]) -> list[scripts.Script]:
    """The scripts that the sections' views need besides attnmech's own."""
    views = (figure for section in sections for figure in section.figures.values() if isinstance(figure, View))
    return list({script.name: script for view in views for script in view.libraries}.values())


def _contents(sections: Sequence[Section]) -> dict[str, str]:
    return {
        "text": "The text",
        **{section.anchor: section.contents or section.heading for section in sections},
        "run": "Model and run",
        "checks": "Checks",
        "provenance": "Provenance",
    }


def _precision(sections: Sequence[Section], data: Mapping[str, Any]) -> str:
    """How exact the page's numbers are, in the units of the figures."""
    rounded = "; ".join(section.rounding for section in sections if section.rounding)
    numbers = f"The numbers on this page have 16 bits each, scaled within their head: {rounded}. " if rounded else ""
    packed = [data["arrays"][data[name]] for name in ("pattern", "norms") if data[name] is not None]
    found = f"{numbers}The marks are exact. {precision_of(packed[0])}"
    if len(packed) < 2:
        return found
    # A share is a product over a sum of products, each off by what its two factors are off by.
    error = 100 * sum(max(each["step"]) for each in packed)
    return f"{found} Value-weighted shares are within {bound(max(error, 2e-3))} % of theirs."


def _mark_colours() -> str:
    """The marks' colours as CSS variables, so that chips and figures agree."""
    return ":root{" + "".join(f"--mark-{mark}:{style.colour};" for mark, style in MARKS.items()) + "}"
