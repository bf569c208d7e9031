"""A joint embedding: points, numbers by layer and head, heads that stand out, search and figures."""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ...basics.arguments import option, shown, string
from ...basics.fields import check_layers
from ...basics.nouns import counted
from ...draw.section import Section
from ...draw.text import with_minus_signs
from ...errors import InputError
from ...results.provenance import Provenance
from ...results.result import PagedResult
from .formulas import spread_ratio
from .numbers import NUMBERS, HeadNumbers
from .patch_images import PatchImages
from .pictures import AFTER, NAMES, criterion_curve, joint_scatter

_RANDOM_POINTS: Final = 1_000  # the largest number of points per head among which `search` takes mean distances

_ANOMALIES: Final[Mapping[str, float]] = {
    "norm disparity": math.log(2),
    "separated clusters": 2.0,
    "attends to first": 0.5,
}
"""The smallest values at which a head is listed: |ln(key norm / query norm)|, centroid distance in spreads, mean
attention.
"""


_BYTES: Final = re.compile(r"(?<=[^\0-\x7f])\[[1-4](?:,[1-4])*/[2-4]\]|\\x[89a-f][0-9a-f]")
"""The notation of labels for the bytes that a token holds, which is not text: 你[1,2/3], \\xff.

The numbers are at most 4, so that a footnote in brackets is not taken for it.
"""


def searched(label: str) -> str:
    r"""Returns the characters of a token in which a search looks, composed.

    >>> searched("你[1,2/3]"), searched(r"\xff"), searched("e\u0301 [1/2]") == "\u00e9 [1/2]"
    ('你', '', True)
    """
    return unicodedata.normalize("NFC", _BYTES.sub("", label))


class Anomaly(NamedTuple):
    """A head that stands out, with the number that makes it stand out."""

    layer: int
    head: int
    what: str  # "norm disparity", "separated clusters" or "attends to first"
    number: float  # median key norm / query norm; distance of centroids / spread; mean attention to the first token


