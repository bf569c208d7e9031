"""How often attnmech's intervals cover, and how often its claims of many heads are false: docs/intervals.md.

    python benchmarks/interval_coverage.py --out docs/intervals.md

Simulated effects (normal, t with 3 degrees of freedom, centred lognormal; correlated 0.3 between heads), and the demo
model's own: every head's ablation effect on 600 texts of its grammar, of which few are drawn at a time. About ten
minutes on two cores, most of them for the 600 texts.
"""

import argparse
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from scipy.stats import norm, t

from attnmech.maths.intervals import TextMeans

TEXTS = (5, 10, 20, 50)
KINDS = ("normal", "t3", "lognormal")
HEADS = 32
Array = NDArray[np.float64]


def effects(kind: str, texts: int, rng: np.random.Generator) -> Array:
    """Effects of mean 0 on some texts, `[head text]`."""
    shared, own = rng.normal(size=(1, texts)), rng.normal(size=(HEADS, texts))
    values = math.sqrt(0.3) * shared + math.sqrt(0.7) * own
    if kind == "t3":
        return np.asarray(t.ppf(norm.cdf(values), 3))
    return np.exp(values) - math.exp(0.5) if kind == "lognormal" else values


def covered(values: Array, mean: Array) -> Array:
    """Whether the t interval of each head holds its mean."""
    low, high = TextMeans.of_values(torch.from_numpy(values)).interval()
    return np.asarray((low.numpy() <= mean) & (mean <= high.numpy()))


def simulated(runs: int) -> Iterator[str]:
    """The rows of the first table."""
    rng = np.random.default_rng(0)
    for kind, texts in track(list(product(KINDS, TEXTS)), "simulated effects", transient=True):
        pointwise, any_alone, any_clear = [], [], []
        for _ in range(runs):
            means = TextMeans.of_values(torch.from_numpy(effects(kind, texts, rng)))
            low, high = means.interval()
            holds = (low <= 0) & (high >= 0)
            pointwise.append(float(holds.double().mean()))
            any_alone.append(not bool(holds.all()))
            any_clear.append(bool(means.clear.any()))
        numbers = (np.mean(pointwise), np.mean(any_alone), np.mean(any_clear))
        yield f"| {kind} | {texts} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |"


def found(runs: int) -> Iterator[str]:
    """The rows of the table of effects that are found."""
    rng = np.random.default_rng(1)
    for texts in track(TEXTS, "power", transient=True):
        shares = []
        for size in (1.0, 2.0, 4.0, 8.0):
            hits = 0
            for _ in range(runs):
                values = effects("normal", texts, rng)
                values[7] += size
                hits += bool(TextMeans.of_values(torch.from_numpy(values)).clear[7])
            shares.append(f"{hits / runs:.2f}")
        yield f"| {texts} | {' | '.join(shares)} |"


def of_the_demo_model(texts: int, runs: int) -> Iterator[str]:
    """The rows of the table of real effects."""
    import attnmech as am
    from attnmech.demo.text import documents

    swept = am.ablate_heads(am.load(), documents(texts, seed=11), progress=True)
    values = swept.per_text.flatten(0, 1).numpy()
    mean, rng = values.mean(axis=1), np.random.default_rng(2)
    for size in track(TEXTS, "the demo model's effects", transient=True):
        held = [covered(values[:, rng.choice(texts, size, replace=False)], mean) for _ in range(runs)]
        by_head = np.mean(held, axis=0)
        yield f"| {size} | {by_head.mean():.2f} | {np.median(by_head):.2f} | {by_head.min():.2f} |"


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/intervals.md"))
    parser.add_argument("--runs", type=int, default=2000, help="simulated experiments (default %(default)s)")
    parser.add_argument("--texts", type=int, default=600, help="texts of the demo model (default %(default)s)")
    arguments = parser.parse_args()
    template = (Path(__file__).parent / "intervals.md").read_text(encoding="utf-8")
    page = template.format(
        runs=arguments.runs,
        texts=arguments.texts,
        simulated="\n".join(simulated(arguments.runs)),
        found="\n".join(found(min(1000, arguments.runs))),
        demo="\n".join(of_the_demo_model(arguments.texts, arguments.runs)),
    )
    arguments.out.write_text(page, encoding="utf-8")
    Console().print(page, markup=False, highlight=False)


if __name__ == "__main__":
    main()
