"""Holds the result of a sweep: the change of a metric, head by head or place by place, with intervals over texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..basics.arguments import whole_number
from ..basics.fields import check_layers
from ..basics.messages import capitalised
from ..draw.chart import at_head
from ..draw.head_maps import effect_map
from ..draw.section import Section
from ..errors import InputError
from ..interventions import Head
from ..maths.intervals import TextMeans
from ..model.run.hooked import HookedModel
from ..results.by_layer import by_layer, subtracted
from ..results.over_texts import OverTexts
from ..results.provenance import Provenance
from ..results.result import TextResult
from .claims import PALE, for_map, interval_note, largest_of
from .sweep import Swept


def unit_of(metric: str) -> str:
    """The unit of a metric, in words."""
    known = {"loss": "nats of loss", "kl": "nats of KL", "logit_difference": "logit difference"}
    known |= {"log_probability": "nats of log-probability", "cross_entropy": "nats of cross-entropy"}
    return known.get(metric, metric)


_DONE = {"zero": "set to zero", "mean": "set to their mean", "resample": "replaced by their values in another text"}


def strongest_of(frame: pd.DataFrame, count: int) -> pd.DataFrame:
    """The rows with the largest effects of either sign, clear effects first."""
    count = whole_number("count", count, least=1)
    keys = frame.assign(unclear=~frame["clear"], size=-frame["effect"].abs())
    return frame.loc[keys.sort_values(["unclear", "size"]).index].head(count).reset_index(drop=True)


@dataclass(frozen=True, repr=False)
class Effects(OverTexts, TextResult):
    """The change of a metric when one place of a layer is changed: after minus before.

    The units are those of the metric: nats for "loss" and "kl", logits for "logit_difference". Intervals are over
    texts: they say how the mean would vary with other texts of the same kind. A subclass names its places. In a
    difference, `before`, `after` and `effect` are differences too.
    """

    PLACE: ClassVar[str]
    """The unit of the second axis: heads, kv heads or positions."""

    metric: str
    method: str
    """How heads were changed: "zero", "mean", "resample", or the sentence of an intervention."""
    layers: tuple[int, ...]
    """The layers in which something was changed."""
    before: Float[Tensor, " text"]
    """The metric on each text, with nothing changed."""
    after: Float[Tensor, "layer place text"]
    """The metric with a single place changed; NaN at places that were not swept, or not reached before the sweep
    stopped.

    For heads, the axis `layer` has every layer of the model; for positions, those in `layers`.
    """
    swept: Float[Tensor, "layer place"]
    """1 at the places that the sweep was meant to change, else 0."""
    tokens: tuple[tuple[str, ...], ...]
    provenance: Provenance

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the axes that layers and texts label."""
        return {"layer": len(self._layer_of_row), "text": len(self.tokens)}

    def _check(self) -> None:
        super()._check()
        check_layers([self._layer_of_row.index(layer) for layer in self.layers], len(self.after))

    @property
    def per_text(self) -> Float[Tensor, "layer place text"]:
        """The effect on each text."""
        return self.after - self.before

    @property
    def effect(self) -> Float[Tensor, "layer place"]:
        """The mean effect over the measured texts; NaN if there are none."""
        return self.per_text.nanmean(dim=-1)

    @property
    def _measured_values(self) -> Float[Tensor, "layer place text"]:
        return self.per_text

    @property
    def _layer_of_row(self) -> Sequence[int]:
        """The layers of the axis `layer`."""
        return self.layers

    @property
    def complete(self) -> bool:
        """Whether every place was measured on every text; False if the sweep was interrupted."""
        return not bool(self.after[self.swept.bool()].isnan().any())

    @property
    def texts(self) -> Int[Tensor, "layer place"]:
        """The number of texts behind each mean; for an unpaired difference, the smaller of the two numbers."""
        if self.parts is None or self.paired:
            return (~self.per_text.isnan()).sum(dim=-1)
        one, other = (part.texts[rows] for part, rows in self._parts_in_rows())
        return torch.minimum(one, other)

    def _parts_in_rows(self) -> list[tuple[Self, list[int]]]:
        """The two results of a difference, each with the indices at which it holds the rows of the difference."""
        return [(part, [part._layer_of_row.index(layer) for layer in self._layer_of_row]) for part in self._two]

    def strongest(self, count: int = 10) -> pd.DataFrame:
        """The rows of `to_frame` with the largest effects of either sign, clear ones first."""
        return strongest_of(self.to_frame(), count)

    def to_frame(self) -> pd.DataFrame:
        """One row per head (or position) swept.

        Columns: layer, head, effect, effect_low, effect_high, agreeing, clear, clear_size, one_text, before, after,
        texts. Low and high are the pointwise interval of the effect. `attrs["intervals"]` says what the columns mean,
        or why there are no intervals.
        """
        index, place = self.swept.nonzero().T
        columns = self._columns("effect") | {
            "before": self.before.nanmean().expand(self.swept.shape),
            "after": self.after.nanmean(dim=-1),
            "texts": self.texts,
        }
        frame = pd.DataFrame(
            {
                "layer": [self._layer_of_row[row] for row in index.tolist()],
                self.PLACE.replace(" ", "_"): place.tolist(),
                **{name: value[index, place].tolist() for name, value in columns.items()},
            }
        )
        frame.attrs["intervals"] = self.note
        return frame

    @property
    def note(self) -> str:
        """A note on the intervals, or on why there are none."""
        return interval_note(self._n_distinct, self._n_texts - self._n_distinct)

    def plot(self) -> "go.Figure":
        """A map of layers × heads (or positions), coloured by the effect, pale where it is not clear; hovering shows
        intervals.
        """
        return self._map(self._means, self._labels["effect"])

    def _map(self, means: TextMeans, label: str, tokens: Sequence[str] = ()) -> "go.Figure":
        rows = [self._layer_of_row.index(layer) for layer in self.layers]
        return effect_map(**for_map(means, rows), layers=self.layers, label=label, columns=self.PLACE, tokens=tokens)

    @property
    def _labels(self) -> Mapping[str, str]:
        return {"effect": f"change ({unit_of(self.metric)})"}

    @property
    def _title(self) -> str:
        return f"Effect of {self.method} on {self.metric}, {self.PLACE} by {self.PLACE}"

    def _sections(self) -> "Sequence[Section]":
        reading = f"Each cell is one {self.PLACE}, changed alone{PALE}."
        return [Section("Effects", reading, {"effects": self.plot()}, "effects.plot()")]

    @property
    def lead(self) -> str:
        """The one sentence that the numbers support."""
        largest = largest_of(
            self,
            self._means,
            lambda place: self._named(self._layer_of_row[place[0]], place[1]),
            things=f"{self.PLACE}s",
            unit=unit_of(self.metric),
            what="effect" if self.parts is None else "difference",
        )
        part = "" if self.complete else "; stopped early, incomplete"
        return capitalised(f"{self._about}: {largest}{part}.")

    @property
    def _about(self) -> str:
        by_intervention = " each head" in self.method
        done = f"changed ({self.method})" if by_intervention else _DONE.get(self.method, self.method.replace("_", " "))
        count = int(self.swept.sum())
        places = f"{count} {self.PLACE}{'' if count == 1 else 's'}"
        return f"{self._opening}{places} {done}{'' if count == 1 else ', one at a time'}, on {self._texts}"

    @property
    def _n_texts(self) -> int:
        return len(self.before)

    def _named(self, layer: int, place: int) -> str:
        return f"{self.PLACE} {place} of layer {layer}"

    def _comparable(self) -> dict[str, Any]:
        asked = {name: self.provenance.options.get(name) for name in ("later", "positions")}
        places = {f"number of {self.PLACE}s": self.swept.shape[1]}
        return {"metric": self.metric, "method": self.method, **places, **asked}

    def _minus(self, other: Self, paired: bool) -> Self:
        rows = [layer for layer in self._layer_of_row if layer in other._layer_of_row]
        mine, yours = ([result._layer_of_row.index(layer) for layer in rows] for result in (self, other))
        swept = self.swept[mine] * other.swept[yours]
        if not swept.any():
            raise InputError(
                f"two results need {self.PLACE}s in common to be subtracted; their layers, {list(self.layers)} and "
                f"{list(other.layers)}, have none."
            )
        before = subtracted(self.before, other.before, paired)
        return replace(
            self,
            layers=tuple(layer for layer in self.layers if layer in other.layers),
            before=before,
            after=subtracted(self.per_text[mine], other.per_text[yours], paired) + before,
            swept=swept,
            tokens=self.tokens if paired else (),
        )