@dataclass(frozen=True, repr=False)
class EmbeddedPoints(HeadNumbers, PagedResult):
    """Queries and keys of heads as points in one space, with their measurements."""

    _TITLE = "Joint embedding of the queries and keys of {model}"
    _SUBTRACT = "subtract what you compare: one.correlation - other.correlation"
    FIGURES = ("points", "criterion")

    heads: tuple[tuple[int, int], ...]
    """The embedded heads as (layer, head), in the order of the axis `chosen`."""
    n_layers: int
    n_heads: int
    stack: str
    geometry: Literal["scaled", "exact"]
    shift: bool
    """Whether the keys were shifted."""
    chosen_by: str
    """The choice of c: "auto", "norm" or "given"."""
    dims: int
    perplexity: float
    seed: int
    labels: tuple[str, ...]
    """The sampled tokens as text."""
    text: Int[Tensor, " token"]
    """The number of each token's text among the texts that were run."""
    position: Int[Tensor, " token"]
    """Each token's place among the real tokens of its text."""
    lengths: Int[Tensor, " text"]
    """The number of tokens in each text."""
    special: Bool[Tensor, " token"]
    types: Int[Tensor, " token"]
    """Indices into `attnmech.runs.token_types.TOKEN_TYPES`."""
    documents: tuple[int, ...]
    """The numbers of the texts in the inputs."""
    texts_seen: int
    """The number of texts in the inputs; from a corpus, not all of them may have been run."""
    pairs: tuple[int, ...]
    """The number of query-key pairs in each layer over which measures before projection are taken."""
    all_pairs: bool
    """Whether these are all pairs that attention sees; otherwise they are a random sample."""
    vectors: Float[Tensor, "chosen point d"]
    """The points before projection: the queries of all sampled tokens, then their keys."""
    offsets: Float[Tensor, "chosen d"]
    """The vector that the shift added to the keys."""
    norms: Float[Tensor, "chosen point"]
    """The norms of queries and keys before scale and shift."""
    highest: Int[Tensor, "chosen token 2"]
    """Each query's two most attended keys, as indices of sampled tokens; −1 where the key was not sampled."""
    weights: Float[Tensor, "chosen token 2"]
    """The attention to these two keys, from 0 to 1."""
    numbers: Mapping[str, Float64[Tensor, " chosen"]]
    after: Mapping[str, Mapping[str, Float64[Tensor, " chosen"]]]
    """The measures after projection, by projection."""
    flags: tuple[str, ...]
    """"edge" where the best c lies at an end of the grid, "flat" where the criterion does not depend on c, otherwise
    "".
    """
    grid: Float64[Tensor, "chosen c"]
    """The values of c that were tried."""
    curve: Float64[Tensor, "chosen c"]
    """The weighted correlation at each value of c; NaN unless c was chosen by it."""
    points: Mapping[str, Float[Tensor, "chosen point dims"]]
    """By projection, the points in the picture: the queries of all sampled tokens, then their keys."""
    patterns: Mapping[str, Float[Tensor, "chosen query key"]]
    """The whole attention patterns of a few short texts, by the text's number."""
    text_labels: Mapping[str, tuple[str, ...]]
    text_special: Mapping[str, Bool[Tensor, " position"]]
    sink: bool
    """Whether a sink takes part of the attention, so that rows do not sum to 1."""
    images: PatchImages | None
    """The images, if tokens are patches of images."""
    types_of_heads: tuple[str, ...]
    """The type of each head, "" where none is claimed; empty if they were not measured."""
    provenance: Provenance

    @property
    def _axis_lengths(self) -> Mapping[str, int]:
        tokens = len(self.labels)
        return {"chosen": len(self.heads), "token": tokens, "point": 2 * tokens, "text": len(self.documents)}

    def _check(self) -> None:
        # The axes of patterns differ from text to text.
        for field_name in ("patterns", "text_special"):
            if set(getattr(self, field_name)) != set(self.text_labels):
                raise ValueError(f"`{field_name}` must have one entry per text of `text_labels`")
        if len(self.flags) != len(self.heads):
            raise ValueError("`flags` must have one entry per head")
        super(EmbeddedPoints, replace(self, patterns={}, text_special={}))._check()
        check_layers(tuple(dict.fromkeys(layer for layer, _ in self.heads)), self.n_layers)

    def _value_of(self, statistic: str) -> Float[Tensor, "layer head"]:
        return self._by_head(self.numbers[statistic])

    def _by_head(self, values: Float[Tensor, " chosen"]) -> Float[Tensor, "layer head"]:
        by_head = torch.full((self.n_layers, self.n_heads), torch.nan, dtype=values.dtype)
        layer, head = torch.tensor(self.heads).T
        by_head[layer, head] = values
        return by_head

    @property
    def trustworthiness(self) -> dict[str, Float[Tensor, "layer head"]]:
        """By projection, the extent (0 to 1) to which neighbours in the picture were neighbours before (Venna & Kaski
        2001).

        Computed by scikit-learn with 5 neighbours and the projection's metric, on at most 1,000 random points.
        """
        return {name: self._by_head(measures["trustworthiness"]) for name, measures in self.after.items()}

    @cached_property
    def anomalies(self) -> tuple[Anomaly, ...]:
        """Heads that stand out, the strongest first.

        "norm disparity": the median norms of queries and keys differ by a factor of at least 2. "separated clusters":
        before the shift, the centroids of queries and keys are at least 2 spreads apart. "attends to first": the first
        token receives at least half of the attention of all later rows. Heads are ranked by the ratio of their number
        to its limit.
        """
        ranked = []
        names = ("query_norm", "key_norm", "separation", "first_attention")
        columns = zip(self.heads, *(self.numbers[name].tolist() for name in names), strict=True)
        for (layer, head), query, key, apart, first in columns:
            ratio = key / query if query > 0 else math.inf
            strength = {
                "norm disparity": (ratio, abs(math.log(ratio)) if ratio > 0 else math.inf),
                "separated clusters": (apart, apart),
                "attends to first": (first, first),
            }
            ranked += [
                (size / _ANOMALIES[what], Anomaly(layer, head, what, number))
                for what, (number, size) in strength.items()
                if size >= _ANOMALIES[what]
            ]
        return tuple(anomaly for _, anomaly in sorted(ranked, key=lambda entry: (-entry[0], entry[1][:3])))

    def _place(self, layer: int, head: int) -> int:
        try:
            return self.heads.index((layer, head))
        except ValueError:
            raise InputError(
                f"layer {layer}, head {head} was not embedded; got {len(self.heads)} heads, from "
                f"L{self.heads[0][0]}H{self.heads[0][1]} to L{self.heads[-1][0]}H{self.heads[-1][1]}."
            ) from None

    def _projection(self, projection: str | None) -> str:
        return next(iter(self.points)) if projection is None else option("projection", projection, self.points)

    def embedded(self, layer: int, head: int) -> tuple[Float[Tensor, "token d"], Float[Tensor, "token d"]]:
        """Returns a head's queries and keys as points before projection."""
        tokens = len(self.labels)
        vectors = self.vectors[self._place(layer, head)]
        return vectors[:tokens], vectors[tokens:]

    def search(self, query: str, *, projection: str | None = None) -> pd.DataFrame:
        """Measures how close together the tokens that contain a string lie in each head, the most clustered head first.

        `queries` and `keys` are the mean distance between two hits, divided by the mean distance between two random
        points of the same kind (of more than 1,000 points, 1,000 are drawn at random). Near 0, the hits form one
        cluster: the head groups tokens by what they are. Near 1, the hits are dispersed: the head groups tokens by
        something else, such as position. `ratio` is the mean of `queries` and `keys`. Distances are measured before
        projection, or in one of the pictures. Case does not matter.

        Raises `InputError` unless at least two sampled tokens contain the string.
        """
        wanted = searched(string("query", query)).casefold()
        texts = [searched(label).casefold() for label in self.labels]
        hits = [place for place, text in enumerate(texts) if wanted and wanted in text]
        if len(hits) < 2:
            raise InputError(
                f"at least two of the {len(self.labels)} sampled tokens must contain {shown(query)}; {len(hits)} "
                f"{'does' if len(hits) == 1 else 'do'}."
            )
        places, tokens = self.vectors, len(self.labels)
        if projection is not None:
            places = self.points[self._projection(projection)]
        drawn = np.random.default_rng([self.seed, 4])
        some = torch.arange(tokens)
        if tokens > _RANDOM_POINTS:
            some = torch.from_numpy(drawn.choice(tokens, _RANDOM_POINTS, replace=False))
        chosen = torch.tensor(hits)
        if len(hits) > _RANDOM_POINTS:
            chosen = chosen[torch.from_numpy(drawn.choice(len(hits), _RANDOM_POINTS, replace=False))]
        kinds = [(start + chosen, start + some) for start in (0, tokens)]
        ratios = np.array([[spread_ratio(of_head[hit], of_head[any_]) for hit, any_ in kinds] for of_head in places])
        frame = pd.DataFrame(self.heads, columns=["layer", "head"]).assign(hits=len(hits), ratio=ratios.sum(axis=1) / 2)
        frame["queries"], frame["keys"] = ratios.T
        return frame.sort_values("ratio", kind="stable", ignore_index=True)

    def to_frame(self) -> pd.DataFrame:
        """One row per head: scale, flag, and all measures before and after projection."""
        layer, head = zip(*self.heads, strict=True)
        frame: dict[str, Any] = {"layer": layer, "head": head}
        for name in NUMBERS:
            frame[name] = self.numbers[name].numpy()
            if name == "scale":
                frame["flag"] = self.flags
            if name == "key_norm":
                frame["disparity"] = (self.numbers["key_norm"] / self.numbers["query_norm"]).numpy()
        for projection, measures in self.after.items():
            frame |= {f"{name}_{projection}": measures[name].numpy() for name in AFTER}
        return pd.DataFrame(frame)

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws `"points"`, a head's queries and keys in the first projection (the name of another one draws that), or
        `"criterion"`, the weighted correlation at each c; not shown.

        Without `layer` and `head`, the figure shows the head with the correlation closest to −1.
        """
        figure = "points" if figure is None else option("figure", figure, (*self.FIGURES, *self.points))
        if (layer is None) != (head is None):
            raise InputError("pass both `layer` and `head`, or neither.")
        place = self._best if layer is None or head is None else self._place(layer, head)
        if figure == "criterion":
            if bool(self.curve[place].isnan().all()):
                raise InputError('the criterion has a curve only with scale="auto" and geometry="scaled".')
            return criterion_curve(
                self.grid[place].numpy(), self.curve[place].numpy(), float(self.numbers["scale"][place])
            )
        name = self._projection(None if figure == "points" else figure)
        where = [
            f"{self._unit} {text}, token {at}"
            for text, at in zip(self.text.tolist(), self.position.tolist(), strict=True)
        ]
        return joint_scatter(self.points[name][place].numpy(), self.labels, where, projection=NAMES[name])

    def _figure_place(self, *figure: str, **options: Any) -> Mapping[str, int]:
        layer, head = self.heads[self._best]
        return {"layer": layer, "head": head, **super()._figure_place(*figure, **options)}

    @property
    def _best(self) -> int:
        return int(self.numbers["correlation"].nan_to_num(torch.inf).argmin())

    @property
    def _unit(self) -> str:
        return "text" if self.images is None else "image"

    @property
    def lead(self) -> str:
        known = self.numbers["correlation"][~self.numbers["correlation"].isnan()]
        count = len(self.documents)
        tokens = f"{counted(len(self.labels), noun='token')} of {count} {self._unit}{'' if count == 1 else 's'}"
        if not len(known):
            return f"{tokens}: too few query-key pairs to correlate distance and dot product."
        layer, head = self.heads[self._best]
        several = (
            f"{float(known.mean()):.2f} on average over {counted(len(known), noun='head')}, " if len(known) > 1 else ""
        )
        what = "score" if self.geometry == "exact" else "dot product"
        closest = ", the closest to −1" if len(known) > 1 else ""
        return with_minus_signs(
            f"{tokens}: the weighted correlation between distance and {what} is {several}{float(known.min()):.2f} "
            f"for L{layer}H{head}{closest}."
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What was sampled, where the shift changes attention, and which values of c are uncertain."""
        sentences = []
        if len(self.labels) < int(self.lengths.sum()):
            sentences.append(
                f"{len(self.labels):,} of {int(self.lengths.sum()):,} tokens were sampled at random as points."
            )
        if len(self.documents) < self.texts_seen:
            sentences.append(
                f"{len(self.documents):,} of {self.texts_seen:,} {self._unit}s were sampled at random and run."
            )
        if not self.all_pairs:
            sentences.append(f"Correlations are over {max(self.pairs):,} randomly sampled query-key pairs.")
        change = self.numbers["attention_change"]
        moved = change > _CHANGED
        if bool(moved.any()):
            sentences.append(
                f"The shift changes attention probabilities by up to {float(change[moved].max()):.2g} (soft cap or "
                f"sink; heads affected: {int(moved.sum())})."
            )
        for flagged, words in (
            ("edge", "at an end of the search grid"),
            ("flat", "undetermined (all values do equally well)"),
        ):
            flags = zip(self.heads, self.flags, strict=True)
            names = [f"L{layer}H{head}" for (layer, head), flag in flags if flag == flagged]
            if names:
                more = "" if len(names) <= 8 else f" and {len(names) - 8} more"
                sentences.append(f"The best c is {words} in {', '.join(names[:8])}{more}.")
        return tuple(sentences)

    def _sections(self) -> Sequence[Section]:
        layer, head = self.heads[self._best]
        sections = [
            Section(
                f"Layer {layer}, head {head}",
                "Each token appears as two points, its query and its key; the nearer a key is to a query, the "
                f"higher their score. {' '.join(self.notes)}".strip(),
                {f"points-{name}": self.plot(name) for name in self.points},
                f"joint.plot(layer={layer}, head={head})",
                name="points",
            )
        ]
        if not bool(self.curve[self._best].isnan().all()):
            sections.append(
                Section(
                    "The choice of c",
                    "Multiplying queries by c and dividing keys by c preserves every dot product but changes "
                    "distances. c minimises the correlation between distance and dot product over near pairs.",
                    {"criterion": self.plot("criterion")},
                    f'joint.plot("criterion", layer={layer}, head={head})',
                )
            )
        return sections


_CHANGED: Final = 1e-5  # changes of attention below this are attributed to rounding
