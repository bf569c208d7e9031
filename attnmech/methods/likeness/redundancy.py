"""Finds heads that attend alike, by the Jensen-Shannon divergence between their patterns.

Formulas: docs/formulas.md#similar-heads.

The divergence is measured on every row within a layer, and on sampled rows between layers
(`attnmech.methods.likeness.divergences`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, ClassVar, Final, Unpack

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import finite_number, option, whole_number
from ...basics.nouns import bracketed
from ...basics.public import public
from ...draw.figure import Figure
from ...draw.head_maps import cell_map
from ...draw.section import Section
from ...draw.style import FIGURE_STYLE, NEUTRAL, SCORE_COLOURS
from ...draw.text import percent
from ...errors import InputError
from ...maths.divergence import effective_number, placed
from ...maths.intervals import TextMeans
from ...maths.statistic import Statistic
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.by_layer import by_layer
from ...results.quantity import Places
from ...results.sentences import interval_of
from ...results.table import require_no_head
from ...runs.options import StreamOptions
from ...runs.reducer import Source, State
from ...runs.stream import stream
from ...runs.summed import SummedTable
from .divergences import STATE, DivergenceReducer, Divergences, axis_lengths, clustered


def heads_in_plane(
    points: Float[np.ndarray, "head 2"], places: Sequence[tuple[int, int]], nearest: Sequence[str], share: float
) -> go.Figure:
    """Every head as a point, coloured by layer; the closer two points are, the more the heads attend alike.

    >>> figure = heads_in_plane(np.array([[0.1, 0.0], [-0.1, 0.0]]), [(0, 0), (0, 1)], ["L0H1, 0.04"] * 2, 1.0)
    >>> figure.data[0].hovertext[0], figure.data[0].textposition[0]
    ('L0H0<br>nearest: L0H1, 0.04', 'top center')

    `places` are the heads' layers and numbers, `nearest` their nearest heads with the divergence, in words, and `share`
    is the share of the heads' spread that the plane shows.
    """
    layers, names = [layer for layer, _ in places], [f"L{layer}H{head}" for layer, head in places]
    sides = _sides(points, names)
    bar = {"title": {"text": "layer", "side": "right"}, "thickness": 12, "dtick": -(-len(set(layers)) // 8)}
    figure = Figure()
    look = {"color": layers, "colorscale": "Viridis", "size": 9, "line": {"color": NEUTRAL, "width": 0.5}}
    figure.add_scatter(
        x=points[:, 0], y=points[:, 1], mode="markers+text", cliponaxis=False, textfont={"size": 9},
        marker=look | ({"showscale": True, "colorbar": bar} if len(set(layers)) > 1 else {}),
        text=[name if side else "" for name, side in zip(names, sides, strict=True)],
        textposition=[side or "top center" for side in sides],
        customdata=[list(place) for place in places],
        hovertext=[f"{name}<br>nearest: {other}" for name, other in zip(names, nearest, strict=True)],
        hovertemplate="%{hovertext}<extra></extra>",
    )  # fmt: skip
    figure.update_layout(template=FIGURE_STYLE, height=480, margin={"t": 20})
    figure.update_xaxes(title=f"√nats; the plane captures {percent(share, 0)} of the spread")
    figure.update_yaxes(title="√nats", scaleanchor="x")
    return figure


_SIDES: Final = {
    "top center": (0, 1), "bottom center": (0, -1), "middle right": (1, 0), "middle left": (-1, 0),
    "top right": (1, 1), "top left": (-1, 1), "bottom right": (1, -1), "bottom left": (-1, -1),
}  # fmt: skip


def _sides(points: Float[np.ndarray, "head 2"], names: Sequence[str]) -> list[str]:
    """The side of each point on which its name overlaps no other name or point, loneliest points first; "" if none."""
    span = float(np.ptp(points, axis=0).max()) or 1.0
    centres, sizes = list(points), [np.full(2, 0.03 * span)] * len(points)
    chosen = [""] * len(names)
    apart = np.linalg.norm(points[:, None] - points, axis=-1)
    for number in np.argsort(-np.sort(apart, axis=1)[:, :4].sum(axis=1), kind="stable"):
        size = np.array([0.028 * len(names[number]), 0.045]) * span
        for side, towards in _SIDES.items():
            centre = points[number] + np.array(towards) * (size + sizes[number]) / 2 * 1.01
            reach = (np.array(sizes) + size) / 2
            if not (np.abs(np.array(centres) - centre) < reach).all(axis=1).any():
                centres, sizes, chosen[number] = [*centres, centre], [*sizes, size], side
                break
    return chosen


_MAPS: Final = 6  # the largest number of layers that a page shows as maps


@public
def redundancy(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    rows: int = 64,
    seed: int = 0,
    **options: Unpack[StreamOptions],
) -> "Redundancy":
    """Measures how much the patterns of any two heads differ, and how many different heads each layer has.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> alike = am.redundancy(am.load(), documents(6))
    >>> alike.clusters(0.1)[0]
    ((0, 3), (0, 4), (0, 6), (0, 7), (1, 3))
    >>> alike.effective_heads.round(decimals=1).tolist()
    [2.3, 3.6, 4.6, 5.1]

    The divergence is the mean over rows of JS(p, q) = H((p + q) / 2) − (H(p) + H(q)) / 2, in nats: 0 if two heads
    attend alike, ln 2 if they have no key in common. Rows of first tokens, special tokens and padding do not count, nor
    do rows that see only one key. A sink that takes part of the attention (gpt-oss) counts as one more key.

    Args:
        model: the model.
        inputs: texts, or an iterator of texts (a corpus); only sums are stored.
        layers: all by default.
        stack: "encoder", "decoder" or "cross" in a model with several stacks.
        rows: the number of rows of each text that are compared between layers; 0 compares heads of the same layer only.
        seed: the seed for choosing these rows; apart from the seed, the choice depends only on the text.
        options: `bos`, `keep_rows`, `truncate`, `shard`, `journal`, `engine` and `progress`, as in `am.stream`.

    Returns:
        Divergences, with intervals over texts; clusters, nearest heads, and the effective number of heads.

    Raises:
        InputError: if the patterns of the sampled rows of a batch would take more than 200 MB, or the sums between
            layers of a few texts more than 100 MB (with about 2,000 heads or more).

    """
    require_model(model)
    rows, seed = whole_number("rows", rows), whole_number("seed", seed, most=2**64 - 1)
    result: Redundancy
    (result,) = stream(model, inputs, [RedundancyReducer(rows, seed)], layers=layers, stack=stack, **options)
    return result


class RedundancyReducer(DivergenceReducer):
    """Sums divergences by text, within each layer and between layers."""

    def finish(self, state: State, source: Source) -> "Redundancy":
        return Redundancy.of(state, source, rows=self.rows)


@dataclass(frozen=True, repr=False)
class Redundancy(SummedTable):
    """How much the patterns of any two heads differ: the mean Jensen-Shannon divergence over rows, in nats, at most ln
    2.

    Heads of the same layer are compared on every row that counts, heads of different layers on sampled rows.
    """

    _TITLE = "Redundant heads of {model}"
    _SUBTRACT = "subtract what you compare: one.divergence - other.divergence"
    _MAIN = "within"
    FIGURES = ("map", "within")
    within = Statistic(
        meaning="The divergence between any two heads of the same layer.",
        bounds=(0.0, math.log(2)),
        axes="layer head other_head",
    )
    divergence = Statistic(
        meaning="The divergence between any two heads; NaN between heads that were not compared.",
        bounds=(0.0, math.log(2)),
        axes="layer head other_layer other_head",
    )

    _STATE: ClassVar[Mapping[str, Any]] = STATE

    rows: int
    """The largest number of rows of each text that were compared between layers."""

    @property
    def _axis_lengths(self) -> Mapping[str, int]:
        return axis_lengths(len(self.layers), self._heads, self.rows)

    def _merge(self, one: State, other: State) -> State:
        return RedundancyReducer().merge(one, other)

    def _by_text(self, name: str) -> TextMeans:
        return self._found.within if name == "within" else self._found.everywhere

    @property
    def _places(self) -> Places:
        return Places.of_heads(self.layers, self._heads, self.n_layers)

    def _places_of(self, name: str) -> Places:
        def in_layers(pairs: Tensor) -> Tensor:
            return self._by_layer(self._found.square(pairs))

        def everywhere(pairs: Tensor) -> Tensor:
            measured = self._by_layer(self._found.between_all(pairs))
            return by_layer(measured, self.layers, self.n_layers, axis=2)

        names: tuple[str, ...]
        if name == "within":
            names, spread = ("layer", "head", "other_head"), in_layers
            places = [(layer, *heads) for layer in self.layers for heads in self._pairs.T.tolist()]
        else:
            names, spread = ("layer", "head", "other_layer", "other_head"), everywhere
            places = [(*one, *other) for one, other in combinations(self._heads_measured, 2)]
        rows = dict(zip(names, map(list, zip(*places, strict=True)), strict=True)) if places else {}
        return Places(rows, tuple(rows.values()), str, things="pairs", spread=spread)

    @property
    def effective_heads(self) -> Float[Tensor, " layer"]:
        """The effective number of different heads in a layer: the Vendi score, exp(−Σ λ ln λ).

        λ are the eigenvalues of K / n, K = 1 − `within` / ln 2. The score is 1 if all heads of a layer attend alike,
        and the number of heads if no two have a key in common.

        Source: Friedman & Dieng 2023, "The Vendi Score", with the kernel of Martins et al. 2009.
        """
        return effective_number(self.within)

    def clusters(self, threshold: float, *, layer: int | None = None) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Groups heads (layer, head) that attend alike, the largest group first; a head unlike the others is in a group
        alone.

        Average linkage joins groups as long as the mean divergence between their heads is at most `threshold`, in nats.
        With `layer`, only heads of that layer are grouped.
        """
        most = finite_number("threshold", threshold, above=0.0)
        places, divergence = self._compared(layer)
        return clustered(places, divergence, most)

    def positions(self, *, layer: int | None = None) -> Float[Tensor, "head 2"]:
        """Places heads as points in the plane, in the order of `to_frame`; their distances approximate √divergence.

        With `layer`, only heads of that layer are placed. The points come from classical scaling (Torgerson 1952); √JS
        is a Euclidean distance.
        """
        return placed(self._compared(layer)[1])[0]

    @cached_property
    def nearest(self) -> pd.DataFrame:
        """One row per head, the most redundant first: its nearest head, and their divergence with its interval.

        `low` and `high` are the simultaneous 95 % interval over all pairs of heads that were compared; NaN for fewer
        than five texts. Heads that were not compared with any other are left out.
        """
        frame = self.to_frame()[["layer", "head", *_OF_NEAREST]].dropna(subset="divergence")
        whole = frame.astype({"nearest_layer": int, "nearest_head": int})
        return whole.sort_values("divergence", kind="stable", ignore_index=True)

    def to_frame(self) -> pd.DataFrame:
        """One row per head: its nearest head, their divergence with its interval, the mean divergence from the other
        heads of its layer (`within`), and the effective number of heads of its layer.
        """
        flat = self._found.whole.flatten(2).flatten(0, 1).clone().fill_diagonal_(torch.nan)
        ends = [end.clamp(0.0, math.log(2)) for end in self._found.everywhere.simultaneous()]
        low, high = (self._found.between_all(end).flatten(2).flatten(0, 1) for end in ends)
        effective = self.effective_heads
        rows = []
        for number, ((layer, head), divergences) in enumerate(zip(self._heads_measured, flat, strict=True)):
            place = self.layers.index(layer)
            own = divergences.reshape(len(self.layers), -1)[place]
            row: dict[str, Any] = {"layer": layer, "head": head, **dict.fromkeys(_OF_NEAREST, math.nan)}
            if not bool(divergences.isnan().all()):
                near = int(divergences.nan_to_num(torch.inf).argmin())
                numbers = (float(values[near]) for values in (divergences, low[number], high[number]))
                row |= dict(zip(_OF_NEAREST, (*self._heads_measured[near], *numbers), strict=True))
            rows.append(row | {"within": float(own.nanmean()), "effective_heads": float(effective[layer])})
        return pd.DataFrame(rows)

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws `"map"`, the default, heads as points in a plane, or `"within"`, heads × heads of a layer.

        Without `layer`, the map has the heads of all layers, and `"within"` shows the layer with the fewest different
        heads. The figure is returned, not shown.
        """
        require_no_head(None, head)
        if figure is not None and option("figure", figure, self.FIGURES) == "within":
            layer = self._fewest if layer is None else self.layers[self._place_of(layer)]
            return self._of_layer(layer)
        places, divergence = self._compared(layer)
        points, share = placed(divergence)
        near = {(row.layer, row.head): row for row in self.nearest.itertuples()}
        nearest = [
            f"L{near[place].nearest_layer}H{near[place].nearest_head}, {near[place].divergence:.3g} nats"
            if place in near
            else "none"
            for place in places
        ]
        return heads_in_plane(points.numpy(), places, nearest, share)

    def _of_layer(self, layer: int) -> "go.Figure":
        """A map of heads × heads, coloured from 0 (dark: they attend alike) to ln 2 (no key in common)."""
        divergence, low, high = (values[layer].numpy() for values in (self.within, *self.interval()))

        def hover(one: int, other: int) -> str:
            words, value, start = f"L{layer}H{one} and L{layer}H{other}", divergence[one, other], low[one, other]
            if not np.isfinite(value):
                return f"{words}<br>not measured"
            ends = f"<br>95 %: {start:.3g} to {high[one, other]:.3g}" if np.isfinite(start) else ""
            return f"{words}<br>{value:.3g} nats{ends}"

        others = np.where(np.eye(self._heads, dtype=bool), np.nan, divergence)
        figure = cell_map(others, hover, "divergence, nats", ends=(0.0, math.log(2)))
        figure.update_traces(colorscale=SCORE_COLOURS[::-1]).update_layout(height=max(260, 110 + 24 * self._heads))
        step = 1 if self._heads <= 32 else None
        return figure.update_xaxes(title=f"head of layer {layer}", dtick=step).update_yaxes(title="head", dtick=step)

    def _figure_place(self, *figure: str, **options: Any) -> Mapping[str, int]:
        within = {"layer": self._fewest} if "within" in (*figure, options.get("figure")) else {}
        return {**within, **super()._figure_place(*figure, **options)}

    @property
    def lead(self) -> str:
        fewest, effective = self._fewest, self.effective_heads
        if bool(effective[fewest].isnan()):
            return f"On {self._texts}, no row sees two keys, so no heads can be compared."
        several = f"layer {fewest} has the fewest effective heads, " if len(self.layers) > 1 else f"layer {fewest} has "
        beginning = f"On {self._texts}, {several}{float(effective[fewest]):.1f} of {self._heads}"
        return f"{beginning}{self._closest_within}{self._closest_between}."

    @property
    def _closest_within(self) -> str:
        pairs = self._found.within.mean
        if not pairs.numel() or bool(pairs.isnan().all()):
            return ""
        row, pair = divmod(int(pairs.nan_to_num(torch.inf).argmin()), pairs.shape[1])
        one, other = self._pairs[:, pair].tolist()
        ends = [float(end[self.layers[row], one, other]) for end in self.simultaneous()]
        span = interval_of(ends, ".3g", pairs.numel(), "pairs")
        layer = self.layers[row]
        return (
            f"; the two heads of one layer that attend most alike are L{layer}H{one} and L{layer}H{other} "
            f"{bracketed(f'Jensen-Shannon divergence {float(pairs[row, pair]):.3g} of at most 0.693 nats{span}')}"
        )

    @property
    def _closest_between(self) -> str:
        means = self._found.everywhere
        between = means.mean[self._found.within.mean.numel() :].reshape(self.state["between"].shape[:3])
        if not between.numel() or bool(between.isnan().all()):
            return ""
        place = int(between.nan_to_num(torch.inf).argmin())
        closest = float(between.flatten()[place])
        across, head, other_head = np.unravel_index(place, between.shape)
        one, other = list(combinations(self.layers, 2))[int(across)]
        ends = [float(end[place - between.numel()].clamp(0.0, math.log(2))) for end in means.simultaneous()]
        span = interval_of(ends, ".3g", means.mean.numel(), "pairs")
        return (
            f"; across layers, L{one}H{head} and L{other}H{other_head} attend most alike "
            f"{bracketed(f'{closest:.3g} nats{span}; at most {self.rows} sampled rows per text')}"
        )

    def _sections(self) -> "Sequence[Section]":
        reading = (
            "Jensen-Shannon divergence between the patterns of two heads, averaged over rows: 0 if they attend "
            "identically, ln 2 = 0.693 nats if they share no key."
        )
        effective = self.effective_heads[list(self.layers)].nan_to_num(torch.inf)
        shown_layers = sorted(self.layers[place] for place in effective.argsort(stable=True)[:_MAPS].tolist())
        few = (
            ""
            if len(shown_layers) == len(self.layers)
            else f" Only the {_MAPS} layers with the fewest effective heads are shown."
        )
        maps = Section(
            "Within a layer",
            f"{reading} Dark cells are pairs of heads that attend alike; hover over a cell for its interval over "
            f"texts.{few}",
            {f"within-{layer}": self.plot("within", layer=layer) for layer in shown_layers},
            f'alike.plot("within", layer={self._fewest})',
            name="within",
        )
        if bool(self._found.whole.isnan().any()):
            return [maps]
        plane = Section(
            "All heads in a plane",
            "Each point is one head, named where there is room; nearby heads attend alike. Distances approximate the "
            "square root of the divergence as closely as a plane allows. Heads of different layers are compared on at "
            f"most {self.rows} rows of each text.",
            {"map": self.plot()},
            "alike.plot()",
        )
        return [plane, maps]

    @cached_property
    def _found(self) -> Divergences:
        return Divergences(self.state)

    @property
    def _heads(self) -> int:
        return self._found.heads

    @property
    def _pairs(self) -> Int[Tensor, "2 pair"]:
        return torch.triu_indices(self._heads, self._heads, 1)

    @property
    def _heads_measured(self) -> list[tuple[int, int]]:
        return [(layer, head) for layer in self.layers for head in range(self._heads)]

    @property
    def _fewest(self) -> int:
        effective = self.effective_heads[list(self.layers)].nan_to_num(torch.inf)
        return self.layers[int(effective.argmin())]

    def _compared(self, layer: int | None) -> tuple[list[tuple[int, int]], Float[Tensor, "head head"]]:
        if layer is None:
            places, divergence = self._heads_measured, self._found.whole.flatten(2).flatten(0, 1)
        else:
            place = self._place_of(layer)
            places, divergence = [(layer, head) for head in range(self._heads)], self._found.whole[place, :, place]
        if bool(divergence.isnan().any()):
            if self.rows == 0 and layer is None:
                raise InputError("with rows=0, only heads of the same layer are compared; pass `layer`.")
            raise InputError(
                "some heads could not be compared: no row of these texts sees two keys. Pass longer texts."
            )
        return places, divergence


_OF_NEAREST: Final = ["nearest_layer", "nearest_head", "divergence", "low", "high"]
