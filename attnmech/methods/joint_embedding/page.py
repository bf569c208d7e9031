"""The page of joint embeddings: all heads as small plots, one head large, sentences and search, with packed numbers."""

import math
from collections.abc import Sequence
from importlib.resources import files
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float32
from scipy.spatial.distance import pdist  # type: ignore[import-untyped]
from torch import Tensor

from ...basics.nouns import counted
from ...draw.embed import View
from ...draw.packing import pack_keys, pack_texts, pack_values
from ...draw.scripts import of_question
from ...draw.section import Section
from ...draw.sentence import sentence_view
from ...draw.text import rounded, visible_token
from ...runs.token_types import TOKEN_TYPES
from .embedded_points import EmbeddedPoints, searched
from .numbers import NUMBERS
from .patch_images import PatchImages
from .pictures import NAMES

FILES: Final = (
    *("embedding_points.js", "embedding_colours.js", "embedding_painters.js", "embedding_matrix.js"),
    *("embedding_attention.js", "embedding_head.js", "embedding_numbers.js", "embedding_picture.js"),
    *("embedding.js", "embedding.css"),
)
SCRIPT: Final = of_question("joint_embedding", tuple(files(__package__) / name for name in FILES))
MOST_COMPARED: Final = 1000  # the largest number of points of a kind over which mean distances are taken, evenly chosen

MEANINGS: Final = {
    "correlation (": "the same correlation between the plotted points, after projection",
    "correlation": "between distance and query-key product before projection, weighted towards nearby pairs; −1: "
    "the nearer a key, the larger its score",
    "Spearman": "rank correlation between the same distance and product",
    "key norm / query norm": "norm of keys relative to queries, before scaling",
    "norm disparity": "median key norm over median query norm",
    "separated clusters": "distance between the centroids of queries and keys before the shift, in spreads of a cloud",
    "attends to first": "mean attention to the first token",
    "trustworthiness": "how well neighbours in the plot agree with neighbours before projection; 1 is perfect",
}
"""The meanings of the usual numbers, by the beginning of their labels."""

_SHOWN: Final = [number for number in NUMBERS.values() if number.label]

IN_ADDRESS: Final = (
    *("show", "projection", "pointColour", "search", "whole", "sorted", "size", "flat", "pictures", "labels", "lines"),
    *("bySize", "text", "point", "mode", "least", "hideFirst", "hideSpecial"),
)

LEAD: Final = (
    "Each token is plotted twice, as a query (●) and as a key (■); a query lies near the keys that it attends to, "
    "as far as the projection allows."
)

READING: Final = (
    "The queries and keys of a head share one space, scaled and shifted without changing its attention. Select a "
    "head among the small plots by click or with the arrow keys; in the large plot, click a point to see its "
    "attention. Distances in a projection are approximate: check the correlation and the trustworthiness beside the "
    "plot before trusting a cluster. In the text, hiding tokens renormalises attention over the other keys; a row "
    "is blank if these have too little attention for the stored precision to determine it to 1 %."
)


def embedding_section(embedded: EmbeddedPoints) -> Section:
    """Returns the view as the section of a page."""
    drawn = embedding_view(embedded)
    return Section("Queries and keys of each head", f"{LEAD} {READING}", {"embedding": drawn}, finding=drawn.finding)


def embedding_view(embedded: EmbeddedPoints) -> View:
    """Returns the points and numbers of all heads, and the whole attention of a few texts, as a view that displays
    itself in a notebook.
    """
    heads, tokens, texts = len(embedded.heads), len(embedded.labels), len(set(embedded.text.tolist()))
    summary = (
        f"{counted(heads, noun='head')} of {embedded.provenance.short_name}, {counted(tokens, noun='token')} "
        f"from {texts:,} {embedded._unit}{'' if texts == 1 else 's'}."
    )
    return View("embedding", embedded._title, READING, _data(embedded), (SCRIPT,), summary)


def _data(embedded: EmbeddedPoints) -> dict[str, Any]:
    layers = sorted({layer for layer, _ in embedded.heads})
    types_of_tokens = [TOKEN_TYPES[kind] for kind in embedded.types.tolist()]
    classes, kinds = sorted(set(types_of_tokens)), sorted(set(embedded.types_of_heads) - {""})
    numbers = [_numbers(embedded, place) for place in range(len(embedded.heads))]
    labels = dict.fromkeys([*chain(*numbers), *(anomaly.what for anomaly in embedded.anomalies)])
    return {
        "inAddress": IN_ADDRESS,
        "layers": layers,
        "places": [[layers.index(layer), head] for layer, head in embedded.heads],
        "tokens": len(embedded.labels),
        "unit": embedded._unit,
        "labels": pack_texts(tuple(visible_token(label) for label in embedded.labels)),
        "characters": pack_texts(tuple(searched(label) for label in embedded.labels)),
        "text": pack_keys(embedded.text.numpy()[None], axes=1),
        "position": pack_keys(embedded.position.numpy()[None], axes=1),
        "lengths": embedded.lengths.tolist(),
        "special": embedded.special.nonzero().flatten().tolist(),
        "classes": classes,
        "class": pack_keys(np.array([classes.index(name) for name in types_of_tokens])[None], axes=1),
        "kinds": kinds,
        "projections": {name: _projection(name, points.numpy()) for name, points in embedded.points.items()},
        "norms": pack_values(embedded.norms.numpy(), axes=1),
        "highest": pack_keys(embedded.highest.numpy(), axes=1),
        "weights": pack_values(embedded.weights.numpy(), axes=1),
        "about": [
            {
                "kind": kinds.index(kind) if kind else -1,
                "scale": rounded(scale),
                "curve": [[rounded(value) for value in values] for values in curve],
                "numbers": of_head,
            }
            for kind, scale, curve, of_head in zip(
                embedded.types_of_heads or [""] * len(embedded.heads),
                embedded.numbers["scale"].tolist(),
                torch.stack((embedded.grid, embedded.curve), dim=1).tolist(),
                numbers,
                strict=True,
            )
        ],
        "meanings": {label: _meaning(label) for label in labels},
        "texts": {number: _sentence(embedded, number, layers) for number in embedded.patterns},
        "notes": list(embedded.notes),
        "anomalies": [
            [layers.index(layer), head, what, rounded(number)] for layer, head, what, number in embedded.anomalies
        ],
        "images": None if embedded.images is None else _images(embedded.images, embedded.labels),
    }


