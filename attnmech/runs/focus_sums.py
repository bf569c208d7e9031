"""Sums statistics of attention rows by text, and the attention that each key and each distance receives."""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..basics.arguments import whole_number
from ..batch import Batch
from ..maths.float64 import as_float64, float64_device, put
from ..maths.focus import STATISTICS, WITH_GLOBAL, DefinedRows, Places, RowMeasures, defined_rows, statistics_by_class
from ..maths.received import Received, neighbours, sink_sums, uniform_attention
from ..maths.sums_by_text import counts_by_text
from ..model.attention.local_global import global_tokens
from ..model.attention.observed import RowBlock
from .reducer import HeldLayers, Reducer, Run, State
from .row_means import RowMeans, closed, sum_of_states
from .token_types import ROW_CLASSES, TOKEN_TYPES, row_classes, token_types

BY_ROW: Final = (*RowMeans._BY_ROW, "top_key")  # the entries that are kept row by row, for texts that are run together


@dataclass(frozen=True)
class FocusSums(Reducer):
    """Sums the statistics of the rows, block by block."""

    last: int = 8

    def __post_init__(self) -> None:
        # As an int, since a journal identifies the reducer by the text of its options.
        object.__setattr__(self, "last", whole_number("last", self.last, least=1))

    def start(self, run: Run) -> State:
        """Empty sums of each statistic per text, and of the attention that each key and distance receives."""
        queries, keys = run.batch.queries(run.stack.label), run.batch.keys(run.stack.label)
        layers, heads = run.n_layers, run.n_heads
        texts, rows = queries.ids.shape
        width = keys.ids.shape[1]
        classes, has_global = row_classes(queries), bool(run.stack.architecture.windows)
        count = len(WITH_GLOBAL if has_global else STATISTICS)
        state = {
            "classes": classes,
            "types": token_types(keys),
            "sums": torch.zeros(count, len(ROW_CLASSES), layers, heads, texts, dtype=torch.float64),
            "counts": torch.zeros(count, len(ROW_CLASSES), layers, 1, texts, dtype=torch.float64),
            "rows": as_float64(classes.sum(dim=-1).T),
            "uniform": torch.zeros(layers, texts, len(ROW_CLASSES), width, dtype=torch.float64),
            "seen": torch.zeros(layers, texts, len(ROW_CLASSES), width, dtype=torch.float64),
            "distance": torch.zeros(len(ROW_CLASSES), layers, heads, max(rows, width), dtype=torch.float64),
        }
        if not run.corpus:
            precision = torch.promote_types(run.model.dtype, torch.float32)
            state["values"] = torch.zeros(count, layers, heads, texts, rows, dtype=precision)
            state["valid"] = torch.zeros(count, layers, 1, texts, rows, dtype=torch.bool)
            state["top_key"] = torch.full((layers, heads, texts, rows), -1, dtype=torch.int32)
        if has_global:
            state["global"] = global_tokens(run.batch)
        # Added to in float64, where that is computed.
        received = torch.zeros(layers, texts, heads, len(ROW_CLASSES), width, device=float64_device(run.model.device))
        return {name: put(value, run.model.device) for name, value in state.items()} | {"received": received}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Reads a block's rows; the statistics of all rows and what keys receive are added layer by layer."""
        key, of_mask = (id(state["classes"]), block.index), self._of_mask(block, state)
        tokens = None if block.stack == "cross" else block.mask.queries
        if key not in run.between:
            run.between[key] = [], Received.nothing(state["classes"], block.q.shape[1], block.k.shape[2], tokens or 0)
        so_far, received = run.between[key]
        received.add(block.attention.pattern, block.rows, of_mask.runs)
        so_far.append(
            (RowMeasures.of(block.attention, block.rows, of_mask.places, self.last, tokens, block.keys), of_mask)
        )
        if block.rows.stop == block.mask.queries:
            del run.between[key]
            self._hold(state, block, run, *zip(*so_far, strict=True))
            state["received"][block.index][..., : received.by_key.shape[-1]].add_(received.by_key)
            if block.stack != "cross":
                far = received.by_distance.sum(dim=0)
                state["distance"][:, block.index, :, : far.shape[-1]].add_(far.transpose(0, 1))

    def _of_mask(self, block: RowBlock, state: State) -> "_OfMask":
        """The tensors that follow from the mask of a block's rows."""
        classes = state["classes"]

        def make() -> _OfMask:
            first, rows, keys = block.batch.keys(block.stack).begins, block.rows, block.keys
            count = block.attention.pattern.shape[-1]
            at = torch.arange(count, device=classes.device) if keys is None else keys
            places = Places.of(rows, first, self.last, keys, count, state.get("global"))
            visible = block.mask.visible_at(rows, keys)[..., :count]
            defined = defined_rows(visible, rows, block.real, first, places, self.last, block.stack != "cross")
            uniform, seen = uniform_attention(visible, classes[:, :, rows.start : rows.stop])
            return _OfMask(defined, places, at, neighbours(keys, count), uniform, seen)

        return block.mask.once(("focus", self.last, block.rows), make)

    def _hold(
        self, state: State, block: RowBlock, run: Run, measures: tuple[RowMeasures, ...], masks: "tuple[_OfMask, ...]"
    ) -> None:
        """Holds a layer's rows, block by block in order, until those of several layers are added together."""
        width, classes = state["uniform"].shape[-1], state["classes"]

        def of_masks() -> _OfRows:
            defined = DefinedRows.joined([mask.defined for mask in masks])
            sums = masks[0].uniform.new_zeros(2, *masks[0].uniform.shape[:2], width)
            for mask in masks:
                sums.index_add_(-1, mask.keys.to(sums.device), torch.stack([mask.uniform, mask.seen]))
            return _OfRows(defined, counts_by_text(defined.valid[:, None], classes), *sums)

        of_rows, joined = block.mask.once(("focus", self.last), of_masks), RowMeasures.joined(measures)
        size, device = len(state["sums"]) * joined.entropy.nbytes, joined.entropy.device
        if layers := self._held(state, run).add(of_rows, block.index, joined, size, device):
            self._add_rows(state, of_rows, layers)

    def _held(self, state: State, run: Run) -> "HeldLayers[_OfRows, RowMeasures]":
        return HeldLayers.of(state, run)

    def _add_rows(self, state: State, of_rows: "_OfRows", layers: dict[int, RowMeasures]) -> None:
        """Adds the statistics of the rows of some layers with the same mask."""
        at = torch.tensor(list(layers), device=state["classes"].device)
        measures, defined = RowMeasures.of_layers(list(layers.values())), of_rows.defined
        values, sums = statistics_by_class(measures, defined, state["classes"])
        of_sums = at.to(sums.device)
        state["sums"].index_copy_(2, of_sums, sums)
        state["counts"].index_copy_(2, of_sums, of_rows.counts[:, :, None].expand(-1, -1, len(at), -1, -1))
        for name, of_mask in (("uniform", of_rows.uniform), ("seen", of_rows.seen)):
            state[name].index_copy_(0, of_sums, of_mask.expand(len(at), -1, -1, -1))
        if "values" in state:
            state["values"].index_copy_(1, at, values)
            state["valid"].index_copy_(1, at, defined.valid[:, None, None].expand(-1, len(at), -1, -1, -1))
            top_key = torch.where(defined.valid[STATISTICS.place("tied_top")][:, None], measures.key, -1)
            state["top_key"].index_copy_(0, at, top_key.transpose(1, 2).int())

    def close(self, state: State, run: Run) -> State:
        """Sums over the batch's texts; the statistics stay separate per text."""
        for of_rows, layers in self._held(state, run).rest():
            self._add_rows(state, of_rows, layers)
        state = state | _by_token(state, run.batch.keys(run.stack.label))
        kinds = as_float64(torch.nn.functional.one_hot(state["types"], len(TOKEN_TYPES)))
        received = as_float64(state["received"])
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
        } | sink_sums(received.sum(dim=3), state["seen"].sum(dim=2))
        kept = {} if run.corpus else {name: state[name] for name in BY_ROW}
        return closed(sums | kept, run)

    def merge(self, one: State, other: State) -> State:
        """The sum of both; positions and distances extend to the longer text."""
        return sum_of_states(one, other)


def _by_token(state: State, keys: Batch) -> State:
    """The sums by key, with each text's keys before its padding, so that positions of several texts can be added."""
    columns = keys.columns
    moved = {"types": state["types"].gather(1, columns.to(state["types"].device))}
    for name in ("received", "uniform", "seen"):
        value = state[name]
        of_texts = columns.reshape(1, len(columns), *[1] * (value.ndim - 3), -1)
        moved[name] = value.gather(-1, of_texts.expand_as(value).to(value.device))
    return moved


@dataclass(frozen=True)
class _OfMask:
    """The tensors that follow from the mask of a block's rows, the same for all layers with that mask."""

    defined: DefinedRows
    places: Places
    keys: Int[Tensor, " key"]
    runs: Int[Tensor, "run 3"]
    uniform: Float[Tensor, "batch class key"]
    seen: Float[Tensor, "batch class key"]


@dataclass(frozen=True, eq=False)
class _OfRows:
    """What the mask of all rows determines: rows that define statistics, their counts, and uniform attention."""

    defined: DefinedRows
    counts: Float[Tensor, "statistic class 1 batch"]
    uniform: Float[Tensor, "batch class key"]
    seen: Float[Tensor, "batch class key"]
