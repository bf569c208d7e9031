"""Which heads attend alike? The Jensen-Shannon divergence between the patterns of heads (formulas §3).

Within a layer it is measured on every row; between layers, whose patterns are never there together, on sampled rows
whose patterns are kept until the batch ends.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, ClassVar, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Bool, Float, Int
from numpy.random import Philox
from scipy.cluster.hierarchy import fcluster, linkage  # type: ignore[import-untyped]
from scipy.spatial.distance import squareform  # type: ignore[import-untyped]
from torch import Tensor

from ..arguments import finite_number, member, option, whole_number
from ..draw.redundancy import divergence_map, heads_in_plane
from ..draw.section import Section
from ..errors import InputError
from ..maths.divergence import among_heads, between_heads, effective_number, placed
from ..maths.intervals import LEVEL, TextMeans, checked_level
from ..model.hooked import HookedModel, require_model
from ..model.inputs import Inputs
from ..model.observed import RowBlock
from ..results import by_layer
from ..runs.groups import by_group, joined
from ..runs.row_means import ROW_CLASSES, row_classes
from ..runs.stream import Reducer, Run, Source, State, stream
from ..runs.summed import Summed

KEPT_BYTES: Final = 200_000_000
"""The most memory that the patterns of the sampled rows of a batch may take."""

_MAPS: Final = 6
"""How many layers a page shows as maps."""


def redundancy(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    bos: bool | None = None,
    rows: int = 64,
    seed: int = 0,
    **corpus: Any,
) -> "Redundancy":
    """How much the patterns of any two heads differ, and how many different heads each layer has.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> alike = am.redundancy(am.load(), documents(6))
    >>> alike.clusters(0.1)[0]
    ((0, 3), (0, 4), (0, 6), (0, 7), (1, 3))
    >>> alike.effective_heads.round(decimals=1).tolist()
    [2.3, 3.6, 4.7, 5.1]

    The mean over rows of JS(p, q) = H((p + q) / 2) − (H(p) + H(q)) / 2, in nats: 0 where two heads attend alike, ln 2
    where they have no key in common. Rows of first tokens, of special tokens and of padding do not count, nor do rows
    that see only one key. If a sink takes part of the attention (gpt-oss), it counts as one more key.

    Args:
        model: the model.
        inputs: texts, or an iterator of texts (a corpus), of which only sums are kept.
        layers: by default all.
        stack: "encoder", "decoder" or "cross" in a model with several.
        bos: whether each text begins with the tokenizer's first token.
        rows: how many rows of each text are compared between layers; 0 compares heads of the same layer only.
        seed: of the choice of these rows, which depends on a text's number and on nothing else.
        corpus: `truncate`, `shard`, `journal` and `progress`, as in `am.stream`.

    Returns:
        Divergences, with intervals within a layer; clusters, nearest heads, and the effective number of heads.

    Raises:
        InputError: if the patterns of the sampled rows of a batch would take more than 200 MB.

    """
    require_model(model)
    rows, seed = whole_number("rows", rows), whole_number("seed", seed, most=2**64 - 1)
    result: Redundancy
    (result,) = stream(model, inputs, [RedundancyReducer(rows, seed)], layers=layers, stack=stack, bos=bos, **corpus)
    return result


@dataclass(frozen=True)
class RedundancyReducer(Reducer):
    """Sums divergences within each layer by text, and between layers over sampled rows."""

    rows: int = 64
    seed: int = 0

    def start(self, run: Run) -> State:
        """Sums by text, the sampled rows, and room for their patterns."""
        label = run.stack.label
        batch, keys = run.batch.queries(label), run.batch.keys(label).ids.shape[1]
        ordinary = row_classes(batch)[:, ROW_CLASSES.index("ordinary")]
        layers, heads, texts = run.n_layers, run.n_heads, len(ordinary)
        place = _sampled(ordinary, run.documents, self.rows if layers > 1 else 0, self.seed)
        precision = torch.promote_types(run.model.dtype, torch.float32)
        # Beside the keys there is room for a sink.
        kept = (layers, texts, place.shape[1], heads, keys + 1)
        _check_room(math.prod(kept) * precision.itemsize, place.shape[1])
        device = run.model.device
        return {
            "within": torch.zeros(layers, math.comb(heads, 2), texts, dtype=torch.float64, device=device),
            "counts": torch.zeros(layers, texts, dtype=torch.float64, device=device),
            "ordinary": ordinary,
            "place": place.to(device),
            "seen": torch.zeros(layers, *place.shape, dtype=torch.bool, device=device),
            "kept": torch.zeros(kept, dtype=precision, device=device),
        }

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Adds a block of rows."""
        layer, start = block.index, block.rows.start
        counted = state["ordinary"][:, start : block.rows.stop] & (block.visible[:, 0].sum(dim=-1) >= 2)
        pattern = _with_sink(block).transpose(1, 2)
        divergence = among_heads(pattern[counted]).double()
        state["within"][layer].index_add_(-1, counted.nonzero()[:, 0], divergence.T)
        state["counts"][layer] += counted.sum(dim=-1)
        here = (state["place"] >= start) & (state["place"] < block.rows.stop)
        text, sample = here.nonzero(as_tuple=True)
        row = state["place"][here] - start
        state["seen"][layer, text, sample] = counted[text, row]
        state["kept"][layer][text, sample, :, : pattern.shape[-1]] = pattern[text, row].to(state["kept"])

    def close(self, state: State, run: Run) -> State:
        """Sums by group of texts, and between layers over all texts."""
        layers, heads = run.n_layers, run.n_heads
        between = torch.zeros(layers, heads, layers, heads, dtype=torch.float64)
        sampled = torch.zeros(layers, layers, dtype=torch.float64)
        kept, seen = state["kept"], state["seen"]
        for one, other in combinations(range(layers), 2):
            both = seen[one] & seen[other]
            divergence = between_heads(kept[one][both], kept[other][both])
            between[one, :, other] = divergence.double().sum(dim=0).cpu()
            sampled[one, other] = both.sum().cpu()
        by_text = {name: state[name].cpu() for name in _BY_TEXT}
        return by_group(by_text, run.documents, _BY_TEXT) | {"between": between, "sampled": sampled}

    def merge(self, one: State, other: State) -> State:
        """The sums of both."""
        return joined(one, other, _BY_TEXT) | {name: one[name] + other[name] for name in ("between", "sampled")}

    def finish(self, state: State, source: Source) -> "Redundancy":
        """The result."""
        return Redundancy.of(state, source, rows=self.rows)


