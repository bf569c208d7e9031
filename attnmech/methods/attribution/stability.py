"""Which nodes or edges stay in a circuit that is chosen on other halves of the prompts.

Formulas: docs/formulas.md#attribution.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from numpy.random import Philox
from scipy.stats import t as student_t  # type: ignore[import-untyped]
from torch import Tensor

from ...basics.public import public
from ...errors import InputError
from ...maths.intervals import LEAST_TEXTS, LEVEL, TextMeans, fewest_texts
from ...results.circuit import Circuit
from ...results.sentences import interval_of

GROUPS: Final = 20
"""The most groups of pairs that the jackknife leaves out, one at a time."""


@public
@dataclass(frozen=True, eq=False, repr=False)
class Stability:
    """How often each node (or edge) is chosen for a circuit of `size` on a random half of the pairs of prompts.

    A node (or edge) is stable if a share of at least `threshold` of the halves chooses it, and more pairs than chance
    allows have the sign of its estimate. Where all signs are arbitrary, some node is stable in at most 5 % of cases.
    """

    names: tuple[str, ...]
    """The nodes or edges, such as "L2H3", "L2 MLP", or "L0H2 → L2H5 v"."""
    estimate: Float[Tensor, " node"]
    """The mean estimate over all pairs."""
    frequency: Float[Tensor, " node"]
    """The share of halves that choose it; an estimate of 0 is never chosen."""
    clear: Bool[Tensor, " node"]
    """Whether the sign of its estimate is clear among all of them: an exact sign test over pairs at 5 %, by Holm."""
    size: int
    """The size of the circuits."""
    threshold: float
    """The least frequency of a stable node."""
    pairs: int
    """The number of different pairs."""
    jaccard: float
    """The nodes that the circuits of two halves share, over those that either has; the mean over draws."""
    jaccard_interval: tuple[float, float]
    """The 95 % interval of `jaccard` over pairs of prompts, not over draws."""
    circuit: Circuit
    """The stable nodes or edges; they need not be connected."""

    @property
    def stable(self) -> Bool[Tensor, " node"]:
        """Whether a node is chosen often enough, and has a clear sign."""
        return (self.frequency >= self.threshold) & self.clear

    def to_frame(self) -> pd.DataFrame:
        """One row per node or edge, the most frequent first: node, estimate, frequency, clear, stable."""
        columns = {name: getattr(self, name).numpy() for name in ("estimate", "frequency", "clear", "stable")}
        order = torch.stack((self.frequency, self.estimate.abs())).numpy()
        return pd.DataFrame({"node": self.names, **columns}).iloc[np.lexsort(-order[::-1])].reset_index(drop=True)

    @property
    def lead(self) -> str:
        """The finding in one sentence."""
        things, least = "nodes" if self.circuit.edges is None else "edges", fewest_texts(len(self.names))
        often, least_share = int((self.frequency >= self.threshold).sum()), f"{100 * self.threshold:.0f} %"
        clear = f"{len(self.circuit)} of these {'has' if len(self.circuit) == 1 else 'have'} a clear sign (stable)"
        if self.pairs < least:
            clear = f"no sign can be clear on fewer than {least} pairs"
        return (
            f"On {self.pairs} pairs, {often} of {len(self.names):,} {things} are in the circuits, of size {self.size}, "
            f"of at least {least_share} of halves; {clear}; the circuits of two halves share {self.jaccard:.2f} of "
            f"their {things}{interval_of(self.jaccard_interval, '.2f')}."
        )

    def __repr__(self) -> str:
        return f"Stability({self.lead})"


Chosen = Callable[[Float[Tensor, " node"]], list[int]]
"""The places of the circuit for some estimates."""


def frequency_and_overlap(
    means: TextMeans, chosen: Chosen, draws: int, seed: int
) -> tuple[Float[Tensor, " node"], float, tuple[float, float]]:
    """The share of halves that choose each node, and the mean Jaccard index of two halves with its interval over texts.

    Each draw makes two halves without a text in common (complementary pairs). The interval is that of the jackknife
    over up to `GROUPS` groups of texts, which leaves each group out of the same halves.
    """
    texts = means.above.shape[-1]
    if texts < LEAST_TEXTS:
        raise InputError(f"halves need at least {LEAST_TEXTS} different pairs of prompts; got {texts}.")
    raw = Philox(key=[seed, texts]).random_raw(draws * texts).reshape(draws, texts)
    rank = torch.from_numpy(raw.argsort(axis=1).argsort(axis=1))
    halves = torch.cat((rank < texts // 2, rank >= texts - texts // 2))

    def overlaps(sets: Bool[Tensor, "half node"]) -> float:
        one, other = sets.chunk(2)
        return float(((one & other).sum(dim=1) / (one | other).sum(dim=1)).nanmean())

    whole = sets_of(means, chosen, halves)
    groups = rank[0] % GROUPS
    left_out = [overlaps(sets_of(means, chosen, halves & (groups != group))) for group in set(groups.tolist())]
    squares = np.square(np.array(left_out) - np.mean(left_out)).sum() * (len(left_out) - 1) / len(left_out)
    half_width = float(student_t.ppf((1 + LEVEL) / 2, len(left_out) - 1) * np.sqrt(squares))
    jaccard = overlaps(whole)
    ends = max(0.0, jaccard - half_width), min(1.0, jaccard + half_width)
    return whole.double().mean(dim=0), jaccard, ends


def sets_of(means: TextMeans, chosen: Chosen, halves: Bool[Tensor, "half text"]) -> Bool[Tensor, "half node"]:
    """What each half chooses; a node whose estimate is 0 there is chosen only by the order of nodes, so not at all."""
    weights = halves.double().T
    values = ((means.above @ weights) / (means.below @ weights)).T
    sets = torch.zeros_like(values, dtype=torch.bool)
    for half, estimates in zip(sets, values, strict=True):
        half[chosen(estimates)] = True
    return sets & (values != 0)
