"""Tests whether removing some heads hurts a task more than removing others
(docs/formulas.md#confirming-a-set-of-heads).

Heads are chosen on one half of the templates and tested on the other half, against all sets of the same shape.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, Unpack

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
from numpy.typing import NDArray

from ...basics.arguments import flag, option, shown, whole_number
from ...basics.public import public
from ...demo.text import documents
from ...draw.figure import Figure
from ...draw.intervals import interval_rows
from ...draw.section import Section
from ...draw.style import FIGURE_STYLE, MARKS, NEUTRAL
from ...draw.text import signed, with_minus_signs
from ...errors import InputError
from ...interventions import Head, Heads, Intervention, Values
from ...maths.intervals import TextMeans
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.table import require_no_head
from ...runs.ablations import checked_seed
from ...runs.journal import kept
from ...runs.options import RunOptions
from .p_values import SetTest, named
from .section import about_each, about_matched, about_other, about_restored, about_set, about_too_few, quantity_of
from .set_effects import (
    FEWEST,
    Discovery,
    HeadSet,
    Measuring,
    Removal,
    general_effects,
    measured_sets,
    other_task,
    same_shape,
)
from .tasks import TaskLike, require_apart, require_one_group_a_prompt, task_of

GENERAL: Final = 8  # on how many texts of the demo model general loss is measured if `task` names one of its tasks
Rule: TypeAlias = Callable[[Discovery], Sequence[Head] | pd.DataFrame]


@public
def confirm_heads(
    model: HookedModel,
    heads: Heads | Rule,
    task: TaskLike,
    *,
    method: str | Intervention = "zero",
    reference: Values | Inputs | Iterable[Inputs] | None = None,
    discovery: TaskLike | None = None,
    others: Sequence[TaskLike] | None = None,
    general: Inputs | Iterable[Inputs] | None = None,
    sets: int = 1000,
    seed: int = 0,
    memory: float = 1.0,
    **options: Unpack[RunOptions],
) -> "HeadClaim":
    """Tests whether removing heads together hurts a task more than removing other heads.

    >>> import attnmech as am
    >>> task = am.Task.of_demo("copying", templates=10, per_template=1)
    >>> claim = am.confirm_heads(am.load(), lambda half: half.strongest(1), task)
    >>> claim.heads, claim.verdict, claim.p == claim.least_p == 1 / 32
    (((1, 0),), 'confirmed', True)

    The groups (templates) of the task's cases are split in halves by `seed`. A rule chooses heads on the discovery
    half. It receives a `Discovery`, which contains no case of the other half; `strongest(5)` returns the five heads
    that hurt most when removed alone. If `heads` is a list, it must have been chosen without the confirmation half: on
    `task.halves(seed)[0]`, or on other texts. Everything else is measured on the confirmation half, which has at least
    five groups.

    `effect` is the metric after minus before, averaged over groups, with its t interval over groups. The null
    distribution comprises *all* sets of the same shape (the same number of heads in each of the same layers), including
    the tested set. `p` is the share of sets that are at least as strong, by their effect studentised over groups
    (`attnmech.methods.claims.p_values.strength`). No p-value is below `least_p`, 1 / number of sets. If there are fewer
    than 20 sets, sets from other layers are added (`wider`); if there are more than `sets`, a sample is drawn with
    `seed`.

    A set is as strong as its strongest heads, so a head that does nothing can be in a strong set. `p_each` therefore
    tests every head: it ranks sets by the contribution of their weakest head, ½ (effect alone + effect of the set −
    effect of the other heads), and is never below the p-value of a t test of the hypothesis that one of the heads adds
    nothing. The verdict is "confirmed" if the intervals of the effect and of each head's contribution exclude 0 and
    p_each ≤ 0.05. It is "in part" if the set has a stronger effect than others (p ≤ 0.05) but not every head is shown
    to contribute. It is "cannot be confirmed" if the model has fewer than 20 sets of the shape: no p-value could be
    0.05 or less.

    Args:
        model: the model.
        heads: a list of (layer, head), a table with these columns, or a rule that chooses one on the discovery half.
        task: an `am.Task`; the name of a task of the demo model ("copying", "agreement", "gender", "recipient"); or
            cases (prompt, answer, against, group), or (text, group) to measure the loss.
        method: how heads are removed: "zero", "mean", "resample". Or an `am.Intervention` in all heads, such as
            `am.Intervention.add("z", values, heads="all")` or `am.Intervention.reweight("all", "first", 0.1)`, which is
            applied to the heads of each set; if it has values for some layers only, sets come from these layers.
        reference: for "mean", the texts to average over; by default the prompts of the discovery half.
        discovery: separate cases for the discovery half; the confirmation half is then all of `task`.
        others: other tasks that show what else the heads do; if `task` is a name, they are by default the demo model's
            other tasks.
        general: texts that show how much a set matters to the loss in general; if `task` is a name, by default 8 texts
            of the demo model.
        sets: the largest number of sets to measure, including the tested set.
        seed: seed of the halves, of the sampled sets, and of the donors for "resample".
        memory: how many GB a step may use on top of the model.
        options: `bos`, `progress`, `journal` and `engine`, as in `am.ablate_heads`.

    Returns:
        The effect with its interval, the null distribution, and a verdict.

    Raises:
        InputError: for fewer than six groups, a group in both halves, a prompt (or prompts of the same tokens) in two
            groups, heads that the model does not have, and in the cases of `am.ablate_heads`.

    """
    require_model(model)
    seed, sets = checked_seed(seed), whole_number("sets", sets, least=FEWEST)
    progress = flag("progress", options.get("progress", False))
    bos, journal, engine = options.get("bos"), options.get("journal"), options.get("engine", "local")
    by_name = task if isinstance(task, str) else None
    whole = task_of(task)
    finding, confirming = whole.halves(seed) if discovery is None else (task_of(discovery), whole)
    require_apart(model, finding, confirming, bos)
    if reference is not None and method != "mean":
        raise InputError(f'`reference` is for method="mean"; got method={shown(method)}.')
    if method == "mean" and reference is None:
        reference = iter(finding.inputs)
    measuring = Measuring(Removal.of(model, method, reference, seed, bos), memory, progress, engine)
    chosen = _chosen(model, heads, Discovery(measuring, finding))
    shape = same_shape(chosen, measuring.removal.layers, model.output_stack.n_heads, sets, seed)
    if general is None and by_name:
        general = documents(GENERAL, seed=1)
    if others is None:
        others = [name for name in ("copying", "agreement", "gender") if by_name and name != by_name]
    further = tuple(map(task_of, others))
    for other in further:
        require_one_group_a_prompt(model, other.cases, bos)
    beside = None if journal is None or general is None else f"{journal}.general"
    with kept(journal), kept(beside):
        noted = {"heads": [list(head) for head in chosen], "task": whole.name, "seed": seed, "sets": len(shape.sets)}
        if callable(heads):
            noted["rule"] = getattr(heads, "__name__", type(heads).__name__).replace("<lambda>", "a lambda")
        measured = measured_sets(measuring, confirming, shape, journal, noted)
        if general is not None:
            measured["general"] = general_effects(measuring, general, shape, beside)
        return HeadClaim(
            task=whole.name,
            method=measuring.removal.name,
            heads=chosen,
            chosen_by_rule=callable(heads),
            higher_is_better=confirming.higher,
            possible=shape.possible,
            wider=shape.wider,
            groups=confirming.groups,
            discovery_groups=finding.groups,
            case_groups=confirming.group_of,
            others=tuple(other_task(measuring, other, chosen) for other in further),
            **measured,
        )


def _chosen(model: HookedModel, heads: Any, half: Discovery) -> HeadSet:
    chosen = heads(half) if callable(heads) else heads
    if isinstance(chosen, pd.DataFrame) and {"layer", "head"} <= {*chosen.columns}:  # such as that of `strongest`
        chosen = sorted(zip(chosen["layer"].tolist(), chosen["head"].tolist(), strict=True))
    if isinstance(chosen, str):
        raise InputError("`heads` must be a list of (layer, head), or a rule that chooses one; got a string.")
    return tuple(model.check_heads(list(chosen) if isinstance(chosen, Iterable) else chosen))


@dataclass(frozen=True, repr=False)
class HeadClaim(SetTest):
    """The effect of removing (or changing) heads on a task, compared with doing the same to other sets of their shape.

    Effects are the metric after minus before, in its units; *harm* is the effect signed so that positive is worse.
    Groups are the unit of evidence: the value of a group is the mean over its cases, and intervals are over groups.
    """

    @property
    def lead(self) -> str:
        """The conclusions that the numbers support."""
        sentences = [about_set(self), about_too_few(self), about_each(self), *map(about_other, self.others)]
        return with_minus_signs(" ".join(filter(None, sentences)))

    @property
    def findings(self) -> dict[str, str]:
        """What the lead leaves out: sets that change the general loss as much ("matched"), if there are general texts,
        and how much of the metric the set alone restores ("restored").
        """
        sentences = {"matched": about_matched(self), "restored": about_restored(self)}
        return {name: sentence for name, sentence in sentences.items() if sentence}

    @property
    def _title(self) -> str:
        return f"{named(self.heads)} and {self.task}: {self.verdict}"

    FIGURES = ("sets", "heads")

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws the effect of every set, from the smallest to the largest, with the interval of the tested set
        ("sets", the default), or the harm of removing each head first, of removing it last, and the mean of both
        ("heads").
        """
        require_no_head(layer, head)
        if figure is not None and option("figure", figure, self.FIGURES) == "heads":
            frame, values = self.by_head(), []
            for name in ("removed_first", "removed_last", "adds"):
                mean, low, high = (frame[f"{name}{end}"].to_numpy() for end in ("", "_low", "_high"))
                values.append((name.replace("_", " "), mean, low, high))
            return interval_rows([named([head]) for head in self.heads], values, label=f"harm: {self._label}")
        frame = self.to_frame()
        effect, low, high = (frame[name].to_numpy() for name in ("effect", "effect_low", "effect_high"))
        return null_sets(list(frame["heads"]), effect, low, high, self._sharing.numpy(), label=self._label)

    def by_head(self) -> pd.DataFrame:
        """One row per head of the set: the harm that it adds, and the harm of removing it first and last.

        Columns: layer, head, adds, removed_first, removed_last, each of these with `_low` and `_high`, the ends of its
        95 % interval over groups. `adds` is the mean of the other two.
        """
        alone, rest = self._harm_in_groups(self.after_alone)[0], self._harm_in_groups(self.after_rest)[0]
        columns = {name: [head[axis] for head in self.heads] for axis, name in enumerate(("layer", "head"))}
        frame = pd.DataFrame(columns)
        harms = {"adds": self._added[0], "removed_first": alone, "removed_last": self.harm[0] - rest}
        for name, harm in harms.items():
            means = TextMeans.of_values(harm)
            low, high = means.interval()
            frame[name], frame[f"{name}_low"], frame[f"{name}_high"] = (x.numpy() for x in (means.mean, low, high))
        return frame

    @property
    def _labels(self) -> Mapping[str, str]:
        return {name: f"{name.replace('_', ' ')}: {self._label}" for name in ("adds", "removed_first", "removed_last")}

    @property
    def _label(self) -> str:
        what, unit = quantity_of(self.metric)
        return f"change of the {what}{f', {unit}' if unit else ''}"

    def _sections(self) -> "Sequence[Section]":
        drawn = "all" if len(self.sets) == self.possible else f"{len(self.sets):,} of the {self.possible:,}"
        sections = [
            Section(
                "Against other sets",
                f"The marks are {drawn} sets of the same shape. The height of a mark is the change of the metric when "
                f"the set is {self._done}, averaged over {len(self.groups)} groups that were not used to choose the "
                "heads. The vertical line is the 95 % interval over groups.",
                {"sets": self.plot()},
                "claim.plot()",
                finding=" ".join(self.findings.values()),
                caveat="p ranks sets by their effect studentised over groups, and consistent effects by size. Other "
                f"heads may take over what {self._done} heads did, so a small effect does not show that a head is "
                "idle.",
            )
        ]
        if len(self.heads) > 1:
            sections.append(
                Section(
                    "Head by head",
                    f"How much worse the model does when a head is {self._done} alone, when it is {self._done} after "
                    "the set's other heads, and the mean of the two, which is the head's contribution to the set.",
                    {"heads": self.plot("heads")},
                    'claim.plot("heads")',
                    finding=with_minus_signs(about_each(self)),
                )
            )
        return sections