def _projection(name: str, in_picture: Float[np.ndarray, "chosen point dims"]) -> dict[str, Any]:
    """Packs the points of every head with one scale for all its axes, which preserves angles."""
    points = in_picture.astype(np.float64)
    centre = (points.min(axis=1) + points.max(axis=1)) / 2
    return {
        "label": NAMES[name],
        "dims": points.shape[-1],
        "centre": centre.tolist(),
        "points": pack_values(points - centre[:, None], axes=1),
        "spread": [[mean_apart(half) for half in np.split(of_head, 2)] for of_head in in_picture],
    }


def mean_apart(points: Float[np.ndarray, "point dim"]) -> float:
    """Returns the mean distance between two different points; of many points, it takes evenly spaced ones.

    >>> mean_apart(np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]))
    3.3333333333333335
    """
    count = min(len(points), MOST_COMPARED)
    some = points[np.arange(count) * len(points) // count]
    return float(pdist(some).mean()) if count > 1 else 0.0


def _numbers(embedded: EmbeddedPoints, place: int) -> dict[str, float | None]:
    """The numbers of one head by their labels, in order; without those that were not measured."""
    measured = {number.label: float(embedded.numbers[number.name][place]) for number in _SHOWN}
    known = {label: value for label, value in measured.items() if not math.isnan(value)}
    known["key norm / query norm"] = float(embedded.numbers["key_norm"][place] / embedded.numbers["query_norm"][place])
    for projection, measures in embedded.after.items():
        for name in ("correlation", "trustworthiness"):
            known[f"{name} ({NAMES[projection]})"] = float(measures[name][place])
    return {label: rounded(value) for label, value in known.items()}


def _meaning(label: str) -> str:
    readings = {number.label: number.reading for number in _SHOWN}
    known = (words for start, words in MEANINGS.items() if label.startswith(start))
    return readings.get(label) or next(known, "")


def _sentence(embedded: EmbeddedPoints, number: str, layers: list[int]) -> dict[str, Any]:
    """The data of a text's sentence view; heads that were not embedded have no weights."""
    stored = embedded.patterns[number]
    shape = (len(layers), 1 + max(head for _, head in embedded.heads), *stored.shape[1:])
    pattern: Float32[np.ndarray, "layer head query key"] = np.zeros(shape, dtype=np.float32)
    rest = np.zeros(shape[:3], dtype=np.float32)
    places = [(layers.index(layer), head) for layer, head in embedded.heads]
    for place, of_head in zip(places, stored.float(), strict=True):
        pattern[place] = of_head
        rest[place] = (1 - of_head.sum(dim=-1)).clamp_min(0)
    missing = [block for block, place in enumerate(np.ndindex(shape[:2])) if place not in places]
    made = sentence_view(
        pattern,
        embedded.text_labels[number],
        layers=layers,
        special=embedded.text_special[number].tolist(),
        sums_to_one=not embedded.sink and not missing,
    )
    data = {name: value for name, value in made.data.items() if name != "rest"}
    if embedded.sink:
        data["rest"] = pack_values(rest)
    return data | {"embedded": True, "missing": missing, "floor": _floor(stored, sink=embedded.sink)}


def _floor(pattern: Float[Tensor, "chosen query key"], *, sink: bool) -> float:
    """The smallest total attention of a row's remaining keys that determines their weights to within 1 %.

    Half a step of the smallest numbers is 2⁻²⁵ in float16 and 2⁻¹⁵⁰ in float32. The weight of no key is 1 minus a sum
    that was rounded to 2⁻¹² or 2⁻²⁵ of its size.
    """
    smallest, relative = (2.0**-25, 2.0**-12) if pattern.dtype == torch.float16 else (2.0**-150, 2.0**-25)
    return 100 * (pattern.shape[-1] * smallest + (relative if sink else 0))


def _images(images: PatchImages, labels: Sequence[str]) -> dict[str, Any]:
    places = [tuple(map(int, label.split(","))) if "," in label else (-1, -1) for label in labels]
    return {
        "pictures": dict(images.pictures),
        "grid": list(images.grid),
        "place": pack_keys(np.array(places)[None], axes=1),
        "colours": pack_keys(images.colours.long().numpy()[None], axes=1),
    }
