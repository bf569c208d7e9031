"""Measures a live page: from Enter to another text's maps, and from a click to what the model writes without a head.

    python benchmarks/live.py --json benchmarks/results/live.json

`attnmech serve` answers a headless Chromium while it measures types and ablations in the background, which it leaves
for each question. On an idle machine; needs what waiting.py needs. See benchmarks/README.md.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Final

from measure import machine, write
from rich.console import Console
from views import opened
from waiting import PACKAGES, Wait, decoder, table_of

MODELS: Final = {"demo": None, "SmolLM2-135M": decoder()}


def waits_of(name: str, repeats: int) -> Iterator[Wait]:
    """The waits of a reader who types texts, and zeroes a head of each."""
    source = MODELS[name]
    command = [sys.executable, "-m", "attnmech", "serve", "--port", "0", *([] if source is None else ["-m", source])]
    to_heads, to_map, to_answer = list[float](), list[float](), list[float]()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server, opened(None) as page:
        assert server.stderr is not None
        try:
            page.goto(next(line.split()[1] for line in server.stderr if line.startswith("serving ")), timeout=0)
            for number in range(repeats):
                page.fill("#live-text", f"The keys to box {number} are on the table of the old house by the sea.")
                start = perf_counter()
                page.press("#live-text", "Enter")
                page.wait_for_url(f"**box+{number}**", wait_until="commit", timeout=0)
                page.wait_for_selector(".heads-cell", timeout=0)
                to_heads.append(perf_counter() - start)
                page.wait_for_selector("html[data-ready]", state="attached", timeout=0)
                to_map.append(perf_counter() - start)
                start = perf_counter()
                page.click("#edit-head [data-way=zero]")
                page.wait_for_selector("#edit-result table", timeout=0)
                to_answer.append(perf_counter() - start)
                page.click("#edit-head [data-way=zero]")
                page.wait_for_selector("#edit-result table", state="detached", timeout=0)
        finally:
            server.terminate()
    yield Wait(f"{name}: from Enter to the heads and the text", to_heads)
    yield Wait(f"{name}: from Enter to the map of attention", to_map, limit=1.0 if source is None else None)
    yield Wait(f"{name}: from a click to what the model writes", to_answer)


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="texts (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default %(default)s)")
    parser.add_argument("--json", type=Path, help="file for every figure")
    chosen = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(chosen.threads), "HF_HUB_OFFLINE": "1"}
    about = machine(PACKAGES)
    waits = [wait for name in MODELS for wait in waits_of(name, chosen.repeats)]
    table = table_of(waits)
    Console(width=None if Console().is_terminal else 120).print(table)
    write(chosen.json, about, chosen, [table], waits=[asdict(wait) | {"verdict": wait.verdict} for wait in waits])


if __name__ == "__main__":
    main()
