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
    layers = sorted({layer for layer, _ in view.heads})
    scale = view.scale[layers].numpy()
    return render_page(
        Page(
            title=view._title,
            headline="The lead",
            heads=PageHeads(layers, scale.shape[1], numbers=[HeadNumber("scale", "scale c", "numbers", scale)]),
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
    shape = len(places), len(labels)
    clouds = torch.from_numpy(30 * generator.normal(size=(2, len(places), 2 * len(labels), 3))).float()
    starts = np.arange(len(labels)) - position
    second = np.where(position > 0, starts + generator.integers(0, np.maximum(position, 1), size=shape), -1)
    weight = generator.uniform(0.5, 0.9, size=shape)
    scale, grid = np.exp(generator.normal(size=shape[:1]) / 2), np.geomspace(0.1, 10, 21)
    patterns = {str(number): _patterns(generator, len(places), lengths[number], precision) for number in range(2)}
    _, head = torch.tensor(places).T
    ratio = torch.full(shape[:1], 1.5, dtype=torch.float64)
    ratio[1:4] = torch.tensor([10.0, 9.0, 8.0])
    numbers = {
        "scale": torch.from_numpy(scale),
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
        vectors=clouds[0],
        offsets=torch.zeros(len(places), 3),
        norms=torch.from_numpy(generator.uniform(1, 3, size=(len(places), 2 * len(labels)))).float(),
        highest=torch.from_numpy(np.stack([np.broadcast_to(starts + position, shape), second], axis=-1)),
        weights=torch.from_numpy(np.stack([weight, (1 - weight) * (position > 0)], axis=-1)).float(),
        numbers={name: numbers.get(name, ratio * torch.nan) for name in NUMBERS},
        after={"pca": dict.fromkeys(AFTER, 0.9 + 0.01 * head.double())},
        flags=("",) * len(places),
        grid=torch.from_numpy(grid).expand(len(places), -1),
        curve=torch.from_numpy(0.2 * np.log(grid / scale[:, None]) ** 2 - 0.9),
        points={"pca": clouds[0], "tsne": clouds[1, ..., :2]},
        patterns=patterns,
        text_labels={number: tuple(row) for number, row in split.items()},
        text_special={number: torch.arange(len(row)) == 0 for number, row in split.items()},
        sink=False,
        images=images,
        types_of_heads=tuple(("previous token", "", "duplicate token")[sum(place) % 3] for place in places),
        provenance=Provenance(f"synthetic {HOSTILE}" if hostile else "a synthetic model", "", "", (), ()),
    )


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
