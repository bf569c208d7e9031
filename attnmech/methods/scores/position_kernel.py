"""The position kernel: the part of a head's score that depends only on the distance between query and key.

Formulas: docs/formulas.md#centred-terms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import index_of, member
from ...basics.nouns import TEXT, Nouns
from ...draw.chart import ByChoice, Chart
from ...draw.section import Section
from ...errors import InputError
from ...maths.scores import ScoreParts
from ...results.by_layer import table_of
from ...results.figure_file import SavesFigures
from .wavelength_figures import kernel_chart
from .wavelengths import UNROTATED, band_names, bands_there, checked_edges, dimensions_of

_ROUNDING: Final = 0.03
"""Rotary tables in bfloat16 change a position term by up to this share of its largest value."""


@dataclass(frozen=True, eq=False)
class PositionKernel(SavesFigures):
    """The `position` term by distance, minus its value at distance 0.

    position(Δ) = native(Δ) + scale · Σ_p A_p cos(ω_p Δ + φ_p) with Δ = i − j. The second part is present only where
    queries and keys are split at means. The kernel is a line under ALiBi, steps (buckets) in T5, and a sum of waves
    under rotary positions.
    """

    layers: tuple[int, ...]
    distances: Int[Tensor, " distance"]
    """Distances in tokens, from 0 to the text's length; from minus that length in a model that sees later tokens."""
    values: Float[Tensor, "layer head distance"]
    bands: Mapping[str, Float[Tensor, "layer head distance"]]
    """What each band of wavelengths adds; empty without rotated means."""
    edges: tuple[float, ...]
    """The wavelengths that separate the bands, in tokens."""

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
