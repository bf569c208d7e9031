"""Measures attention views (size, building, opening): attnmech's model view, CircuitsVis and BertViz.

    pip install -c constraints.txt . -r benchmarks/requirements.txt
    pip install --no-deps bertviz==1.4.1
    python benchmarks/views.py --json views.json

Every contender makes a page of the same patterns, from a NumPy array to a file. The page opens in Chromium without a
network, and counts as interactive once it has drawn its contents and answered a click on its second head. BertViz is
blank without d3, jQuery and RequireJS from a CDN; `--libraries FOLDER` answers these three requests from files
(`d3.min.js`, `jquery.min.js`, `require.min.js`). On an idle machine. See benchmarks/README.md.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread
from time import monotonic
from typing import Any, Final

import numpy as np
from measure import alternating_times, machine, write
from rich.console import Console
from rich.table import Table

PACKAGES = ("attnmech", "circuitsvis", "bertviz", "torch", "playwright")
SHAPES: Final = {"12 x 128²": (1, 12, 128), "16 x 512²": (1, 16, 512), "24 x 16 x 256²": (24, 16, 256)}
"""The numbers of layers, heads and tokens."""
OURS: Final = "attnmech, model_view"
SIZE_TARGET: Final = ("16 x 512²", "CircuitsVis, attention_heads", 10.0)
"""The other view's file must be at least this many times as large as attnmech's at this shape."""
FRAME_TARGET: Final = 50.0
"""The median frame of the largest view may take this many milliseconds."""
LIMIT: Final = 60
"""A page that needs more seconds than this counts as not opening."""
MEMORY: Final = 8.0
"""The memory that the browser may use to open a page, in GB."""
PATTERNS: Final = (
    "Patterns: causal softmax of scores drawn from N(0, 1.5²), with seed 0; head h of H loses 2^(-8 h / (H - 1)) a "
    "token of distance, as with ALiBi, and the first key gains 6 l / L - 1 in layer l of L, a sink that grows."
)
TEXT: Final = "The old anchor lay in shallow water , and Anna sang of shells while the tide went out ."

Pattern = np.ndarray
"""[layer head query key], float32."""


def pattern_of(layers: int, heads: int, tokens: int) -> Pattern:
    """The patterns that `PATTERNS` describes."""
    scores = np.random.default_rng(0).normal(scale=1.5, size=(layers, heads, tokens, tokens)).astype(np.float32)
    distance = np.subtract.outer(np.arange(tokens), np.arange(tokens)).astype(np.float32)
    slope = 2 ** (-8 * np.arange(heads, dtype=np.float32) / max(heads - 1, 1))
    scores -= slope[:, None, None] * distance
    scores[..., 0] += (6 * np.arange(layers, dtype=np.float32) / layers - 1)[:, None, None]
    scores[..., distance < 0] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def tokens_of(count: int) -> list[str]:
    """A text of this many words."""
    words = TEXT.split()
    return [("" if place == 0 else " ") + words[place % len(words)] for place in range(count)]


# ---- contenders ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """How a page is made, and how a script in it detects that it is interactive."""

    write: Callable[[Pattern, list[str], Path], object]
    target: str
    """JavaScript: the element to click once everything is drawn, or null before that."""
    answered: str
    """JavaScript: whether that click, on `target`, has changed the view."""
    fetches: bool = False
    """Whether the page is blank without scripts from a CDN."""


def write_attnmech(pattern: Pattern, tokens: list[str], path: Path) -> None:
    """attnmech's own page."""
    from attnmech.draw.all_heads import model_view

    model_view(pattern, tokens, layers=range(len(pattern))).write_html(path)


def write_circuitsvis(pattern: Pattern, tokens: list[str], path: Path) -> None:
    """CircuitsVis takes one axis of heads, and its HTML needs no network."""
    from circuitsvis.attention import attention_heads

    html = attention_heads(pattern.reshape(-1, *pattern.shape[2:]), tokens).local_src
    path.write_text(f'<!doctype html><meta charset="utf-8"><body>{html}</body>', "utf-8")


def write_bertviz(pattern: Pattern, tokens: list[str], path: Path, *, view: str) -> None:
    """BertViz takes one tensor per layer, with a batch axis."""
    import bertviz
    import torch

    layers = [torch.from_numpy(layer)[None] for layer in pattern]
    html = getattr(bertviz, view)(layers, tokens, html_action="return").data
    path.write_text(f'<!doctype html><meta charset="utf-8"><body>{html}</body>', "utf-8")


