"""The page of joint embeddings: all heads as small plots, one head large, sentences and search, with packed numbers."""

from importlib.resources import files
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Float32
from scipy.spatial.distance import pdist  # type: ignore[import-untyped]

from ...basics.nouns import counted
from ...draw.embed import View
from ...draw.packing import pack_keys, pack_texts, pack_values
from ...draw.scripts import of_question
from ...draw.section import Section
from ...draw.sentence import sentence_view
from ...draw.text import visible_token
from .page_data import EmbeddingHead, EmbeddingImages, EmbeddingText, EmbeddingView, searched

FILES: Final = (
    *("embedding_points.js", "embedding_colours.js", "embedding_painters.js", "embedding_matrix.js"),
    *("embedding_attention.js", "embedding_head.js", "embedding_numbers.js", "embedding_picture.js"),
    *("embedding.js", "embedding.css"),
)
SCRIPT: Final = of_question("joint_embedding", tuple(files(__package__) / name for name in FILES))
"""The script and style of the page."""

MOST_COMPARED: Final = 1000
"""The largest number of points of a kind over which mean distances are taken, evenly chosen."""

NAMES: Final = {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP", "pacmap": "PaCMAP", "opentsne": "openTSNE"}

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

IN_ADDRESS: Final = (
    *("show", "projection", "pointColour", "search", "whole", "sorted", "size", "flat", "pictures", "labels", "lines"),
    *("bySize", "text", "point", "mode", "least", "hideFirst", "hideSpecial"),
)
"""The names of the view's choices in the page's address."""

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


def embedding_section(view: EmbeddingView) -> Section:
    """Returns the view as the section of a page."""
    drawn = embedding_view(view)
    return Section("Queries and keys of each head", f"{LEAD} {READING}", {"embedding": drawn}, finding=drawn.finding)


def embedding_view(view: EmbeddingView) -> View:
    """Returns the contents of the page as a view that displays itself in a notebook."""
    heads, tokens, texts = len(view.heads), len(view.labels), len(set(view.text.tolist()))
    summary = (
        f"{counted(heads, noun='head')} of {view.model}, {counted(tokens, noun='token')} "
        f"from {texts:,} {_unit(view)}{'' if texts == 1 else 's'}."
    )
    return View("embedding", view.title, READING, _data(view), (SCRIPT,), summary)


def _unit(view: EmbeddingView) -> str:
    """The word for the source of tokens."""
    return "text" if view.images is None else "image"


def _data(view: EmbeddingView) -> dict[str, Any]:
    layers = sorted({head.layer for head in view.heads})
    classes, kinds = sorted(set(view.classes)), sorted({head.kind for head in view.heads} - {""})
    return {
        "inAddress": IN_ADDRESS,
        "layers": layers,
        "places": [[layers.index(head.layer), head.head] for head in view.heads],
        "tokens": len(view.labels),
        "unit": _unit(view),
        "labels": pack_texts(tuple(visible_token(label) for label in view.labels)),
        "characters": pack_texts(tuple(searched(label) for label in view.labels)),
        "text": pack_keys(np.asarray(view.text)[None], axes=1),
        "position": pack_keys(np.asarray(view.position)[None], axes=1),
        "lengths": np.asarray(view.lengths).tolist(),
        "special": np.flatnonzero(view.special).tolist(),
        "classes": classes,
        "class": pack_keys(np.array([classes.index(name) for name in view.classes])[None], axes=1),
        "kinds": kinds,
        "projections": {name: _projection(view, name) for name in view.heads[0].points},
        "norms": pack_values(np.stack([head.norms for head in view.heads]).astype(np.float32), axes=1),
        "highest": pack_keys(np.stack([head.highest for head in view.heads]), axes=1),
        "weights": pack_values(np.stack([head.weights for head in view.heads]).astype(np.float32), axes=1),
        "about": [_about(head, kinds) for head in view.heads],
        "meanings": {label: _meaning(view, label) for label in _labels(view)},
        "texts": {str(number): _sentence(view, text, layers) for number, text in view.texts.items()},
        "notes": [str(note) for note in view.notes],
        "anomalies": [
            [layers.index(layer), head, what, _plain(number)] for layer, head, what, number in view.anomalies
        ],
        "images": None if view.images is None else _images(view.images),
    }


# ---- points -------------------------------------------------------------------------------------------------------


def _projection(view: EmbeddingView, name: str) -> dict[str, Any]:
    """Packs the points of every head with 16 bits per coordinate and one scale for all axes of a head, which preserves
    angles.
    """
    points = np.stack([head.points[name] for head in view.heads]).astype(np.float64)
    centre = (points.min(axis=1) + points.max(axis=1)) / 2
    return {
        "label": NAMES.get(name, name),
        "dims": points.shape[-1],
        "centre": centre.tolist(),
        "points": pack_values((points - centre[:, None]).astype(np.float64), axes=1),
        "spread": [[mean_apart(half) for half in np.split(of_head, 2)] for of_head in points.astype(np.float32)],
    }


def mean_apart(points: Float[np.ndarray, "point dim"]) -> float:
    """Returns the mean distance between two different points; of many points, it takes evenly spaced ones.

    >>> mean_apart(np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]))
    3.3333333333333335
    """
    count = min(len(points), MOST_COMPARED)
    some = points[np.arange(count) * len(points) // count]
    return float(pdist(some).mean()) if count > 1 else 0.0


# ---- heads and texts ----------------------------------------------------------------------------------------------


def _about(head: EmbeddingHead, kinds: list[str]) -> dict[str, Any]:
    grid, criterion = (np.asarray(values, dtype=np.float64) for values in head.curve)
    return {
        "kind": kinds.index(head.kind) if head.kind else -1,
        "scale": _plain(head.scale),
        "curve": [[_plain(value) for value in grid], [_plain(value) for value in criterion]],
        "numbers": {label: _plain(number) for label, number in head.numbers.items()},
    }


def _labels(view: EmbeddingView) -> list[str]:
    """The labels of all numbers and anomalies."""
    return list(
        dict.fromkeys(
            [label for head in view.heads for label in head.numbers] + [what for _, _, what, _ in view.anomalies]
        )
    )


def _meaning(view: EmbeddingView, label: str) -> str:
    known = (words for start, words in MEANINGS.items() if label.startswith(start))
    return view.meanings.get(label) or next(known, "")


def _sentence(view: EmbeddingView, text: EmbeddingText, layers: list[int]) -> dict[str, Any]:
    """The data of a sentence view; heads outside `view` have no weights."""
    shape = (len(layers), 1 + max(head.head for head in view.heads), *text.patterns.shape[1:])
    pattern: Float32[np.ndarray, "layer head query key"] = np.zeros(shape, dtype=np.float32)
    rest = np.zeros(shape[:3], dtype=np.float32)
    for block, head in enumerate(view.heads):
        place = layers.index(head.layer), head.head
        pattern[place] = text.patterns[block]
        if text.rest is not None:
            rest[place] = text.rest[block]
    there = {(layers.index(head.layer), head.head) for head in view.heads}
    missing = [block for block, place in enumerate(np.ndindex(shape[:2])) if place not in there]
    whole = text.rest is None and not missing
    made = sentence_view(pattern, text.labels, layers=layers, special=text.special, sums_to_one=whole)
    data = {name: value for name, value in made.data.items() if name != "rest"}
    if text.rest is not None:
        data["rest"] = pack_values(rest)
    return data | {"embedded": True, "missing": missing, "floor": _floor(text)}


def _floor(text: EmbeddingText) -> float:
    """The smallest total attention of a row's remaining keys that determines their weights to within 1 %.

    Half a step of the smallest numbers is 2⁻²⁵ in float16 and 2⁻¹⁵⁰ in float32. The weight of no key is 1 minus a sum
    that was rounded to 2⁻¹² or 2⁻²⁵ of its size.
    """
    smallest, relative = (2.0**-25, 2.0**-12) if text.patterns.dtype == np.float16 else (2.0**-150, 2.0**-25)
    return float(100 * (text.patterns.shape[-1] * smallest + (0 if text.rest is None else relative)))


def _images(images: EmbeddingImages) -> dict[str, Any]:
    return {
        "pictures": {str(number): picture for number, picture in images.pictures.items()},
        "grid": list(images.grid),
        "place": pack_keys(images.place[None], axes=1),
        "colours": pack_keys(images.colours.astype(np.int64)[None], axes=1),
    }


def _plain(value: float) -> float | None:
    """Rounds a value to six digits for JSON; None for NaN and infinities."""
    return float(f"{value:.6g}") if np.isfinite(value) else None
