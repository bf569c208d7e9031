"""An offline HTML page about a model's heads, on one text or over a corpus, with the sections that methods describe.

The page loads nothing: the scripts, the numbers and the style are all in the one file, compressed, and its content
security policy lets no other script run and no request leave. Python makes each figure once; its script fills in the
numbers and sentences of the reader's choices when they scroll into view.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from markupsafe import Markup

from ..basics.nouns import TEXT, Nouns
from . import scripts
from .carried import Carried
from .chart import ByChoice, Chart, of_heads
from .embed import View
from .heads import PageHeads
from .numbers import ScoreNumbers, TableRow, row_sentences
from .packing import rounding_note
from .patterns import PROBABILITY, VALUE_WEIGHTED
from .section import TABS, Choice, OfPattern, Section, in_page_order
from .style import marks_for
from .templates import rendered
from .text import bound, json_for_script, labels_of, visible_token
from .token_weights import unattended

SINK: Final = 1e-3
"""If a row's probabilities fall short of 1 by more than this, the missing part belongs to a sink."""

ALL: Final = "all"
"""The tab that shows the sections of all tabs, one below the other."""

STATUS_WORDS: Final = {"ok": "✓ ok", "warn": "! caveat", "fail": "✗ fails"}
"""The outcomes of a check, readable without colour."""


_READ: Final = ("text", "through", "edit", "start")
"""The fields of `Live` that scripts read."""


