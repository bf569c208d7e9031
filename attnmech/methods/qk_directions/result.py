"""The singular directions of W_Q W_Kᵀ of every head, with the tokens that they read and their shares of the scores.

Formulas: docs/formulas.md#query-key-directions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Unpack

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from einops import einsum
from jaxtyping import Float, Int, Int64
from torch import Tensor

from ...basics.arguments import flag, index_of, shown, whole_number
from ...basics.public import public
from ...draw.chart import Chart, table_of_heads
from ...draw.head_maps import effect_map
from ...draw.section import Section
from ...draw.text import percent, plotly_text, quoted, visible_token, with_minus_signs
from ...errors import InputError
from ...maths.intervals import LEVEL, TextMeans
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...model.stack.centring import Centre, checked_centre, require_means_of
from ...results.by_layer import OfLayers, table_of
from ...results.mean_qk import MeanQK
from ...results.provenance import Provenance
from ...results.table import framed, require_one_figure
from ...runs.options import CorpusOptions
from ...runs.reducer import Source, State
from ...runs.stream import stream
from ...runs.words import texts_by_id
from .sums import CovarianceSums, Directions, Reader

_READ: Final = 1000  # the number of the texts' most frequent tokens among which the tokens of a direction are chosen
_TOKENS: Final = 5  # the number of tokens listed at each end of a direction
SIDES: Final = ("query", "key")
ENDS: Final = ("highest", "lowest")


@public
def qk_directions(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    k: int = 8,
    distance: int = 0,
    layers: Iterable[int] | None = None,
    centre: Centre | None = "mean",
    first_key: bool = True,
    **options: Unpack[CorpusOptions],
) -> "QKDirections":
    """Splits the query-key term of every head into the singular directions of W_Q W_Kᵀ, and says how much each carries.

    query_key_ij = Σ_r (q_i·a_r)(c_r·k_j), scale left out, with W_Q W_Kᵀ = Σ_r σ_r u_r v_rᵀ

    q_i·a_r is what the query reads along u_r, and c_r·k_j what the key reads along v_r; tokens with the same sign on
    both sides attract each other. The share of a direction is its part of the variance of the scores along a row, as in
    `am.variance_shares`; the shares of a head add up to its share of `query_key`.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> split = am.qk_directions(am.load(), documents(12), layers=[2])
    >>> split.share.shape                                                          # [layer head direction]
    torch.Size([1, 8, 24])
    >>> split.of_head(2, 6)["key_highest"].iloc[0]                              # doctest: +SKIP

    With rotary positions, the directions are those of W_Q R W_Kᵀ, with R the rotation at `distance`. They split the
    scores at all distances exactly; what a key reads turns with the distance, so v_r holds at `distance` alone. Where
    queries and keys are normed, W_Q and W_K include the norms' γ, and tokens are read up to a positive factor.

    Args:
        model: the model.
        inputs: texts, or an iterator of texts (a corpus); only sums are stored.
        k: the largest number of directions of a head for which vectors and tokens are kept: those with the largest
            shares.
        distance: from key to query, in tokens; with rotary positions the directions depend on it.
        layers: all by default.
        centre: where queries and keys are split, as in `am.variance_shares`.
        first_key: whether the first token of a text counts as a key.
        options: `bos`, `truncate`, `journal`, `engine` and `progress`, as in `am.stream`.

    Returns:
        The shares of all directions, with intervals over texts that hold for all heads and directions together, and
        for `k` directions of each head the vectors and the tokens that they read.

    Raises:
        ExactnessError: if the terms do not add up to the scores that the model used.
        InputError: for models with several stacks, models that read no tokens, and models that compute queries or keys
            from latents; for a `distance` beyond the model's positions; and in the cases of `am.variance_shares`.

    """
    require_model(model)
    flag("first_key", first_key)
    centre = checked_centre(centre)
    reader = Reader.of(model, whole_number("distance", distance, least=0))
    chosen = tuple(dict.fromkeys(model.points.check_layers(layers)))
    if isinstance(centre, MeanQK):
        require_means_of(centre, model.weights_hash, reader.stack, chosen)
    split = [
        (of_layer.a.to(reader.precision), of_layer.c.to(reader.precision)) for of_layer in reader.directions(chosen)
    ]
    a, c = (torch.stack(matrices) for matrices in zip(*split, strict=True))
    reducer = DirectionsReducer(a, c, centre, first_key, distance, min(a.shape[-1], whole_number("k", k, least=1)))
    result: QKDirections
    (result,) = stream(model, inputs, [reducer], layers=chosen, **options)
    return result


@dataclass(frozen=True, eq=False)
class DirectionsReducer(CovarianceSums):
    """Computes `QKDirections` once the covariances are summed."""

    distance: int
    k: int

    @property
    def options(self) -> dict[str, str]:
        """Everything but the matrices, which follow from the model and the distance."""
        names = ("distance", "k", "centre", "first_key")
        return {name: str(getattr(self, name)) for name in names}

    @torch.no_grad()
    def finish(self, state: State, source: Source) -> "QKDirections":
        model = source.model
        means = TextMeans.of_ratio(state["sums"], state["counts"], source.provenance.copies)
        share, (low, high) = means.mean, means.interval(1 - (1 - LEVEL) / max(1, means.mean.numel()))
        share, low, high = (value.permute(1, 2, 0) for value in (share, low, high))
        kept = share.nan_to_num(0.0).topk(self.k, dim=-1).indices
        frequent = state["tokens"].argsort(descending=True, stable=True)[:_READ]
        read = frequent[state["tokens"][frequent] > 0]
        if not len(read):
            raise InputError(
                "`inputs` must have tokens that are neither special nor the first of a text; give longer texts."
            )
        reader = Reader.of(model, self.distance)
        strength, vectors, tokens, readings = [], [], [], []
        for row, split in enumerate(reader.directions(source.layers)):
            strength.append(split.singular.square() / split.singular.square().sum(dim=-1, keepdim=True))
            of_layer = _kept(split, kept[row])
            vectors.append(of_layer)
            normed = reader.normed(source.layers[row], read.to(model.device)).cpu().double()
            scores = einsum(normed, of_layer, "token d_model, side head kept d_model -> head kept side token")
            ends = [scores.topk(min(_TOKENS, len(read)), largest=largest) for largest in (True, False)]
            tokens.append(torch.stack([read[end.indices] for end in ends], dim=-2))
            readings.append(torch.stack([end.values for end in ends], dim=-2))
        query, key = torch.stack(vectors, dim=1).float()
        ids = torch.stack(tokens)
        return QKDirections(
            layers=source.layers,
            n_layers=len(source.stack.places),
            documents=source.documents,
            truncated=source.truncated,
            distance=self.distance,
            share=share,
            low=low,
            high=high,
            strength=torch.stack(strength),
            kept=kept,
            query=query,
            key=key,
            tokens=ids,
            readings=torch.stack(readings).float(),
            texts=texts_by_id(model, ids, source.stack.label),
            provenance=source.provenance,
        )


def _kept(split: Directions, kept: Int[Tensor, "head kept"]) -> Float[Tensor, "side head kept d_model"]:
    """What queries and keys read along some directions, √σ u and √σ v."""
    root = split.singular.sqrt()[..., None]
    places = kept[..., None].expand(-1, -1, split.query.shape[-1])
    return torch.stack([(root * vectors).gather(1, places) for vectors in (split.query, split.key)])


@dataclass(frozen=True, repr=False)
class QKDirections(OfLayers):
    """The singular directions of W_Q W_Kᵀ of each head, numbered from the largest singular value down."""

    _TITLE = "Query-key directions of the heads of {model}"
    _SUBTRACT = "the directions of two models differ; compare their shares of query_key: am.variance_shares"
    _AXES: ClassVar = {"measured": "layers", "side": SIDES, "end": ENDS}

    layers: tuple[int, ...]
    n_layers: int
    documents: int
    """The number of texts."""
    truncated: int
    """The number of texts cut to the model's length."""
    distance: int
    """The distance from key to query at which W_Q and W_K are multiplied, in tokens."""
    share: Float[Tensor, "measured head direction"]
    """Each direction's share of the variance of scores along a row; NaN where no row sees two different scores."""
    low: Float[Tensor, "measured head direction"]
    """The low end of the share's 95 % interval, which holds for all heads and directions together; NaN below five
    texts."""
    high: Float[Tensor, "measured head direction"]
    strength: Float[Tensor, "measured head direction"]
    """σ_r² / Σ σ², which follows from the weights alone."""
    kept: Int64[Tensor, "measured head kept"]
    """The numbers of the directions with the largest shares, largest first."""
    query: Float[Tensor, "measured head kept d_model"]
    """√σ u of the kept directions: what a query reads of the stream through the norm, before its γ."""
    key: Float[Tensor, "measured head kept d_model"]
    """√σ v of the kept directions: what a key reads at `distance`."""
    tokens: Int[Tensor, "measured head kept side end token"]
    """The tokens with the highest and the lowest readings at queries and at keys, by their embeddings alone."""
    readings: Float[Tensor, "measured head kept side end token"]
    texts: Mapping[int, str]
    """The texts of the tokens, by id."""
    provenance: Provenance

    def _check(self) -> None:
        super()._check()
        if self.kept.numel() and not 0 <= int(self.kept.min()) <= int(self.kept.max()) < self.share.shape[-1]:
            raise ValueError(f"`kept` must number the {self.share.shape[-1]} directions; got {shown(self.kept)}")
        for token in self.tokens.flatten().tolist():
            self.texts[token]

    def _place(self, layer: int, head: int) -> tuple[int, int]:
        heads = self.share.shape[1]
        return self._place_of(layer), index_of("head", head, heads, f"this model has {heads} heads per layer")

    def of_head(self, layer: int, head: int) -> pd.DataFrame:
        """The kept directions of a head, the largest share first: direction, share, share_low, share_high, strength,
        and the tokens with extreme readings, query_highest, query_lowest, key_highest and key_lowest.
        """
        row, head = self._place(layer, head)
        numbers = self.kept[row, head]
        columns = {name: value[row, head][numbers].tolist() for name, value in self._columns.items()}
        kept = pd.DataFrame({"direction": numbers.tolist()} | columns)
        for side, name in enumerate(SIDES):
            for end, extreme in enumerate(ENDS):
                kept[f"{name}_{extreme}"] = [
                    [self.texts[token] for token in tokens] for tokens in self.tokens[row, head, :, side, end].tolist()
                ]
        return kept

    def vectors(self, layer: int, head: int) -> dict[str, Float[Tensor, " d_model"]]:
        """The kept directions of a head by name, "query 0", "key 0", …, for `am.decompose_by_source(directions=…)`."""
        row, head = self._place(layer, head)
        named = zip(self.kept[row, head].tolist(), self.query[row, head], self.key[row, head], strict=True)
        return {f"{side} {number}": vector for number, *both in named for side, vector in zip(SIDES, both, strict=True)}

    @property
    def query_key(self) -> Float[Tensor, "layer head"]:
        """The sum of all shares: the share of the term `query_key`."""
        return self._by_layer(self.share.sum(dim=-1))

    def to_frame(self) -> pd.DataFrame:
        """One row per direction: layer, head, direction, share, share_low, share_high, strength."""
        heads, directions = self.share.shape[1:]
        return table_of({"layer": self.layers, "head": range(heads), "direction": range(directions)}, self._columns)

    @property
    def _columns(self) -> Mapping[str, Float[Tensor, "measured head direction"]]:
        return {"share": self.share, "share_low": self.low, "share_high": self.high, "strength": self.strength}

    def by_head(self) -> pd.DataFrame:
        """One row per head: layer, head, the largest share of a direction (share, share_low, share_high), and the
        share of all directions (query_key).
        """
        frame = self.to_frame()
        sums = self.share.sum(dim=-1).flatten().tolist()
        strongest = frame.loc[frame.share.fillna(-1).groupby([frame.layer, frame["head"]], sort=False).idxmax()]
        strongest = strongest.assign(query_key=sums).reset_index(drop=True)
        return strongest[["layer", "head", "share", "share_low", "share_high", "query_key"]]

    @property
    def _labels(self) -> Mapping[str, str]:
        return {"share": "largest share of one direction", "query_key": "share of query-key"}

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws layers × heads, coloured by the share of each head's strongest direction."""
        largest = self.share.nan_to_num(-torch.inf).amax(dim=-1).masked_fill(self.share[..., 0].isnan(), torch.nan)
        require_one_figure(figure)
        drawn = effect_map(largest, layers=self.layers, label="largest share", signed=False)
        return framed(drawn, self.layers, layer, head)

    @property
    def lead(self) -> str:
        """The head whose scores depend most on one direction."""
        heads = self.by_head()
        if heads.share.isna().all():
            return "No row sees two keys with different scores, so no direction has a share."
        top = heads.iloc[int(heads.share.argmax())]
        known = "" if pd.isna(top.share_low) else f" ({percent(top.share_low, 0)} to {percent(top.share_high, 0)})"
        first = self.of_head(int(top.layer), int(top["head"])).iloc[0]
        read = {name: ", ".join(map(quoted, first[f"{name}_highest"][:3])) for name in SIDES}
        return (
            f"One direction carries {percent(top.share, 0)}{known} of the variance of the scores of "
            f"L{int(top.layer)}H{int(top['head'])} along a row; by embeddings alone, it reads "
            f"{read['query']} at queries and {read['key']} at keys."
        )

    @property
    def _table(self) -> pd.DataFrame:
        return self.by_head()

    def _page_sections(self) -> "Sequence[Section]":
        heads = range(self.share.shape[1])
        chart = directions_chart([[self.of_head(layer, head) for head in heads] for layer in self.layers])
        at = "" if not self.distance else f" at distance {self.distance}"
        return [
            Section(
                "What its queries and keys read",
                f"Each singular direction of W_Q W_Kᵀ{at} has two ends, + and −, and a share of the variance of scores "
                "along a row. A query at one end raises the scores of keys at the same end, and lowers those at the "
                "other. The tokens are those of the texts with the most extreme readings.",
                {"qk-directions": chart},
                "split.of_head({layer}, {head})",
                caveat="Tokens are read by their embeddings alone; later layers read more.",
                tab="why",
            ),
            *self._sections(),
        ]

    def _sections(self) -> "Sequence[Section]":
        return [
            Section(
                "Heads that depend on one direction",
                "Each cell is one head. Its colour is the largest share of the variance of scores along a row that one "
                "direction carries.",
                {"qk-strongest": self.plot()},
                "split.plot()",
                tab="why",
            )
        ]


