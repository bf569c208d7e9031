"""Synthetic joint embeddings: heads with known shapes of points, hostile tokens, and consistent patterns."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from plotly import express

from attnmech.draw.heads import HeadNumber, PageHeads
from attnmech.draw.page import Page, render_page
from attnmech.methods.joint_embedding.numbers import NUMBERS
from attnmech.methods.joint_embedding.page import embedding_section
from attnmech.methods.joint_embedding.patch_images import PatchImages
from attnmech.methods.joint_embedding.pictures import AFTER
from attnmech.methods.joint_embedding.result import JointEmbedding
from attnmech.results.provenance import Provenance
from attnmech.runs.token_types import TOKEN_TYPES

from .conftest import HOSTILE, TOKENS

WORDS = ("the", "dog", "cat", "saw", "a", "bird", "in", "garden", ",", "and", "then", "ran", "seven", "12", ".")
TYPES = {",": "comma", ".": "sentence end", "12": "number", "<s>": "special"}


def page_of(view: JointEmbedding) -> str:
    """A page of the view, with a map of the heads."""
    layers = sorted({layer for layer, _ in view.heads})
    scale = view.scale[layers].numpy()
    heads = PageHeads(layers, scale.shape[1], numbers=[HeadNumber("scale", "scale c", "numbers", scale)])
    return render_page(
        Page(
            title=view._title,
            headline="The lead",
            heads=heads,
            sections=[embedding_section(view)],
            provenance={},
            start=view.anomalies[0][:2],
        )
    )


def made_view(
    layers: int = 3,
    heads: int = 4,
    lengths: Sequence[int] = (7, 9, 5),
    *,
    projections: Sequence[tuple[str, int]] = (("pca", 3), ("tsne", 2)),
    missing: Sequence[tuple[int, int]] = (),
    precision: Any = torch.float32,
    images: PatchImages | None = None,
    hostile: bool = True,
) -> JointEmbedding:
    """Texts of random words, each beginning with `<s>`; the first holds the hostile tokens, or its tokens are patches.

    The whole attention is there for the first two texts. The second to fourth head have longer keys than queries.
    """
    generator = np.random.default_rng(0)
    labels: list[str] = []
    for number, length in enumerate(lengths):
        words = ["<s>", *(f" {word}" for word in generator.choice(WORDS, length - 1))]
        if hostile and number == 0:
            words[1 : 1 + len(TOKENS)] = TOKENS[: length - 1]
        labels += words[:length]
    text = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    places = [place for place in np.ndindex(layers, heads) if place not in missing]
    made = [_head(generator, *place, labels, position, np.asarray(lengths)[text], projections) for place in places]
    patterns = {str(number): _patterns(generator, len(made), lengths[number], precision) for number in range(2)}
    stacked = {name: torch.stack([torch.from_numpy(head[name]) for head in made]) for name in made[0] if name != "kind"}
    layer, head = torch.tensor(places).T
    ratio = torch.full((len(made),), 1.5, dtype=torch.float64)
    ratio[1:4] = torch.tensor([10.0, 9.0, 8.0])
    numbers = {
        "scale": stacked["scale"],
        "correlation": -0.9 + 0.01 * head.double(),
        "spearman": torch.full_like(ratio, -0.85),
        "query_norm": torch.ones_like(ratio),
        "key_norm": ratio,
    }
    tokens = [label for label, number in zip(labels, text, strict=True) if number < 2]
    split = {"0": tokens[: lengths[0]], "1": tokens[lengths[0] :]}
    if images is not None:
        labels = [PATCH_LABELS[place] for place in position]
    return JointEmbedding(
        heads=tuple(places),
        n_layers=layers,
        n_heads=heads,
        stack="",
        geometry="scaled",
        shift=True,
        chosen_by="auto",
        dims=2,
        perplexity=50.0,
        seed=0,
        labels=tuple(labels),
        text=torch.from_numpy(text),
        position=torch.from_numpy(position),
        lengths=torch.tensor(lengths),
        special=torch.from_numpy(position == 0),
        types=torch.tensor([TOKEN_TYPES.index(TYPES.get(label.strip(), "word")) for label in labels]),
        documents=tuple(range(len(lengths))),
        texts_seen=len(lengths),
        pairs=(100,) * layers,
        all_pairs=False,
        vectors=stacked["pca"],
        offsets=torch.zeros(len(made), 3),
        norms=stacked["norms"],
        highest=stacked["highest"],
        weights=stacked["weights"],
        numbers={name: numbers.get(name, ratio * torch.nan) for name in NUMBERS},
        after={"pca": dict.fromkeys(AFTER, 0.913 - 0.01 * layer.double())},
        flags=("",) * len(made),
        grid=stacked["grid"],
        curve=stacked["curve"],
        points={name: stacked[name] for name, _ in projections},
        patterns=patterns,
        text_labels={number: tuple(row) for number, row in split.items()},
        text_special={number: torch.arange(len(row)) == 0 for number, row in split.items()},
        sink=False,
        images=images,
        types_of_heads=tuple(head["kind"] for head in made),
        provenance=Provenance(f"synthetic {HOSTILE}" if hostile else "a synthetic model", "", "", (), ()),
    )


def _head(
    generator: np.random.Generator,
    layer: int,
    head: int,
    labels: Sequence[str],
    position: np.ndarray,
    length: np.ndarray,
    projections: Sequence[tuple[str, int]],
) -> dict[str, Any]:
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
    first_weight = generator.uniform(0.5, 0.9, size=count)
    grid = np.geomspace(0.1, 10, 21)
    scale = np.exp(generator.normal() / 2)
    return by_name | {
        "norms": np.exp(generator.normal(size=2 * count) / 3 + np.repeat([1, 2], count)).astype(np.float32),
        "highest": np.stack([starts + position, second], axis=1).astype(np.int64),
        "weights": np.stack([first_weight, (1 - first_weight) * (position > 0)], axis=1).astype(np.float32),
        "scale": np.asarray(scale),
        "grid": grid,
        "curve": -0.9 + 0.2 * np.log(grid / scale) ** 2,
        "kind": {"spiral": "previous token", "by word": "duplicate token", "": ""}[kind],
    }


def _patterns(generator: np.random.Generator, heads: int, length: int, precision: Any) -> torch.Tensor:
    """Causal rows with much attention on the first token, sharper in some heads."""
    scores = generator.normal(size=(heads, length, length)) * (1 + np.arange(heads) % 4)[:, None, None]
    scores[:, :, 0] += 3
    exponential = np.where(np.triu(np.ones((length, length), dtype=bool), k=1), 0, np.exp(scores))
    return torch.from_numpy(exponential / exponential.sum(axis=-1, keepdims=True)).to(precision)


PATCH_LABELS: Final = ["[CLS]", *(f"{row},{column}" for row in range(4) for column in range(5))]


def made_images(rows: int = 4, columns: int = 5, count: int = 3) -> PatchImages:
    """Pictures with a colour gradient as PNGs; each has the tokens `PATCH_LABELS`."""
    generator = np.random.default_rng(3)
    pictures, colours = {}, []
    for number in range(count):
        pixels = generator.integers(0, 60, size=(rows * 16, columns * 16, 3))
        pixels[..., number % 3] += np.linspace(0, 190, columns * 16).astype(int)[None]
        pixels[..., (number + 1) % 3] += np.linspace(0, 150, rows * 16).astype(int)[:, None]
        if number < 2:
            pictures[str(number)] = express.imshow(pixels.astype(np.uint8), binary_string=True).data[0].source
        means = pixels.reshape(rows, 16, columns, 16, 3).mean(axis=(1, 3)).reshape(-1, 3)
        colours.append(np.concatenate([np.zeros((1, 3)), means]))
    return PatchImages((rows, columns), pictures, torch.from_numpy(np.concatenate(colours)).float())
