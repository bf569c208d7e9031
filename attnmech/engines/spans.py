"""Sums of attention between spans of requests and by distance: for segments, and for head types on repeated tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from ..maths.received import received_by_distance
from ..maths.softmax import Attention
from .groups import Group

_MOST = 2**30  # the most bytes that the sums of one request may take


@dataclass(frozen=True)
class SpanSums:
    """The sums of one request. Masses are sums over rows; rows with a tie have no highest key."""

    starts: tuple[int, ...]  # the position at which each span begins; the last one ends with the request
    span: Int[Tensor, " position"]
    mass: Float[Tensor, "layer head query_span key_span"]
    distance: Float[Tensor, "layer head query_span distance"]
    top: Float[Tensor, "layer head query_span key_span"]  # the number of rows whose highest key is in each span
    top_distance: Float[Tensor, "layer head query_span distance"]
    row: Float[Tensor, "layer head position"]

    @classmethod
    def nothing(cls, starts: Sequence[int], length: int, layers: int, heads: int, device: torch.device) -> "SpanSums":
        """The sums before the first row of a request of at most `length` tokens.

        Raises `InputError` for spans that do not begin at 0 or do not increase, and for too many of them.
        """
        if not starts or starts[0] != 0 or any(two <= one for one, two in pairwise(starts)):
            raise InputError(f"the starts of spans must increase from 0; got {list(starts)}.")
        count, places = len(starts), layers * heads
        if 4 * places * (2 * count * (count + length) + length) > _MOST:
            raise InputError(f"{count} spans of {length} tokens in {places} heads take more than a gigabyte.")
        at = torch.arange(length, device=device)
        span = torch.searchsorted(torch.tensor(starts, device=device), at, right=True) - 1
        between, far, by_row = (
            torch.zeros(layers, heads, *shape, device=device) for shape in ((count, count), (count, length), (length,))
        )
        return cls(tuple(starts), span, between, far, between.clone(), far.clone(), by_row)

    def add(self, layer: int, group: Group, place: int, attention: Attention) -> None:
        """Adds the rows of one of a group's pieces."""
        rows, first = group.pieces[place].rows, int(group.first[place])
        chosen = (place, slice(None), slice(len(group.rows) - len(rows), None))
        pattern = attention.pattern[chosen][..., first:]
        queries, keys = self.span[rows.start : rows.stop], self.span[: rows.stop]
        members = torch.nn.functional.one_hot(keys, len(self.starts)).to(pattern)
        self.mass[layer].index_add_(1, queries, pattern @ members)
        of_rows = torch.nn.functional.one_hot(queries, len(self.starts)).T[None].bool()
        far = received_by_distance(pattern[None], of_rows, rows)[0]
        self.distance[layer, ..., : far.shape[-1]] += far
        self.row[layer, :, rows.start : rows.stop] = pattern.sum(dim=-1)
        key = attention.top.key[chosen] - first
        clear = (attention.top.first > attention.top.second)[chosen].to(pattern)
        back = torch.arange(rows.start, rows.stop, device=key.device) - key
        for sums, at in ((self.top, self.span[key]), (self.top_distance, back)):
            flat = queries * sums.shape[-1] + at
            sums[layer].flatten(1).scatter_add_(1, flat, clear)


class SpanTotals:
    """The sums of the requests that name spans."""

    def __init__(self, layers: int, heads: int, device: torch.device) -> None:
        self._shape, self._open = (layers, heads, device), dict[str, SpanSums]()
        self.ended: list[tuple[SpanSums, list[int]]] = []  # the requests that have ended, with their tokens

    def begin(self, request: str, starts: Sequence[int], length: int) -> None:
        """Begins a request with spans, which will have at most `length` tokens."""
        layers, heads, device = self._shape
        self._open[request] = SpanSums.nothing(starts, length, layers, heads, device)

    def add(self, layer: int, group: Group, names: Sequence[str], attention: Attention) -> None:
        """Adds the rows of a group; `names` are the requests of its pieces."""
        for place, name in enumerate(names):
            if name in self._open:
                self._open[name].add(layer, group, place, attention)

    def end(self, request: str, ids: Sequence[int]) -> None:
        """Notes that a request has ended; `ids` are its tokens."""
        if request in self._open:
            self.ended.append((self._open.pop(request), list(ids)))

    def state(self) -> dict[str, Tensor]:
        """The sums of all requests that have ended, named by their number."""
        tensors: dict[str, Tensor] = {}
        for number, (sums, ids) in enumerate(self.ended):
            starts = [start for start in sums.starts if start < len(ids)]
            own, tokens = slice(len(starts)), slice(len(ids))
            of_request = {
                "starts": torch.tensor(starts),
                "ids": torch.tensor(ids),
                "mass": sums.mass[..., own, own],
                "top": sums.top[..., own, own],
                "distance": sums.distance[..., own, tokens],
                "top_distance": sums.top_distance[..., own, tokens],
                "row": sums.row[..., tokens],
            }
            tensors |= {f"{name} {number}": value.cpu().contiguous() for name, value in of_request.items()}
        return tensors
