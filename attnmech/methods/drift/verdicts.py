"""Says at which depth of a model its streams move, by cosine, by rank and by churn."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any, Final

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy.random import Philox
from scipy.stats import rankdata  # type: ignore[import-untyped]
from torch import Tensor

from ...draw.figure_page import table_html
from ...draw.text import html_text
from ...maths.intervals import LEAST_TEXTS, TextMeans

MOVEMENTS: Final[Mapping[str, str]] = {"cosine": "cosine_step", "rank": "rank_step", "churn": "churn"}
"""The three metrics, each with the statistic of its movement since the layer below."""

_LEAST_STEPS: Final = 3


@dataclass(frozen=True)
class Movement:
    """How far tokens move from layer to layer by each metric, as sums by text."""

    layers: tuple[int, ...]  # the layers that have a layer below
    sums: Mapping[str, Float[Tensor, "step text"]]  # sums of movement, by metric
    counts: Mapping[str, Float[Tensor, "step text"]]
    levels: Mapping[str, Float[np.ndarray, " layer"]]  # the means of cosine and log rank in every layer measured

    def profile(self, metric: str) -> Float[np.ndarray, " step"]:
        """The mean movement in each layer."""
        movement: np.ndarray = (self.sums[metric].sum(dim=-1) / self.counts[metric].sum(dim=-1)).numpy()
        return movement

    @property
    def places(self) -> Float[Tensor, " step"]:
        """The depth of each step, from 0 for the first to 1 for the last."""
        return torch.linspace(0, 1, len(self.layers), dtype=torch.float64)

    @property
    def where(self) -> TextMeans:
        """Depth Σ w m / Σ m and distance from the middle Σ |2w − 1| m / Σ m of each metric, `[2 metric]`."""
        weights = torch.stack((self.places, (2 * self.places - 1).abs()))
        above = torch.stack(
            [torch.stack([(weight[:, None] * m).sum(dim=0) for m in self.sums.values()]) for weight in weights]
        )
        below = torch.stack([m.sum(dim=0) for m in self.sums.values()]).expand_as(above)
        return TextMeans.of_ratio(above, below)


@dataclass(frozen=True)
class DriftVerdicts:
    """At which depth streams move by cosine, by rank and by churn, and whether the three agree."""

    stories: pd.DataFrame  # one row per metric: the depth of its movement, and the name of its story
    agreement: pd.DataFrame  # one row per pair of metrics: Spearman's ρ over layers; how many shuffled orders reach |ρ|
    lead: str  # the finding in one sentence

    @classmethod
    def of(cls, measured: Movement, untrained: Movement | None, texts: int) -> "DriftVerdicts":
        """Judges the movement; `untrained` is the movement in a model with random weights."""
        stories, agreement = _stories(measured), _agreement(measured)
        if untrained is not None:
            other, others = _stories(untrained), _agreement(untrained)
            for name in ("depth", "from_middle", "largest_step"):
                stories[f"{name}_untrained"] = other[name]
            agreement["rho_untrained"] = others["rho"]
        return cls(stories, agreement, _lead(stories, agreement, texts))

    def to_frame(self) -> pd.DataFrame:
        """The table of stories."""
        return self.stories

    def _repr_html_(self) -> str:
        return f"<p>{html_text(self.lead)}</p>{table_html(self.stories)}{table_html(self.agreement)}"

    def __repr__(self) -> str:
        return f"DriftVerdicts({self.lead})"


def _stories(measured: Movement) -> pd.DataFrame:
    where, steps = measured.where, len(measured.layers)
    low, high = (end.clamp(0, 1) for end in where.simultaneous())
    even = float((2 * measured.places - 1).abs().mean()) if steps else 0.0
    rows = []
    for place, metric in enumerate(MOVEMENTS):
        profile = measured.profile(metric)
        known = steps >= _LEAST_STEPS and bool(np.isfinite(profile).all()) and bool(profile.any())
        still = steps > 0 and not profile.any()
        row: dict[str, Any] = {"metric": metric, "story": "no movement" if still else "unknown"}
        if known:
            ends = [(float(low[number, place]), float(high[number, place])) for number in range(2)]
            row["story"] = _story(ends[0], ends[1], even)
        for number, name in enumerate(("depth", "from_middle")):
            row[name] = float(where.mean[number, place]) if known else np.nan
            row[f"{name}_low"], row[f"{name}_high"] = (float(end[number, place]) for end in (low, high))
        row["largest_step"] = measured.layers[int(profile.argmax())] if known else None
        rows.append(row)
    return pd.DataFrame(rows).astype({"largest_step": "Int64"})


def _story(depth: tuple[float, float], from_middle: tuple[float, float], even: float) -> str:
    """Names the story by the interval of the depth or, if that contains ½, of the distance from the middle.

    >>> _story((0.2, 0.4), (0.5, 0.7), 0.6), _story((0.4, 0.6), (0.3, 0.5), 0.6), _story((0.4, 0.6), (0.5, 0.7), 0.6)
    ('early', 'in the middle', 'undecided')
    """
    if depth[1] < 0.5:
        return "early"
    if depth[0] > 0.5:
        return "late"
    if from_middle[1] < even:
        return "in the middle"
    return "at both ends" if from_middle[0] > even else "undecided"


def _agreement(measured: Movement) -> pd.DataFrame:
    pairs = [
        ("movement", one, other, measured.profile(one), measured.profile(other))
        for one, other in combinations(MOVEMENTS, 2)
    ]
    # A high rank means far from the token's own embedding, as a low cosine does.
    pairs.append(("level", "cosine", "rank", -measured.levels["cosine"], measured.levels["rank"]))
    rows = []
    for what, one, other, series, others in pairs:
        rho, shuffled = rank_agreement(series, others)
        rows.append({"of": what, "one": one, "other": other, "rho": rho, "p_shuffled": shuffled})
    return pd.DataFrame(rows)


def _lead(stories: pd.DataFrame, agreement: pd.DataFrame, texts: int) -> str:
    clauses = ", ".join(_told(row) for row in stories.to_dict("records"))
    few = "" if texts >= LEAST_TEXTS else f" Fewer than {LEAST_TEXTS} texts do not support a verdict."
    pairs = agreement[agreement["of"] == "movement"].to_dict("records")
    together = [
        f"{pair['one']} and {pair['other']}" for pair in pairs if pair["rho"] > 0 and pair["p_shuffled"] <= 0.05
    ]
    agree = (
        f"Across layers, the step sizes of {', and of '.join(together)} correlate more than in shuffled layers."
        if together
        else "Across layers, no two measures have step sizes that correlate more than in shuffled layers."
    )
    return f"Where tokens move away from their embeddings: {clauses}. {agree}{few}"


def _told(row: Mapping[Any, Any]) -> str:
    if not np.isfinite(row["depth"]):
        why = "" if row["story"] == "no movement" else " (at least three steps are needed)"
        return f"by {row['metric']} {row['story']}{why}"
    return (
        f"by {row['metric']} {row['story']} (depth {row['depth']:.2f}, largest step into layer {row['largest_step']})"
    )


_ALL_ORDERS: Final = 7  # the largest number of layers for which all orders are tried
_ORDERS: Final = 9999  # the number of random orders for more layers
_LEAST: Final = 3
_ROUNDING: Final = 1e-12


def rank_agreement(one: Float[np.ndarray, " layer"], other: Float[np.ndarray, " layer"]) -> tuple[float, float]:
    """Computes Spearman's ρ of two series, and the share of orders with at least this |ρ|; NaN for a constant series.

    All orders of up to seven layers are tried; for more layers, 9,999 random orders and the true one.

    >>> rho, p = rank_agreement(np.array([1.0, 2.0, 4.0, 8.0]), np.array([0.0, 1.0, 3.0, 2.0]))
    >>> round(rho, 3), round(p, 3)
    (0.8, 0.333)
    """
    if len(one) < _LEAST or not (np.isfinite(one).all() and np.isfinite(other).all()):
        return math.nan, math.nan
    ranks = [_standard(rankdata(series)) for series in (one, other)]
    if not all(np.isfinite(series).all() for series in ranks):
        return math.nan, math.nan
    exact = len(one) <= _ALL_ORDERS
    if exact:
        orders = np.array(list(permutations(range(len(one)))))
    else:  # raw bits of Philox-4×64 give the same orders in every version of numpy
        bits = Philox(key=[0, len(one)]).random_raw(_ORDERS * len(one)).reshape(_ORDERS, len(one))
        orders = bits.argsort(axis=1, kind="stable")
    rho = float(ranks[0] @ ranks[1])
    as_large = np.abs(ranks[0][orders] @ ranks[1]) >= abs(rho) - _ROUNDING
    share = as_large.mean() if exact else (as_large.sum() + 1) / (len(orders) + 1)
    return rho, float(share)


def _standard(ranks: np.ndarray) -> np.ndarray:
    centred = ranks - ranks.mean()
    size = float(np.linalg.norm(centred))
    return centred / size if size > 0 else np.full(len(ranks), np.nan)