_SHOWN: Final = 3  # the number of tokens shown at each end
_ENDS: Final = {"highest": "+", "lowest": "−"}


def directions_chart(frames: Sequence[Sequence[pd.DataFrame]]) -> Chart:
    """A table with two lines for each direction of each layer and head, from `QKDirections.directions`."""
    columns: dict[str, Callable[[pd.Series, str], str]] = {
        "direction": lambda line, end: f"{line.direction} {_ENDS[end]}",
        "share (95 %)": lambda line, end: _share(line) if end == "highest" else "",
        "queries that read": lambda line, end: _tokens(line[f"query_{end}"]),
        "keys that read": lambda line, end: _tokens(line[f"key_{end}"]),
    }
    texts = {
        name: [
            [[column(line, end) for _, line in of_head.iterrows() for end in _ENDS] for of_head in of_layer]
            for of_layer in frames
        ]
        for name, column in columns.items()
    }
    return table_of_heads(texts, 60 + 52 * len(frames[0][0]))


def _share(line: pd.Series) -> str:
    share = percent(line.share)
    if pd.isna(line.share_low):
        return share
    return with_minus_signs(f"{share} ({100 * line.share_low:.1f} to {100 * line.share_high:.1f})")


def _tokens(tokens: Sequence[str]) -> str:
    return ", ".join(plotly_text(visible_token(token)) for token in tokens[:_SHOWN])
