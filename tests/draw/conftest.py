"""Small views whose numbers all differ, with hostile tokens, and their pages opened in a real browser."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from browser import WHOLE, opening

from attnmech.draw.circuitsvis import token_log_probs
from attnmech.draw.embed import View
from attnmech.draw.heads import HeadNumber, PageHeads
from attnmech.draw.numbers import FocusNumbers, ScoreNumbers, TableRow, UpdateNumbers
from attnmech.draw.page import Page, render_page
from attnmech.draw.section import Section
from attnmech.methods.focus.section import about_all_heads, focus_sections
from attnmech.methods.scores.section import score_sections
from attnmech.methods.updates.section import update_sections

TOKENS = (
    "</script><script>window.owned=1</script>",
    "<img src=x onerror=window.owned=1>",
    '<a href="javascript:window.owned=1">',
    " the",
    "\n$x$",
    " &amp;",
    " the",
)
SHOWN = 'acts.show("pattern", view="{figure}")'
START = "#layer=2&head=0&rank=0&query=6&tab=all"
FULL_START = "#layer=2&head=0&rank=0&split=means&side=query&query=6&tab=all"
"""Where the pages begin."""
HOSTILE = "</script><script>window.owned=1</script><img src=x onerror=window.owned=1>\u2028"


def by_meta(figure: Any) -> dict[str, Any]:
    return {trace.meta: trace for trace in figure.data}


@pytest.fixture(scope="session")
def view() -> ScoreNumbers:
    """2 layers × 3 heads × 7 tokens of a causal model without a position term, ranks 0 to 4."""
    layers, heads, count, ranks = 2, 3, len(TOKENS), 5
    generator = np.random.default_rng(0)
    key_bias = generator.normal(size=(layers, heads, 1, count))
    query_key = generator.normal(size=(layers, heads, count, count))
    hidden = np.triu(np.ones((count, count), dtype=bool), k=1)
    scores = np.where(hidden, np.nan, key_bias + query_key).astype(np.float32)
    exponential = np.where(hidden, 0, np.exp(np.nan_to_num(scores)))
    ranked_key = np.full((layers, heads, count, ranks), -1, dtype=np.int32)
    share = generator.uniform(size=(layers, heads, count, ranks)).astype(np.float32)
    for query in range(count):
        order = np.argsort(-scores[:, :, query, : query + 1], axis=-1)[..., :ranks]
        ranked_key[:, :, query, : order.shape[-1]] = order
    share[:, :, 0] = np.nan
    share[ranked_key < 0] = np.nan
    return ScoreNumbers(
        tokens=TOKENS,
        layers=(2, 5),
        scores=scores,
        pattern=(exponential / exponential.sum(axis=-1, keepdims=True)).astype(np.float32),
        ranked_key=ranked_key,
        ranked_share={"key_bias": share, "query_key": 1 - share},
        key_terms={"key_bias": key_bias[:, :, 0].astype(np.float32)},
        notes=(f"This model has no position term. {HOSTILE}",),
        terms={"key_bias": key_bias.astype(np.float32), "query_key": query_key.astype(np.float32)},
        special=(True, *[False] * (count - 1)),
    )


@pytest.fixture(scope="session")
def focus() -> FocusNumbers:
    """4 layers × 3 heads, including the two layers of `view`; one head lacks a number, and one number has intervals."""
    generator = np.random.default_rng(1)
    first_top, previous_top, concentration = generator.uniform(size=(3, 4, 3)).astype(np.float32)
    self_top = np.array([[0.2, 0.9, 0.5], [0.25, 0.25, 0.75], [0.0, np.nan, 1.0], [0.1, 0.3, 0.6]], dtype=np.float32)
    return FocusNumbers(
        layers=(0, 2, 5, 7),
        self_top=self_top,
        first_top=first_top,
        previous_top=previous_top,
        concentration=concentration,
        rows=f"row 0 is left out: it sees only itself {HOSTILE}",
        low={"first_top": first_top / 2},
        high={"first_top": (1 + first_top) / 2},
    )


@pytest.fixture(scope="session")
def updates(view: ScoreNumbers) -> UpdateNumbers:
    """3 layers × 3 heads × 7 tokens, with the two layers of `view`; one magnitude is 0, and row 0 has no choice."""
    generator = np.random.default_rng(2)
    shape = (3, 3, len(TOKENS))
    magnitude = np.exp(generator.normal(size=(2, *shape)) - 3).astype(np.float32)
    orientation = generator.uniform(-1, 1, size=(2, *shape)).astype(np.float32)
    magnitude[0, 2, 1, 4], orientation[0, 2, 1, 4], orientation[0, 0, 0, 3] = 0, np.nan, 1
    magnitude[1, :, :, 0] = orientation[1, :, :, 0] = np.nan
    attended = np.zeros(shape, dtype=np.int32)
    attended[0], attended[2], attended[1] = view.ranked_key[0, :, :, 0], view.ranked_key[1, :, :, 0], 1
    attended[:, :, 0] = -1
    return UpdateNumbers(
        tokens=TOKENS, layers=(2, 4, 5), magnitude=magnitude, orientation=orientation, attended=attended
    )


def sections_of(view: ScoreNumbers, *further: Section) -> list[Section]:
    return [*score_sections(view, "scores", SHOWN, ""), *further]


def page(view: ScoreNumbers, sections: Sequence[Section], **parts: Any) -> str:
    blank: dict[str, Any] = {
        "title": "t",
        "headline": "h",
        "heads": heads_of(view),
        "facts": [],
        "checks": [],
        "provenance": {},
    }
    return render_page(Page(**blank | parts, view=view, nouns=view.nouns, sections=sections))


def heads_of(view: ScoreNumbers) -> PageHeads:
    """Heads with hostile sentences: one without a number, and one of the other two with a type."""
    layers, heads = view.scores.shape[:2]
    values = np.arange(layers * heads, dtype=float).reshape(layers, heads) - 2
    values[0, 1] = np.nan
    places = [[(layer, head) for head in range(heads)] for layer in view.layers]
    return PageHeads(
        view.layers,
        heads,
        numbers=[
            HeadNumber("mass", f"mass {HOSTILE}", "where", values),
            HeadNumber("effect", "effect, nats", "matters", -values, np.abs(values) > 1),
        ],
        types=[[("induction", "previous") if head == 2 else () for _, head in row] for row in places],
        letters={"induction": ("I", "#d55e00")},
        sentences=[[f"L{layer}H{head} {HOSTILE}" for layer, head in row] for row in places],
        card={"Note": [[f"L{layer}H{head} {HOSTILE}" for layer, head in row] for row in places]},
    )


@pytest.fixture(scope="session")
def all_sections(view: ScoreNumbers, focus: FocusNumbers, updates: UpdateNumbers) -> list[Section]:
    expected = token_log_probs(
        np.random.default_rng(6).normal(size=(len(TOKENS), 20)),
        list(range(len(TOKENS))),
        TOKENS,
        text_of=lambda token: TOKENS[token % len(TOKENS)],
    )
    shown = [updates.layers.index(layer) for layer in view.layers]
    by_side = {name: getattr(updates, name)[:, shown] for name in ("magnitude", "orientation")}
    return [
        *score_sections(view, "scores(centre={split})", SHOWN, about_all_heads(focus), other=uncentred(view)),
        Section("Expected", "reading", {"expected-tokens": expected}, name="expected", finding=expected.finding),
        *focus_sections(focus, "focus", view.layers),
        *update_sections(replace(updates, layers=view.layers, attended=updates.attended[shown], **by_side), "updates"),
    ]


def uncentred(view: ScoreNumbers) -> ScoreNumbers:
    """The same scores with a different split: a third of each term in another, and no term of the key alone."""
    whole = np.nan_to_num(view.scores)
    share = view.ranked_share["key_bias"]
    return replace(
        view,
        ranked_share={"query_key": share / 2, "query_bias": 1 - share / 2},
        key_terms={},
        terms={"query_key": whole / 3, "query_bias": 2 * whole / 3},
    )


@pytest.fixture(scope="session")
def full_page_html(view: ScoreNumbers, all_sections: list[Section]) -> str:
    return page(view, all_sections, brief={"Where": HOSTILE})


@pytest.fixture(scope="session")
def page_html(view: ScoreNumbers) -> str:
    return page(
        view,
        sections_of(view, Section("Last", "reading", {"last": go.Figure()}, "print()  # </script>")),
        title=f"Title {HOSTILE}",
        headline=f"Finding {HOSTILE}, in nats",
        headlines=[[f"L{layer}H{head} {HOSTILE}: 3 nats" for head in range(3)] for layer in view.layers],
        facts=[TableRow("layers", "2"), TableRow(HOSTILE, HOSTILE, detail=HOSTILE)],
        checks=[TableRow("rows sum to 1", "1e-7", "ok"), TableRow("causal", "0.3", "fail", "looks ahead")],
        provenance={"model": HOSTILE},
    )


def choose_by_address(page: Any, address: str) -> None:
    """Selects an address as on a page just opened, scrolled to its top; nothing else changes."""
    page.evaluate(
        """address => {
             document.activeElement.blur();
             scrollTo(0, 0);
             history.replaceState({ queryChosen: false }, "", address);
             dispatchEvent(new Event("hashchange"));
           }""",
        address,
    )


def settle(page: Any) -> None:
    """Waits for two frames: the second has drawn what the first requested."""
    page.evaluate("async () => { for (const _ of [1, 2]) await new Promise(requestAnimationFrame); }")


def visiting(html: str, scope: Any) -> Any:
    """A fixture that opens a page, for the tests of a module or for one test."""

    @pytest.fixture(scope=scope)
    def visit(chromium: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        path = tmp_path_factory.mktemp("page") / "page.html"
        with opening(chromium, request.getfixturevalue(html), path, **WHOLE) as page:
            yield page

    return visit


def at_start(visit: str, address: str) -> Any:
    """A fixture of a page shared by tests that change only its choice."""

    @pytest.fixture
    def opened(request: pytest.FixtureRequest) -> Any:
        page = request.getfixturevalue(visit)
        page.mouse.move(0, 0)
        choose_by_address(page, address)
        return page

    return opened


visit, opened_alone = visiting("page_html", "module"), visiting("page_html", "function")
visit_full, opened_full_alone = visiting("full_page_html", "module"), visiting("full_page_html", "function")
opened, opened_full = at_start("visit", START), at_start("visit_full", FULL_START)


@pytest.fixture
def shown(chromium: Any, tmp_path: Path) -> Iterator[Callable[[View], Any]]:
    """Opens views, each in a separate page, and waits until they show their findings."""
    with ExitStack() as pages:

        def show(view: View) -> Any:
            path = view.write_html(tmp_path / f"{view.kind}.html")
            page = pages.enter_context(opening(chromium, path.read_text("utf-8"), path))
            page.wait_for_selector(".attnmech-finding:not(:empty)")
            return page

        yield show
