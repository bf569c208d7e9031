"""Sums of the attention between segments, taken in one pass."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import flag, option, whole_number
from ...errors import InputError
from ...maths.float64 import as_float64, put
from ...maths.groups import by_group, joined
from ...maths.received import received_by_distance
from ...model.attention.observed import RowBlock
from ...runs.reducer import Reducer, Run, State
from .formulas import ByDistance, by_lag, peakedness, received_by_segment, receivers
from .segmentation import KINDS, Segmented, Segments

KEPT_BYTES: Final = 2_000_000_000  # the most memory that the cells of a batch's texts may take, in bytes
_FITTED: Final = 2**22  # the number of totals by distance that are fitted at a time
LAGS: Final = 8  # the number of segments back that have their own lag; segments farther back count with the last


@dataclass(frozen=True)
class SegmentSums(Reducer):
    """Sums the attention between segments, and by distance in tokens."""

    segments: Segments = "sentence"
    first: bool = True
    gap: int = 4

    def __post_init__(self) -> None:
        if isinstance(self.segments, str):
            option("segments", self.segments, KINDS)
        flag("first", self.first)
        object.__setattr__(self, "gap", whole_number("gap", self.gap, least=1))

    def start(self, run: Run) -> State:
        """Empty tensors for the cells of each text, and for the sums by distance."""
        if run.stack.label == "cross":
            raise InputError("segments are measured in self-attention, not in cross-attention; use another `stack`.")
        if run.corpus and not isinstance(self.segments, str):
            known = ", ".join(KINDS)
            raise InputError(
                f"spans need a list of texts; for an iterator of texts, `segments` must be one of {known}."
            )
        batch = run.batch.queries(run.stack.label)
        segmented = Segmented.of(batch, self.segments)
        precision = torch.promote_types(run.model.dtype, torch.float32)
        texts, length = batch.ids.shape
        cells = run.n_layers, texts, run.n_heads, segmented.most, segmented.most
        if (size := math.prod(cells) * precision.itemsize) > KEPT_BYTES:
            raise InputError(
                f"{segmented.most} segments of {texts} texts in {run.n_layers} layers × {run.n_heads} heads would "
                f"take {size / 1e9:.1f} GB; the limit is {KEPT_BYTES / 1e9:.0f} GB. Use longer segments, fewer "
                "`layers`, shorter texts, or an iterator of texts."
            )
        far = 2 * length - 1 if looks_both_ways(run) else length
        state = {
            "segment": segmented.of_token,
            "mass": torch.zeros(cells, dtype=precision),
            "distance": torch.zeros(*cells[:3], far, dtype=torch.float64),
            "row": torch.zeros(*cells[:3], length, dtype=torch.float64),
        }
        return {name: put(value, run.model.device) for name, value in state.items()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        rows = slice(block.rows.start, block.rows.stop)
        segment = state["segment"][:, rows]
        if not bool((segment >= 0).any()):
            return
        lowest = int(segment[segment >= 0].min())
        pattern = block.pattern
        place, index, both_ways = state["segment"], block.index, looks_both_ways(run)
        mass, distance = state["mass"][index], state["distance"][index]
        received_by_segment(pattern, segment, place[:, : pattern.shape[-1]], lowest, mass[:, :, lowest:])
        far = received_by_distance(pattern, block.real[:, None], block.rows, place.shape[1] if both_ways else None)
        distance[..., : far.shape[-1]] += as_float64(far[:, :, 0])
        state["row"][index][..., rows] = pattern.sum(dim=-1) * block.real[:, None]
        if not self.first:
            begins = block.batch.queries(block.stack).begins
            to_first = pattern.gather(-1, begins[:, None, None, None].expand(*pattern.shape[:3], 1))[..., 0]
            _leave_out_first(state, index, block, to_first * block.real[:, None], begins, both_ways)

    def close(self, state: State, run: Run) -> State:
        """Returns the cells as means over rows, and sums by distance in segments, by group of texts."""
        begins = run.batch.queries(run.stack.label).begins.tolist()
        of_texts = [self.closed_text(state, *text, looks_both_ways(run)) for text in enumerate(begins)]
        grouped = grouped_texts(of_texts, run.batch.digests)
        if run.corpus:
            return grouped
        return grouped | {name: state[name].transpose(1, 2).cpu() for name in _BY_CELL}

    def closed_text(self, state: State, text: int, begin: int, both_ways: bool) -> dict[str, Tensor]:
        """The sums of one text, by layer; its cells become means over rows, and its totals a fit."""
        segment = state["segment"][text]
        rows = torch.bincount(segment[segment >= 0])
        starts = [0, *rows.cumsum(dim=0).tolist()]
        distance, row = of_text(state, (slice(None), text), begin, starts[-1], both_ways)
        layers = []
        for some in torch.split(torch.arange(len(distance)), max(1, _FITTED // distance[0].numel())):
            at = slice(int(some[0]), int(some[-1]) + 1)
            fit = ByDistance.fitted(distance[at], row[at], 0 if self.first else 1)
            distance[at], row[at] = fit.weights, fit.factors
            layers += [
                self._closed_layer(state["mass"][layer, text], rows, fit.at(place).cells(starts), lags_of(both_ways))
                for place, layer in enumerate(some.tolist())
            ]
        return {name: torch.stack([layer_values[name] for layer_values in layers]) for name in _BY_TEXT}

    def _closed_layer(self, mass: Tensor, rows: Tensor, expected: Tensor, lags: range) -> dict[str, Tensor]:
        """The sums of one text in one layer; in float64, the cells of all layers need several times the memory."""
        mass = mass[:, : len(rows), : len(rows)]
        mass /= rows[:, None]
        sums, counts = by_lag(mass, rows, lags)
        peaks = peakedness(receivers(mass / rows, self.gap))
        # A device without float64 leaves what is fitted on the CPU.
        by_distance = peakedness(receivers(expected / rows.to(expected.device), self.gap)).to(peaks)
        return {
            "sums": sums,
            "expected": by_lag(expected, rows, lags)[0],
            "counts": counts,
            "peaks": peaks.nan_to_num(0.0),
            "expected_peaks": by_distance.nan_to_num(0.0).clamp_min(0.0).masked_fill(peaks.isnan(), 0.0),
            "peak_counts": as_float64(~peaks.isnan()),
        }

    def merge(self, one: State, other: State) -> State:
        return joined(one, other, _BY_TEXT)


def grouped_texts(of_texts: Sequence[Mapping[str, Tensor]], digests: Int[Tensor, " text"]) -> State:
    """The state of several texts, from what `closed_text` returned for each."""
    by_text = {name: torch.stack([values[name] for values in of_texts], dim=-1) for name in _BY_TEXT}
    by_text |= {name: by_text[name].movedim(1, 0) for name in ("sums", "expected")}
    by_text["counts"] = by_text["counts"][0, :, None, None]
    return by_group({name: value.cpu() for name, value in by_text.items()}, digests, _BY_TEXT)


_BY_TEXT: Final = ("sums", "expected", "counts", "peaks", "expected_peaks", "peak_counts")  # by text or group
_BY_CELL: Final = ("mass", "distance", "row")  # the entries of a state that are stored only for texts run together


def looks_both_ways(run: Run) -> bool:
    """Whether tokens can attend to later ones."""
    return not run.stack.architecture.causal


def lags_of(both_ways: bool) -> range:
    """The distance in segments of each entry of the axis `lag`."""
    return range(-LAGS if both_ways else 0, LAGS + 1)


def of_text(
    state: Mapping[str, Tensor], at: tuple[Any, ...], begin: int, length: int, both_ways: bool
) -> tuple[Tensor, Tensor]:
    """Views of one text's sums by distance and by row, without the entries that exist only for longer texts of its
    batch.
    """
    distance, row = state["distance"][at], state["row"][at]
    middle = (distance.shape[-1] + 1) // 2
    own = distance[..., middle - length : middle + length - 1] if both_ways else distance[..., :length]
    return own, row[..., begin : begin + length]


def _leave_out_first(
    state: State,
    index: int,
    block: RowBlock,
    to_first: Float[Tensor, "batch head row"],
    begins: Int[Tensor, " batch"],
    both_ways: bool,
) -> None:
    rows = torch.arange(block.rows.start, block.rows.stop, device=to_first.device)
    segment = state["segment"][:, block.rows.start : block.rows.stop].clamp_min(0)
    heads = to_first.shape[1]
    state["mass"][index][..., 0].scatter_add_(-1, segment[:, None].expand(-1, heads, -1), -to_first)
    zero = (state["distance"].shape[-1] - 1) // 2 if both_ways else 0
    far, precise = (rows - begins[:, None]).clamp_min(0) + zero, as_float64(to_first)
    state["distance"][index].scatter_add_(-1, far[:, None].expand(-1, heads, -1).to(precise.device), -precise)
    state["row"][index][..., block.rows.start : block.rows.stop] -= precise
