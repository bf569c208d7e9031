"""Measures the page of joint embeddings: its size, the time to make and open it, and frame times while all heads move.

    python benchmarks/embedding_page.py --json embedding_page.json

24 layers × 16 heads, 1,000 tokens (2,000 points per head), two texts of 50 tokens with their attention. Chromium draws
in software, without a GPU (`--disable-gpu`). On an idle machine. See benchmarks/README.md.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, Final

import numpy as np
import torch
from measure import machine, write
from rich.table import Table

from attnmech.methods.joint_embedding.numbers import NUMBERS
from attnmech.methods.joint_embedding.page import embedding_view
from attnmech.methods.joint_embedding.result import JointEmbedding
from attnmech.results.provenance import Provenance
from attnmech.runs.token_types import TOKEN_TYPES

LAYERS, HEADS, TEXTS, LENGTH = 24, 16, 20, 50
MOVED: Final = ("all heads, scrolled", "plots x 3, scrolled", "head, turned")
FRAME_TARGET: Final = 50.0
"""The median frame may take this many milliseconds."""
FRAMES: Final = 100
MOVING: Final = """async ([frames, sized]) => {
  const box = document.querySelector(".attnmech-embedding-matrix");
  const plot = document.getElementById("figure-0").control.plot;
  const times = [];
  for (let frame = 0, last = performance.now(); frame < frames; frame += 1) {
    if (sized === "head") plot.drag(3, 1, true);
    else box.scrollTop = 12 * Math.abs(frames / 2 - frame);
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - last);
    last += times.at(-1);
  }
  return times.slice(3);
}"""
SIZED: Final = """size => {
  const slider = document.querySelector(".attnmech-embedding input[type=range]");
  slider.value = size;
  slider.dispatchEvent(new Event("input"));
}"""


def made_view(dims: int) -> JointEmbedding:
    """Clouds drawn from N(0, 1), queries and keys 1 apart."""
    generator = np.random.default_rng(0)
    count, heads = TEXTS * LENGTH, tuple((layer, head) for layer in range(LAYERS) for head in range(HEADS))
    points = generator.normal(size=(len(heads), 2 * count, dims)).astype(np.float32)
    points[:, count:, 0] += 1
    scores = np.tril(generator.uniform(0.1, 1, size=(len(heads), LENGTH, LENGTH)))
    pattern = torch.from_numpy((scores / scores.sum(axis=-1, keepdims=True)).astype(np.float16))
    labels = tuple(f" word{place}" for place in range(LENGTH))
    ones, curve = torch.ones(len(heads), dtype=torch.float64), np.linspace(-0.9, -0.5, 21)
    return JointEmbedding(
        heads=heads, n_layers=LAYERS, n_heads=HEADS, stack="", geometry="scaled", shift=True, chosen_by="auto",
        dims=dims, perplexity=50.0, seed=0, labels=labels * TEXTS,
        text=torch.arange(TEXTS).repeat_interleave(LENGTH), position=torch.arange(LENGTH).repeat(TEXTS),
        lengths=torch.full((TEXTS,), LENGTH), special=torch.zeros(count, dtype=torch.bool),
        types=torch.full((count,), TOKEN_TYPES.index("word")), documents=tuple(range(TEXTS)), texts_seen=TEXTS,
        pairs=(count,) * LAYERS, all_pairs=True, vectors=torch.from_numpy(points),
        offsets=torch.zeros(len(heads), dims),
        norms=torch.from_numpy(generator.uniform(1, 2, size=(len(heads), 2 * count)).astype(np.float32)),
        highest=torch.from_numpy(generator.integers(0, count, size=(len(heads), count, 2))),
        weights=(torch.from_numpy(np.sort(generator.uniform(size=(len(heads), count, 2)))) / 2).float().flip(-1),
        numbers={name: ones if name in ("scale", "query_norm", "key_norm") else ones * torch.nan for name in NUMBERS},
        after={}, flags=("",) * len(heads), grid=torch.from_numpy(np.geomspace(0.1, 10, 21)).expand(len(heads), -1),
        curve=torch.from_numpy(curve).expand(len(heads), -1), points={"pca": torch.from_numpy(points)},
        patterns=dict.fromkeys(("0", "1"), pattern), text_labels=dict.fromkeys(("0", "1"), labels),
        text_special=dict.fromkeys(("0", "1"), torch.zeros(LENGTH, dtype=torch.bool)), sink=False, images=None,
        types_of_heads=(), provenance=Provenance("made up", "", "", (), ()),
    )  # fmt: skip


def frames_of(path: Path) -> dict[str, Any]:
    """The time until the page is drawn, and the times of frames while it moves, in milliseconds."""
    from playwright import sync_api

    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_context(offline=True, viewport={"width": 1400, "height": 900}).new_page()
        began = monotonic()
        page.goto(path.as_uri())
        page.wait_for_selector(".attnmech-sentence-box", timeout=60_000)
        found: dict[str, Any] = {"opening_ms": 1000 * (monotonic() - began)}
        for name in MOVED:
            page.evaluate(SIZED, 3 if "3" in name else 1)
            page.wait_for_timeout(2000)
            times = sorted(page.evaluate(MOVING, [FRAMES, "head" if "head," in name else "all"]))
            found[name] = {"median_ms": median(times), "p90_ms": times[int(0.9 * len(times))]}
        browser.close()
    return found


def main() -> None:
    """Prints the figures, and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(("attnmech", "playwright"))}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        for dims in (2, 3):
            view = made_view(dims)
            began = monotonic()
            path.write_text(embedding_view(view).to_html(), "utf-8")
            figures = {"making_s": monotonic() - began, "size_mb": path.stat().st_size / 1e6, **frames_of(path)}
            figures["within_target"] = all(
                each["median_ms"] <= FRAME_TARGET for each in figures.values() if isinstance(each, dict)
            )
            found[f"{dims}-D"] = figures
    print(json.dumps(found, indent=2))
    about = found.pop("machine")
    table = Table("page", "MB", "made, s", "drawn after, s", *(f"{name}, ms" for name in MOVED))
    for dims, figures in found.items():
        numbers = [figures["size_mb"], figures["making_s"], figures["opening_ms"] / 1000]
        frames = [figures[name]["median_ms"] for name in MOVED]
        table.add_row(dims, *(f"{each:.1f}" for each in numbers), *(f"{each:.0f}" for each in frames))
    write(given.json, about, given, [table], pages=found)


if __name__ == "__main__":
    main()