@dataclass(frozen=True)
class Live:
    """What makes a page answer: it reads other texts, and says what the model writes without some heads."""

    text: str
    """The text that the page is about."""
    texts: Sequence[str] = ()
    """The texts read before."""
    through: Literal["server", "notebook", ""] = ""
    """Who answers; nobody answers a saved page."""
    most: int = 0
    """The longest text, in characters."""
    edits: bool = True
    """Whether the model writes text, so that the page offers to edit heads."""
    edit: Mapping[str, Any] = field(default_factory=dict)
    """What a saved page shows of an edit (attnmech/live/edits.py)."""
    start: str = ""
    """The choices with which a saved page opens, as in an address."""
    linked: dict[str, str] = field(default_factory=dict)
    """The texts of the scripts that the page fetches from its server, by name; filled in as the page is written."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """The content of a page about one text, or about a corpus."""

    title: str
    """The page's title."""
    headline: str
    """The finding at the top of the page, in one sentence."""
    headlines: Sequence[Sequence[str]] = ()
    """The headline of each chosen head, by layer and head; empty if the headline is about all heads."""
    heads: PageHeads
    """What the page says about each head."""
    view: ScoreNumbers | None = None
    """The text, and the attention of every layer and head; None on a page about a corpus."""
    nouns: Nouns = TEXT
    """The words for a text and its positions."""
    notes: Sequence[str] = ()
    """What the page leaves out, besides the notes on its text."""
    sections: Sequence[Section]
    """The sections, which the page orders by tab; choices replace `{layer}`, `{head}`, … in their calls."""
    facts: Sequence[TableRow] = ()
    """Facts about the model and the run, such as layers, heads, the largest residual."""
    checks: Sequence[TableRow] = ()
    """The certificate's checks, with their status."""
    table: str = ""
    """The numbers as the HTML of a table."""
    provenance: Mapping[str, str]
    """The origin of the numbers: model, weights' hash, versions, options."""
    more: Sequence[str] = ()
    """Further findings, which the reader can unfold."""
    setup: str = ""
    """The Python that precedes the calls."""
    reasons: Sequence[Sequence[Sequence[str]]] = ()
    """For each layer of `view`, head and query, one line that says why the head attends where it does."""
    brief: Mapping[str, str] = field(default_factory=dict)
    """The findings over all heads, one sentence per question."""
    start: tuple[int, ...] = ()
    """The layer, the head and, on a page about a text, the query that the page shows first; by default the first head
    and the last token."""
    detailed: Sequence[int] | None = None
    """The heads, counted layer by layer, whose scores and terms the page holds cell by cell; None for all heads."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", in_page_order(self.sections))


def render_page(page: Page, *, reads_files: bool = False, awaited: str = "", live: Live | None = None) -> str:
    """Returns the whole page as HTML for a UTF-8 file; it opens offline.

    With `reads_files`, its scripts may load further scripts from files beside it. With `awaited`, the page begins with
    this sentence on what it lacks, and reloads when its file holds a page without one. With `live`, it answers.
    """
    data = _data(page)
    values = {"data": _json(page, data, _carried([page])), **_values(page, data)}
    return _document([page], reads_files=reads_files, awaited=awaited, live=live, **values)


def render_parts(
    parts: Mapping[tuple[int, str], Page], texts: Sequence[str], stacks: Mapping[str, str], *, awaited: str = "",
    live: Live | None = None,
) -> str:  # fmt: skip
    """Returns one page for several texts or stacks of one model; it shows the first until the reader chooses another.

    `parts` are the pages by the text's number and the stack's name, `texts` the beginnings of the texts, `stacks` the
    stacks in words; a single text or stack is not a choice.
    """
    pages, choices = list(parts.values()), []
    if len(texts) > 1:
        label = pages[0].nouns.text.capitalize()
        choices.append(Choice("text", label, tuple(range(len(texts))), words=tuple(texts)))
    if len(stacks) > 1:
        choices.append(Choice("stack", "Stack", tuple(stacks), words=tuple(stacks.values())))
    bodies, carried = [], _carried(pages)
    for (text, stack), page in parts.items():
        chosen = {choice.name: {"text": text, "stack": stack}[choice.name] for choice in choices}
        data = _data(page) | {"part": chosen}
        values = _values(page, data) | {"parts": choices, "chosen": chosen, "awaited": awaited, "live": live}
        numbers = Markup('<script type="application/json" id="data">{}</script>').format(_json(page, data, carried))
        bodies.append((text, stack, rendered("explorer.html", **values) + numbers))
    choose = scripts.package_text("parts.js")
    return _document(pages, choose, awaited=awaited, live=live, bodies=bodies, title=pages[0].title, data="")


def _document(
    pages: Sequence[Page], before: str = "", *, reads_files: bool = False, awaited: str = "",
    live: Live | None = None, **values: Any,
) -> str:  # fmt: skip
    """The whole document, with style, security policy and scripts; the script `before` runs before the page's."""
    carried, page = _carried(pages), scripts.joined(scripts.PAGE)
    starts = "" if live is None else scripts.package_text("live_start.js")
    answers = "" if live is None else scripts.joined(scripts.LIVE)
    boot = "\n".join(filter(None, (scripts.boot(), starts, before, scripts.package_text("theme.js"))))
    through = "" if live is None else live.through
    renewal = "" if through else scripts.package_text("renewal.js")
    if live is not None and through == "server":
        live.linked.update((script.name, script.text) for script in carried)
        carriers = "".join(script.link for script in carried)
    else:
        carriers = scripts.carriers(carried)
    crosses = any(shown.view is not None and shown.view.crosses for shown in pages)
    marks = marks_for(TEXT) | (marks_for(TEXT, crosses=True) if crosses else {})
    colours = "".join(f"--mark-{mark}:{style.colour};" for mark, style in marks.items())
    return str(
        rendered(
            "page.html",
            policy=scripts.content_policy(
                *filter(None, (renewal, boot, page, answers, *(script.text for script in carried))),
                reads_files=reads_files,
                reads_itself=bool(awaited) and not through,
                asks=through == "server",
            ),
            awaited=awaited,
            live=live,
            live_data="" if live is None else Markup(json_for_script({name: getattr(live, name) for name in _READ})),
            style=Markup(f"{scripts.package_text('page.css')}:root{{{colours}}}"),
            carriers=Markup(carriers),
            renewal=Markup(renewal),
            boot=Markup(boot),
            script=Markup(page),
            answers=Markup(answers),
            explorer=True,
            **values,
        )
    )


def _values(page: Page, data: Mapping[str, Any]) -> dict[str, Any]:
    view = page.view
    return vars(page) | {
        "card": page.heads.card,
        "tabs": _tabs(page),
        "notes": (*page.notes, *(() if view is None else view.notes)),
        "contents": _contents(page),
        "choices": _selectable(page),
        "place": _choices(page)[:2],
        "parts": (),
        "heads_in_detail": None if page.detailed is None else len(page.detailed),
        "tokens": () if view is None else view.tokens,
        "written": 0 if view is None else view.written,
        "keys": () if view is None else view.keys,
        "table": Markup(page.table),
        "statuses": STATUS_WORDS,
        "precision": _precision(page.sections, data),
    }


