"""How are the points of every head projected, and what is left of distances in the picture?"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import InputError
from .distances import rank_correlation, weighted_correlation
from .projections import CANNOT_PLACE, METRICS, Projection, project, trustworthiness
from .token_pairs import Pairs

FITTED: Final = 12_000
"""How many points of a head a projection is computed on; further ones are placed by it."""

TRUST_POINTS: Final = 1_000
"""On how many points, drawn at random, trustworthiness is measured: it compares each point with every other."""

AFTER: Final = ("correlation", "spearman", "trustworthiness")
"""What is measured after projection."""


@dataclass(frozen=True)
class Projecting:
    """How points become a picture."""

    name: str
    dims: int
    perplexity: float
    seed: int

    def check_room(self, count: int) -> None:
        """Raises `InputError` for more points than are projected, if the projection cannot place the rest."""
        if count > FITTED and self.name in CANNOT_PLACE:
            raise InputError(
                f'projection="{self.name}" takes {FITTED:,} points, {FITTED // 2:,} tokens, at most; got '
                f"{count // 2:,} tokens. Give sample={FITTED // 2} or less, or a projection that places the others: "
                '"pca", "umap" or "opentsne".'
            )

    def fit(self, vectors: Float[Tensor, "point d"]) -> Projection:
        """The projection of a head's points, or of a sample of them: its tokens' queries and keys."""
        fitted = vectors[self._fitted(len(vectors))] if self.name != "pca" else vectors
        return project(self.name, fitted.numpy(), dims=self.dims, perplexity=self.perplexity, seed=self.seed)

    def points(self, vectors: Float[Tensor, "point d"]) -> Float[Tensor, "point dims"]:
        """All points of a head in the picture, in float32."""
        projection = self.fit(vectors)
        if len(projection.points) == len(vectors):
            return torch.from_numpy(np.asarray(projection.points, dtype=np.float32))
        assert projection.place is not None
        chosen = self._fitted(len(vectors))
        rest = torch.ones(len(vectors), dtype=torch.bool).index_fill(0, chosen, False)
        found = torch.empty(len(vectors), self.dims)
        found[chosen] = torch.from_numpy(projection.points).float()
        found[rest] = torch.from_numpy(projection.place(vectors[rest].numpy())).float()
        return found

    def _fitted(self, count: int) -> Tensor:
        tokens = count // 2
        if count <= FITTED:
            return torch.arange(count)
        drawn = np.sort(np.random.default_rng([self.seed, 2]).choice(tokens, FITTED // 2, replace=False))
        return torch.from_numpy(np.concatenate((drawn, drawn + tokens)))


def after_projection(
    name: str,
    vectors: Float[Tensor, "point d"],
    points: Float[Tensor, "point dims"],
    offset: Float[Tensor, " d"],
    pairs: Pairs,
    seed: int,
) -> dict[str, float]:
    """What distances in the picture say about dot products, over the pairs of points that attention sees.

    `offset` is what a shift has added to the keys: the dot products are those of the model.
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
    some = _some(len(vectors), seed)
    return {
        "correlation": weighted_correlation(distance, product),
        "spearman": rank_correlation(distance, product),
        "trustworthiness": trustworthiness(vectors[some].numpy(), points[some].numpy(), METRICS[name]),
    }


def _some(count: int, seed: int) -> Tensor:
    if count <= TRUST_POINTS:
        return torch.arange(count)
    return torch.from_numpy(np.sort(np.random.default_rng([seed, 3]).choice(count, TRUST_POINTS, replace=False)))