CONTENDERS: Final = {
    OURS: Contender(
        write_attnmech,
        """() => {
            const cell = document.querySelectorAll(".attnmech-model-overview button")[1];
            return cell && drawn(cell.firstChild) && drawn(document.querySelector(".attnmech-model-map")) && cell;
        }""",
        """(cell) => {
            const map = document.querySelector(".attnmech-model-map");
            return cell.getAttribute("aria-pressed") === "true" && drawn(map);
        }""",
    ),
    "CircuitsVis, attention_heads": Contender(
        write_circuitsvis,
        """() => {
            const canvases = [...document.querySelectorAll("canvas")];
            const ready = canvases.length > 2 && drawn(canvases[1]) && drawn(canvases.at(-1));
            return ready && document.querySelectorAll("h4")[1];
        }""",
        """() => {
            const headings = [...document.querySelectorAll("h3")].map(({ textContent }) => textContent);
            return headings.includes("Head 1 Zoomed") && drawn([...document.querySelectorAll("canvas")].at(-1));
        }""",
    ),
    "BertViz, head_view": Contender(
        partial(write_bertviz, view="head_view"),
        """() => {
            const box = document.querySelectorAll("svg > g:last-of-type > rect")[1];
            if (!box || !document.querySelector("svg #attention line")) return null;
            window.fill = box.getAttribute("fill");
            return box;
        }""",
        """(box) => box.getAttribute("fill") !== window.fill""",
        fetches=True,
    ),
    "BertViz, model_view": Contender(
        partial(write_bertviz, view="model_view"),
        """() => [...document.querySelectorAll("svg rect")].filter(({ style }) => style.opacity === "0")[1]""",
        """() => document.querySelector("svg .detail")""",
        fetches=True,
    ),
}

PROBE: Final = """(() => {
    window.drawn = (canvas) => {
        if (!canvas?.width) return false;
        const middle = Math.floor(canvas.height / 2);
        return canvas.getContext("2d").getImageData(0, middle, canvas.width, 1).data.some((value) => value > 0);
    };
    const find = TARGET;
    const answered = ANSWERED;
    let target = null;
    const timer = setInterval(() => {
        if (!target) {
            target = find();
            if (!target) return;
            target.dispatchEvent(new MouseEvent("click", { bubbles: true, view: window }));
        }
        if (!answered(target)) return;
        clearInterval(timer);
        window.interactive = performance.now();
    }, 10);
})()"""
"""JavaScript that runs before the page's own: it checks every 10 milliseconds, and clicks once."""

FRAMES: Final = """() => {
    window.frames = [];
    let last = performance.now();
    const step = (now) => {
        window.frames.push(now - last);
        last = now;
        requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
}"""


# ---- opening ------------------------------------------------------------------------------------------------------


@contextmanager
def opened(libraries: Path | None, probe: str = "") -> Iterator[Any]:
    """A page in a separate browser, in which every request fails except those for local files and to this machine."""
    from playwright.sync_api import sync_playwright

    def answer(route: Any) -> None:
        url = route.request.url
        if url.startswith(("file:", "http://127.0.0.1:")):
            route.continue_()
        elif libraries is not None and (file := libraries / url.rsplit("/", 1)[-1]).exists():
            route.fulfill(body=file.read_bytes(), content_type="text/javascript")
        else:
            route.abort()

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path="/usr/bin/chromium",
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.route("**/*", answer)
        if probe:
            page.add_init_script(probe)
        yield page
        browser.close()


def seconds_to_interactive(contender: Contender, path: Path, libraries: Path | None) -> float | str:
    """The time from the start of the navigation to the answered click; if a limit is exceeded, its name instead."""
    from playwright.sync_api import Error

    probe = PROBE.replace("TARGET", contender.target).replace("ANSWERED", contender.answered)
    passed: list[str] = []
    try:
        with opened(libraries, probe) as page, within_limits(passed):
            page.goto(path.as_uri(), wait_until="commit", timeout=0)
            page.wait_for_function("() => window.interactive", timeout=0)
            return float(page.evaluate("() => window.interactive")) / 1000
    except Error:  # the browser is gone
        return passed[0] if passed else "crashed"


@contextmanager
def within_limits(passed: list[str]) -> Iterator[None]:
    """Ends this process's browsers if they exceed the time or memory limit, and says which; busy browsers do not
    respond.
    """
    import psutil

    done = Event()
    end = monotonic() + LIMIT

    def watch() -> None:
        while not done.wait(0.25):
            found = [each for each in psutil.Process().children(recursive=True) if "chromium" in each.name()]
            if monotonic() > end:
                passed.append(f"not in {LIMIT} s")
            elif sum(each.memory_info().rss for each in found) > MEMORY * 1e9:
                passed.append(f"not in {MEMORY:g} GB")
            else:
                continue
            for process in found:
                process.kill()
            return

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def median_frames(path: Path) -> dict[str, float]:
    """Milliseconds of the median frame of attnmech's view while its small maps scroll, and so on."""
    with opened(None) as page:
        page.goto(path.as_uri())
        page.wait_for_selector(".attnmech-model-map")
        box = page.locator(".attnmech-model-overview").bounding_box()
        map_box = page.locator(".attnmech-model-map").bounding_box()
        page.evaluate(FRAMES)
        actions = {"scrolling": partial(_scroll, page, box), "hovering": partial(_hover, page, box, map_box)}
        actions["moving between heads"] = partial(_move, page)
        found = {}
        for name, act in actions.items():
            page.evaluate("() => { window.frames.length = 0; }")
            act()
            found[name] = median(page.evaluate("() => window.frames"))
        return found


