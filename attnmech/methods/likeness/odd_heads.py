"""Finds heads that are dead, collapsed or unlike the other heads, and measures how much heads attend far back.

Classes after arXiv 2603.09616 and robust scores after Iglewicz & Hoaglin 1993 (docs/formulas.md#similar-heads).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final, Unpack

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import option, whole_number
from ...basics.nouns import counted
from ...basics.public import public
from ...draw.head_maps import effect_map
from ...draw.section import Section
from ...draw.text import percent, with_minus_signs
from ...errors import InputError
from ...maths.float64 import as_float64, put
from ...maths.focus import STATISTICS as OF_FOCUS
from ...maths.focus import FocusStatistics, collapse_classes
from ...maths.groups import by_group, joined
from ...maths.intervals import LEAST_TEXTS, TextMeans
from ...maths.outliers import critical_score, robust_scores, spread_of
from ...maths.statistic import Statistic, Statistics
from ...maths.update_statistics import STATISTICS as OF_UPDATES
from ...maths.update_statistics import UpdateStatistics
from ...model.attention.observed import LayerEnd, RowBlock
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.by_layer import table_of
from ...results.quantity import Places
from ...results.table import framed
from ...runs.focus_sums import FocusSums
from ...runs.options import StreamOptions
from ...runs.reducer import Reducer, Run, Source, State
from ...runs.stream import stream
from ...runs.summed import SummedTable
from ...runs.token_types import ROW_CLASSES, row_classes
from ...runs.update_sums import UpdateSums

FAR: Final = ("far", "far_ordinary")  # attention beyond a distance: to all keys; to all but the first token
_PARTS: Final[Mapping[str, Reducer]] = {"focus": FocusSums(), "updates": UpdateSums()}
_BY_TEXT: Final = (
    "far_mass", "far_uniform", "far_rows", "focus_sums", "focus_counts", "update_sums", "update_counts",
)  # fmt: skip


@dataclass(frozen=True)
class OddHeadsReducer(Reducer):
    """Takes the sums of `am.attention_focus` and `am.residual_updates`, and sums attention beyond a distance."""

    beyond: int = 16

    points = UpdateSums.points
    optional_points = UpdateSums.optional_points

    def start(self, run: Run) -> State:
        """Sums of 0 for all parts, with the part's name before each entry's name."""
        texts = len(run.documents)
        far = {
            "mass": torch.zeros(len(FAR), run.n_layers, run.n_heads, texts, dtype=torch.float64),
            "uniform": torch.zeros(len(FAR), run.n_layers, texts, dtype=torch.float64),
            "rows": torch.zeros(len(FAR), run.n_layers, texts, dtype=torch.float64),
        }
        of_parts = {name: part.start(_as_corpus(run)) for name, part in _PARTS.items()}
        of_parts["far"] = {name: put(value, run.model.device) for name, value in far.items()}
        return {f"{part} {name}": value for part, state in of_parts.items() for name, value in state.items()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        for name, part in _PARTS.items():
            part.add(_of(state, name), block, _as_corpus(run))
        self._add_far(_of(state, "far"), block)

    def _add_far(self, far: State, block: RowBlock) -> None:
        batch = block.batch.queries(block.stack)
        # The first row of a text does not count, here as elsewhere.
        classes = row_classes(batch)[:, : ROW_CLASSES.index("first"), block.rows.start : block.rows.stop].any(dim=1)
        seen = block.visible[:, 0]
        keys = torch.arange(seen.shape[-1], device=seen.device)
        rows = torch.arange(block.rows.start, block.rows.stop, device=seen.device)
        beyond = seen & ((rows[:, None] - keys).abs() >= self.beyond)
        first = batch.first[:, None, : seen.shape[-1]]
        for place, some in enumerate((beyond, beyond & ~first)):
            counted = classes & some.any(dim=-1)
            chosen = some & counted[..., None]
            mass = torch.einsum("thrk,trk->ht", block.pattern, chosen.to(block.pattern))
            share = as_float64(chosen.sum(dim=-1)) / as_float64(seen.sum(dim=-1).clamp_min(1))
            far["mass"][place, block.index] += as_float64(mass)
            far["uniform"][place, block.index] += share.sum(dim=-1)
            far["rows"][place, block.index] += as_float64(counted.sum(dim=-1))

    def add_layer(self, state: State, end: LayerEnd, run: Run) -> None:
        """Adds the sums of what a layer's heads wrote."""
        _PARTS["updates"].add_layer(_of(state, "updates"), end, _as_corpus(run))

    def close(self, state: State, run: Run) -> State:
        """Sums by group of texts."""
        whole = _as_corpus(run)
        focus, updates = (part.close(_of(state, name), whole) for name, part in _PARTS.items())
        far = {f"far_{name}": value.cpu() for name, value in _of(state, "far").items()}
        return by_group(far, run.batch.digests, tuple(far)) | {
            # Without masses on global tokens, which come last.
            "focus_sums": focus["sums"][: len(OF_FOCUS)],
            "focus_counts": focus["counts"][: len(OF_FOCUS)],
            "update_sums": updates["sums"],
            "update_counts": updates["counts"],
        }

    def merge(self, one: State, other: State) -> State:
        return joined(one, other, _BY_TEXT)

    def finish(self, state: State, source: Source) -> "OddHeads":
        return OddHeads.of(state, source, beyond=self.beyond)


