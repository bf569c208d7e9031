"""Scores by wavelength and by distance: sums over rotary planes, grouped into bands, with their figures.

The position kernel is the part of a score that depends only on the distance between query and key.

Formulas: docs/formulas.md#wavelengths and docs/formulas.md#centred-terms.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Bool, Float, Int
from plotly.colors import sample_colorscale  # type: ignore[import-untyped]
from plotly.subplots import make_subplots  # type: ignore[import-untyped]
from torch import Tensor

from ...basics.arguments import finite_number, index_of, listed, member
from ...basics.nouns import TEXT, Nouns
from ...draw.chart import ByChoice, Chart, Slot
from ...draw.figure import Figure
from ...draw.head_maps import SIGNED_COLOURS, reach_of
from ...draw.section import Section
from ...draw.style import FIGURE_STYLE, NEUTRAL, SCORE_COLOURS, TERMS
from ...draw.text import signed
from ...errors import InputError, UnsupportedModelError
from ...maths.float64 import as_float64
from ...maths.scores import ScoreParts
from ...maths.variance_shares import row_covariances
from ...results.by_layer import table_of
from ...results.figure_file import SavesFigures
from ...results.score_terms import TermsByHead, require_term

EDGES: Final = (8.0, 64.0, 512.0, 4096.0)  # the wavelengths, in tokens, at which bands end by default
UNROTATED: Final = "not rotated"  # the band of dimensions that do not turn


@dataclass(frozen=True, eq=False)
class Wavelengths(SavesFigures, Mapping[str, Any]):
    """Scores as a sum over bands of wavelengths: a mapping from bands to `[batch layer head query key]`, computed on
    demand.

    (R_i q)·(R_j k) = Σ_p |q_p| |k_p| cos(ω_p (i − j) + φ_p) over the planes p in which queries and keys turn. A band
    comprises the planes with a wavelength 2π / ω_p between two edges. Models with a position term or a soft cap also
    have the entries `position` and `softcap`; all entries add up to the scores. Bands may cancel each other.
    """

    layers: tuple[int, ...]
    n_layers: int
    edges: tuple[float, ...]
    parts: tuple[ScoreParts, ...]
    real: Bool[Tensor, "batch position"]

    @classmethod
    def of(
        cls, parts: Sequence[ScoreParts], real: Tensor, layers: tuple[int, ...], n_layers: int, edges: Sequence[float]
    ) -> "Wavelengths":
        """Splits scores into bands between the edges; raises `UnsupportedModelError` for a model without rotation."""
        checked = checked_edges(edges)
        if all(part.wavelengths is None for part in parts):
            raise UnsupportedModelError(
                "this model does not rotate its queries and keys, so its scores have no wavelength bands."
            )
        if any(part.wavelengths is not None and bool(part.wavelengths.isnan().any()) for part in parts):
            raise InputError(
                "wavelengths are measured from the rotation between neighbouring tokens; give a longer text."
            )
        return cls(layers, n_layers, checked, tuple(parts), real)

    def __iter__(self) -> Iterator[str]:
        names = bands_there(self.edges, self.parts)
        native = any(parts.position is not None for parts in self.parts)
        capped = any(parts.softcap is not None for parts in self.parts)
        return iter([*names, *(["position"] if native else []), *(["softcap"] if capped else [])])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> Float[Tensor, "batch layer head query key"]:
        require_term(name, list(self))
        return torch.stack([self._of(name, parts, slice(None)) for parts in self.parts], dim=1)

    @property
    def variance_shares(self) -> TermsByHead:
        """Each band's share of the variance of scores along a row, outside [0, 1] where bands cancel."""

        def terms_of(parts: ScoreParts, rows: slice) -> tuple[dict[str, Tensor], Tensor]:
            terms = {name: self._of(name, parts, rows) for name in self}
            return terms, torch.stack(list(terms.values())).sum(dim=0)

        return shares_within_rows(self.layers, self.n_layers, self.parts, self.real, terms_of)

    def plot(self) -> "go.Figure":
        """Each band's share of the variance of scores along a row, as a map of layers × heads for each band."""
        shares = {name: value[list(self.layers)].numpy() for name, value in self.variance_shares.items()}
        return band_maps(shares, layers=self.layers, label="share of the variance within rows")

    def __repr__(self) -> str:
        return f"Wavelengths({', '.join(self)}; layers {list(self.layers)})"

    def _of(self, name: str, parts: ScoreParts, rows: slice) -> Float[Tensor, "batch head row key"]:
        if name in band_names(self.edges):
            return parts.over(dimensions_of(name, self.edges, parts), rows)
        whole = parts.total(rows)
        if name == "softcap":
            return whole.new_zeros(whole.shape) if parts.softcap is None else parts.term(name, rows)
        return whole.new_zeros(whole.shape) if parts.position is None else parts.position.expand_as(whole)


