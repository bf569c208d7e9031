"""Steering: how a metric changes as a direction is added, and what that does to other texts.

Formulas: docs/formulas.md#steering.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import finite_number, listed
from ...basics.messages import capitalised
from ...basics.nouns import counted
from ...basics.public import public
from ...draw.section import Section
from ...draw.text import with_minus_signs
from ...errors import InputError
from ...interventions import Heads, Intervention, Positions, Values
from ...maths.intervals import TextMeans
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.over_texts import OverTexts
from ...results.provenance import Provenance
from ...results.result import PagedResult
from ...runs.ablations import reread
from ...runs.claims import about_largest, interval_note
from ...runs.effects import unit_of
from ...runs.journal import owning_journal
from ...runs.metrics import MetricLike
from ...runs.options import SweepOptions
from ...runs.sweep import Sweeps, run_sweep
from .figures import dose_curve
from .mean_difference import MeanDifference


@dataclass(frozen=True, repr=False)
class Steering(OverTexts, PagedResult):
    """The effect of adding a direction on a metric, by factor: `effect [factor]`; intervals are over texts."""

    SUBTRACT: ClassVar[str] = "subtract their `effect`"
    _is_about_heads: ClassVar[bool] = False

    metric: str
    what: str
    """What is added, and where: "a mean difference added to resid_post of L2"."""
    factors: tuple[float, ...]
    before: Float[Tensor, " text"]
    """The metric of each text without the direction."""
    per_text: Float[Tensor, "factor text"]
    """The change of the metric."""
    side: Float[Tensor, "factor other_text"] | None
    """The KL divergence from the unchanged output on each of the other texts, in nats; None without other texts."""
    tokens: tuple[tuple[str, ...], ...]
    """The tokens of the texts."""
    provenance: Provenance
    side_copies: tuple[int, ...] = ()
    """For each of the other texts, the number of the first that is the same; empty if all differ."""

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the labelled axes."""
        return {"factor": len(self.factors), "text": len(self.tokens)}

    @property
    def effect(self) -> Float[Tensor, " factor"]:
        """The mean change of the metric over texts."""
        return self.per_text.mean(dim=-1)

    @property
    def side_effect(self) -> Float[Tensor, " factor"] | None:
        """The mean KL divergence on other texts, in nats; None without other texts."""
        return None if self.side is None else self.side.mean(dim=-1)

    @property
    def _measured_values(self) -> Float[Tensor, "factor text"]:
        return self.per_text

    def to_frame(self) -> pd.DataFrame:
        """One row per factor: factor, effect, effect_low, effect_high, agreeing, clear, clear_size, one_text, and with
        other texts side, side_low, side_high.
        """
        columns = {name: value.numpy() for name, value in self._columns("effect").items()}
        if self.side is not None:
            means = TextMeans.of_values(self.side, self.side_copies)
            low, high = means.interval()
            columns |= {"side": means.mean.numpy(), "side_low": low.numpy(), "side_high": high.numpy()}
        frame = pd.DataFrame({"factor": self.factors, **columns})
        frame.attrs["intervals"] = interval_note(self._distinct, len(self.before) - self._distinct)
        return frame

    def plot(self) -> "go.Figure":
        """The effect over the factor, and on a second axis the change of other texts."""
        return dose_curve(self.to_frame(), unit_of(self.metric))

    @property
    def lead(self) -> str:
        """The finding in one sentence."""
        texts = counted(len(self.before), self._distinct)
        largest = about_largest(
            self._means, lambda place: f"factor {self.factors[place[0]]:g}", things="factors", unit=unit_of(self.metric)
        )
        side = ""
        if self.side_effect is not None:
            strongest = int(self.effect.abs().argmax())
            moved = float(self.side_effect[strongest])
            side = f"; at factor {self.factors[strongest]:g}, other texts move by {moved:.3g} nats (KL divergence)"
        return with_minus_signs(f"{capitalised(self.what)}, on {texts}: {largest}{side}.")

    @property
    def _title(self) -> str:
        return f"Steering of {self.metric}"

    def _sections(self) -> "Sequence[Section]":
        reading = (
            "The change of the metric when the direction is added, times the factor, with 95 % intervals over texts."
        )
        if self.side is not None:
            reading += " Dotted: how far the output moves on other texts."
        return [Section("Dose", reading, {"dose": self.plot()}, "steering.plot()")]


