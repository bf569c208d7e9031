"""Projects points to 2 or 3 dimensions with scikit-learn (PCA, t-SNE), umap-learn, PaCMAP or openTSNE."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from ...errors import InputError
from .token_pairs import drawn

Points: TypeAlias = NDArray[Any]  # `[point d]`, in float32 or float64
Watch: TypeAlias = Callable[[float], None]  # called with the share of iterations done, if the library tells it
PROJECTIONS: Final = ("pca", "tsne", "umap", "pacmap", "opentsne")

METRICS: Final = {"pca": "euclidean", "pacmap": "euclidean", "tsne": "cosine", "umap": "cosine", "opentsne": "cosine"}
"""The metric of the neighbours that each projection preserves; AttentionViz uses the cosine for t-SNE and UMAP."""

NEIGHBOURS: Final = {"umap": 15, "pacmap": 10}  # the number of neighbours that UMAP and PaCMAP use: their own defaults
TRUSTED: Final = 5

CANNOT_PLACE: Final = {
    "tsne": 'scikit-learn\'s t-SNE embeds only the points that it was fitted on; use projection="opentsne"',
    "pacmap": "PaCMAP treats new points as another data set, so a known point may land elsewhere",
}

_PACKAGES: Final = {"umap": "umap", "pacmap": "pacmap", "opentsne": "openTSNE"}
FITTED: Final = 12_000  # the most points of a head to which a projection is fitted; it then places the others
Place: TypeAlias = Callable[[Points], Points]
Fitted: TypeAlias = tuple[Points, Place | None]  # None if the library places no further points: `CANNOT_PLACE`


@dataclass(frozen=True)
class Projecting:
    """A projection's name and settings."""

    name: str
    dims: int
    perplexity: float
    seed: int

    def check(self, count: int) -> None:
        """Raises `InputError` for too few points, and for more points than a projection is fitted to, if it cannot
        place the others.
        """
        name, tokens = self.name, count // 2
        if count > FITTED and name in CANNOT_PLACE:
            raise InputError(
                f'projection="{name}" takes at most {FITTED:,} points ({FITTED // 2:,} tokens); got {tokens:,} tokens. '
                f"Use sample={FITTED // 2} or less, or a projection that can place further points: "
                '"pca", "umap" or "opentsne".'
            )
        fitted = min(count, FITTED)
        if name in ("tsne", "opentsne") and 3 * self.perplexity > fitted - 1:
            raise InputError(
                f"a perplexity of {self.perplexity:g} needs {int(3 * self.perplexity) + 2} points; {fitted // 2} "
                f"tokens give {fitted}, one query and one key each. Use more text, or "
                f"perplexity={max(1, (fitted - 1) // 3)} or less."
            )
        least = NEIGHBOURS.get(name, self.dims) + 1
        if count < least:
            raise InputError(
                f'projection="{name}" in {self.dims} dimensions needs {least} points; {tokens} tokens give {count}, '
                "one query and one key each. Use more text."
            )

    def fit(self, vectors: Float[Tensor, "point d"], watch: Watch = lambda share: None) -> Fitted:
        """Fits the projection to a head's points, or to the queries and keys of a sample of its tokens."""
        dtype = np.float32 if self.name in ("umap", "pacmap") else np.float64
        fitted = vectors if self.name == "pca" else vectors[self._fitted(len(vectors))]
        wide = np.ascontiguousarray(fitted.numpy(), dtype=dtype)
        with _quiet():
            points, transform = _BY[self.name](wide, self.dims, self.perplexity, self.seed, watch)

        def place(more: Points) -> Points:
            assert transform is not None
            with _quiet():
                return np.asarray(transform(np.ascontiguousarray(more, dtype=dtype)))

        return points, place if transform else None

    def points(self, vectors: Float[Tensor, "point d"], watch: Watch) -> Float[Tensor, "point dims"]:
        """Returns all of a head's points in the picture, in float32; `watch` hears of the share that is done."""
        points, place = self.fit(vectors, watch)
        if len(points) == len(vectors):
            return torch.from_numpy(np.asarray(points, dtype=np.float32))
        assert place is not None
        chosen = self._fitted(len(vectors))
        rest = torch.ones(len(vectors), dtype=torch.bool).index_fill(0, chosen, False)
        placed = torch.empty(len(vectors), self.dims)
        placed[chosen] = torch.from_numpy(points).float()
        placed[rest] = torch.from_numpy(place(vectors[rest].numpy())).float()
        return placed

    def _fitted(self, count: int) -> Tensor:
        chosen = drawn(count // 2, FITTED // 2, [self.seed, 2])
        return torch.cat((chosen, chosen + count // 2))


def require_installed(name: str) -> None:
    """Raises `InputError` naming the extra, if the library of a projection is missing."""
    if name in _PACKAGES:
        try:
            import_module(_PACKAGES[name])
        except ImportError as error:
            raise InputError(f'projection="{name}" needs: pip install "attnmech[{name}]".') from error


def trustworthiness(points: Points, projected: Points, metric: str) -> float:
    """Measures, from 0 to 1, to what extent neighbours in the picture were neighbours before (Venna & Kaski 2001).

    Computed by scikit-learn with 5 neighbours, or fewer for few points; NaN for fewer than four points.
    """
    from sklearn.manifold import trustworthiness as measured  # type: ignore[import-untyped]

    neighbours = min(TRUSTED, (len(points) - 1) // 2)
    if neighbours < 1 or len(points) < 4:
        return float("nan")
    return float(measured(points, projected, n_neighbors=neighbours, metric=metric))


def _pca(points: Points, dims: int, perplexity: float, seed: int, watch: Watch) -> Fitted:
    from sklearn.decomposition import PCA  # type: ignore[import-untyped]

    count = min(dims, *points.shape)
    # The exact solver on the covariance needs no random start, and no further matrix of the points' size.
    fitted = PCA(n_components=count, svd_solver="covariance_eigh").fit(points)

    def transform(more: Points) -> Points:
        return np.pad(fitted.transform(more), ((0, 0), (0, dims - count)))

    return transform(points), transform


def _tsne(points: Points, dims: int, perplexity: float, seed: int, watch: Watch) -> Fitted:
    from sklearn.manifold import TSNE

    made = TSNE(n_components=dims, metric="cosine", perplexity=perplexity, init="pca", random_state=seed)
    # scikit-learn only prints its iterations, and the process's output is the user's, so `watch` hears nothing.
    return made.fit_transform(points), None


def _umap(points: Points, dims: int, perplexity: float, seed: int, watch: Watch) -> Fitted:
    from umap import UMAP  # type: ignore[import-untyped]

    # UMAP is reproducible with one thread only.
    made = UMAP(n_components=dims, n_neighbors=NEIGHBOURS["umap"], metric="cosine", random_state=seed, n_jobs=1)
    return made.fit_transform(points), made.transform


def _pacmap(points: Points, dims: int, perplexity: float, seed: int, watch: Watch) -> Fitted:
    from pacmap import PaCMAP  # type: ignore[import-untyped]

    made = PaCMAP(n_components=dims, n_neighbors=NEIGHBOURS["pacmap"], random_state=seed)
    return made.fit_transform(points, init="pca"), None


def _opentsne(points: Points, dims: int, perplexity: float, seed: int, watch: Watch) -> Fitted:
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
    return np.asarray(fitted), fitted.transform  # which has its own perplexity of 5


_BY: Final[dict[str, Callable[[Points, int, float, int, Watch], Fitted]]] = {
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
