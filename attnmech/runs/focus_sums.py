"""What is summed of where heads look: statistics of rows by text, and what each key and distance receives."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..arguments import whole_number
from ..maths.focus import (
    STATISTICS,
    defined_rows,
    received_by_distance,
    received_by_key,
    row_statistics,
    uniform_attention,
)
from ..model.observed import RowBlock
from .row_means import ROW_CLASSES, RowMeans, added, closed, row_classes, sums_by_text
from .stream import Reducer, Run, State
from .token_types import TOKEN_TYPES, token_types

SINK_RATE: Final = 0.3
"""ε of Sink_k^ε: above this mean attention a key counts as a sink of a head in a text (Gu et al. 2024)."""

BY_ROW: Final = (*RowMeans.BY_ROW, "top_key")
"""What is kept row by row of texts that are run together."""


@dataclass(frozen=True)
class FocusSums(Reducer):
    """Sums the statistics of the rows, block by block."""

    gathered: ClassVar[bool] = True
    last: int = 8

    def __post_init__(self) -> None:
        # As an int: the journal of a corpus identifies the reducer by the text of its options.
        object.__setattr__(self, "last", whole_number("last", self.last, least=1))

    def start(self, run: Run) -> State:
        """Sums of each statistic per text, and what each key and distance receives."""
        queries, keys = run.batch.queries(run.stack.label), run.batch.keys(run.stack.label)
        layers, heads = run.n_layers, run.n_heads
        texts, rows = queries.ids.shape
        width = keys.ids.shape[1]
        classes = row_classes(queries)
        state = {
            "classes": classes,
            "types": token_types(keys),
            "sums": torch.zeros(len(STATISTICS), len(ROW_CLASSES), layers, heads, texts, dtype=torch.float64),
            "counts": torch.zeros(len(STATISTICS), len(ROW_CLASSES), layers, 1, texts, dtype=torch.float64),
            "rows": classes.sum(dim=-1).T.double(),
            "received": torch.zeros(layers, texts, heads, len(ROW_CLASSES), width),
            "uniform": torch.zeros(layers, texts, len(ROW_CLASSES), width, dtype=torch.float64),
            "seen": torch.zeros(layers, texts, len(ROW_CLASSES), width, dtype=torch.float64),
            "distance": torch.zeros(len(ROW_CLASSES), layers, heads, max(rows, width), dtype=torch.float64),
        }
        if not run.corpus:
            precision = torch.promote_types(run.model.dtype, torch.float32)
            state["values"] = torch.zeros(len(STATISTICS), layers, heads, texts, rows, dtype=precision)
            state["valid"] = torch.zeros(len(STATISTICS), layers, 1, texts, rows, dtype=torch.bool)
            state["top_key"] = torch.full((layers, heads, texts, rows), -1, dtype=torch.int32)
        device = run.model.device
        return {name: value.to(device) for name, value in state.items()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Adds each statistic of the block's rows, and what its keys receive."""
        layer, rows, keys = block.index, slice(block.rows.start, block.rows.stop), block.keys
        classes = state["classes"][:, :, rows]
        aligned = block.stack != "cross"
        tokens = block.mask.queries if aligned else None
        defined = block.mask.once(
            ("focus", self.last, block.rows),
            lambda: defined_rows(
                block.visible,
                block.rows,
                block.real,
                block.batch.keys(block.stack).begins,
                self.last,
                aligned,
                keys,
            ),
        )
        values, valid = self._of_layer(state, layer, run)
        found = row_statistics(block.attention, block.rows, defined, self.last, tokens, keys)
        values[..., rows], valid[..., rows] = found.transpose(1, 2), defined.valid[:, None]
        received = received_by_key(block.attention, classes)
        if keys is None:
            state["received"][layer][..., : received.shape[-1]] += received
        else:
            state["received"][layer].index_add_(-1, keys, received.to(state["received"].dtype))
        if aligned:
            for begin, part in _side_by_side(block.pattern[..., :tokens], keys):
                far = received_by_distance(part, classes, block.rows, begin=begin).double().sum(dim=0)
                state["distance"][:, layer, :, : far.shape[-1]] += far.transpose(0, 1)
        uniform = block.mask.once(("uniform", block.rows), lambda: uniform_attention(block.visible, classes))
        at = torch.arange(block.scores.shape[-1], device=classes.device) if keys is None else keys
        for name, value in zip(("uniform", "seen"), uniform, strict=True):
            state[name][layer].index_add_(-1, at, value)
        if block.rows.stop == block.mask.queries:
            sums = sums_by_text(values, valid, state["classes"])
            state["sums"][:, :, layer], state["counts"][:, :, layer] = sums
        if "top_key" in state:
            choice = defined.valid[STATISTICS.index("tied_top")]
            key = block.top_key.masked_fill(~choice[:, None], -1)
            state["top_key"][layer, :, :, rows] = key.transpose(0, 1).int()

    def _of_layer(
        self, state: State, layer: int, run: Run
    ) -> tuple[Float[Tensor, "statistic head batch row"], Bool[Tensor, "statistic _ batch row"]]:
        """Where the statistics of a layer's rows are put until its last block: they are summed at once."""
        if "values" in state:
            return state["values"][:, layer], state["valid"][:, layer]
        key = self, "of layer"
        if key not in run.between:
            texts, _, rows = state["classes"].shape
            precision = torch.promote_types(run.model.dtype, torch.float32)
            values = torch.zeros(len(STATISTICS), run.n_heads, texts, rows, dtype=precision)
            valid = torch.zeros(len(STATISTICS), 1, texts, rows, dtype=torch.bool)
            run.between[key] = values.to(run.model.device), valid.to(run.model.device)
        return cast(tuple[Tensor, Tensor], run.between[key])

    def close(self, state: State, run: Run) -> State:
        """Sums over the batch's texts; the statistics stay separate per text."""
        kinds = torch.nn.functional.one_hot(state["types"], len(TOKEN_TYPES)).double()
        received, seen = state["received"].double(), state["seen"].sum(dim=2)
        rate = received.sum(dim=3) / seen.clamp_min(1)[:, :, None]
        sums = {
            "sums": state["sums"],
            "counts": state["counts"],
            "rows": state["rows"].sum(dim=-1),
            "distance": state["distance"],
            "received": torch.einsum("lthck->clhk", received),
            "uniform": torch.einsum("ltck->clk", state["uniform"]),
            "seen": torch.einsum("ltck->clk", state["seen"]),
            "by_type": torch.einsum("lthck,tky->clhy", received, kinds),
            "uniform_by_type": torch.einsum("ltck,tky->cly", state["uniform"], kinds),
            "sinks": (rate > SINK_RATE).sum(dim=1).long(),
            "sink_rate": rate.sum(dim=1),
            "samples": (seen > 0).sum(dim=1),
        }
        kept = {} if run.corpus else {name: state[name] for name in BY_ROW}
        return closed(sums | kept, run)

    def merge(self, one: State, other: State) -> State:
        """The sum of both; positions and distances extend to the longer text."""
        return added(one, other)


def _side_by_side(
    pattern: Float[Tensor, "batch head row key"], keys: Int[Tensor, " key"] | None
) -> Iterator[tuple[int, Float[Tensor, "batch head row some_keys"]]]:
    """The keys in runs of neighbours, each with the position that it begins at."""
    if keys is None:
        yield 0, pattern
        return
    ends = [*((keys[1:] - keys[:-1] > 1).nonzero()[:, 0] + 1).tolist(), len(keys)]
    for start, end in zip([0, *ends], ends, strict=False):
        yield int(keys[start]), pattern[..., start:end]
