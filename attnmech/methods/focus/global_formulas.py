"""The shares of a row's attention that go to the global tokens and to the keys of its window."""

from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...maths.statistic import Statistic, Statistics

MASSES: Final = Statistics(
    Statistic(
        name="global_mass",
        meaning="Mean attention of local tokens to the global ones.",
        label="attention of local tokens to global ones",
    ),
    Statistic(
        name="window_mass",
        meaning="Mean attention of local tokens to the other keys of their windows.",
        label="attention in the window",
    ),
    Statistic(
        name="uniform_global_mass",
        meaning="`global_mass` if every row attended uniformly to the keys that it sees.",
    ),
    Statistic(name="among_global", meaning="Mean attention of global tokens to global tokens."),
)
"""The masses measured on every row, in the order of the axis `statistic`."""


def masses(
    pattern: Float[Tensor, "batch head row key"],
    visible: Bool[Tensor, "batch 1 row key"],
    global_rows: Bool[Tensor, "batch row"],
    global_keys: Bool[Tensor, "batch key"],
    real: Bool[Tensor, "batch row"],
) -> tuple[Float[Tensor, "statistic batch head row"], Bool[Tensor, "statistic batch row"]]:
    """Returns all `MASSES` on each row, 0 where undefined, and the rows on which each mass is defined.

    On a local row that sees a global token and other keys:

        global_mass   Σ_{j global} p_ij        window_mass   Σ_{j not global} p_ij
        uniform_global_mass   (number of global tokens) / (number of keys that the row sees)

    and on the row of a global token, which sees every key, among_global: Σ_{j global} p_ij. A global token inside the
    window counts as global; the model also attends to it only once.
    """
    chosen = global_keys[:, None, None]
    seen = visible[:, 0]
    both, others = ((seen & keys[:, None]).sum(dim=-1) for keys in (global_keys, ~global_keys))
    local = real & ~global_rows & (both > 0) & (others > 0)
    to_global, to_others = ((pattern * keys.to(pattern)).sum(dim=-1) for keys in (chosen, ~chosen))
    uniform = (both / (both + others).clamp_min(1)).to(pattern)[:, None].expand_as(to_global)
    values = torch.stack((to_global, to_others, uniform, to_global))
    valid = torch.stack((local, local, local, real & global_rows & (others > 0)))
    return values.masked_fill(~valid[:, :, None], 0.0), valid
