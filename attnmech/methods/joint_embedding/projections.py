"""Projects points to 2 or 3 dimensions with scikit-learn (PCA, t-SNE), umap-learn, PaCMAP or openTSNE."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError

Points: TypeAlias = NDArray[Any]
"""`[point d]`, in float32 or float64."""

Watch: TypeAlias = Callable[[float], None]
"""Called with the share of a projection's iterations that are done, if the library tells it."""

PROJECTIONS: Final = ("pca", "tsne", "umap", "pacmap", "opentsne")

METRICS: Final = {"pca": "euclidean", "pacmap": "euclidean", "tsne": "cosine", "umap": "cosine", "opentsne": "cosine"}
"""The metric of the neighbours that each projection preserves; AttentionViz uses the cosine for t-SNE and UMAP."""

NEIGHBOURS: Final = {"umap": 15, "pacmap": 10}
"""The number of neighbours that UMAP and PaCMAP use: their own defaults."""

TRUSTED: Final = 5
"""The number of neighbours that `trustworthiness` uses."""

CANNOT_PLACE: Final = {
    "tsne": 'scikit-learn\'s t-SNE embeds only the points that it was fitted on; use projection="opentsne"',
    "pacmap": "PaCMAP treats new points as another data set, so a known point may land elsewhere",
}
"""The reasons why a projection cannot place further points."""

_PACKAGES: Final = {"umap": "umap", "pacmap": "pacmap", "opentsne": "openTSNE"}


@dataclass(frozen=True)
class Projection:
    """Points in 2 or 3 dimensions, and the function that places further points."""

    points: Points
    place: Callable[[Points], Points] | None
    """None if the library cannot place further points (`CANNOT_PLACE`)."""


def project(
    name: str, points: Points, *, dims: int, perplexity: float, seed: int, watch: Watch = lambda share: None
) -> Projection:
    """Projects points `[point d]` to 2 or 3 dimensions, reproducibly for a seed.

    Raises `InputError` for too few points, and for a library that is not installed.
    """
    check_enough(name, len(points), dims=dims, perplexity=perplexity)
    wide = np.ascontiguousarray(points, dtype=np.float32 if name in ("umap", "pacmap") else np.float64)
    with _quiet():
        return _BY[name](wide, dims, perplexity, seed, watch)


def require_installed(name: str) -> None:
    """Raises `InputError` naming the extra, if the library of a projection is missing."""
    if name in _PACKAGES:
        try:
            import_module(_PACKAGES[name])
        except ImportError as error:
            raise InputError(f'projection="{name}" needs: pip install "attnmech[{name}]".') from error


def check_enough(name: str, count: int, *, dims: int, perplexity: float) -> None:
    """Raises `InputError` if a projection needs more points."""
    if name in ("tsne", "opentsne") and 3 * perplexity > count - 1:
        raise InputError(
            f"a perplexity of {perplexity:g} needs {int(3 * perplexity) + 2} points; {count // 2} tokens give "
            f"{count}, one query and one key each. Use more text, or perplexity={max(1, (count - 1) // 3)} or less."
        )
    least = NEIGHBOURS.get(name, dims) + 1
    if count < least:
        raise InputError(
            f'projection="{name}" in {dims} dimensions needs {least} points; {count // 2} tokens give {count}, one '
            "query and one key each. Use more text."
        )


def trustworthiness(points: Points, projected: Points, metric: str) -> float:
    """Measures, from 0 to 1, to what extent neighbours in the picture were neighbours before (Venna & Kaski 2001).

    Computed by scikit-learn with 5 neighbours, or fewer for few points; NaN for fewer than four points.
    """
    from sklearn.manifold import trustworthiness as measured  # type: ignore[import-untyped]

    neighbours = min(TRUSTED, (len(points) - 1) // 2)
    if neighbours < 1 or len(points) < 4:
        return float("nan")
    return float(measured(points, projected, n_neighbors=neighbours, metric=metric))


def _pca(points: Points, dims: int, perplexity: float, seed: int, watch: Watch) -> Projection:
    from sklearn.decomposition import PCA  # type: ignore[import-untyped]

    count = min(dims, *points.shape)
    # The exact solver on the covariance needs no random start, and no further matrix of the points' size.
    fitted = PCA(n_components=count, svd_solver="covariance_eigh").fit(points)

    def place(more: Points) -> Points:
        placed: Points = fitted.transform(np.asarray(more, dtype=np.float64))
        return np.pad(placed, ((0, 0), (0, dims - count)))

    return Projection(place(points), place)


def _tsne(points: Points, dims: int, perplexity: float, seed: int, watch: Watch) -> Projection:
    from sklearn.manifold import TSNE

    made = TSNE(n_components=dims, metric="cosine", perplexity=perplexity, init="pca", random_state=seed)
    # scikit-learn only prints its iterations, and the process's output is the user's, so `watch` hears nothing.
    return Projection(made.fit_transform(points), None)


def _umap(points: Points, dims: int, perplexity: float, seed: int, watch: Watch) -> Projection:
    from umap import UMAP  # type: ignore[import-untyped]

    # UMAP is reproducible with one thread only.
    made = UMAP(n_components=dims, n_neighbors=NEIGHBOURS["umap"], metric="cosine", random_state=seed, n_jobs=1)
    placed = made.fit_transform(points)

    def place(more: Points) -> Points:
        with _quiet():
            return np.asarray(made.transform(np.ascontiguousarray(more, dtype=np.float32)))

    return Projection(placed, place)


def _pacmap(points: Points, dims: int, perplexity: float, seed: int, watch: Watch) -> Projection:
    from pacmap import PaCMAP  # type: ignore[import-untyped]

    made = PaCMAP(n_components=dims, n_neighbors=NEIGHBOURS["pacmap"], random_state=seed)
    return Projection(made.fit_transform(points, init="pca"), None)


def _opentsne(points: Points, dims: int, perplexity: float, seed: int, watch: Watch) -> Projection:
    from openTSNE import TSNE  # type: ignore[import-untyped]

    fast = {"negative_gradient_method": "bh"} if dims > 2 else {}
    made = TSNE(n_components=dims, metric="cosine", perplexity=perplexity, random_state=seed, **fast)
    calls, watching = 0, True

    def hear(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if watching:  # not while further points are placed
            watch(calls * made.callbacks_every_iters / (made.early_exaggeration_iter + made.n_iter))

    made.callbacks = [hear]
    fitted = made.fit(points)
    watching = False

    def place(more: Points) -> Points:
        with _quiet():
            # openTSNE uses its own perplexity of 5 for further points.
            return np.asarray(fitted.transform(np.asarray(more, dtype=np.float64)))

    return Projection(np.asarray(fitted), place)


_BY: Final[dict[str, Callable[[Points, int, float, int, Watch], Projection]]] = {
    "pca": _pca, "tsne": _tsne, "umap": _umap, "pacmap": _pacmap, "opentsne": _opentsne,
}  # fmt: skip


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the libraries' internal warnings and PaCMAP's log."""
    log = logging.getLogger("pacmap")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