def _of(state: State, part: str) -> State:
    """The tensors of one part; changing them in place changes the state."""
    beginning = f"{part} "
    return {name.removeprefix(beginning): value for name, value in state.items() if name.startswith(beginning)}


def _as_corpus(run: Run) -> Run:
    """The same run, marked as a corpus so that no rows are stored."""
    return replace(run, corpus=True)


class OddHeadStatistics:
    """What attention does on each row, and what a head writes there."""

    bos_mass = Statistic(meaning="Mean probability of the first token over all rows.", short="BOS mass")
    entropy = FocusStatistics.entropy
    concentration = FocusStatistics.concentration
    self_mass = FocusStatistics.self_mass
    distance = FocusStatistics.distance
    far_ordinary = Statistic(meaning="Long-range mass without the first token.", short="long-range mass")
    magnitude = UpdateStatistics.magnitude
    orientation = UpdateStatistics.orientation


STATISTICS: Final = Statistics(OddHeadStatistics, Statistic)
CLASSES: Final = ("dead", "sink", "low entropy")  # of collapse; a head belongs to the first that applies


@public
def odd_heads(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    beyond: int = 16,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    **options: Unpack[StreamOptions],
) -> "OddHeads":
    """Finds heads that are dead, collapsed or unlike the others, and measures how much each head attends far back.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> odd = am.odd_heads(am.load(), documents(6))
    >>> odd.far_mass.shape, sorted(set(odd.to_frame()["class"]))
    (torch.Size([4, 8]), ['', 'sink'])

    A head is "dead" if its BOS mass, (1/T) Σ_i p_i0, is above 0.95; otherwise a "sink" if it is above 0.5; otherwise of
    "low entropy" if its mean entropy is below 0.5 nats (arXiv 2603.09616). A head is "unusual" if a statistic's robust
    score (x − median) / (1.4826 · median |x − median|) over all heads measured exceeds the critical score in size: the
    95th percentile of the largest |score| among that many normal values, over all statistics together. Heads are not a
    sample and their statistics are not normal, so "unusual" describes a head and claims nothing. An unusual head is
    "steady" if its whole simultaneous 95 % interval over texts lies beyond the critical score. Update magnitudes are
    compared by their logarithms.

    Long-range mass is Σ_j p_ij over keys at a distance |i − j| of at least `beyond` tokens, on rows that see at least
    one of these keys; its baseline is the mass of uniform attention. The first token draws attention whatever word it
    is, so both masses are also measured without that key.

    Args:
        model: the model.
        inputs: texts, or an iterator of texts (a corpus); only sums are stored.
        beyond: the smallest distance of a far key, in tokens.
        layers: all by default.
        stack: "encoder" or "decoder" in a model with several stacks.
        options: `bos`, `keep_rows`, `truncate`, `shard`, `journal`, `engine` and `progress`, as in `am.stream`.

    Returns:
        Statistics, classes and scores of every head; `odd` ranks the heads that stand out.

    Raises:
        InputError: for cross-attention, because its queries and keys have no distance.

    """
    require_model(model)
    beyond = whole_number("beyond", beyond, least=1)
    if model.stack(stack).label == "cross":
        raise InputError("queries and keys of cross-attention belong to different texts, so they have no distance.")
    result: OddHeads
    (result,) = stream(model, inputs, [OddHeadsReducer(beyond)], layers=layers, stack=stack, **options)
    return result