@dataclass(frozen=True, repr=False)
class HeadEffects(Effects):
    """The change of a metric when a head is changed: after minus before, `.effect [layer head]`.

    The units are those of the metric: nats for "loss" and "kl", logits for "logit_difference". Intervals are over
    texts: they say how the mean would vary with other texts of the same kind.
    """

    PLACE: ClassVar[str] = "head"

    shift: Float[Tensor, "layer head of_layer of_head"] | None
    """The shift of the pattern of each head of the model when one head is changed: Jensen-Shannon divergence in
    nats."""
    by_draw: Float[Tensor, "layer head draw"] | None = field(default=None, kw_only=True)
    """The effect with each draw of donors, if method="resample" drew several; `effect` is their mean."""

    @property
    def draw_spread(self) -> Float[Tensor, "layer head"] | None:
        """The standard deviation of the effect over draws of donors; None for one draw.

        The standard error of the mean over draws is smaller by the square root of their number. Intervals over texts
        include the spread of the texts and of their donors.
        """
        return None if self.by_draw is None else self.by_draw.std(dim=-1)

    def section(self, call: str, layers: Sequence[int], on: str) -> "Section":
        """The map of heads, for a page on which the reader chooses a head in `layers`; `on` names the texts."""
        loss = "the loss of masked tokens" if "masked" in self.provenance.options else "the loss"
        return Section(
            name="map-ablation",
            contents="Without each head",
            tab="matter",
            heading="What the model loses with each head",
            finding=self.lead,
            reading=f"Each cell is one head. Blue: {loss} rises without it, so it helped; brown: the loss falls; "
            "pale: the change is not clear among all heads. Click a cell to choose its head.",
            caveat=f"On {on}. Other heads may take over for an ablated head, so heads that matter together can each "
            f"look idle. Without an ablation, the model may never see zero there.",
            figures={"ablation": at_head(self.plot(), self.layers, tuple(layers))},
            call=f"{call}.plot()",
        )

    def to_frame(self) -> pd.DataFrame:
        """The columns of every sweep, plus draw_spread if several donors were drawn for each text."""
        frame = super().to_frame()
        if self.draw_spread is None:
            return frame
        index, place = self.swept.nonzero().T
        with_spread = frame.assign(draw_spread=self.draw_spread[index, place].numpy())
        with_spread.attrs = frame.attrs
        return with_spread

    @property
    def _layer_of_row(self) -> Sequence[int]:
        return range(len(self.after))

    def _named(self, layer: int, place: int) -> str:
        return f"L{layer}H{place}"

    def _comparable(self) -> dict[str, Any]:
        return super()._comparable() | {"number of layers": len(self.after)}

    def _minus(self, other: Self, paired: bool) -> Self:
        difference = super()._minus(other, paired)
        both = self.shift is not None and other.shift is not None
        shift = self.shift - other.shift if both else None  # type: ignore[operator]
        return replace(difference, shift=shift, by_draw=None)


