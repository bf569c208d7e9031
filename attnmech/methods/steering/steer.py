"""Steering: how a metric changes as a direction is added, and what that does to other texts.

Formulas: docs/formulas.md#steering.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import finite_number, listed
from ...basics.messages import capitalised
from ...basics.public import public
from ...draw.section import Section
from ...draw.text import with_minus_signs
from ...errors import InputError
from ...interventions import Heads, Intervention, Positions, Values
from ...maths.intervals import TextMeans
from ...maths.statistic import POSITIVE, UNBOUNDED, Statistic
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.provenance import Provenance
from ...results.quantity import Places
from ...results.sentences import unit_of
from ...results.table import Table, require_no_head
from ...runs.ablations import reread
from ...runs.journal import owning_journal
from ...runs.metrics import MetricLike
from ...runs.options import SweepOptions
from ...runs.sweep import Sweeps, run_sweep
from .figures import dose_curve
from .mean_difference import MeanDifference


@dataclass(frozen=True, repr=False)
class Steering(Table):
    """The effect of adding a direction on a metric, by factor: `effect [factor]`; intervals are over texts."""

    _TITLE = "Steering of {metric}"
    _SUBTRACT: ClassVar[str] = "subtract their `effect`"
    _is_about_heads: ClassVar[bool] = False
    _MAIN = "effect"
    _AXES: ClassVar = {"factor": "factors", "text": "tokens"}
    effect = Statistic(
        meaning="The mean change of the metric over texts.", tested=True, bounds=UNBOUNDED, axes="factor"
    )
    side_effect = Statistic(
        meaning="The mean KL divergence on other texts, in nats; NaN without other texts.",
        bounds=POSITIVE,
        axes="factor",
    )

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
    def quantities(self) -> tuple[str, ...]:
        """The names of the statistics: "effect" and, with other texts, "side_effect"."""
        return ("effect",) if self.side is None else ("effect", "side_effect")

    def _by_text(self, name: str) -> TextMeans:
        nothing = torch.full_like(self.per_text, torch.nan)
        return TextMeans.of_values(self.per_text if name == "effect" else nothing if self.side is None else self.side)

    def _distinct_means(self, name: str, every: TextMeans) -> TextMeans:
        return every.merged(self.provenance.copies if name == "effect" else self.side_copies)

    @property
    def _places(self) -> Places:
        rows = {"factor": self.factors}
        return Places(rows, (slice(None),), lambda place: f"factor {self.factors[place[0]]:g}", things="factors")

    @property
    def _n_texts(self) -> int:
        return len(self.before)

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """The effect over the factor, and on a second axis the change of other texts."""
        require_no_head(layer, head)
        return dose_curve(self.to_frame(), unit_of(self.metric))

    @property
    def lead(self) -> str:
        largest = self._largest("effect", unit=unit_of(self.metric))
        side = ""
        if self.side is not None:
            strongest = int(self.effect.abs().argmax())
            moved = float(self.side_effect[strongest])
            side = f"; at factor {self.factors[strongest]:g}, other texts move by {moved:.3g} nats (KL divergence)"
        return with_minus_signs(f"{capitalised(self.what)}, on {self._texts}: {largest}{side}.")

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
    direction: MeanDifference | Values | Mapping[int, Tensor] | Tensor,
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
        direction: from `am.mean_difference`; a vector, for the `layers`; or tensors by layer, as in
            `am.Intervention.add`.
        inputs: texts, or token ids.
        heads: the heads, at z, q, k and v; by default all.
        metric: as in `am.ablate_heads`.
        at: the point to which it is added; by default that of the mean difference, or "resid_post".
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
    values, usual = (
        (direction.values, direction.at) if isinstance(direction, MeanDifference) else (direction, "resid_post")
    )
    change = _change(usual if at is None else at, values, layers, heads, positions)
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
    by_head = at in ("z", "q", "k", "v")
    if by_head and layers is not None:
        raise InputError(f"at {at!r}, choose `heads`, a list of (layer, head); `layers` are for points of the stream.")
    where: dict[str, Any] = {"layers": layers, "heads": heads}
    if by_head:
        where = {"heads": "all" if heads is None else heads}
    elif layers is None and isinstance(values, Values | Mapping):
        where["layers"] = list(values.by_layer if isinstance(values, Values) else values)
    return lambda factor: Intervention.add(at, values, factor=factor, positions=positions, **where)