def null_sets(
    names: Sequence[str],
    effect: NDArray[np.floating],
    low: NDArray[np.floating],
    high: NDArray[np.floating],
    sharing: NDArray[np.bool_],
    *,
    label: str,
) -> go.Figure:
    """Draws one mark per set, from the smallest effect to the largest, and the first set as a star with its interval.

    `sharing` marks the sets that have a head in common with the first set; they get a different symbol.
    """
    figure = Figure()
    order = np.argsort(effect, kind="stable")
    place = np.empty(len(effect), dtype=int)
    place[order] = np.arange(1, len(effect) + 1)
    rest = np.arange(len(effect)) > 0
    kinds = (("sets that share a head with it", rest & sharing, MARKS["other"]), ("other sets", rest & ~sharing, None))
    for name, drawn, mark in kinds:
        figure.add_scatter(
            x=place[drawn], y=effect[drawn], mode="markers", name=name,
            marker={
                "color": mark.colour if mark else NEUTRAL, "symbol": mark.symbol if mark else "circle-open", "size": 5,
            },
            text=[f"{names[number]}<br>{signed(effect[number], '.4g')}" for number in drawn.nonzero()[0].tolist()],
            hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip
    style = MARKS["self"]
    figure.add_scatter(
        x=place[:1], y=effect[:1], mode="markers", name=f"the tested set, {names[0]}",
        marker={"color": style.colour, "symbol": "star", "size": 13},
        error_y={"type": "data", "array": high[:1] - effect[:1], "arrayminus": effect[:1] - low[:1], "thickness": 2},
        text=[f"{names[0]}<br>{signed(effect[0], '.4g')}<br>95 %: {signed(low[0], '.3g')} to {signed(high[0], '.3g')}"],
        hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip
    figure.add_hline(y=0, line={"color": NEUTRAL, "width": 1})
    figure.update_layout(template=FIGURE_STYLE, height=380, margin={"t": 60})
    figure.update_xaxes(title="sets of this shape, ordered by effect", showgrid=False)
    figure.update_yaxes(title=label)
    return figure
