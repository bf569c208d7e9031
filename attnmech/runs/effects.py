"""Holds the result of a sweep: the change of a metric, head by head or place by place, with intervals over texts."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..basics.fields import check_layers
from ..basics.messages import capitalised
from ..draw.section import Section
from ..errors import InputError
from ..interventions import Head
from ..maths.intervals import TextMeans
from ..maths.statistic import UNBOUNDED, Statistic
from ..model.run.hooked import HookedModel
from ..results.by_layer import by_layer, subtracted
from ..results.provenance import Provenance
from ..results.quantity import Places
from ..results.sentences import PALE, unit_of
from ..results.table import TextResult
from .sweep import Swept

_DONE = {"zero": "set to zero", "mean": "set to their mean", "resample": "replaced by their values in another text"}


@dataclass(frozen=True, repr=False)
class Changes(TextResult):
    """How a metric changes under each of several changes to the model; the main statistic is a change."""

    metric: str
    before: Float[Tensor, " text"]  # the metric on each text, with nothing changed
    tokens: tuple[tuple[str, ...], ...]
    provenance: Provenance

    @property
    def texts(self) -> Int[Tensor, "*place"]:
        """The number of texts behind each mean; for an unpaired difference, the smaller of the two numbers."""
        if self.parts is None or self.paired:
            return (~self._main.per_text.isnan()).sum(dim=-1)
        one, other = (part.texts[rows] for part, rows in self._parts_in_rows())
        return torch.minimum(one, other)

    def _parts_in_rows(self) -> Sequence[tuple[Self, Any]]:
        """The two results of a difference, each with the indices of the places that the difference has."""
        return [(part, slice(None)) for part in self._two]

    @property
    def complete(self) -> bool:
        """Whether everything was measured on every text; False if the sweep was interrupted."""
        return not bool(self._main.per_text[self._places.index].isnan().any())

    @property
    def _further(self) -> Mapping[str, Tensor]:
        return {"texts": self.texts}

    def _statistic(self, name: str) -> Statistic:
        return replace(super()._statistic(name), unit=unit_of(self.metric))

    def _label_of(self, name: str) -> str:
        return f"change ({unit_of(self.metric)})"

    @property
    def lead(self) -> str:
        of = "" if self._MAIN == "effect" else f" of {self._MAIN}s"
        what = self._MAIN if self.parts is None else f"difference{of}"
        largest = self._largest(self._MAIN, unit=unit_of(self.metric), what=what)
        part = "" if self.complete else "; stopped early, incomplete"
        return capitalised(f"{self._about}: {largest}{part}{self._remark}.")

    @property
    @abstractmethod
    def _about(self) -> str:
        """What was changed, and on which texts: the beginning of the lead."""

    @property
    def _remark(self) -> str:
        return ""

    @property
    def _n_texts(self) -> int:
        return len(self.before)

    def _difference(
        self, other: Self, paired: bool, effects: Mapping[str, tuple[Tensor, Tensor]] | None = None, **fields: Any
    ) -> Self:
        """The difference of two results; `effects` of both, by the field that holds `before` plus an effect."""
        before = subtracted(self.before, other.before, paired)
        fields |= {name: subtracted(*both, paired) + before for name, both in (effects or {}).items()}
        return replace(self, before=before, tokens=self.tokens if paired else (), **fields)

    def _comparable(self) -> dict[str, Any]:
        return {"metric": self.metric, **{name: self.provenance.options.get(name) for name in ("later", "positions")}}


class OneEffect(Changes):
    """The metric after each change minus the metric before."""

    _MAIN = "effect"
    effect = Statistic(
        meaning="The mean effect over the measured texts; NaN if there are none.",
        printed=True,
        tested=True,
        bounds=UNBOUNDED,
    )

    after: Float[Tensor, "*place text"]

    @property
    def per_text(self) -> Float[Tensor, "*place text"]:
        """The effect on each text."""
        return self.after - self.before

    def _by_text(self, name: str) -> TextMeans:
        return TextMeans.of_values(self.per_text)

    @property
    def _further(self) -> Mapping[str, Tensor]:
        after = self.after.nanmean(dim=-1)
        return {"before": self.before.nanmean().expand(after.shape), "after": after, **super()._further}


@dataclass(frozen=True, repr=False)
class Effects(OneEffect):
    """The change of a metric when one place of a layer is changed: after minus before.

    The units are those of the metric: nats for "loss" and "kl", logits for "logit_difference". Intervals are over
    texts: they say how the mean would vary with other texts of the same kind. A subclass names its places. In a
    difference, `before`, `after` and `effect` are differences too.
    """

    _TITLE = "Effect of {result.method} on {metric}, {result._PLACE} by {result._PLACE}"
    _AXES: ClassVar = {"layer": "_layer_of_row", "text": "tokens"}
    _PLACE: ClassVar[str]  # the unit of the second axis: heads, kv heads or positions
    effect = replace(OneEffect.effect, axes="layer place")

    method: str
    """How heads were changed: "zero", "mean", "resample", or the sentence of an intervention."""
    layers: tuple[int, ...]
    """The layers in which something was changed."""
    after: Float[Tensor, "layer place text"]
    """The metric with a single place changed; NaN at places that were not swept, or not reached before the sweep
    stopped.

    For heads, the axis `layer` has every layer of the model; for positions, those in `layers`.
    """
    swept: Float[Tensor, "layer place"]
    """1 at the places that the sweep was meant to change, else 0."""

    def _check(self) -> None:
        super()._check()
        check_layers([self._layer_of_row.index(layer) for layer in self.layers], len(self.after))

    @property
    def _layer_of_row(self) -> Sequence[int]:
        """The layers of the axis `layer`."""
        return self.layers

    def _parts_in_rows(self) -> list[tuple[Self, list[int]]]:
        """The two results of a difference, each with the indices at which it holds the rows of the difference."""
        return [(part, [part._layer_of_row.index(layer) for layer in self._layer_of_row]) for part in self._two]

    @property
    def _places(self) -> Places:
        rows, place = self.swept.nonzero().T
        layers = [self._layer_of_row[row] for row in rows.tolist()]
        return Places(
            {"layer": layers, self._PLACE.replace(" ", "_"): place.tolist()},
            (rows, place),
            lambda at: self._named(self._layer_of_row[at[0]], at[1]),
            things=f"{self._PLACE}s",
        )

    @property
    def _rows_of_map(self) -> tuple[tuple[int, ...], Sequence[int]]:
        return self.layers, [self._layer_of_row.index(layer) for layer in self.layers]

    def _map(self, name: str, layer: int | None = None, head: int | None = None, **look: Any) -> "go.Figure":
        return super()._map(name, layer, head, columns=self._PLACE, **look)

    def _sections(self) -> "Sequence[Section]":
        reading = f"Each cell is one {self._PLACE}, changed alone{PALE}."
        return [Section("Effects", reading, {"effects": self.plot()}, "effects.plot()")]

    @property
    def _about(self) -> str:
        by_intervention = " each head" in self.method
        done = f"changed ({self.method})" if by_intervention else _DONE.get(self.method, self.method.replace("_", " "))
        count = int(self.swept.sum())
        places = f"{count} {self._PLACE}{'' if count == 1 else 's'}"
        return f"{self._opening}{places} {done}{'' if count == 1 else ', one at a time'}, on {self._texts}"

    def _named(self, layer: int, place: int) -> str:
        return f"{self._PLACE} {place} of layer {layer}"

    def _comparable(self) -> dict[str, Any]:
        places = {f"number of {self._PLACE}s": self.swept.shape[1]}
        return super()._comparable() | {"method": self.method, **places}

    def _minus(self, other: Self, paired: bool) -> Self:
        rows = [layer for layer in self._layer_of_row if layer in other._layer_of_row]
        mine, yours = ([result._layer_of_row.index(layer) for layer in rows] for result in (self, other))
        swept = self.swept[mine] * other.swept[yours]
        if not swept.any():
            raise InputError(
                f"two results need {self._PLACE}s in common to be subtracted; their layers, {list(self.layers)} and "
                f"{list(other.layers)}, have none."
            )
        layers = tuple(layer for layer in self.layers if layer in other.layers)
        effects = {"after": (self.per_text[mine], other.per_text[yours])}
        return self._difference(other, paired, effects, layers=layers, swept=swept)


@dataclass(frozen=True, repr=False)
class HeadEffects(Effects):
    """The change of a metric when a head is changed: after minus before, `.effect [layer head]`.

    The units are those of the metric: nats for "loss" and "kl", logits for "logit_difference". Intervals are over
    texts: they say how the mean would vary with other texts of the same kind.
    """

    _PLACE: ClassVar[str] = "head"

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

    @property
    def _further(self) -> Mapping[str, Tensor]:
        spread = {} if self.draw_spread is None else {"draw_spread": self.draw_spread}
        return {**super()._further, **spread}

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
    there = [name for name in ("after", "swept", "shift", "by_draw") if fields[name] is not None]
    known = {name: by_layer(fields[name], fields["layers"], n_layers) for name in there}
    return fields | known | {"swept": known["swept"].nan_to_num(0.0)}


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