_BY_TEXT: Final = ("within", "counts")
"""The entries of a state whose last axis is texts, or groups of them."""


def _sampled(
    ordinary: Bool[Tensor, "batch row"], documents: Int[Tensor, " batch"], rows: int, seed: int
) -> Int[Tensor, "batch sample"]:
    """The positions of `rows` ordinary rows of each text, −1 after the last of a text that has fewer.

    The bits are Philox-4×64's (Salmon et al. 2011), keyed by the text's number: neither padding nor the rest of the
    batch matters.
    """
    found = []
    for members, document in zip(ordinary.cpu(), documents.tolist(), strict=True):
        known = members.nonzero()[:, 0]
        order = np.argsort(Philox(key=[seed, document]).random_raw(len(known)), kind="stable")
        found.append(known[np.sort(order[:rows])])
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=-1)


def _check_room(size: int, rows: int) -> None:
    if size > KEPT_BYTES:
        fits = rows * KEPT_BYTES // size
        raise InputError(
            f"the patterns of {rows} sampled rows of each text of a batch would take {size / 1e6:.0f} MB, and at most "
            f"{KEPT_BYTES // 10**6} MB are kept. Use rows={fits}, fewer `layers`, or shorter texts; an iterator of "
            "texts, iter(texts), is run in smaller batches than a list."
        )


def _with_sink(block: RowBlock) -> Float[Tensor, "batch head row key_or_sink"]:
    """The pattern after a column for the sink's share, 0 where the layer has none."""
    # Layers with and without a sink are compared: the column is always there.
    rest = block.pattern.new_zeros(*block.pattern.shape[:-1], 1)
    if block.sink is not None:
        rest = (1 - block.pattern.sum(dim=-1, keepdim=True)).clamp_min(0)
    return torch.cat((rest, block.pattern), dim=-1)