@dataclass(frozen=True, repr=False)
class OddHeads(OddHeadStatistics, SummedTable):
    """Heads that stand out: each head's class of collapse, its robust scores among all heads, and its long-range mass.

    Masses are from 0 to 1, entropy is in nats, distance in tokens, magnitude in units of the stream's norm; values are
    NaN where nothing was measured.
    """

    _TITLE = "Odd heads of {model}"
    _SUBTRACT = "subtract what you compare: one.far_mass - other.far_mass"
    _AXES: ClassVar = {
        "layer": "layers",
        "far": FAR,
        "class": ROW_CLASSES,
        "of_focus": OF_FOCUS,
        "of_updates": OF_UPDATES,
    }

    _STATE: ClassVar[Mapping[str, Any]] = {
        "far_mass": Float[Tensor, "far layer head group"],
        "far_uniform": Float[Tensor, "far layer group"],
        "far_rows": Float[Tensor, "far layer group"],
        "focus_sums": Float[Tensor, "of_focus class layer head group"],
        "focus_counts": Float[Tensor, "of_focus class layer 1 group"],
        "update_sums": Float[Tensor, "of_updates class layer head group"],
        "update_counts": Float[Tensor, "of_updates class layer head group"],
        "groups": Int[Tensor, " group"],
        "modulus": Int[Tensor, " 1"],
    }

    _MAIN = "magnitude"

    beyond: int
    """The smallest distance of a far key, in tokens."""

    def _merge(self, one: State, other: State) -> State:
        return OddHeadsReducer(self.beyond).merge(one, other)

    @property
    def far_mass(self) -> Float[Tensor, "layer head"]:
        """Mean attention to keys at a distance of at least `beyond` tokens, over the rows that see such keys."""
        return self._by_layer(self._far(0).mean)

    def _robust_score(self, statistic: str) -> Float[Tensor, "layer head"]:
        """The robust score of each head among all heads measured; magnitudes are compared by their logarithms."""
        means = self._by_text(option("statistic", statistic, STATISTICS)).mean
        return self._by_layer(robust_scores(_compared(statistic, means)))

    @property
    def collapse(self) -> tuple[tuple[str, ...], ...]:
        """The class of each head in each layer: one of `CLASSES`, "", or "not measured" in other layers and where all
        texts have one token.
        """
        # The only row of a text of one token has nothing to choose from.
        mass = self.bos_mass.masked_fill(self.entropy.isnan(), math.nan)
        entropy = self._by_layer(self._of_focus("entropy", first=True).mean)
        return collapse_classes(mass, entropy)

    @property
    def _critical(self) -> float:
        return critical_score(len(self.layers) * self._heads, len(STATISTICS))

    @cached_property
    def odd(self) -> pd.DataFrame:
        """One row per head and reason: dead, sink and low-entropy heads first, then the most unusual.

        Columns: layer, head, reason (a class or "unusual"), statistic, value with its simultaneous 95 % interval over
        all heads and statistics, peers (the median over heads), score, and steady: whether the whole interval lies
        beyond the critical score. A steady head would also be unusual on other texts.
        """
        heads = pd.concat([self._heads_by(name) for name in STATISTICS], ignore_index=True)
        classes = [self.collapse[layer][head] for layer, head in zip(heads["layer"], heads["head"], strict=True)]
        parts = []
        for name in CLASSES:
            by = heads["statistic"] == ("entropy" if name == "low entropy" else "bos_mass")
            some = heads[by & (pd.Series(classes) == name)].assign(reason=name, steady=None)
            parts.append(some.sort_values("value", ascending=name == "low entropy", kind="stable"))
        unusual = heads[heads["score"].abs() > self._critical].assign(reason="unusual")
        parts.append(unusual.sort_values("score", key=lambda score: -score.abs(), kind="stable"))
        return pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)[_COLUMNS]

    def _heads_by(self, statistic: str) -> pd.DataFrame:
        """One row per head: its value of a statistic, as in `odd`."""
        low, high = (ends[STATISTICS.place(statistic)] for ends in self._simultaneous)
        means, is_magnitude = self._by_text(statistic).mean, statistic == "magnitude"
        middle, wide = spread_of(_compared(statistic, means).flatten())
        ends = _compared(statistic, torch.stack([low, high]).clamp_min(0 if is_magnitude else -math.inf))
        beyond = (ends - middle) / wide if wide > 0 else torch.zeros_like(ends)
        score = robust_scores(_compared(statistic, means))
        steady = (beyond * score.sign() > self._critical).all(dim=0)
        columns = {"value": means, "low": low, "high": high, "score": score, "steady": steady}
        frame = table_of({"layer": self.layers, "head": range(self._heads)}, columns)
        return frame.assign(statistic=statistic, peers=float(means.nanmedian() if is_magnitude else middle))

    @property
    def _places(self) -> Places:
        return Places.of_heads(self.layers, self._heads, self.n_layers)

    def to_frame(self) -> pd.DataFrame:
        """One row per head: layer, head, class, unusual (the statistics), far_mass and its baselines, and for each
        statistic its mean, its pointwise interval (`_low`, `_high`) and its score.
        """
        frame, collapse = super().to_frame(), self.collapse
        unusual = self.odd[self.odd["reason"] == "unusual"]
        named = {place: ", ".join(some["statistic"]) for place, some in unusual.groupby(["layer", "head"], sort=False)}
        places = list(zip(frame["layer"], frame["head"], strict=True))
        frame.insert(2, "class", [collapse[layer][head] for layer, head in places])
        frame.insert(3, "unusual", [named.get(place, "") for place in places])
        return frame

    @property
    def _further(self) -> Mapping[str, Tensor]:
        baselines = {"far_baseline": self._uniform(0), "far_ordinary_baseline": self._uniform(1)}
        return {
            "far_mass": self.far_mass,
            **{name: value[:, None].expand(-1, self._heads) for name, value in baselines.items()},
            **{f"{name}_score": self._robust_score(name) for name in self.quantities},
        }

    def far_by_type(self, types: Mapping[tuple[int, int], str]) -> pd.DataFrame:
        """Long-range mass by type of head, the largest first: number of heads, means with and without the first key.

        `types` maps (layer, head) to a type, as `am.head_types(model).main_types` does; heads not in it have type "".
        """
        frame = self.to_frame()
        places = zip(frame["layer"].astype(int), frame["head"].astype(int), strict=True)
        named = frame.assign(type=[types.get(place, "") for place in places])
        means = named.groupby("type")[["far_mass", "far_baseline", "far_ordinary", "far_ordinary_baseline"]].mean()
        means.insert(0, "heads", named.groupby("type").size())
        return means.sort_values("far_ordinary", ascending=False).reset_index()

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws layers × heads, coloured by the robust score of a statistic or by each head's most extreme score.

        The figure is returned, not shown.
        """
        if figure is None:
            scores = torch.stack([self._robust_score(name)[list(self.layers)] for name in STATISTICS]).nan_to_num(0.0)
            shown, name = scores.gather(0, scores.abs().argmax(dim=0, keepdim=True))[0], "most unusual"
        else:
            shown = self._robust_score(figure)[list(self.layers)]
            name = STATISTICS[figure].title
        return framed(effect_map(shown, layers=self.layers, label=f"score, {name}"), self.layers, layer, head)

    @property
    def lead(self) -> str:
        """The finding in one paragraph."""
        heads, odd = len(self.layers) * self._heads, self.odd
        if bool(self.entropy.isnan().all()):
            return f"On {self._texts}, no token after the first sees two keys, so how heads attend is not measured."
        counts = [_counted(int((odd["reason"] == name).sum()), name) for name in CLASSES]
        unusual = odd[odd["reason"] == "unusual"]
        several = len(unusual[["layer", "head"]].drop_duplicates())
        most = ""
        if several:
            first = unusual.iloc[0]
            texts_counted = len(self.state["groups"])
            known = (
                f"; {counted(texts_counted)} {'is' if texts_counted == 1 else 'are'} too few to generalise"
                if texts_counted < LEAST_TEXTS
                else f"; the 95 % interval over texts {'also lies' if first['steady'] else 'does not lie entirely'} "
                "beyond"
            )
            most = (
                f". The most unusual is L{first['layer']}H{first['head']} ({STATISTICS[first['statistic']].title} "
                f"{first['value']:.3g} against a median of {first['peers']:.3g}, score {first['score']:.3g} beyond "
                f"±{self._critical:.3g}{known})"
            )
        return with_minus_signs(
            f"Of {counted(heads, noun='head')} on {self._texts}, {', '.join(counts)}; {several} of the others "
            f"{'is' if several == 1 else 'are'} unusual{most}.{self._longest_range}"
        )

    @property
    def _longest_range(self) -> str:
        mass = self.far_ordinary
        if bool(mass.isnan().all()):
            return f" No row sees a key {self.beyond} tokens away, so long-range mass is undefined."
        layer, head = divmod(int(mass.nan_to_num(-1.0).argmax()), mass.shape[1])
        return (
            f" The head with the longest range is L{layer}H{head}: it gives {percent(float(mass[layer, head]), 0)} "
            f"of its attention to keys {self.beyond} or more tokens away, excluding the first token; uniform "
            f"attention would give them {percent(float(self._uniform(1)[layer]), 0)}."
        )

    def _sections(self) -> "Sequence[Section]":
        reading = (
            "Each cell is one head, coloured by the distance of its most unusual statistic from the median over all "
            f"heads, in robust standard deviations; beyond ±{self._critical:.2g} a head counts as unusual. "
        )
        compared = f"Statistics: {', '.join(statistic.title for statistic in STATISTICS.values())}."
        caveat = (
            "Heads are not a random sample, so “unusual” is a description, not a test. The threshold is the 95th "
            "percentile of the largest |score| among that many normal values, over all statistics together."
        )
        return [
            Section("Heads unlike the others", reading + compared, {"odd": self.plot()}, "odd.plot()", caveat=caveat),
            Section(
                "Long-range attention",
                f"Each cell is one head, coloured by its long-range mass: attention to keys at least {self.beyond} "
                "tokens away, excluding the text's first token.",
                {"far": self.plot("far_ordinary")},
                'odd.plot("far_ordinary")',
            ),
        ]

    @property
    def _heads(self) -> int:
        return self.state["far_mass"].shape[2]

    def _by_text(self, name: str) -> TextMeans:
        if name == "far_ordinary":
            return self._far(1)
        if name == "bos_mass":
            # The mean is over all rows, including those that do not see the first token.
            mass = self.state["focus_sums"][OF_FOCUS.place("first_mass")].sum(dim=0)
            return TextMeans.of_ratio(mass, self.state["focus_counts"][OF_FOCUS.place("entropy")].sum(dim=0))
        if name in OF_FOCUS:
            return self._of_focus(name)
        sums, counts = (self.state[entry][OF_UPDATES.place(name)] for entry in ("update_sums", "update_counts"))
        above, below = (values[: ROW_CLASSES.index("first")].sum(dim=0) for values in (sums, counts))
        return TextMeans.of_ratio(above, below)

    def _of_focus(self, statistic: str, *, first: bool = False) -> TextMeans:
        some = slice(None) if first else slice(ROW_CLASSES.index("first"))
        sums, counts = (self.state[name][OF_FOCUS.place(statistic)][some] for name in ("focus_sums", "focus_counts"))
        return TextMeans.of_ratio(sums.sum(dim=0), counts.sum(dim=0))

    def _far(self, place: int) -> TextMeans:
        return TextMeans.of_ratio(self.state["far_mass"][place], self.state["far_rows"][place][:, None])

    def _uniform(self, place: int) -> Float[Tensor, " layer"]:
        sums, rows = (self.state[name][place].sum(dim=-1) for name in ("far_uniform", "far_rows"))
        return self._by_layer(sums / rows)

    @cached_property
    def _simultaneous(self) -> tuple[Tensor, Tensor]:
        means = [self._by_text(name) for name in STATISTICS]
        above, below = (torch.stack([getattr(one, name) for one in means]) for name in ("above", "below"))
        return TextMeans(above, below).simultaneous()


def _compared(statistic: str, values: Tensor) -> Tensor:
    return values.log() if statistic == "magnitude" else values


def _counted(count: int, name: str) -> str:
    one, several = {
        "dead": ("is dead", "are dead"), "sink": ("is a sink", "are sinks"),
        "low entropy": ("has low entropy", "have low entropy"),
    }[name]  # fmt: skip
    return f"{count} {one if count == 1 else several}"


_COLUMNS: Final = ["layer", "head", "reason", "statistic", "value", "low", "high", "peers", "score", "steady"]