def _json(page: Page, data: Mapping[str, Any], carried: Sequence[scripts.Script]) -> Markup:
    last = () if page.view is None else _positions(page.view)[-1:]
    first = page.start or (page.heads.layers[0], 0, *last)
    start = dict(zip(("layer", "head", "query"), first, strict=False))
    names = {script.label: script.name for script in carried}
    return Markup(json_for_script({**data, "start": start, "scripts": names}))


def _carried(pages: Sequence[Page]) -> list[scripts.Script]:
    sections = [section for page in pages for section in page.sections]
    drawn = [figure for section in sections for figure in section.figures.values()]
    views = [figure for figure in drawn if isinstance(figure, View)]
    further = {script.name: script for view in views for script in view.libraries}
    charts = [figure.template if isinstance(figure, Chart) else figure for figure in drawn]
    traces = {str(trace.type) for chart in charts if isinstance(chart, go.Figure) for trace in chart.data}
    types = traces - {"table"}  # page_figures.js draws tables
    plotly = [scripts.plotly_for(types)] if types else []
    return [scripts.views(), scripts.heads(), *({script.name: script for script in plotly} | further).values()]


def _choices(page: Page) -> list[Choice]:
    """All choices, in the order of an address; the choices that only one section offers come last."""
    offered = _offered(page)
    queries = [] if page.view is None else [Choice("query", "Query", _positions(page.view))]
    return [
        Choice("layer", "Layer", tuple(page.heads.layers), everywhere=True),
        Choice("head", "Head", tuple(range(page.heads.count)), everywhere=True),
        *(choice for choice in offered if choice.everywhere),
        *queries,
        Choice("tab", "Tab", (*_tabs(page), ALL)),
        *page.heads.choices,
        *(choice for choice in offered if not choice.everywhere),
    ]


def _positions(view: ScoreNumbers) -> tuple[int, ...]:
    return tuple(range(view.first, view.first + len(view.tokens)))


def _offered(page: Page) -> list[Choice]:
    return list({choice.name: choice for section in page.sections for choice in section.choices}.values())


def _tabs(page: Page) -> dict[str, str]:
    """The page's tabs, in words; one without a section is left out, except that of the model."""
    used = {section.tab for section in page.sections} | {"model"}
    return {tab: words.format(token=page.nouns.token) for tab, words in TABS.items() if tab in used}


def _selectable(page: Page) -> list[tuple[Choice, str]]:
    """The choices above the sections, each with the tabs whose sections follow it."""
    listed = []
    for choice in _offered(page):
        if choice.everywhere:
            tabs = {section.tab for section in page.sections if choice.name in _followed(section)}
            listed.append((choice, " ".join(tab for tab in TABS if tab in tabs)))
    return listed


def _followed(section: Section) -> set[str]:
    """The choices that change a section; views of attention follow that of weights."""
    figures = section.figures.values()
    texts = (section.finding, section.reading)
    followed = {choice.name for choice in section.choices}
    for part in (*figures, *texts):
        if isinstance(part, Chart | ByChoice):
            followed |= part.follows
        elif isinstance(part, OfPattern):
            followed.add("weight")
    return followed


def _data(page: Page) -> dict[str, Any]:
    sections, choices = page.sections, _choices(page)
    store = Carried({choice.name: choice.values for choice in choices}, page.detailed)
    drawn = {name: figure for section in sections for name, figure in section.figures.items()}
    of_text = _NO_TEXT if page.view is None else _text_data(page.view, store)
    texts = {} if page.view is None else {"row-finding": row_sentences(page.view)}
    if page.reasons:
        texts["reason"] = ByChoice(np.array(page.reasons, dtype=object), ("layer", "head", "query"))
    of_heads = {f"card-{number}": entries for number, entries in enumerate(page.heads.card.values())}
    for name, entries in (of_heads | ({"headline": page.headlines} if page.headlines else {})).items():
        texts[name] = ByChoice(np.array(entries, dtype=object), ("layer", "head"))
    figures = {
        name: _figure(name, figure, store) for name, figure in drawn.items() if isinstance(figure, (Chart, go.Figure))
    }
    of_sections = {}
    for section in sections:
        in_detail = any(figures[name]["inDetail"] for name in section.figures if name in figures)
        for part, text in {"finding": section.finding, "reading": section.reading}.items():
            if isinstance(text, ByChoice):
                name = f"{section.anchor}-{part}"
                of_sections[name] = store.column(text, name, in_detail=in_detail)
    return {
        **of_text,
        "choices": {choice.name: choice.values for choice in choices},
        "inCalls": {choice.name: choice.in_calls for choice in choices if choice.in_calls},
        "optional": [choice.name for choice in choices if not choice.everywhere and choice.name != "query"],
        "heads": page.heads.data,
        "detailed": page.detailed,
        "nouns": page.nouns.for_views,
        "figures": figures,
        "views": {name: figure.kind for name, figure in drawn.items() if isinstance(figure, OfPattern)},
        "remarks": {
            name: figure.remarks for name, figure in drawn.items() if isinstance(figure, OfPattern) and figure.remarks
        },
        "others": {
            name: {
                "kind": figure.kind,
                "data": json.loads(figure.json),
                "scripts": [script.label for script in figure.libraries],
            }
            for name, figure in drawn.items()
            if isinstance(figure, View)
        },
        "texts": {name: store.column(text, name) for name, text in texts.items()} | of_sections,
        "arrays": store.arrays,
        "tables": store.tables,
    }


