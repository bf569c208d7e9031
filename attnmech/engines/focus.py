"""Sums of the statistics of attention focus over the requests of a serving engine.

The state is that of `am.attention_focus` on a corpus whose documents are the requests, without what needs the text of
tokens.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..maths.float64 import as_float64, float64_device
from ..maths.focus import STATISTICS, DefinedRows, Places, RowMeasures, defined_rows, statistics_by_class
from ..maths.groups import FIRST, by_group, joined, text_digest
from ..maths.received import received_by_key, sink_sums
from ..maths.softmax import Attention
from ..maths.sums_by_text import by_class, counts_by_text
from .groups import Group

State = dict[str, Tensor]

_BY_REQUEST = ("sums", "counts")


class FocusTotals:
    """Adds up the statistics of requests row by row; a request that has ended counts as one text."""

    def __init__(self, layers: int, heads: int, device: torch.device, *, last: int = 8, positions: int = 128) -> None:
        """`last` as in `am.attention_focus`; what keys receive is kept for the first `positions` of each request."""
        self.last, self._positions, self._device = last, positions, float64_device(device)
        self._layers, self._heads = layers, heads
        self._open: dict[str, int] = {}
        self._by_slot: State = {
            "sums": self._zeros(0, layers, len(STATISTICS), 3, heads),
            "counts": self._zeros(0, layers, len(STATISTICS), 3, 1),
            "received": self._zeros(0, layers, heads, 3, positions).float(),
            "seen": self._zeros(0, layers, 3, positions).float(),
        }
        self._ended: State | None = None
        self.documents = 0

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)

    def slots(self, requests: Sequence[str]) -> Int[Tensor, " request"]:
        """The place of each request among those that have not ended."""
        for request in requests:
            if request not in self._open:
                used = set(self._open.values())
                self._open[request] = next(slot for slot in range(len(used) + 1) if slot not in used)
        if (lacking := len(self._open) - len(self._by_slot["seen"])) > 0:
            grown = {name: value.new_zeros(lacking, *value.shape[1:]) for name, value in self._by_slot.items()}
            self._by_slot = {name: torch.cat((value, grown[name])) for name, value in self._by_slot.items()}
        return torch.tensor([self._open[request] for request in requests], device=self._device)

    def add(
        self,
        layer: int,
        group: Group,
        attention: Attention,
        window: int | None,
        special: Bool[Tensor, "request row"],
        slots: Int[Tensor, " request"],
    ) -> None:
        """Adds the rows of a group; `special` is True at the rows of special tokens."""
        rows, device = group.rows, self._device

        def of_tokens() -> Tensor:
            first = torch.arange(rows.start, rows.stop, device=group.first.device) == group.first[:, None]
            return by_class(group.real, special, first)

        classes = group.once("classes", of_tokens)

        def of_mask() -> tuple[Places, DefinedRows, Tensor, Tensor]:
            visible = group.visible(window)
            places = Places.of(rows, group.first, self.last, None, rows.stop)
            defined = defined_rows(visible, rows, group.real, group.first, places, self.last, True)
            counts = counts_by_text(defined.valid[:, None], classes)
            seen = torch.matmul(as_float64(classes), as_float64(visible[:, 0]))
            return places, defined, counts.to(device), self._by_position(group, seen).float().to(device)

        places, defined, counts, seen = group.once(("focus", window), of_mask)
        _, sums = statistics_by_class(RowMeasures.of(attention, rows, places, self.last), defined, classes)
        received = self._by_position(group, received_by_key(attention.pattern, classes)).to(seen)
        width = received.shape[-1]
        by_slot = self._by_slot
        by_slot["sums"][:, layer].index_add_(0, slots, sums.permute(3, 0, 1, 2))
        by_slot["counts"][:, layer].index_add_(0, slots, counts.permute(3, 0, 1, 2))
        by_slot["received"][:, layer, ..., :width].index_add_(0, slots, received)
        by_slot["seen"][:, layer, :, :width].index_add_(0, slots, seen)

    def _by_position(
        self, group: Group, by_column: Float[Tensor, "request *places key"]
    ) -> Float[Tensor, "request *places position"]:
        """The entries of the first positions of each request; 0 beyond its end."""
        count = min(self._positions, group.rows.stop)
        at = group.first[:, None] + torch.arange(count, device=group.first.device)
        there = at < group.rows.stop
        shape = len(at), *[1] * (by_column.ndim - 2), count
        at = at.clamp_max(group.rows.stop - 1).view(shape).expand(*by_column.shape[:-1], count)
        return by_column.gather(-1, at).masked_fill(~there.view(shape), 0.0)

    def end(self, request: str, ids: Sequence[int]) -> None:
        """Makes a request one of the texts; `ids` are its tokens."""
        slot = self._open.pop(request)
        one = {name: value[slot].clone() for name, value in self._by_slot.items()}
        for value in self._by_slot.values():
            value[slot] = 0.0
        digest = text_digest(ids)
        text = {
            "sums": one["sums"].permute(1, 2, 0, 3)[..., None],
            "counts": one["counts"].permute(1, 2, 0, 3)[..., None],
            FIRST: digest,  # requests have no numbers: another run ends them in another order
        }
        text = {name: value.cpu() for name, value in text.items()}
        text = by_group(text, digest, _BY_REQUEST)
        received, seen = (as_float64(one[name]) for name in ("received", "seen"))
        whole = {
            "rows": one["counts"][0, STATISTICS.place("entropy"), :, 0],
            "received": received.permute(2, 0, 1, 3),
            "seen": seen.transpose(0, 1),
            **sink_sums(received.sum(dim=2)[:, None], seen.sum(dim=1)[:, None]),
        }
        whole = {name: value.cpu() for name, value in whole.items()}
        self.documents += 1
        if self._ended is None:
            self._ended = text | whole
            return
        added = {name: self._ended[name] + value for name, value in whole.items()}
        self._ended = added | joined(self._ended, text, _BY_REQUEST)

    def state(self) -> State:
        """The sums over the requests that have ended."""
        ended = self._ended or {}
        longest = int((ended["samples"].sum(dim=0) > 0).sum()) if ended else 0
        by_key = ("received", "seen", "sinks", "sink_rate", "samples")
        cut = {name: value[..., :longest] if name in by_key else value for name, value in ended.items()}
        return {name: value.contiguous() for name, value in cut.items()}