def _scroll(page: Any, box: Mapping[str, float]) -> None:
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    for step in range(40):
        page.mouse.wheel(0, 40 if step < 20 else -40)
        page.wait_for_timeout(16)


def _hover(page: Any, *boxes: Mapping[str, float]) -> None:
    for box in boxes:
        for step in range(60):
            page.mouse.move(box["x"] + box["width"] * step / 60, box["y"] + box["height"] * step / 60)


def _move(page: Any) -> None:
    page.focus('.attnmech-model-overview [aria-pressed="true"]')
    for step in range(80):
        page.keyboard.press("ArrowDown" if step % 4 == 3 else "ArrowRight" if (step // 12) % 2 == 0 else "ArrowLeft")


# ---- measuring ----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One contender at one shape."""

    shape: str
    contender: str
    size: int = 0
    build: list[float] = field(default_factory=list)
    interactive: list[float] = field(default_factory=list)
    stopped: str = ""
    """Why it did not become interactive."""


def rows_of(shape: str, folder: Path, repeats: int, libraries: Path | None) -> list[Row]:
    """Builds and opens every contender's page, in turns; a page that does not open is not opened again."""
    layers, heads, count = SHAPES[shape]
    pattern, tokens = pattern_of(layers, heads, count), tokens_of(count)
    paths = {name: folder / f"{name.replace(', ', '-')}.html" for name in CONTENDERS}
    builds = {name: partial(contender.write, pattern, tokens, paths[name]) for name, contender in CONTENDERS.items()}
    times = alternating_times(builds, repeats)
    rows = [Row(shape, name, paths[name].stat().st_size, times[name]) for name in CONTENDERS]
    opening = list(rows)
    if libraries is None:
        for row in rows:
            row.stopped = "blank without a CDN" if CONTENDERS[row.contender].fetches else ""
        opening = [row for row in rows if not row.stopped]
    for _ in range(repeats):
        for row in tuple(opening):
            seconds = seconds_to_interactive(CONTENDERS[row.contender], paths[row.contender], libraries)
            if isinstance(seconds, str):
                row.stopped = seconds
                opening.remove(row)
            else:
                row.interactive.append(seconds)
    return rows


def table_of(shape: str, rows: list[Row]) -> Table:
    """The contenders of one shape."""
    table = Table("", title=f"{shape} (layers x heads x tokens²)", title_justify="left", caption_justify="left")
    for heading in ("MB", "x attnmech", "build s", "interactive s", "x attnmech"):
        table.add_column(heading, justify="right")
    ours = next(row for row in rows if row.contender == OURS)
    for row in rows:
        opens, ratio = row.stopped, ""
        if row.interactive:
            opens = f"{median(row.interactive):.2f}"
            ratio = f"{median(row.interactive) / median(ours.interactive):.1f}" if ours.interactive else ""
        cells = (f"{row.size / 1e6:.2f}", f"{row.size / ours.size:.2f}", f"{median(row.build):.2f}", opens, ratio)
        table.add_row(row.contender, *cells)
    if shape == SIZE_TARGET[0]:
        factor = next(row.size for row in rows if row.contender == SIZE_TARGET[1]) / ours.size
        reached = "reached" if factor >= SIZE_TARGET[2] and ours.interactive else "MISSED"
        table.caption = f"size target: {SIZE_TARGET[1]} / attnmech at least {SIZE_TARGET[2]:g}: {factor:.0f}, {reached}"
    return table


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default %(default)s)")
    parser.add_argument("--libraries", type=Path, help="folder with the three scripts that BertViz asks a CDN for")
    parser.add_argument("--json", type=Path, help="file for every figure")
    return parser.parse_args()


def main() -> None:
    """Measures, prints and writes the results."""
    chosen = arguments()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    console = Console(width=None if Console().is_terminal else 150)
    about = machine(PACKAGES)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)
    console.print(PATTERNS, highlight=False)
    rows: list[Row] = []
    tables: list[Table] = []
    frames: dict[str, float] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        tiny = pattern_of(1, 2, 4)
        for contender in CONTENDERS.values():
            contender.write(tiny, tokens_of(4), folder / "tiny.html")  # imports and caches are not timed
        for shape in chosen.shapes:
            found = rows_of(shape, folder, chosen.repeats, chosen.libraries)
            tables.append(table_of(shape, found))
            console.print(tables[-1])
            rows += found
            if shape == list(SHAPES)[-1]:
                frames = median_frames(folder / "attnmech-model_view.html")
    if frames:
        slowest = max(frames.values())
        shown = ", ".join(f"{name} {value:.1f} ms" for name, value in frames.items())
        verdict = "reached" if slowest <= FRAME_TARGET else "MISSED"
        tables[-1].caption = f"median frame of {OURS}: {shown} (target {FRAME_TARGET:g} ms: {verdict})"
        console.print(tables[-1].caption, highlight=False)
    write(chosen.json, about, chosen, tables, rows=[asdict(row) for row in rows], frames=frames)


if __name__ == "__main__":
    main()
