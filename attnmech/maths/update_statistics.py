"""Statistics of what a head writes, row by row: the update compared with the stream, and the value that it reads most.

The formulas are those of `updates.py` (docs/formulas.md#residual-updates).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .statistic import RowStatistic, Statistics
from .updates import cosine


@dataclass(frozen=True)
class AgainstStream:
    """What each head writes for each token, compared with the stream there, before the norm that follows attention."""

    norm: Float[Tensor, "*layers batch head position"]  # ‖u‖
    product: Float[Tensor, "*layers batch head position"]  # u · x
    stream: Float[Tensor, "*layers batch position"]  # ‖x‖

    @cached_property
    def magnitude(self) -> Float[Tensor, "*layers batch head position"]:
        """m = ‖u‖ / ‖x‖."""
        return self.norm / self.stream[..., None, :]

    @cached_property
    def orientation(self) -> Float[Tensor, "*layers batch head position"]:
        """c = cos(u, x)."""
        return cosine(self.product, self.norm, self.stream[..., None, :])


@dataclass(frozen=True)
class LayerRows:
    """Facts about the rows of some layers that do not depend on what their heads write."""

    key: Int[Tensor, "*layers batch head row"]
    """The key to which each row attends most; −1 where it has no choice. Keys beyond the values that were read are not
    tokens.
    """
    real: Bool[Tensor, "batch row"]  # the rows that are tokens
    begins: Int[Tensor, " batch"]  # the first key of each text
    by_token: Float[Tensor, "*layers batch row"]  # the factor of a row's update in the norm that follows attention
    aligned: bool  # whether queries and keys are the same tokens
    by_global: Bool[Tensor, "batch row"] | None = None  # the rows of global tokens, which may read separate values


def update_statistics(
    written: AgainstStream, read: Sequence[AgainstStream], rows: LayerRows
) -> tuple[Float[Tensor, "statistic *layers head batch row"], Bool[Tensor, "statistic *layers head batch row"]]:
    """Every statistic of every row of some layers (0 where it is undefined), and where it is defined.

    `read` compares the keys' values with the stream there; if it has two entries, rows of global tokens use the second.
    """
    factor = rows.by_token[..., None, :]
    written = AgainstStream(written.norm * factor, written.product * factor, written.stream)
    target = _target(read[0], rows)
    if rows.by_global is not None:
        for of_global in read[1:]:
            target = target.but(rows.by_global[:, None], _target(of_global, rows))
    of_rows = UpdateRows(written, target, rows)
    shape = written.norm
    valid = torch.stack([statistic.defined(of_rows).expand_as(shape) for statistic in STATISTICS.values()])
    values = torch.stack([statistic.value(of_rows) for statistic in STATISTICS.values()]).masked_fill_(~valid, 0.0)
    return values.transpose(-3, -2), valid.transpose(-3, -2)


@dataclass(frozen=True)
class Target:
    """What the most attended key of each row would write, compared with the stream at that key."""

    magnitude: Float[Tensor, "*layers batch head row"]
    orientation: Float[Tensor, "*layers batch head row"]
    compared: Bool[Tensor, "*layers batch head row"]  # whether the most attended key is a token with a nonzero stream
    directed: Bool[Tensor, "*layers batch head row"]  # whether the key's value is nonzero as well

    def but(self, rows: Bool[Tensor, "batch 1 row"], other: "Target") -> "Target":
        """Returns a copy with the numbers of another target in some rows."""
        return Target(*(torch.where(rows, vars(other)[name], value) for name, value in vars(self).items()))


def _target(read: AgainstStream, rows: LayerRows) -> Target:
    """Compares v_j W_O with x_j, for the key j to which each row attends most."""
    tokens = read.stream.shape[-1]
    at = rows.key.clamp(0, tokens - 1)
    streams = (read.stream > 0)[..., None, :].expand_as(read.norm)
    compared = (rows.key >= 0) & (rows.key < tokens) & streams.gather(-1, at)
    directed = compared & (read.norm > 0).gather(-1, at)
    magnitude = read.magnitude.gather(-1, at) * rows.by_token[..., None, :]
    return Target(magnitude, read.orientation.gather(-1, at), compared, directed)


@dataclass(frozen=True)
class UpdateRows:
    """The rows of some layers, as the formulas of `STATISTICS` read them."""

    written: AgainstStream  # what each head writes, after the norm that follows attention
    target: Target
    rows: LayerRows

    @cached_property
    def real(self) -> Bool[Tensor, "*layers batch 1 row"]:
        """The rows of tokens with a nonzero stream."""
        return (self.rows.real & (self.written.stream > 0))[..., None, :]

    @cached_property
    def chooses(self) -> Bool[Tensor, "*layers batch head row"]:
        """The rows that attend most to a single key."""
        return self.real & (self.rows.key >= 0)

    @cached_property
    def at_self(self) -> Bool[Tensor, "*layers batch head row"]:
        """Whether that key is the row's own token."""
        key = self.rows.key
        here = key == torch.arange(key.shape[-1], device=key.device)
        return here if self.rows.aligned else torch.zeros_like(here)

    @cached_property
    def at_first(self) -> Bool[Tensor, "*layers batch head row"]:
        """Whether that key is the first token of the text and not the row's own."""
        return (self.rows.key == self.rows.begins[:, None, None]) & ~self.at_self


