"""The distance of a stream from its token's own embedding, and the rows of the vocabulary nearest to it.

Formulas: docs/formulas.md#residual-drift.

For a stream y at token t, the rows e_v of the vocabulary and a similarity s:

- rank = #{v: s(y, e_v) > s(y, e_t)}, 0 if no row is more similar than the token's own;
- churn = 1 − |K_(l−1) ∩ K_l| / k, where K_l are the k rows most similar to y in layer l.

s is the dot product y·e, the cosine, or the cosine of y − ȳ and e − ē.
"""

from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear

from ...maths.float64 import as_float64
from ...maths.precision import product_rounding

SIMILARITIES: Final = ("cosine", "centred cosine", "dot")
_SPARE: Final = 8  # rows stored besides the k nearest, until close candidates have been compared in float64
_PAIRS_AT_ONCE: Final = 1024  # the largest number of pairs of a stream and a row compared in float64 at once


def directions(
    x: Float[Tensor, "*places d_model"], similarity: str, mean: Float[Tensor, "*#places d_model"] | None = None
) -> Float[Tensor, "*places d_model"]:
    """Returns vectors whose products are the similarity: x, x / ‖x‖, or (x − mean) / ‖x − mean‖; 0 if the norm is 0.

    >>> directions(torch.tensor([3.0, 4.0]), "cosine")
    tensor([0.6000, 0.8000])
    """
    if similarity == "dot":
        return x
    if similarity == "centred cosine":
        assert mean is not None
        x = x - mean
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(norm > 0, x / norm.clamp_min(torch.finfo(x.dtype).tiny), 0.0)


def churn(one: Int[Tensor, "*places k"], other: Int[Tensor, "*places k"]) -> Float[Tensor, "*places"]:
    """Returns 1 − |one ∩ other| / k, for sets without repeats.

    >>> churn(torch.tensor([3, 1, 4, 5]), torch.tensor([5, 9, 2, 3]))
    tensor(0.5000, dtype=torch.float64)
    """
    both = torch.cat((one, other), dim=-1).sort(dim=-1).values
    shared = (both.diff(dim=-1) == 0).sum(dim=-1)
    return 1 - shared.double() / one.shape[-1]


def sum_over_pairs(unit: Float[Tensor, "token d_model"]) -> Float[Tensor, ""]:
    """Returns Σ_(i≠j) cos(y_i, y_j) for unit vectors: ‖Σ ŷ‖² − Σ ‖ŷ‖².

    >>> sum_over_pairs(torch.tensor([[1.0, 0.0], [0.6, 0.8]]))       # two pairs, of cosine 0.6
    tensor(1.2000)
    """
    return unit.sum(dim=0).square().sum() - unit.square().sum()


def centred(products: Float[Tensor, "layer row row"], members: Bool[Tensor, " row"]) -> Float[Tensor, "layer row row"]:
    """Computes the products of streams minus the mean of `members`, from the products of the streams."""
    with_mean = products[:, :, members].mean(dim=-1)
    square = with_mean[:, members].mean(dim=-1)
    return products - with_mean[:, :, None] - with_mean[:, None, :] + square[:, None, None]


def cosine_of(products: Float[Tensor, "layer row row"], one: int, other: int) -> Float[Tensor, " layer"]:
    """Computes the cosine of any two streams from the products of all streams; NaN where one of the two is 0."""
    norms = (products[:, one, one] * products[:, other, other]).clamp_min(0).sqrt()
    return torch.where(norms > 0, products[:, one, other] / norms, torch.nan).clamp(-1, 1)