@public
@owning_journal
def steer(
    model: HookedModel,
    direction: MeanDifference | Values | Mapping[int, Tensor],
    inputs: Inputs | Iterable[Inputs],
    *,
    heads: Heads | None = None,
    metric: MetricLike = "loss",
    at: str | None = None,
    layers: Iterable[int] | None = None,
    positions: Positions | None = None,
    factors: Iterable[int | float] = (-1.0, 0.5, 1.0, 2.0),
    side_inputs: Inputs | Iterable[Inputs] | None = None,
    **options: Unpack[SweepOptions],
) -> Steering:
    """Measures how a metric changes as a direction is added with growing factors, and how far other texts change.

    >>> import attnmech as am
    >>> model, names = am.load(), ("Anna", "Tom", "Mia", "Leo", "Nina", "Max")
    >>> one, other = ([f"{name} {verb}" for name in names] for verb in ("met the", "lost an"))
    >>> direction = am.mean_difference(model, one, other)
    >>> doses = am.steer(model, direction, other, layers=[2], factors=[0, 1], metric="kl", side_inputs=one)
    >>> float(doses.effect[0]), bool(doses.effect[1] > 0)
    (0.0, True)

    Args:
        model: the model.
        direction: from `am.mean_difference`, or tensors by layer, with the axes of the point.
        inputs: texts, or token ids.
        heads: the heads, at z, q, k and v; by default all.
        metric: as in `am.ablate_heads`.
        at: the point to which it is added; by default that of the mean difference.
        layers: the layers, at points of the stream; by default all of the direction's layers together.
        positions: the rows, as in `am.Intervention.add`; by default all.
        factors: numbers; 0 changes nothing.
        side_inputs: texts that should stay the same; their outputs are compared with the unchanged ones (KL
            divergence).
        options: answers, against, bos, memory, journal, engine, partial and progress, as in `am.ablate_heads`.

    Returns:
        The effect by factor (metric with the direction minus metric without), with intervals over texts, and the mean
        KL divergence on `side_inputs`.

    Raises:
        InputError: for directions, layers, heads or factors that do not fit, and in the cases of `am.ablate_heads`.

    Source: Turner et al. 2023 (activation addition); Li et al. 2023 (ITI).
    """
    require_model(model)
    numbers = [finite_number("factors", factor) for factor in listed("factors", factors, "a list of numbers")]
    if not any(numbers):
        raise InputError("`factors` must name at least one number other than 0, such as [0.5, 1, 2].")
    if len(model.stacks) > 1:
        raise InputError(
            "a direction belongs to one stack, and this model has several; use am.sweep with am.Intervention.add(..., "
            "stack=...)."
        )
    where = direction.at if isinstance(direction, MeanDifference) and at is None else at
    if where is None:
        raise InputError('`at` must name the point to which the direction is added, such as "resid_post".')
    values = direction.values if isinstance(direction, MeanDifference) else direction
    change = _change(where, values, layers, heads, positions)
    # Factor 0 changes nothing, and another batch could only add rounding.
    moving = [place for place, factor in enumerate(numbers) if factor != 0]
    changes = [(change(numbers[place]),) for place in moving]
    noted: dict[str, Any] = {"factors": numbers}
    apart = None
    if side_inputs is not None:
        shared: Any = {name: value for name, value in options.items() if name in ("bos", "memory")}
        apart = Sweeps(model, reread(side_inputs), "kl", noted=noted, **shared)
        noted = noted | {"side inputs": apart.provenance.inputs}
    swept = run_sweep(model, reread(inputs), changes, metric, noted=noted, **options)
    per_text = torch.zeros(len(numbers), len(swept.before), dtype=torch.float64)
    per_text[moving] = swept.after - swept.before
    side = None
    if apart is not None:
        journal = options.get("journal")
        running: Any = {name: value for name, value in options.items() if name in ("engine", "progress")}
        side = torch.zeros(len(numbers), apart.texts, dtype=torch.float64)
        side[moving] = apart.sweep(changes, journal=None if journal is None else f"{journal}.side", **running).after
    return Steering(
        str(swept.provenance.options["metric"]), str(change(1.0)), tuple(numbers), swept.before, per_text, side,
        swept.tokens, swept.provenance, () if apart is None else apart.provenance.copies,
    )  # fmt: skip


def _change(
    at: Any, values: Any, layers: Iterable[int] | None, heads: Heads | None, positions: Positions | None
) -> Any:
    """The intervention that adds a direction, by factor."""
    by_head = at in ("z", "q", "k", "v")
    if by_head and layers is not None:
        raise InputError(f"at {at!r}, choose `heads`, a list of (layer, head); `layers` are for points of the stream.")
    chosen = list(values.by_layer if isinstance(values, Values) else values) if layers is None else list(layers)
    where: dict[str, Any] = {"layers": chosen}
    if by_head:
        where = {"heads": "all" if heads is None else heads}
    return lambda factor: Intervention.add(at, values, factor=factor, positions=positions, **where)