def effects_of(model: HookedModel, heads: Sequence[Head], swept: Swept, method: str, draws: int = 1) -> HeadEffects:
    """The effects of a sweep that changed one head at a time, once per draw."""
    return HeadEffects(**head_fields(model, heads, swept, method, draws))


def head_fields(
    model: HookedModel, heads: Sequence[Head], swept: Swept, method: str, draws: int = 1, *, by_kv_head: bool = False
) -> dict[str, Any]:
    """The fields of `HeadEffects` after a sweep that changed one head, or kv head, at a time."""
    stack = model.output_stack
    count = stack.n_kv_heads if by_kv_head else stack.n_heads
    n_layers = len(stack.places)
    after = swept.after.reshape(len(heads), draws, -1)
    fields = effect_fields(heads, count, replace(swept, after=after.mean(dim=1)), method)
    fields |= {"shift": None, "by_draw": None}
    if draws > 1:
        fields["by_draw"] = _at(heads, count, (after - swept.before).nanmean(dim=-1))
    if swept.shift is not None:
        shift = swept.shift.reshape(len(heads), draws, *swept.shift.shape[1:]).mean(dim=1)
        fields["shift"] = by_layer(_at(heads, count, shift), stack.layers, n_layers, axis=2)
    return fields | _of_all_layers(fields, n_layers)


def _of_all_layers(fields: Mapping[str, Any], n_layers: int) -> dict[str, Any]:
    """Expands fields measured in some layers to a row for every layer of the model."""
    there = [name for name in ("after", "swept", "shift", "by_draw") if fields[name] is not None]
    known = {name: by_layer(fields[name], fields["layers"], n_layers) for name in there}
    return known | {"swept": known["swept"].nan_to_num(0.0)}


def effect_fields(places: Sequence[tuple[int, int]], count: int, swept: Swept, method: str) -> dict[str, Any]:
    """The fields of `Effects` after a sweep that changed one of `count` places per layer at a time."""
    return {
        "metric": str(swept.provenance.options["metric"]),
        "method": method,
        "layers": tuple(sorted({layer for layer, _ in places})),
        "before": swept.before,
        "after": _at(places, count, swept.after),
        "swept": _at(places, count, torch.ones(len(places), dtype=torch.float64)).nan_to_num(0.0),
        "tokens": swept.tokens,
        "provenance": swept.provenance,
    }


def _at(
    places: Sequence[tuple[int, int]], count: int, values: Float[Tensor, "change ..."]
) -> Float[Tensor, "layer place ..."]:
    """Puts the result of each change at its place, with NaN at all other places."""
    layers = sorted({layer for layer, _ in places})
    rows, columns = torch.tensor([(layers.index(layer), place) for layer, place in places]).T
    whole = torch.full((len(layers), count, *values.shape[1:]), torch.nan, dtype=torch.float64)
    whole[rows, columns] = values
    return whole
