"""Synthetic joint embeddings: heads with known shapes of points, hostile tokens, and consistent patterns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly import express

from attnmech.draw.heads import HeadNumber, PageHeads
from attnmech.draw.page import Page, render_page
from attnmech.methods.joint_embedding.page import embedding_section
from attnmech.methods.joint_embedding.page_data import EmbeddingHead, EmbeddingImages, EmbeddingText, EmbeddingView

from .conftest import HOSTILE, TOKENS

WORDS = ("the", "dog", "cat", "saw", "a", "bird", "in", "garden", ",", "and", "then", "ran", "seven", "12", ".")
CLASSES = {",": "punctuation", ".": "punctuation", "12": "number", "<s>": "special"}


def page_of(view: EmbeddingView) -> str:
    """A page of the view, with a map of the heads."""
    layers = sorted({head.layer for head in view.heads})
    scale = np.full((len(layers), 1 + max(head.head for head in view.heads)), np.nan)
    for head in view.heads:
        scale[layers.index(head.layer), head.head] = head.scale
    heads = PageHeads(layers, scale.shape[1], numbers=[HeadNumber("scale", "scale c", "numbers", scale)])
    place = view.anomalies[0][:2] if view.anomalies else (view.heads[0].layer, view.heads[0].head)
    section = embedding_section(view)
    return render_page(
        Page(title=view.title, headline="The lead", heads=heads, sections=[section], provenance={}, start=place)
    )


def made_view(
    layers: int = 3,
    heads: int = 4,
    lengths: Sequence[int] = (7, 9, 5),
    *,
    projections: Sequence[tuple[str, int]] = (("pca", 3), ("tsne", 2)),
    missing: Sequence[tuple[int, int]] = (),
    precision: Any = np.float32,
    carried: int = 2,
    images: EmbeddingImages | None = None,
    hostile: bool = True,
    seed: int = 0,
) -> EmbeddingView:
    """Texts of random words, each beginning with `<s>`; the first holds the hostile tokens."""
    generator = np.random.default_rng(seed)
    labels: list[str] = []
    for number, length in enumerate(lengths):
        words = ["<s>", *(f" {word}" for word in generator.choice(WORDS, length - 1))]
        if hostile and number == 0:
            words[1 : 1 + len(TOKENS)] = TOKENS[: length - 1]
        labels += words[:length]
    text = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    special = position == 0
    made = [
        _head(generator, layer, head, labels, position, np.asarray(lengths)[text], projections)
        for layer in range(layers)
        for head in range(heads)
        if (layer, head) not in missing
    ]
    patterns = {number: _patterns(generator, len(made), lengths[number], precision) for number in range(carried)}
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return EmbeddingView(
        title="Queries and keys in one space",
        model=f"synthetic {HOSTILE}" if hostile else "a synthetic model",
        heads=made,
        labels=labels,
        text=text,
        position=position,
        lengths=np.asarray(lengths),
        special=special,
        classes=[CLASSES.get(label.strip(), "word") for label in labels],
        texts={
            number: EmbeddingText(
                labels[starts[number] : starts[number + 1]], [True] + [False] * (lengths[number] - 1), pattern
            )
            for number, pattern in patterns.items()
        },
        notes=["Tokens were sampled.", HOSTILE] if hostile else ["1,000 tokens were sampled evenly from the corpus."],
        anomalies=[
            (each.layer, each.head, "keys are longer than queries, norm ratio", float(10 - rank))
            for rank, each in enumerate(made[1 : 15 if not hostile else 4])
        ],
        images=images,
    )


def _head(
    generator: np.random.Generator,
    layer: int,
    head: int,
    labels: Sequence[str],
    position: np.ndarray,
    length: np.ndarray,
    projections: Sequence[tuple[str, int]],
) -> EmbeddingHead:
    """A spiral by position, clusters by word, or two clouds apart."""
    count = len(labels)
    kind = ("spiral", "", "by word")[(layer + head) % 3]
    share = position / length
    codes = np.array([sum(label.strip().encode()) for label in labels])
    shapes = {
        "spiral": np.stack([share * np.cos(9 * share), share * np.sin(9 * share), share], axis=1) * (3 + layer),
        "by word": np.stack([np.cos(codes), np.sin(2.3 * codes), np.cos(1.7 * codes)], axis=1) * 2,
        "": np.zeros((count, 3)),
    }
    noise = 0.15 if kind else 1.0
    base = np.concatenate([shapes[kind], shapes[kind] + (0 if kind else 1.5 * (head % 2))])
    points = base + noise * generator.normal(size=(2 * count, 3)) * [1, 0.8, 0.6] + [100 * head, layer, 0]
    tsne = 30 * base[:, [1, 0, 2]] + 4 * generator.normal(size=(2 * count, 3))
    by_name = {name: (points if name == "pca" else tsne)[:, :dims].astype(np.float32) for name, dims in projections}
    starts = np.arange(count) - position
    second = np.where(position > 0, starts + generator.integers(0, np.maximum(position, 1)), -1)
    highest = np.stack([starts + position, second], axis=1).astype(np.int64)
    first_weight = generator.uniform(0.5, 0.9, size=count)
    grid = np.geomspace(0.1, 10, 21)
    scale = float(np.exp(generator.normal() / 2))
    return EmbeddingHead(
        layer=layer,
        head=head,
        points=by_name,
        norms=np.exp(generator.normal(size=2 * count) / 3 + np.repeat([1, 2], count)).astype(np.float32),
        highest=highest,
        weights=np.stack([first_weight, (1 - first_weight) * (position > 0)], axis=1).astype(np.float32),
        scale=scale,
        curve=(grid, -0.9 + 0.2 * np.log(grid / scale) ** 2),
        numbers={
            "correlation": -0.9 + 0.01 * head,
            "Spearman": -0.85,
            "key norm / query norm": float(np.exp(1)),
            "trustworthiness (pca)": 0.913 - 0.01 * layer,
        },
        kind={"spiral": "previous token", "by word": "duplicate token", "": ""}[kind],
    )


def _patterns(generator: np.random.Generator, heads: int, length: int, precision: Any) -> np.ndarray:
    """Causal rows with much attention on the first token, sharper in some heads."""
    scores = generator.normal(size=(heads, length, length)) * (1 + np.arange(heads) % 4)[:, None, None]
    scores[:, :, 0] += 3
    exponential = np.where(np.triu(np.ones((length, length), dtype=bool), k=1), 0, np.exp(scores))
    return (exponential / exponential.sum(axis=-1, keepdims=True)).astype(precision)


def made_images(rows: int = 4, columns: int = 5, count: int = 3) -> tuple[EmbeddingImages, list[int]]:
    """Pictures with a colour gradient as PNGs, and the lengths of their texts ([CLS] and the patches)."""
    generator = np.random.default_rng(3)
    pictures, colours = {}, []
    for number in range(count):
        pixels = generator.integers(0, 60, size=(rows * 16, columns * 16, 3))
        pixels[..., number % 3] += np.linspace(0, 190, columns * 16).astype(int)[None]
        pixels[..., (number + 1) % 3] += np.linspace(0, 150, rows * 16).astype(int)[:, None]
        if number < 2:
            pictures[number] = express.imshow(pixels.astype(np.uint8), binary_string=True).data[0].source
        means = pixels.reshape(rows, 16, columns, 16, 3).mean(axis=(1, 3)).reshape(-1, 3)
        colours.append(np.concatenate([np.zeros((1, 3)), means]))
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1).reshape(-1, 2)
    place = np.concatenate([np.concatenate([[[-1, -1]], grid]) for _ in range(count)])
    return EmbeddingImages(pictures, (rows, columns), place, np.concatenate(colours)), [rows * columns + 1] * count
