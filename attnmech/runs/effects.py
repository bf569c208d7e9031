"""What sweeps find: by how much a metric changes, head by head or place by place, with intervals over texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import InputError
from ..interventions import Head
from ..maths.bootstrap import interval, poisson_weights
from ..model.hooked import HookedModel
from ..results import PagedResult, Provenance
from .row_means import REPLICATES
from .sweep import Swept

if TYPE_CHECKING:
    import plotly.graph_objects as go  # type: ignore[import-untyped]

    from ..draw.figure_page import Section


def ratio_interval(
    above: Float[Tensor, "*places text"], below: Float[Tensor, "*#places text"], level: float = 0.95
) -> tuple[Float[Tensor, "*places"], Float[Tensor, "*places"]]:
    """The interval of Σ above / Σ below over texts, by the Poisson bootstrap.

    Texts of which `above` is NaN are left out; NaN where fewer than two are left.
    """
    if not 0 < level < 1:
        raise InputError(f"`level` must lie between 0 and 1; got {level!r}.")
    weights = poisson_weights(torch.arange(above.shape[-1]), REPLICATES)
    there = ~above.isnan()
    estimates = (above.nan_to_num(0.0) @ weights) / (below.double().where(there, 0.0) @ weights)
    low, high = interval(estimates, level)
    enough = there.sum(dim=-1) > 1
    return low.masked_fill(~enough, torch.nan), high.masked_fill(~enough, torch.nan)


def mean_interval(
    values: Float[Tensor, "*places text"], level: float = 0.95
) -> tuple[Float[Tensor, "*places"], Float[Tensor, "*places"]]:
    """The interval of a mean over texts by the Poisson bootstrap; texts that are NaN are left out, NaN under two."""
    return ratio_interval(values, torch.ones_like(values), level)


def unit_of(metric: str) -> str:
    """What a metric is counted in, with its name."""
    return {"loss": "nats of loss", "kl": "nats of KL", "logit_difference": "logit difference"}.get(metric, metric)


_DONE = {"zero": "set to zero", "mean": "set to their mean", "resample": "set to what they are in another text"}


@dataclass(frozen=True, repr=False)
class Effects(PagedResult):
    """By how much a metric changes when something is done at a place of a layer: after less before.

    Units are those of the metric: nats for "loss" and "kl", logits for "logit_difference". The interval is over texts
    (Poisson bootstrap): how the mean would vary with other texts of the same kind. A subclass says what its places are.
    """

    PLACE: ClassVar[str]
    """What stands along the second axis: heads, or positions."""

    metric: str
    method: str
    """What was done: "zero", "mean", "resample", ..."""
    layers: tuple[int, ...]
    """The layers of the axis `layer`."""
    before: Float[Tensor, " text"]
    """The metric of each text, with nothing changed."""
    after: Float[Tensor, "layer place text"]
    """The metric with each place changed alone; NaN where one was not swept, or the sweep was stopped before."""
    swept: Float[Tensor, "layer place"]
    """1 at the places that the sweep was asked for."""
    tokens: tuple[tuple[str, ...], ...]
    provenance: Provenance

    @property
    def per_text(self) -> Float[Tensor, "layer place text"]:
        """The effect on each text."""
        return self.after - self.before

    @property
    def effect(self) -> Float[Tensor, "layer place"]:
        """The mean effect over the texts measured; NaN where there is none."""
        return self.per_text.nanmean(dim=-1)

    def interval(self, level: float = 0.95) -> tuple[Float[Tensor, "layer place"], Float[Tensor, "layer place"]]:
        """Low and high end of the bootstrap interval over texts; NaN where fewer than two were measured."""
        return mean_interval(self.per_text, level)

    @property
    def complete(self) -> bool:
        """Whether every place was measured on every text; else the sweep was stopped, and this is a part."""
        return not bool(self.after[self.swept.bool()].isnan().any())

    def strongest(self, count: int = 10) -> pd.DataFrame:
        """The rows of `to_frame` with the largest effects, whatever their sign."""
        frame = self.to_frame()
        order = frame["effect"].abs().sort_values(ascending=False).index
        return frame.loc[order].head(count).reset_index(drop=True)

    def to_frame(self) -> pd.DataFrame:
        """A row a head (or position) swept: layer, head, effect, effect_low, effect_high, before, after, texts."""
        low, high = self.interval()
        effect, after, per_text = self.effect, self.after.nanmean(dim=-1), self.per_text
        rows = []
        for index, place in self.swept.nonzero().tolist():
            rows.append(
                {
                    "layer": self.layers[index],
                    self.PLACE: place,
                    "effect": float(effect[index, place]),
                    "effect_low": float(low[index, place]),
                    "effect_high": float(high[index, place]),
                    "before": float(self.before.nanmean()),
                    "after": float(after[index, place]),
                    "texts": int((~per_text[index, place].isnan()).sum()),
                }
            )
        return pd.DataFrame(rows)

    def plot(self) -> "go.Figure":
        """Layers × heads (or positions), coloured by the effect, with intervals in the hover."""
        low, high = self.interval()
        return self._map(self.effect, low, high, f"change of {unit_of(self.metric)}")

    def _map(
        self, value: Float[Tensor, "layer place"], low: Tensor, high: Tensor, label: str, tokens: Sequence[str] = ()
    ) -> "go.Figure":
        from ..draw.effects import effect_map

        return effect_map(
            value.numpy(), low.numpy(), high.numpy(), layers=self.layers, label=label, columns=self.PLACE, tokens=tokens
        )

    @property
    def _title(self) -> str:
        return f"Effect of {self.method} on {self.metric}, {self.PLACE} by {self.PLACE}"

    def _sections(self) -> "Sequence[Section]":
        from ..draw.figure_page import Section

        return [Section("Effects", f"Each cell is one {self.PLACE}, changed alone.", self.plot(), "effects.plot()")]

    @property
    def lead(self) -> str:
        """The one sentence that the numbers support."""
        frame = self.strongest(1)
        measured = frame.dropna(subset=["effect"])
        if measured.empty:
            return f"{self._about}: nothing was measured."
        top = measured.iloc[0]
        known = "" if pd.isna(top.effect_low) else f" ({top.effect_low:+.3g} to {top.effect_high:+.3g})"
        part = "" if self.complete else "; stopped early, this is a part"
        return (
            f"{self._about}: {self._named(int(top['layer']), int(top[self.PLACE]))} has the largest effect, "
            f"{top.effect:+.3g} {unit_of(self.metric)}{known}{part}."
        )

    @property
    def _about(self) -> str:
        texts = "1 text" if len(self.before) == 1 else f"{len(self.before)} texts"
        done = _DONE.get(self.method, self.method.replace("_", " "))
        return f"{int(self.swept.sum())} {self.PLACE}s {done}, one at a time, on {texts}"

    def _named(self, layer: int, place: int) -> str:
        return f"{self.PLACE} {place} of layer {layer}"

    def _tensors(self) -> dict[str, Tensor]:
        return {"before": self.before, "after": self.after, "swept": self.swept}

    def _facts(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "method": self.method,
            "layers": list(self.layers),
            "tokens": [list(row) for row in self.tokens],
        }

    @classmethod
    def _from_saved(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], provenance: Provenance) -> Self:
        return cls(**cls._fields(tensors, facts), provenance=provenance)

    @classmethod
    def _fields(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "metric": facts["metric"],
            "method": facts["method"],
            "layers": tuple(facts["layers"]),
            "before": tensors["before"],
            "after": tensors["after"],
            "swept": tensors["swept"],
            "tokens": tuple(tuple(row) for row in facts["tokens"]),
        }


@dataclass(frozen=True, repr=False)
class HeadEffects(Effects):
    """By how much a metric changes when something is done to a head: after less before, `.effect [layer head]`.

    Units are those of the metric: nats for "loss" and "kl", logits for "logit_difference". The interval is over texts
    (Poisson bootstrap): how the mean would vary with other texts of the same kind.
    """

    PLACE: ClassVar[str] = "head"

    shift: Float[Tensor, "layer head of_layer of_head"] | None
    """By how much changing one head moves the pattern of another, of any layer of the model: Jensen-Shannon
    divergence in nats."""

    def _named(self, layer: int, place: int) -> str:
        return f"L{layer}H{place}"

    def _tensors(self) -> dict[str, Tensor]:
        return super()._tensors() | ({} if self.shift is None else {"shift": self.shift})

    @classmethod
    def _fields(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> dict[str, Any]:
        return super()._fields(tensors, facts) | {"shift": tensors.get("shift")}


def effects_of(model: HookedModel, heads: Sequence[Head], swept: Swept, method: str) -> HeadEffects:
    """The effects of a sweep that changed one head at a time."""
    return HeadEffects(**head_fields(model, heads, swept, method))


def head_fields(model: HookedModel, heads: Sequence[Head], swept: Swept, method: str) -> dict[str, Any]:
    """The fields of `HeadEffects` of a sweep that changed one head at a time."""
    fields = effect_fields(heads, model.output_stack.n_heads, swept, method)
    return fields | {"shift": None if swept.shift is None else _at(heads, model.output_stack.n_heads, swept.shift)}


def effect_fields(places: Sequence[tuple[int, int]], count: int, swept: Swept, method: str) -> dict[str, Any]:
    """The fields of `Effects` of a sweep that changed one of `count` places of a layer at a time."""
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
    """What each change gave, at its place; NaN at the others."""
    layers = sorted({layer for layer, _ in places})
    rows, columns = torch.tensor([(layers.index(layer), place) for layer, place in places]).T
    whole = torch.full((len(layers), count, *values.shape[1:]), torch.nan, dtype=torch.float64)
    whole[rows, columns] = values
    return whole
