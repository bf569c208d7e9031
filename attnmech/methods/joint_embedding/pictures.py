"""Projects the points of every head, and measures how well distances in the picture still fit dot products."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import InputError
from ...maths.ranks import rank_correlation
from .distances import weighted_correlation
from .projections import CANNOT_PLACE, METRICS, Projection, Watch, project, trustworthiness
from .token_pairs import Pairs, drawn

FITTED: Final = 12_000
"""The largest number of a head's points to which a projection is fitted; it then places the other points."""

TRUST_POINTS: Final = 1_000
"""The largest number of random points for trustworthiness, which compares every pair of points."""

AFTER: Final = ("correlation", "spearman", "trustworthiness")
"""The measures taken after projection."""


@dataclass(frozen=True)
class Projecting:
    """A projection's name and settings."""

    name: str
    dims: int
    perplexity: float
    seed: int

    def check_room(self, count: int) -> None:
        """Raises `InputError` for more points than a projection is fitted to, if it cannot place the others."""
        if count > FITTED and self.name in CANNOT_PLACE:
            raise InputError(
                f'projection="{self.name}" takes at most {FITTED:,} points ({FITTED // 2:,} tokens); got '
                f"{count // 2:,} tokens. Use sample={FITTED // 2} or less, or a projection that can place further "
                'points: "pca", "umap" or "opentsne".'
            )

    def fit(self, vectors: Float[Tensor, "point d"], watch: Watch = lambda share: None) -> Projection:
        """Fits the projection to a head's points, or to the queries and keys of a sample of its tokens."""
        fitted = vectors[self._fitted(len(vectors))] if self.name != "pca" else vectors
        settings: Any = {"dims": self.dims, "perplexity": self.perplexity, "seed": self.seed}
        return project(self.name, fitted.numpy(), watch=watch, **settings)

    def points(self, vectors: Float[Tensor, "point d"], watch: Watch) -> Float[Tensor, "point dims"]:
        """Returns all of a head's points in the picture, in float32; `watch` hears of the share that is done."""
        projection = self.fit(vectors, watch)
        if len(projection.points) == len(vectors):
            return torch.from_numpy(np.asarray(projection.points, dtype=np.float32))
        assert projection.place is not None
        chosen = self._fitted(len(vectors))
        rest = torch.ones(len(vectors), dtype=torch.bool).index_fill(0, chosen, False)
        placed = torch.empty(len(vectors), self.dims)
        placed[chosen] = torch.from_numpy(projection.points).float()
        placed[rest] = torch.from_numpy(projection.place(vectors[rest].numpy())).float()
        return placed

    def _fitted(self, count: int) -> Tensor:
        tokens = count // 2
        chosen = drawn(tokens, FITTED // 2, [self.seed, 2])
        return torch.cat((chosen, chosen + tokens))


def after_projection(
    name: str,
    vectors: Float[Tensor, "point d"],
    points: Float[Tensor, "point dims"],
    offset: Float[Tensor, " d"],
    pairs: Pairs,
    seed: int,
) -> dict[str, float]:
    """Measures how well distances in the picture fit dot products, over the pairs of points that attention sees.

    `offset` is the vector that a shift added to the keys; it is subtracted again, so dot products are the model's.
    """
    tokens = len(vectors) // 2
    queries, keys = vectors[:tokens].double(), vectors[tokens:].double() - offset.double()
    wide = points.double()
    product = pairs.products(queries, keys)
    distance = (
        torch.cat(
            [
                (wide[query] - wide[tokens + key]).norm(dim=-1)
                for query, key in zip(torch.split(pairs.query, 2**18), torch.split(pairs.key, 2**18), strict=True)
            ]
        )
        if len(pairs)
        else product
    )
    some = drawn(len(vectors), TRUST_POINTS, [seed, 3])
    return {
        "correlation": weighted_correlation(distance, product),
        "spearman": rank_correlation(distance, product),
        "trustworthiness": trustworthiness(vectors[some].numpy(), points[some].numpy(), METRICS[name]),
    }
