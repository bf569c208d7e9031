"""Measures joint embeddings: all heads of a 24 × 16 model by PCA, one head by t-SNE, UMAP, PaCMAP and openTSNE.

    python benchmarks/joint_embedding.py --json joint_embedding.json

For comparison, it runs the recipe of AttentionViz on the same model and tokens: queries and keys by hooks on
transformers' model, then, head by head, c from a grid by the weighted correlation, the shift, and scikit-learn's
projection. The recipe computes nothing else (no correlations after projection, no trustworthiness, no effect of the
shift). The steps for one head time only the projection.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from measure import machine, memory_growth, write
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from shapes import N_VOCAB, SHAPES, build

if TYPE_CHECKING:
    from torch import Tensor

TEXTS: Final = 87
TOKENS: Final = 5_034
"""AttentionViz's demo shows 5,034 tokens of 87 sentences."""

TARGETS: Final = {"pca, all heads": 60.0, "pacmap": 30.0, "tsne": 90.0}
"""Targets in seconds, on two cores."""

GRID: Final = 2.0 ** np.linspace(-3, 3, 25)
Array = NDArray[Any]


def texts(count: int) -> "list[Tensor]":
    """Random token ids of 87 texts of different lengths, `count` tokens in all."""
    import torch

    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(TEXTS, 8.0))
    lengths = np.maximum(4, np.round(shares * count)).astype(int)
    lengths[0] += count - lengths.sum()
    return [torch.from_numpy(rng.integers(3, N_VOCAB, (1, length))) for length in lengths]


def recipe(model: Any, given: "list[Tensor]", projection: Callable[[Array], Array]) -> Any:
    """The steps of AttentionViz on transformers' BLOOM: text by text, then head by head."""
    import torch

    kept: list[list[Tensor]] = [[] for _ in model.base_model.h]
    handles = [
        block.self_attention.query_key_value.register_forward_hook(
            lambda module, args, output, layer=layer: kept[layer].append(output[0].detach())
        )
        for layer, block in enumerate(model.base_model.h)
    ]
    with torch.no_grad():
        for ids in given:
            model(ids)
    for handle in handles:
        handle.remove()
    found, heads = {}, model.config.n_head
    for layer, of_texts in enumerate(kept):
        split = [each.view(len(each), heads, 3, -1).numpy() for each in of_texts]
        for head in range(heads):
            pairs = [(each[:, head, 0], each[:, head, 1]) for each in split]
            found[layer, head] = projection(_joint(pairs))
    return found


def _joint(pairs: list[tuple[Array, Array]]) -> Array:
    """Queries and keys of one head, scaled by the c with the lowest weighted correlation, and shifted."""
    q, k = (np.concatenate([pair[kind] for pair in pairs]) for kind in (0, 1))
    best = min(GRID, key=lambda c: _criterion(pairs, q, k, float(c)))
    return np.concatenate((q * best, k / best - (k / best).mean(0) + (q * best).mean(0)))


def _criterion(pairs: list[tuple[Array, Array]], q: Array, k: Array, c: float) -> float:
    moved = (q * c).mean(0) - (k / c).mean(0)
    distances, products = [], []
    for queries, keys in pairs:
        seen = np.tril_indices(len(queries))
        shifted = keys / c + moved
        squares = ((queries * c) ** 2).sum(1)[:, None] + (shifted**2).sum(1) - 2 * c * queries @ shifted.T
        distances.append(np.sqrt(np.maximum(squares, 0))[seen])
        products.append((queries @ keys.T)[seen])
    distance, product = np.concatenate(distances), np.concatenate(products)
    tau = np.percentile(distance, 20)
    near = distance < tau
    cov = np.cov(distance[near], product[near], aweights=(tau - distance[near]) ** 2)
    return float(cov[0, 1] / np.sqrt(cov[0, 0] * cov[1, 1]))


def steps(model: Any, plain: Any, given: "list[Tensor]", tokens: int) -> dict[str, Callable[[], Any]]:
    """The timed steps, by name."""
    import torch
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    import attnmech as am
    from attnmech.methods.joint_embedding.projections import Projecting

    found = am.joint_embedding(model, given[:40], heads=[(0, 5)], sample=tokens)
    rng = np.random.default_rng(0)
    # The points of some texts, repeated to the number of all texts' points: the cost of a projection depends on the
    # number.
    drawn = found.vectors[0][rng.integers(0, len(found.vectors[0]), 2 * tokens)]
    vectors = drawn + 0.1 * torch.from_numpy(rng.normal(size=drawn.shape)).to(drawn)

    def one(projection: str) -> Any:
        return Projecting(projection, 2, 50.0, 0).points(vectors, lambda share: None)

    tsne = TSNE(metric="cosine", perplexity=50, random_state=0)
    return {
        "pca": lambda: one("pca"),
        "pacmap": lambda: one("pacmap"),
        "umap": lambda: one("umap"),
        "opentsne": lambda: one("opentsne"),
        "tsne": lambda: one("tsne"),
        "tsne: the recipe": lambda: tsne.fit_transform(vectors.numpy()),
        "pca, all heads": lambda: am.joint_embedding(model, given, sample=tokens),
        "pca, all heads: the recipe": lambda: recipe(plain, given, PCA(2).fit_transform),
    }


def main() -> None:
    """Prints a table, and writes it as JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path)
    options.add_argument("--tokens", type=int, default=TOKENS)
    options.add_argument("--layers", type=int, help="of the model; by default all 24")
    options.add_argument("--only", nargs="*", help="some of the steps, by name")
    chosen = options.parse_args()
    console, packages = Console(), ("torch", "scikit-learn", "umap-learn", "pacmap", "openTSNE", "transformers")
    about = machine(packages)
    console.print(about)
    import attnmech as am

    plain = build(SHAPES["bloom"], chosen.tokens, chosen.layers)
    plain.config._attn_implementation = "eager"
    model = am.load(plain)
    model.certificate  # noqa: B018 - measured apart from what follows
    rows = []
    for name, step in steps(model, plain, texts(chosen.tokens), chosen.tokens).items():
        if chosen.only and name not in chosen.only:
            continue
        load, start, cpu = os.getloadavg()[0], perf_counter(), os.times()
        grown = memory_growth(step)
        seconds, after = perf_counter() - start, os.times()
        busy = after.user + after.system - cpu.user - cpu.system
        row = {"step": name, "seconds": seconds, "cpu_seconds": busy, "gb": grown / 1e9, "load_average": load}
        rows.append(row | {"target": TARGETS.get(name)})
        console.print(row)
    table = Table("step", "seconds", "CPU seconds", "GB", "load", "target")
    for row in rows:
        numbers = [f"{row[name]:.1f}" for name in ("seconds", "cpu_seconds", "gb", "load_average")]
        table.add_row(row["step"], *numbers, "" if row["target"] is None else f"{row['target']:g}")
    write(chosen.json, about, chosen, [table], steps=rows)


if __name__ == "__main__":
    main()
