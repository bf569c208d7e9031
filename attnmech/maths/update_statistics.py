"""What is measured of each row of what a head writes? The update against the stream, and the value that it reads most.

The formulas are those of `updates.py` (formulas §1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .updates import cosine

STATISTICS: Final = (
    "magnitude", "orientation", "along", "across", "target_magnitude", "target_orientation",
    "magnitude_at_self", "magnitude_at_first", "magnitude_elsewhere",
)  # fmt: skip
"""What is measured for every head, row by row, in the order of the axis `statistic`."""


@dataclass(frozen=True)
class AgainstStream:
    """What each head writes of each token, against the stream there, before the norm that follows attention."""

    norm: Float[Tensor, "batch head position"]
    """‖u‖."""
    product: Float[Tensor, "batch head position"]
    """u · x."""
    stream: Float[Tensor, "batch position"]
    """‖x‖."""

    @property
    def magnitude(self) -> Float[Tensor, "batch head position"]:
        """‖u‖ / ‖x‖."""
        return self.norm / self.stream[:, None]

    @property
    def orientation(self) -> Float[Tensor, "batch head position"]:
        """cos(u, x)."""
        return cosine(self.product, self.norm, self.stream[:, None])


@dataclass(frozen=True)
class LayerRows:
    """What is known of a layer's rows, whatever its heads write."""

    key: Int[Tensor, "batch head row"]
    """The key that each row attends to most; −1 where it has no choice. Those after the values read are no tokens."""
    real: Bool[Tensor, "batch row"]
    """Which rows are tokens."""
    begins: Int[Tensor, " batch"]
    """The first key of each text."""
    by_token: Float[Tensor, "batch row"]
    """What the norm that follows attention multiplies a row's update by."""
    aligned: bool
    """Whether queries and keys are the same tokens."""
    by_global: Bool[Tensor, "batch row"] | None = None
    """The rows of global tokens, which may read values of their own."""


def update_statistics(
    written: AgainstStream, read: Sequence[AgainstStream], rows: LayerRows
) -> tuple[Float[Tensor, "statistic head batch row"], Bool[Tensor, "statistic head batch row"]]:
    """Every statistic of every row, 0 where it is undefined, and where it is defined.

        magnitude           m = ‖u‖ / ‖x‖            orientation         c = cos(u, x)
        along               m c                       across              m √(1 − c²)
        target_magnitude    that of the key that the row attends to most, if the row read nothing else
        magnitude at self   m of the rows whose highest key is their own; likewise at first and elsewhere

    `read` are the keys' values against the stream there; of two, the second are those that rows of global tokens read.
    """
    factor = rows.by_token[:, None]
    written = AgainstStream(written.norm * factor, written.product * factor, written.stream)
    magnitude, orientation = written.magnitude, written.orientation
    target = _target(read[0], rows)
    if rows.by_global is not None:
        for of_global in read[1:]:
            target = target.but(rows.by_global[:, None], _target(of_global, rows))
    real = rows.real[:, None] & (written.stream > 0)[:, None]
    seen = real & (rows.key >= 0)
    at_first = rows.key == rows.begins[:, None, None]
    at_self = rows.key == torch.arange(rows.key.shape[-1], device=rows.key.device)
    at_self = at_self if rows.aligned else torch.zeros_like(at_self)
    found = {
        "magnitude": (magnitude, real),
        "orientation": (orientation, real & (written.norm > 0)),
        "along": (magnitude * orientation, real),
        "across": (magnitude * (1 - orientation**2).clamp_min(0).sqrt(), real),
        "target_magnitude": (target.magnitude, real & target.compared),
        "target_orientation": (target.orientation, real & target.directed),
        "magnitude_at_self": (magnitude, seen & at_self),
        "magnitude_at_first": (magnitude, seen & at_first & ~at_self),
        "magnitude_elsewhere": (magnitude, seen & ~at_first & ~at_self),
    }
    valid = torch.stack([found[name][1].expand_as(magnitude) for name in STATISTICS])
    values = torch.stack([found[name][0] for name in STATISTICS]).masked_fill_(~valid, 0.0)
    return values.transpose(1, 2), valid.transpose(1, 2)


@dataclass(frozen=True)
class _Target:
    """What the key that each row attends to most would write, against the stream there."""

    magnitude: Float[Tensor, "batch head row"]
    orientation: Float[Tensor, "batch head row"]
    compared: Bool[Tensor, "batch head row"]
    """Whether there is such a key, a token with a nonzero stream."""
    directed: Bool[Tensor, "batch head row"]
    """Whether, in addition, its value is nonzero."""

    def but(self, rows: Bool[Tensor, "batch 1 row"], other: "_Target") -> "_Target":
        """The same with other numbers in some rows."""
        return _Target(*(torch.where(rows, vars(other)[name], value) for name, value in vars(self).items()))


def _target(read: AgainstStream, rows: LayerRows) -> _Target:
    """v_j W_O against x_j, for the key j that each row attends to most."""
    tokens = read.stream.shape[-1]
    at = rows.key.clamp(0, tokens - 1)
    compared = (rows.key >= 0) & (rows.key < tokens) & (read.stream > 0)[:, None].expand_as(read.norm).gather(-1, at)
    directed = compared & (read.norm > 0).gather(-1, at)
    magnitude = read.magnitude.gather(-1, at) * rows.by_token[:, None]
    return _Target(magnitude, read.orientation.gather(-1, at), compared, directed)