class Scan:
    """Finds the ranks and nearest rows of many streams, one block of the vocabulary at a time.

    A block costs one matrix product. Comparisons that its rounding error could decide are repeated in float64, namely
    with rows about as similar as the token's own row or the k-th nearest row.

    Args:
        streams: the streams' `directions`, in the precision of the products.
        precise: the streams' `directions` in float64, on `float64_device`.
        own: the id of each stream's own token, on the same device as `precise`.
        k: the number of nearest rows to find.
        rows_of: the `directions` of rows in float64, by their ids.

    """

    def __init__(
        self,
        streams: Float[Tensor, "stream d_model"],
        precise: Float[Tensor, "stream d_model"],
        own: Int[Tensor, " stream"],
        k: int,
        rows_of: Callable[[Int[Tensor, " token"]], Float[Tensor, "token d_model"]],
    ) -> None:
        self._streams, self._precise, self._own, self._k, self._rows_of = streams, precise, own, k, rows_of
        self._rounding = 2 * product_rounding(streams.dtype, streams.shape[-1])
        self._size = torch.linalg.vector_norm(streams, dim=-1)
        self._own_similarity = self._exactly(torch.arange(len(own), device=own.device), own)
        self._more = torch.zeros_like(own)
        self._longest = streams.new_zeros(())
        self._values = streams.new_zeros(len(streams), 0)
        self._ids = torch.zeros(len(streams), 0, dtype=torch.long, device=streams.device)

    def add(self, start: int, rows: Float[Tensor, "row d_model"]) -> None:
        """Compares all streams with the rows `start`, `start` + 1, …"""
        similar = linear(self._streams, rows)
        longest = torch.linalg.vector_norm(rows, dim=-1).max()
        self._longest = torch.maximum(self._longest, longest)
        self._count(start, similar, self._rounding * self._size * longest)
        self._keep_nearest(start, similar)

    def finish(self) -> tuple[Int[Tensor, " stream"], Int[Tensor, "stream k"]]:
        """Returns the ranks of the tokens' own rows, and the ids of the most similar rows, nearest first; among equally
        similar rows, the lower id first.
        """
        values = as_float64(self._values)
        ids = self._ids.to(values.device)
        order = ids.argsort(dim=-1)
        values, ids = values.gather(-1, order), ids.gather(-1, order)
        last = values.topk(self._k, dim=-1).values[:, -1:]
        close = (values - last).abs() <= as_float64(self._rounding * self._size * self._longest)[:, None]
        stream, place = (close & (close.sum(dim=-1, keepdim=True) > 1)).nonzero(as_tuple=True)
        values[stream, place] = self._exactly(stream, ids[stream, place])
        order = values.argsort(dim=-1, descending=True, stable=True)[:, : self._k]
        return self._more, ids.gather(-1, order)

    def _count(self, start: int, similar: Tensor, rounding: Tensor) -> None:
        above = similar - self._own_similarity.to(similar)[:, None]
        self._more += (above > rounding[:, None]).sum(dim=-1).to(self._more.device)
        close = (above.abs_() <= rounding[:, None]).nonzero().to(self._own.device)
        stream, place = close.unbind(dim=1)
        others = start + place != self._own[stream]
        stream, place = stream[others], place[others]
        more = self._exactly(stream, start + place) > self._own_similarity[stream]
        self._more.index_add_(0, stream, more.to(self._more))

    def _keep_nearest(self, start: int, similar: Tensor) -> None:
        """Merges a block's most similar rows into the nearest rows so far."""
        wanted = self._k + _SPARE
        here = torch.arange(len(similar), device=similar.device)
        if self._values.shape[1] == wanted:
            here = (similar.amax(dim=-1) > self._values[:, -1]).nonzero()[:, 0]
        nearest = similar[here].topk(min(wanted, similar.shape[1]), dim=-1)
        values = torch.cat((self._values[here], nearest.values), dim=-1)
        ids = torch.cat((self._ids[here], start + nearest.indices), dim=-1)
        best = values.topk(min(wanted, values.shape[1]), dim=-1)
        if best.values.shape[1] != self._values.shape[1]:
            self._values, self._ids = best.values, ids.gather(-1, best.indices)
        else:
            self._values[here], self._ids[here] = best.values, ids.gather(-1, best.indices)

    def _exactly(self, stream: Int[Tensor, " pair"], token: Int[Tensor, " pair"]) -> Float[Tensor, " pair"]:
        similarities = [self._precise.new_zeros(0)]
        for some, ids in zip(*(torch.split(indices, _PAIRS_AT_ONCE) for indices in (stream, token)), strict=True):
            similarities.append((self._precise[some] * self._rows_of(ids)).sum(dim=-1))
        return torch.cat(similarities)
