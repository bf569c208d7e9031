"""Measures how often attnmech's intervals cover, and how often its claims about many heads are false:
docs/intervals.md.

    python benchmarks/interval_coverage.py --out docs/intervals.md

It simulates effects that are correlated at 0.3 between heads, and draws a few texts at a time from the demo
model's own ablation effects on 600 texts of its grammar. Takes about half an hour on one core.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from scipy.stats import norm, t

from attnmech.maths.intervals import HEAVY_SHARE, TextMeans

TEXTS = (5, 10, 20, 50)
KINDS = ("normal", "t3", "skewed", "lognormal")
HEADS = 32
Array = NDArray[np.float64]


def effects(kind: str, texts: int, rng: np.random.Generator, heads: int = HEADS) -> Array:
    """Effects on some texts, `[head text]`: with mean 0 or, for "skewed", with median 0."""
    shared, own = rng.normal(size=(1, texts)), rng.normal(size=(heads, texts))
    values = math.sqrt(0.3) * shared + math.sqrt(0.7) * own
    if kind == "t3":
        return np.asarray(t.ppf(norm.cdf(values), 3))
    if kind in ("lognormal", "skewed"):
        return np.exp(values) - (math.exp(0.5) if kind == "lognormal" else 1.0)
    return values


def covered(values: Array, mean: Array) -> Array:
    """Whether the t interval of each head contains its mean."""
    low, high = TextMeans.of_values(torch.from_numpy(values)).interval()
    return np.asarray((low.numpy() <= mean) & (mean <= high.numpy()))


def simulated(runs: int) -> Iterator[str]:
    """The rows of the first table."""
    rng = np.random.default_rng(0)
    for kind, heads, texts in track(list(product(KINDS, (HEADS, 1024), TEXTS)), "simulated effects", transient=True):
        true_mean = math.exp(0.5) - 1.0 if kind == "skewed" else 0.0
        coverage, directions, sizes = [], [], []
        for _ in range(runs if heads == HEADS else runs // 10):
            values = effects(kind, texts, rng, heads)
            means = TextMeans.of_values(torch.from_numpy(values))
            coverage.append(covered(values, np.asarray(true_mean)).mean())
            directions.append(bool(means.direction.any()))
            sizes.append(kind != "skewed" and bool(means.clear_size.any()))
        direction = "" if kind == "lognormal" else f"{np.mean(directions):.3f}"
        size = "" if kind == "skewed" else f"{np.mean(sizes):.3f}"
        yield f"| {kind} | {heads:,} | {texts} | {np.mean(coverage):.3f} | {direction} | {size} |"


def found(runs: int) -> Iterator[str]:
    """The rows of the table of effects that are detected."""
    rng = np.random.default_rng(1)
    for texts, heavy in track(list(product((5, 10, 20, 40), (False, True))), "power", transient=True):
        shares = []
        for size in (1.0, 2.0, 4.0, 8.0):
            clear, sized = 0, 0
            for _ in range(runs):
                values = effects("normal", texts, rng)
                values[7] += size
                if heavy:
                    values[3] *= 0.01
                    values[3, rng.integers(texts)] = 20.0
                means = TextMeans.of_values(torch.from_numpy(values))
                clear += bool(means.clear[7])
                sized += bool(means.clear_size[7])
            shares.append(f"{clear / runs:.2f}, {sized / runs:.2f}")
        yield f"| {texts} | {'one heavy tail' if heavy else 'normal'} | {' | '.join(shares)} |"


def effects_of_the_demo_model(texts: int) -> Array:
    """The effect of zero-ablating each head on each text, `[head text]`."""
    import attnmech as am

    sys.path.append(str(Path(__file__).parents[1] / "examples" / "demo_model"))
    from write_texts import documents

    given = [document.text for document in documents(texts, seed=11)]
    swept = am.ablate_heads(am.load(), given, progress=True)
    return np.asarray(swept.per_text.flatten(0, 1).numpy())


def exchanged(values: Array, draws: int) -> Iterator[str]:
    """The rows of the table of exchanged texts."""
    rng = np.random.default_rng(3)
    for name in ("clear", "clear_size"):
        changes, counts = [], []
        for _ in track(range(draws), f"exchanged texts, {name}", transient=True):
            drawn = values[:, rng.choice(values.shape[1], 42, replace=False)]
            before, after = (getattr(TextMeans.of_values(torch.from_numpy(each)), name) for each in
                             (drawn[:, :41], drawn[:, 1:]))  # fmt: skip
            changes.append(int((before != after).sum()))
            counts.append(int(before.sum()))
        shares = [np.mean([change == count for change in changes]) for count in range(3)]
        columns = " | ".join(f"{share:.3f}" for share in (*shares, 1 - sum(shares)))
        yield f"| {name} | {columns} | {np.mean(counts):.1f} |"


def coverage_of_the_demo_model(values: Array, runs: int) -> Iterator[str]:
    """The rows of the table of real effects."""
    mean, rng = values.mean(axis=1), np.random.default_rng(2)
    for size in track(TEXTS, "the demo model's effects", transient=True):
        held = [covered(values[:, rng.choice(values.shape[1], size, replace=False)], mean) for _ in range(runs)]
        by_head = np.mean(held, axis=0)
        yield f"| {size} | {by_head.mean():.2f} | {np.median(by_head):.2f} | {by_head.min():.2f} |"


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/intervals.md"))
    parser.add_argument("--runs", type=int, default=1000, help="experiments and draws (default %(default)s)")
    parser.add_argument("--texts", type=int, default=600, help="texts of the demo model (default %(default)s)")
    arguments = parser.parse_args()
    template = (Path(__file__).parent / "intervals.md").read_text(encoding="utf-8")
    values = effects_of_the_demo_model(arguments.texts)
    page = template.format(
        runs=f"{arguments.runs:,}",
        texts=arguments.texts,
        heavy=HEAVY_SHARE,
        exchanges=f"{arguments.runs:,}",
        simulated="\n".join(simulated(arguments.runs)),
        found="\n".join(found(min(1000, arguments.runs))),
        exchanged="\n".join(exchanged(values, arguments.runs)),
        demo="\n".join(coverage_of_the_demo_model(values, arguments.runs)),
    )
    arguments.out.write_text(page, encoding="utf-8")
    Console().print(page, markup=False, highlight=False)


if __name__ == "__main__":
    main()