_ROWS_AT_ONCE: Final = 256


def shares_within_rows(
    layers: tuple[int, ...],
    n_layers: int,
    parts: Sequence[ScoreParts],
    real: Bool[Tensor, "batch position"],
    terms_of: Callable[[ScoreParts, slice], tuple[Mapping[str, Tensor], Tensor]],
) -> TermsByHead:
    """Each term's share of the variance of scores along a row; `terms_of` gives the terms of rows, and their sum."""
    shares: dict[str, Tensor] = {}
    for layer, part in zip(layers, parts, strict=True):
        sums: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        for start in range(0, real.shape[1], _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            terms, total = terms_of(part, rows)
            of_terms, whole = row_covariances(terms, total, (part.visible & real[:, None, :, None])[:, :, rows])
            for name, value in (*of_terms.items(), ("", whole)):
                sums[name] = sums[name] + as_float64(value).sum(dim=(0, 2))
        variance = sums.pop("")
        for name, value in sums.items():
            empty = torch.full((n_layers, len(variance)), torch.nan, dtype=torch.float64)
            shares.setdefault(name, empty)[layer] = value / variance
    return TermsByHead(layers, shares)


def checked_edges(edges: Sequence[float]) -> tuple[float, ...]:
    """Returns the wavelengths at which bands end; raises `InputError` unless they are strictly increasing."""
    numbers = tuple(finite_number("edges", edge, above=0.0) for edge in listed("edges", edges, "a list of numbers"))
    if list(numbers) != sorted(set(numbers)):
        raise InputError(f"`edges` must be strictly increasing; got {list(numbers)}.")
    return numbers


def band_names(edges: Sequence[float], tokens: str = TEXT.tokens) -> tuple[str, ...]:
    """Returns the names of the bands, from short to long wavelengths; the last is for dimensions that do not turn.

    >>> band_names((8.0, 64.0))
    ('under 8 tokens', '8 to 64 tokens', '64 tokens and more', 'not rotated')
    """
    if not edges:
        return ("rotated", UNROTATED)
    ends = [f"{edge:g}" for edge in edges]
    inner = [f"{low} to {high} {tokens}" for low, high in pairwise(ends)]
    return (f"under {ends[0]} {tokens}", *inner, f"{ends[-1]} {tokens} and more", UNROTATED)


def bands_there(edges: Sequence[float], parts: Sequence[ScoreParts]) -> list[str]:
    """The bands that contain at least one dimension in some layer."""
    return [name for name in band_names(edges) if any(bool(dimensions_of(name, edges, part).any()) for part in parts)]


def dimensions_of(band: str, edges: Sequence[float], parts: ScoreParts) -> Bool[Tensor, " d_head"]:
    """The dimensions of a head that belong to a band; without rotation, all belong to `UNROTATED`."""
    turns = parts.wavelengths
    if turns is None:
        return torch.full(parts.query.shape[-1:], band == UNROTATED, device=parts.query.device)
    if band == UNROTATED:
        return turns.isinf()
    place = torch.bucketize(turns, torch.tensor(edges, dtype=turns.dtype, device=turns.device), right=True)
    return (place == band_names(edges).index(band)) & ~turns.isinf()


_ROUNDING: Final = 0.03  # rotary tables in bfloat16 change a position term by up to this share of its largest value


@dataclass(frozen=True, eq=False)
class PositionKernel(SavesFigures):
    """The `position` term by distance, minus its value at distance 0.

    position(Δ) = native(Δ) + scale · Σ_p A_p cos(ω_p Δ + φ_p) with Δ = i − j. The second part is present only where
    queries and keys are split at means. The kernel is a line under ALiBi, steps (buckets) in T5, and a sum of waves
    under rotary positions.
    """

    layers: tuple[int, ...]
    distances: Int[Tensor, " distance"]  # in tokens, from 0 to the text's length; from −length if later tokens are seen
    values: Float[Tensor, "layer head distance"]
    bands: Mapping[str, Float[Tensor, "layer head distance"]]  # what each band adds; empty without rotated means
    edges: tuple[float, ...]  # the wavelengths that separate the bands, in tokens

    @classmethod
    def of(
        cls, parts: Sequence[ScoreParts], layers: tuple[int, ...], edges: Sequence[float], *, by_position: bool
    ) -> "PositionKernel":
        """Reads the kernels of one text's parts off its first and last rows."""
        if by_position:
            raise InputError(
                "with means by position, the position term depends on the positions of query and key, not on their "
                'distance alone; use centre="mean" or means by head.'
            )
        if any("position" not in part.names() for part in parts):
            raise InputError(
                'these scores have no position term; split them at means: am.decompose_scores(..., centre="mean").'
            )
        length = parts[0].query.shape[2]
        both_ways = any(bool(part.visible[:, :, 0, 1:].any()) for part in parts)
        distances = torch.arange(-(length - 1) if both_ways else 0, length)

        def by_distance(make: Callable[[ScoreParts, slice], Tensor]) -> Tensor:
            return torch.stack([_by_distance(make, part, both_ways) for part in parts])

        edges = checked_edges(edges)
        turning = any(part.wavelengths is not None and part.centred for part in parts)
        names = [name for name in bands_there(edges, parts) if name != UNROTATED] if turning else []
        bands = {name: by_distance(partial(_of_means, name, edges)) for name in names}
        values = by_distance(_position)
        if not all(map(_is_of_distance, parts, values[..., -length:])):
            raise InputError(
                "the position term of this text is not a function of distance, since its positions do not count its "
                "tokens one by one (as with a picture's tokens, or position_ids); look at the term itself."
            )
        return cls(layers, distances, values, bands, edges)

    def plot(self, layer: int, head: int) -> "go.Figure":
        """A head's kernel and its bands, as lines over distance."""
        index = self.layers.index(member("layer", layer, self.layers, "the layers decomposed"))
        head = index_of("head", head, self.values.shape[1])
        return self._chart().figure(layer=index, head=head)

    def _chart(self, nouns: Nouns = TEXT) -> Chart:
        names = dict(zip(band_names(self.edges), band_names(self.edges, nouns.tokens), strict=True))
        distances, values = (array.cpu().double().numpy() for array in (self.distances, self.values))
        bands = {names[name]: value.cpu().double().numpy() for name, value in self.bands.items()}
        return kernel_chart(distances, values, bands, nouns)

    def section(self, call: str, nouns: Nouns = TEXT) -> Section:
        """The kernels of every head, for a page on which the reader chooses a head."""
        values = self.values.cpu().numpy()

        def finding(layer: int, head: int) -> str:
            kernel = values[layer, head]
            best = int(self.distances[int(kernel.argmax())])
            spread = float(kernel.max() - kernel.min())
            where = f"at the {nouns.token} itself" if best == 0 else f"at distance {best}"
            return f"Distance alone changes the score by {spread:.2f}; the score is highest {where}."

        return Section(
            name="position-kernel",
            tab="why",
            contents="Position by distance",
            heading="The position term by distance",
            finding=ByChoice.texts(("layer", "head"), values.shape[:2], finding),
            reading="How much a key's score gains or loses from its distance behind the query, whatever the two "
            f"{nouns.tokens} are."
            + (" Thin lines show the bands of wavelength; they add up to the thick line." if self.bands else ""),
            caveat="Attention depends on all terms of the score together.",
            figures={"kernel": self._chart(nouns)},
            call=f"{call}.plot(layer={{layer}}, head={{head}})",
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per head and distance: layer, head, distance, position, and one column per band."""
        columns = {"position": self.values, **self.bands}
        axes = {"layer": self.layers, "head": range(self.values.shape[1]), "distance": self.distances.tolist()}
        return table_of(axes, columns)


def _position(parts: ScoreParts, rows: slice) -> Tensor:
    return parts.term("position", rows)


def _is_of_distance(parts: ScoreParts, kernel: Float[Tensor, "head distance"]) -> bool:
    """Whether the middle row has the position term of the last row, by distance, within the rounding of 16 bits."""
    middle = kernel.shape[-1] // 2
    row = _row(_position, parts, middle)[:, : middle + 1].flip(-1)
    largest = max(float(row.abs().amax()), float(_row(_position, parts, kernel.shape[-1] - 1).abs().amax()))
    return bool((row - row[:, :1] - kernel[:, : middle + 1]).abs().amax() <= _ROUNDING * largest)


def _of_means(band: str, edges: Sequence[float], parts: ScoreParts, rows: slice) -> Tensor:
    """The contribution of a band to scale · (R_i q̄)·(R_j k̄)."""
    query, key = parts.query_from_bias, parts.key_from_bias
    assert query is not None and key is not None
    if query.ndim < 4:
        return query.new_zeros(1, query.shape[-2], 1, 1)
    chosen = dimensions_of(band, edges, parts)
    return parts.scale * (query[:, :, rows][..., chosen] @ key[..., chosen].mT)


def _by_distance(
    make: Callable[[ScoreParts, slice], Tensor], parts: ScoreParts, both_ways: bool
) -> Float[Tensor, "head distance"]:
    """The last row in reverse, after the first row if that row sees later keys; each minus its value at distance 0."""
    behind = _row(make, parts, parts.query.shape[2] - 1).flip(-1)
    behind = behind - behind[:, :1]
    if not both_ways:
        return behind
    ahead = _row(make, parts, 0)
    ahead = (ahead - ahead[:, :1])[:, 1:].flip(-1)
    return torch.cat((ahead, behind), dim=-1)


def _row(make: Callable[[ScoreParts, slice], Tensor], parts: ScoreParts, place: int) -> Float[Tensor, "head key"]:
    _, heads, length, _ = parts.query.shape
    return make(parts, slice(place, place + 1)).expand(1, heads, 1, length)[0, :, 0]


_DASHES: Final = ("dash", "dot", "dashdot", "longdash", "longdashdot")


def band_maps(shares: Mapping[str, Float[np.ndarray, "layer head"]], *, layers: Sequence[int], label: str) -> go.Figure:
    """Draws a map of layers × heads for each band, on a common scale centred on zero.

    >>> figure = band_maps({"under 8 tokens": np.array([[0.4, -0.1]])}, layers=[3], label="share")
    >>> [(trace.meta, trace.y) for trace in figure.data]
    [('under 8 tokens', ('3',))]
    """
    reach = reach_of(np.stack(list(shares.values())))
    titles = [_in_two_lines(name) for name in shares]
    figure = Figure(make_subplots(1, len(shares), shared_yaxes=True, horizontal_spacing=0.02, subplot_titles=titles))
    for column, (name, share) in enumerate(shares.items(), start=1):
        hover = [
            [
                f"L{layer}H{head}<br>{name}<br>" + (signed(value, ".3g") if np.isfinite(value) else "not defined")
                for head, value in enumerate(row)
            ]
            for layer, row in zip(layers, share, strict=True)
        ]
        cells = go.Heatmap(
            z=share,
            x=list(range(share.shape[1])),
            y=[str(layer) for layer in layers],
            coloraxis="coloraxis",
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            xgap=1,
            ygap=1,
            meta=name,
        )
        figure.add_trace(cells, row=1, col=column)
    bar = {"title": {"text": label, "side": "right"}, "thickness": 12}
    scale = {"cmin": -reach, "cmax": reach, "colorscale": SIGNED_COLOURS, "colorbar": bar}
    title = {"text": "The bands of a head add up to 1 and may cancel each other.", "font": {"size": 13}, "y": 0.99}
    height = max(280, 170 + 18 * len(layers))
    figure.update_layout(template=FIGURE_STYLE, height=height, coloraxis=scale, margin={"t": 80}, title=title)
    figure.update_annotations(font={"size": 12, "color": NEUTRAL})
    figure.update_xaxes(title="head", showgrid=False)
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_yaxes(title="layer", col=1)
    return figure


def kernel_chart(
    distances: Float[np.ndarray, " distance"],
    whole: Float[np.ndarray, "layer head distance"],
    bands: Mapping[str, Float[np.ndarray, "layer head distance"]],
    nouns: Nouns = TEXT,
) -> Chart:
    """Draws each head's position term by the distance from query to key, and what each band of wavelengths adds to it.

    Args:
        distances: query position − key position, in tokens.
        whole: the term at each distance, in units of the score, minus its value at distance 0.
        bands: what each band contributes at each distance; empty for a model without rotation.
        nouns: the words for the positions.

    Returns:
        A chart with one trace per band and, last, one for the whole "position" term (named in the traces' `meta`).

    """
    colours = sample_colorscale(SCORE_COLOURS[::-1][:4], np.linspace(0, 1, max(2, len(bands))).tolist())
    figure, slots = Figure(), []
    for place, (name, values) in enumerate({**bands, "position": whole}.items()):
        last = name == "position"
        line = (
            {"color": TERMS["position"].colour, "width": 3, "dash": "solid"}
            if last
            else {"color": colours[place], "width": 1.5, "dash": _DASHES[place % len(_DASHES)]}
        )
        figure.add_scatter(
            x=distances,
            mode="lines",
            line=line,
            name="sum" if last else name,
            meta=name,
            showlegend=True,
            hovertemplate=f"{name}<br>distance %{{x}}<br>%{{y:+.3f}}<extra></extra>",
        )
        slots.append(Slot(f"data.{place}.y", ByChoice(values, ("layer", "head"))))
    legend = {"title": {"text": "wavelength" if bands else "term"}}
    figure.layout = {"template": FIGURE_STYLE, "height": 420, "legend": legend, "margin": {"t": 90}}
    figure.update_xaxes(title=f"distance from query to key, in {nouns.tokens}")
    figure.update_yaxes(
        title=f"position term of the score,<br>minus its value at the {nouns.token} itself", zeroline=True
    )
    return Chart(figure, tuple(slots))


def dimension_bars(frame: pd.DataFrame, *, title: str) -> go.Figure:
    """Draws the query, the key and what each dimension adds to the score, for one pair of tokens.

    Args:
        frame: the table of `SplitScores.dimensions`.
        title: names the pair and gives the sum.

    Returns:
        A figure with bars of "query", "key" and "product" (the traces' `meta`), one below the other.

    """
    names = {"query": "query q", "key": "key k", "product": "scale · q · k"}
    figure = Figure(make_subplots(3, 1, shared_xaxes=True, vertical_spacing=0.08, subplot_titles=list(names.values())))
    turns = [
        "<br>does not turn" if np.isinf(wavelength) else f"<br>a turn in {wavelength:.4g} tokens"
        for wavelength in frame["wavelength"]
    ]
    for row, name in enumerate(names, start=1):
        values = frame[name].to_numpy()
        colours = np.where(values < 0, SIGNED_COLOURS[0], SIGNED_COLOURS[-1]).tolist()
        bars = go.Bar(
            x=list(range(len(values))),
            y=values,
            marker={"color": colours if name == "product" else "#6f9cc1"},
            customdata=turns,
            hovertemplate=f"dimension %{{x}}%{{customdata}}<br>{name} %{{y:.4g}}<extra></extra>",
            showlegend=False,
            meta=name,
        )
        figure.add_trace(bars, row=row, col=1)
    figure.update_layout(
        template=FIGURE_STYLE, height=480, bargap=0.1, margin={"t": 90}, title={"text": title, "font": {"size": 13}}
    )
    figure.update_annotations(font={"size": 12, "color": NEUTRAL})
    figure.update_xaxes(title="dimension of the head", row=3)
    figure.update_yaxes(zeroline=True, zerolinecolor=NEUTRAL)
    figure.update_yaxes(title="score", row=3)
    return figure


def _in_two_lines(name: str) -> str:
    """The name of a band, broken into two lines.

    >>> _in_two_lines("under 8 tokens"), _in_two_lines("64 tokens and more")
    ('under 8<br>tokens', '64 tokens<br>and more')
    """
    return re.sub(" (and more|tokens)$", r"<br>\1", name)