class UpdateStatistics:
    """What a head writes on each row, compared with the stream."""

    magnitude = RowStatistic(
        label="mean ‖u‖ / ‖x‖",
        short="update magnitude",
        meaning="Mean of ‖u‖ / ‖x‖, the update at each row relative to the stream there: figure 7.",
        bounds=(0.0, math.inf),
        defined=lambda rows: rows.real,
        value=lambda rows: rows.written.magnitude,
    )
    orientation = RowStatistic(
        label="mean cos(u, x)",
        short="update orientation",
        meaning="Mean of cos(u, x), negative where the head removes part of the stream: figure 8.",
        bounds=(-1.0, 1.0),
        defined=lambda rows: rows.real & (rows.written.norm > 0),
        value=lambda rows: rows.written.orientation,
    )
    along = RowStatistic(
        label="mean u·x / ‖x‖²",
        meaning="Mean of the update's signed component along the stream, u·x / ‖x‖².",
        bounds=(-math.inf, math.inf),
        defined=lambda rows: rows.real,
        value=lambda rows: rows.written.magnitude * rows.written.orientation,
    )
    across = RowStatistic(
        label="mean ‖u across x‖ / ‖x‖",
        meaning="Mean size of the update's component orthogonal to the stream, in units of ‖x‖.",
        bounds=(0.0, math.inf),
        defined=lambda rows: rows.real,
        value=lambda rows: rows.written.magnitude * (1 - rows.written.orientation**2).clamp_min(0).sqrt(),
    )
    target_magnitude = RowStatistic(
        label="mean ‖u‖ / ‖x‖ at the highest key",
        meaning="Mean of ‖v_j W_O‖ / ‖x_j‖ for the key j that each row attends to most.",
        bounds=(0.0, math.inf),
        defined=lambda rows: rows.real & rows.target.compared,
        value=lambda rows: rows.target.magnitude,
    )
    target_orientation = RowStatistic(
        label="mean cos(u, x) at the highest key",
        meaning="Mean of cos(v_j W_O, x_j) for the key j that each row attends to most.",
        bounds=(-1.0, 1.0),
        defined=lambda rows: rows.real & rows.target.directed,
        value=lambda rows: rows.target.orientation,
    )
    magnitude_at_self = RowStatistic(
        label="mean ‖u‖ / ‖x‖ where the<br>token itself is highest",
        meaning="Mean magnitude on rows that attend most to their own token.",
        bounds=(0.0, math.inf),
        defined=lambda rows: rows.chooses & rows.at_self,
        value=lambda rows: rows.written.magnitude,
    )
    magnitude_at_first = RowStatistic(
        label="mean ‖u‖ / ‖x‖ where the<br>first token is highest",
        meaning="Mean magnitude on rows that attend most to the first token: figure 10 claims that it is small.",
        bounds=(0.0, math.inf),
        defined=lambda rows: rows.chooses & rows.at_first,
        value=lambda rows: rows.written.magnitude,
    )
    magnitude_elsewhere = RowStatistic(
        label="mean ‖u‖ / ‖x‖ where<br>another key is highest",
        meaning="Mean magnitude on rows that attend most to any other key.",
        bounds=(0.0, math.inf),
        defined=lambda rows: rows.chooses & ~rows.at_first & ~rows.at_self,
        value=lambda rows: rows.written.magnitude,
    )


STATISTICS: Final = Statistics(UpdateStatistics, RowStatistic)  # of every head and row, in the order of `statistic`