_NO_TEXT: Final[Mapping[str, Any]] = {
    "tokens": (), "written": 0, "labels": (), "special": (), "marks": {}, "pattern": None, "rest": None, "norms": None,
    "words": [PROBABILITY.words, VALUE_WEIGHTED.words],
}  # fmt: skip
"""The text of a page about a corpus."""


def _text_data(view: ScoreNumbers, store: Carried) -> dict[str, Any]:
    rest, marks = unattended(view.pattern), marks_for(view.nouns, crosses=view.crosses)
    other = {"keys": [visible_token(token) for token in view.keys]} if view.crosses else {}
    return other | {
        "tokens": [visible_token(token) for token in view.tokens],
        "written": view.written,
        "labels": labels_of(view.tokens, view.keys or None, view.nouns)[0],
        "special": list(view.key_special if view.crosses else view.special) or [False] * len(view.key_tokens),
        "marks": {mark: style.sign for mark, style in marks.items()},
        "pattern": store.array(of_heads(view.pattern)),
        "rest": store.array(of_heads(rest)) if rest.max() > SINK else None,
        "norms": None if view.value_norms is None else store.array(of_heads(view.value_norms)),
        "words": [PROBABILITY.words, VALUE_WEIGHTED.words],
    }


def _figure(name: str, drawn: Chart | go.Figure, store: Carried) -> dict[str, Any]:
    chart = drawn if isinstance(drawn, Chart) else Chart(drawn, ())
    slots = [store.slot(slot, name) for slot in chart.slots]
    parts = [part for slot in slots for part in (*slot["columns"], slot["less"], slot["where"], slot["weights"])]
    return {
        "figure": json.loads(chart.template.to_json()),
        "slots": slots,
        "inDetail": any("detailed" in part["over"] for part in parts if part is not None),
        "follows": sorted(chart.follows),
        "clicks": {name: path.split(".") for name, path in chart.clicks.items()},
    }


def _contents(page: Page) -> dict[str, dict[str, str]]:
    """The contents: for each tab in words, its sections' headings by anchor."""
    tabs = _tabs(page)
    contents: dict[str, dict[str, str]] = {words: {} for words in tabs.values()}
    for section in page.sections:
        contents[tabs[section.tab]][section.anchor] = section.contents or section.heading
    last = {
        "run": ("Model and run", page.facts),
        "checks": ("Checks", page.checks),
        "numbers": ("The numbers", page.table),
    }
    contents[tabs["model"]] |= {name: words for name, (words, content) in last.items() if content}
    contents[tabs["model"]]["provenance"] = "Provenance"
    return contents


def _precision(sections: Sequence[Section], data: Mapping[str, Any]) -> str:
    """The precision of the page's numbers, in the units of the figures, in words."""
    rounded = "; ".join(section.rounding for section in sections if section.rounding)
    numbers = f"Numbers on this page are stored in 16 bits, scaled within each head: {rounded}. " if rounded else ""
    packed = [data["arrays"][data[name]] for name in ("pattern", "norms") if data[name] is not None]
    if not packed:
        return numbers
    sentences = f"{numbers}The marks are exact. {rounding_note(packed[0])}"
    if len(packed) < 2:
        return sentences
    # A share is a product over a sum of products; each product has the relative errors of its two factors.
    error = 100 * sum(max(array["step"]) for array in packed)
    return f"{sentences} Value-weighted shares are within {bound(max(error, 2e-3))} % of their values."
