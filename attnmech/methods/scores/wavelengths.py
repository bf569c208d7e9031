"""Scores by wavelength: sums over rotary planes, grouped into bands.

Formulas: docs/formulas.md#wavelengths.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...basics.arguments import finite_number, listed
from ...basics.nouns import TEXT
from ...errors import InputError, UnsupportedModelError
from ...maths.float64 import as_float64
from ...maths.scores import ScoreParts
from ...maths.variance_shares import row_covariances
from ...results.figure_file import SavesFigures
from ...results.score_terms import TermsByHead, require_term
from .wavelength_figures import band_maps

EDGES: Final = (8.0, 64.0, 512.0, 4096.0)
"""The wavelengths, in tokens, at which bands end by default."""

UNROTATED: Final = "not rotated"
"""The band of dimensions that do not turn."""


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
        shares: dict[str, Tensor] = {}
        for layer, parts in zip(self.layers, self.parts, strict=True):
            seen = parts.visible & self.real[:, None, :, None]
            terms = {name: self._of(name, parts, slice(None)) for name in self}
            of_terms, whole = row_covariances(terms, torch.stack(list(terms.values())).sum(dim=0), seen)
            variance = as_float64(whole).sum(dim=(0, 2))
            for name, value in of_terms.items():
                empty = torch.full((self.n_layers, len(variance)), torch.nan, dtype=torch.float64)
                shares.setdefault(name, empty)[layer] = as_float64(value).sum(dim=(0, 2)) / variance
        return TermsByHead(self.layers, shares)

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