@dataclass(frozen=True, repr=False)
class Redundancy(Summed):
    """How much the patterns of any two heads differ: Jensen-Shannon divergence in nats, mean over rows, at most ln 2.

    Two heads of the same layer are compared on every row that counts; heads of different layers on sampled rows.
    """

    SUBTRACT = "subtract what you compare: one.divergence - other.divergence"

    STATE: ClassVar[Mapping[str, Any]] = {
        "within": Float[Tensor, "layer pair group"],
        "counts": Float[Tensor, "layer group"],
        "between": Float[Tensor, "layer head layer head"],
        "sampled": Float[Tensor, "layer layer"],
        "groups": Int[Tensor, " group"],
        "modulus": Int[Tensor, " 1"],
    }
    """The types of the entries of `state`."""

    rows: int
    """How many rows of each text were compared between layers, at most."""

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the axes of `state` that are known from elsewhere."""
        return {"layer": len(self.layers), "pair": math.comb(self._heads, 2)}

    @property
    def _reducer(self) -> Reducer:
        return RedundancyReducer()

    # -- how different heads are ------------------------------------------------------------------------------

    @cached_property
    def divergence(self) -> Float[Tensor, "layer head layer head"]:
        """Between any two heads; NaN between heads that were not compared."""
        found = by_layer(self._whole, self.layers, self.n_layers)
        return by_layer(found, self.layers, self.n_layers, axis=2)

    @property
    def within(self) -> Float[Tensor, "layer head head"]:
        """Between two heads of the same layer."""
        return self._by_layer(self._means.mean)

    def interval(
        self, level: float = LEVEL
    ) -> tuple[Float[Tensor, "layer head head"], Float[Tensor, "layer head head"]]:
        """Low and high end of the pointwise t interval over texts of `within`; NaN for fewer than five texts."""
        return self._ends(self._means.interval(checked_level(level)))

    def simultaneous(
        self, level: float = LEVEL
    ) -> tuple[Float[Tensor, "layer head head"], Float[Tensor, "layer head head"]]:
        """Simultaneous intervals of `within`: they hold for all pairs together, so also for the nearest.

        Source: `attnmech.maths.intervals`, studentised max-T.
        """
        return self._ends(self._means.simultaneous(checked_level(level)))

    @property
    def effective_heads(self) -> Float[Tensor, " layer"]:
        """How many different heads a layer has: the Vendi score, exp(−Σ λ ln λ).

        λ are the eigenvalues of K / n, K = 1 − `within` / ln 2. It is 1 if all heads of a layer attend alike, and the
        number of heads if no two have a key in common.

        Source: Friedman & Dieng 2023, "The Vendi Score", with the kernel of Martins et al. 2009.
        """
        return effective_number(self.within)

    def clusters(self, threshold: float, *, layer: int | None = None) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Groups of heads (layer, head) that attend alike, the largest first; a head unlike the others is alone.

        Average linkage: groups are joined as long as the mean divergence between their heads is at most `threshold`,
        in nats. With `layer`, the heads of that layer.
        """
        most = finite_number("threshold", threshold, above=0.0)
        places, divergence = self._compared(layer)
        if len(places) == 1:
            return (tuple(places),)
        joined_at = linkage(squareform(divergence.numpy(), checks=False), method="average")
        members: dict[int, list[tuple[int, int]]] = {}
        for place, cluster in zip(places, fcluster(joined_at, most, criterion="distance").tolist(), strict=True):
            members.setdefault(cluster, []).append(place)
        return tuple(sorted((tuple(each) for each in members.values()), key=lambda each: (-len(each), each)))

    def positions(self, *, layer: int | None = None) -> Float[Tensor, "head 2"]:
        """Heads as points in the plane, in the order of `to_frame`; their distances are close to √divergence.

        With `layer`, the heads of that layer. By classical scaling (Torgerson 1952): √JS is a Euclidean distance.
        """
        return placed(self._compared(layer)[1])[0]

    @cached_property
    def nearest(self) -> pd.DataFrame:
        """One row per head, the most redundant first: its nearest head, their divergence and its interval.

        `low` and `high` are the simultaneous 95 % interval over all pairs of heads of the same layer; NaN between
        layers, and for fewer than five texts. Heads that were compared with no other are left out.
        """
        frame = self.to_frame()[["layer", "head", *_OF_NEAREST]].dropna(subset="divergence")
        whole = frame.astype({"nearest_layer": int, "nearest_head": int})
        return whole.sort_values("divergence", kind="stable", ignore_index=True)

    def to_frame(self) -> pd.DataFrame:
        """One row per head: its nearest head, their divergence with its interval, the mean divergence from the other
        heads of its layer (`within`), and the effective number of heads of its layer.
        """
        flat = self._whole.flatten(2).flatten(0, 1).clone().fill_diagonal_(torch.nan)
        ends = [end[list(self.layers)] for end in self.simultaneous()]
        effective = self.effective_heads
        rows = []
        for (layer, head), found in zip(self._places, flat, strict=True):
            place = self.layers.index(layer)
            own = found.reshape(len(self.layers), -1)[place]
            row: dict[str, Any] = {"layer": layer, "head": head, **dict.fromkeys(_OF_NEAREST, math.nan)}
            if not bool(found.isnan().all()):
                near = int(found.nan_to_num(torch.inf).argmin())
                nearest_layer, nearest_head = self._places[near]
                row |= {"nearest_layer": nearest_layer, "nearest_head": nearest_head, "divergence": float(found[near])}
                if nearest_layer == layer:
                    row |= {name: float(end[place, head, nearest_head]) for name, end in zip(_ENDS, ends, strict=True)}
            rows.append(row | {"within": float(own.nanmean()), "effective_heads": float(effective[layer])})
        return pd.DataFrame(rows)

    # -- figures ----------------------------------------------------------------------------------------------

    def plot(self, figure: str = "map", *, layer: int | None = None) -> "go.Figure":
        """`"map"`, heads as points in the plane, or `"within"`, heads × heads of one layer; returned, not shown.

        Without `layer`, the map has the heads of all layers, and `"within"` is of the layer with the fewest different
        heads.
        """
        if option("figure", figure, ("map", "within")) == "within":
            layer = self._fewest if layer is None else self._layer(layer)
            return divergence_map(*(each[layer].numpy() for each in (self.within, *self.interval())), layer=layer)
        places, divergence = self._compared(layer)
        points, share = placed(divergence)
        near = {(row.layer, row.head): row for row in self.nearest.itertuples()}
        told = [
            f"L{near[place].nearest_layer}H{near[place].nearest_head}, {near[place].divergence:.3g} nats"
            if place in near
            else "none"
            for place in places
        ]
        return heads_in_plane(points.numpy(), places, told, share)

    @property
    def _title(self) -> str:
        return f"Redundant heads of {self.provenance.model}"

    @property
    def _texts(self) -> str:
        return f"{self.documents} {'text' if self.documents == 1 else 'texts'}"

    @property
    def lead(self) -> str:
        fewest, effective = self._fewest, self.effective_heads
        if bool(effective[fewest].isnan()):
            return f"On {self._texts} no row sees two keys, so no heads are compared."
        several = f"layer {fewest} has the fewest different heads, " if len(self.layers) > 1 else f"layer {fewest} has "
        told = f"On {self._texts}, {several}{float(effective[fewest]):.1f} of {self._heads}"
        return f"{told}{self._closest_within}{self._closest_between}."

    @property
    def _closest_within(self) -> str:
        """The most similar heads of one layer, as part of a sentence."""
        pairs = self._means.mean
        if not pairs.numel() or bool(pairs.isnan().all()):
            return ""
        row, pair = divmod(int(pairs.nan_to_num(torch.inf).argmin()), pairs.shape[1])
        one, other = self._pairs[:, pair].tolist()
        low, high = (float(end[self.layers[row], one, other]) for end in self.simultaneous())
        span = f", {low:.3g} to {high:.3g} with all {pairs.numel()} pairs at once" if not math.isnan(low) else ""
        layer = self.layers[row]
        return (
            f"; the two heads of one layer that attend most alike are L{layer}H{one} and L{layer}H{other} "
            f"({float(pairs[row, pair]):.3g} nats of at most 0.693{span})"
        )

    @property
    def _closest_between(self) -> str:
        """The most similar heads of two layers, as part of a sentence."""
        means = self.state["between"] / self.state["sampled"][:, None, :, None]
        if bool(means.isnan().all()):
            return ""
        one, head, other, other_head = np.unravel_index(int(means.nan_to_num(torch.inf).argmin()), means.shape)
        found = float(means.nan_to_num(torch.inf).min())
        return (
            f"; of two layers, L{self.layers[one]}H{head} and L{self.layers[other]}H{other_head} ({found:.3g}, on "
            f"at most {self.rows} sampled rows of each text)"
        )

    def _sections(self) -> "Sequence[Section]":
        about = (
            "Jensen-Shannon divergence between the patterns of two heads, mean over rows: 0 where they attend alike, "
            "ln 2 = 0.693 nats where they have no key in common."
        )
        effective = self.effective_heads[list(self.layers)].nan_to_num(torch.inf)
        shown_layers = sorted(self.layers[place] for place in effective.argsort(stable=True)[:_MAPS].tolist())
        few = "" if len(shown_layers) == len(self.layers) else f" The {_MAPS} layers with the fewest different heads."
        maps = Section(
            "Within a layer",
            f"{about} Dark cells are pairs of heads that attend alike; the hover box has the interval over texts.{few}",
            {f"within-{layer}": self.plot("within", layer=layer) for layer in shown_layers},
            f'alike.plot("within", layer={self._fewest})',
            name="within",
        )
        if bool(self._whole.isnan().any()):
            return [maps]
        plane = Section(
            "All heads in a plane",
            "Each point is one head; the closer two points are, the more the heads attend alike. Their distance is "
            "close to the root of the divergence, as far as a plane can show it. Heads of different layers are "
            f"compared on at most {self.rows} rows of each text.",
            {"map": self.plot()},
            "alike.plot()",
        )
        return [plane, maps]

    # -- the numbers behind it --------------------------------------------------------------------------------

    @property
    def _heads(self) -> int:
        return self.state["between"].shape[1]

    @property
    def _pairs(self) -> Int[Tensor, "2 pair"]:
        return torch.triu_indices(self._heads, self._heads, 1)

    @property
    def _places(self) -> list[tuple[int, int]]:
        """Every measured head: layer and number."""
        return [(layer, head) for layer in self.layers for head in range(self._heads)]

    @property
    def _fewest(self) -> int:
        """The layer with the fewest different heads."""
        effective = self.effective_heads[list(self.layers)].nan_to_num(torch.inf)
        return self.layers[int(effective.argmin())]

    @cached_property
    def _means(self) -> TextMeans:
        """The means over texts of every pair of heads of each measured layer."""
        return TextMeans.of_ratio(self.state["within"], self.state["counts"][:, None])

    def _square(self, pairs: Float[Tensor, "layer pair"]) -> Float[Tensor, "layer head head"]:
        """Symmetric matrices of the measured layers; 0 between a head and itself if any row counts."""
        one, other = self._pairs
        found = pairs.new_zeros(len(self.layers), self._heads, self._heads)
        found[:, one, other] = found[:, other, one] = pairs
        nothing = self.state["counts"].sum(dim=-1) == 0
        return found.masked_fill(nothing[:, None, None], torch.nan)

    def _by_layer(self, pairs: Float[Tensor, "layer pair"]) -> Float[Tensor, "all_layers head head"]:
        return by_layer(self._square(pairs), self.layers, self.n_layers)

    def _ends(self, ends: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        low, high = (self._by_layer(end.clamp(0.0, math.log(2))) for end in ends)
        return low, high

    @cached_property
    def _whole(self) -> Float[Tensor, "layer head layer head"]:
        """Between any two heads of the measured layers."""
        means = self.state["between"] / self.state["sampled"][:, None, :, None]
        found = torch.full_like(means, torch.nan)
        for one, other in combinations(range(len(self.layers)), 2):
            found[one, :, other], found[other, :, one] = means[one, :, other], means[one, :, other].T
        for place, own in enumerate(self._square(self._means.mean)):
            found[place, :, place] = own
        return found

    def _layer(self, layer: int) -> int:
        return member("layer", layer, self.layers, "the layers measured")

    def _compared(self, layer: int | None) -> tuple[list[tuple[int, int]], Float[Tensor, "head head"]]:
        """Some heads, all of which were compared with each other, and their divergences."""
        if layer is None:
            places, found = self._places, self._whole.flatten(2).flatten(0, 1)
        else:
            place = self.layers.index(self._layer(layer))
            places, found = [(layer, head) for head in range(self._heads)], self._whole[place, :, place]
        if bool(found.isnan().any()):
            if self.rows == 0 and layer is None:
                raise InputError("with rows=0 only heads of the same layer are compared; give a `layer`.")
            raise InputError("not all heads were compared: no row of these texts sees two keys. Give longer texts.")
        return places, found


_OF_NEAREST: Final = ["nearest_layer", "nearest_head", "divergence", "low", "high"]
_ENDS: Final = ("low", "high")
