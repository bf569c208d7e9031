"""Compares two models, or two prompts, head by head: method(b) − method(a)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, get_args, get_type_hints

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]
from torch import Tensor

from ...basics.arguments import flag, option, shown
from ...basics.nouns import counted
from ...basics.public import Arguments, public
from ...batch import Batch
from ...draw.head_maps import effect_map
from ...draw.section import Section
from ...draw.text import short_name, with_minus_signs
from ...errors import InputError
from ...maths.divergence import between_heads
from ...maths.intervals import fewest_texts
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...model.stack.stack import Stack
from ...results.by_layer import table_of
from ...results.provenance import Provenance
from ...results.result import PagedResult
from ...results.sentences import no_interval
from ...results.table import TextResult, framed
from ...runs.ablations import reread
from ...runs.corpus import CorpusBatch, by_text
from ...runs.sweep import batches_of

MOVED: Final = 0.5
"""A head counts as moved only if its divergence from the head that matches it is below this share of its divergence
from the head with the same number.
"""

_BESIDE: Final = (("layer", ("head", "place")), ("of_layer", ("of_head",)))  # axes of layers, with the axis of heads


def pattern_divergence(
    one: HookedModel, first: Sequence[Batch], other: HookedModel, second: Sequence[Batch], stack: Stack
) -> tuple[Float[Tensor, "layer head other_head"], Float[Tensor, "layer head position"]]:
    """Measures the divergence between any two heads of a layer of a stack in two runs, and by position between heads
    with the same number.

    Both are Jensen-Shannon divergences in nats. The first is the mean over the rows that see two or more keys. The
    second is the mean over texts at each position; NaN at positions where no text has a row that counts.

    Raises `InputError` if no row of these texts counts.
    """
    layers, heads = stack.layers, stack.n_heads
    longest = max(batch.queries(stack.label).ids.shape[1] for batch in first)
    sums = torch.zeros(len(layers), heads, heads, dtype=torch.float64)
    by_row = torch.zeros(len(layers), heads, longest, dtype=torch.float64)
    counts = torch.zeros(longest, dtype=torch.float64)
    for left, right in zip(first, second, strict=True):
        mask = left.queries(stack.label).mask.cpu() & (left.keys(stack.label).lengths > 1).cpu()[:, None]
        if stack.architecture.causal:
            mask[torch.arange(len(mask)), mask.int().argmax(dim=1)] = False
        rows = mask.shape[1]
        counts[:rows] += mask.sum(dim=0)
        for place, layer in enumerate(layers):
            patterns = [
                model.run(batch, points=[stack.point("pattern")], layers=[layer])[stack.point("pattern"), layer].cpu()
                for model, batch in ((one, left), (other, right))
            ]
            divergence = between_heads(*(pattern.transpose(1, 2) for pattern in patterns)).double()
            divergence = divergence.masked_fill(~mask[..., None, None], 0.0)
            sums[place] += divergence.sum(dim=(0, 1))
            by_row[place, :, :rows] += divergence.diagonal(dim1=-2, dim2=-1).sum(dim=0).T
    if not bool(counts.any()):
        raise InputError(
            "heads are compared on rows that see at least two keys, and these texts have one token each; pass "
            "longer texts."
        )
    return sums / counts.sum(), by_row / counts


def matched(divergence: Float[Tensor, "layer head other_head"]) -> Int[Tensor, "layer head"]:
    """Assigns to each head of the first run a head of the second run in the same layer, with the least total
    divergence.

    A head keeps its number unless its match has less than half the divergence of the head with that number (`MOVED`),
    so that rounding does not exchange heads that attend alike.

    >>> matched(torch.tensor([[[0.4, 0.0], [0.0, 0.4]], [[0.1, 0.09], [0.2, 0.0]]]).double()).tolist()
    [[1, 0], [0, 1]]
    """
    cost = divergence.clone()
    cost.diagonal(dim1=-2, dim2=-1).mul_(MOVED)
    return torch.stack([torch.from_numpy(linear_sum_assignment(of_layer.numpy())[1]) for of_layer in cost])


def reordered(result: Any, order: Mapping[int, Sequence[int]]) -> Any:
    """Reorders the heads of each layer of a result: head h of the copy is head `order[layer][h]` of the argument.

    Every tensor with axes of layers and heads in its annotation is reordered, including the tensors of a state.
    """
    hints = get_type_hints(type(result))
    layers = getattr(result, "layers", None)
    changed: dict[str, Any] = {}
    for field in fields(result):
        value = getattr(result, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = _moved(value, hints[field.name], order, layers)
        elif field.name == "state":
            kinds = type(result)._STATE
            changed["state"] = {
                name: _moved(x, kinds[name], order, layers) if name in kinds else x for name, x in value.items()
            }
    return replace(result, **changed)


def _moved(value: Tensor, hint: Any, order: Mapping[int, Sequence[int]], layers: Sequence[int] | None) -> Tensor:
    axes = next((kind.dim_str for kind in (hint, *get_args(hint)) if hasattr(kind, "dim_str")), "")
    names = [name.removeprefix("#") for name in axes.split()]
    for layer_axis, head_axes in _BESIDE:
        head_axis = next((name for name in head_axes if name in names), None)
        if layer_axis not in names or head_axis is None:
            continue
        at, of = names.index(layer_axis), names.index(head_axis)
        if value.shape[of] == 1:
            continue
        # An axis as long as the model has a row for every layer; a shorter one has rows for the layers measured.
        every = value.shape[at] > max(order)
        numbers = range(value.shape[at]) if every or layers is None else layers
        parts = [
            part.index_select(of - (of > at), torch.tensor(order[number])) if number in order else part
            for number, part in zip(numbers, value.unbind(at), strict=True)
        ]
        value = torch.stack(parts, dim=at)
    return value


_PLACES = ("layer", "head", "texts", "before", "after")
_TOKENS = 512  # the approximate number of tokens in a batch


@public
def compare(
    a: HookedModel | Inputs,
    b: HookedModel | Inputs,
    inputs: Inputs | Iterable[Inputs] | None = None,
    method: Callable[..., Any] | None = None,
    *,
    model: HookedModel | None = None,
    statistic: str | None = None,
    match: bool = False,
    **options: Any,
) -> "Comparison":
    """Compares two models on the same texts, or one model on two aligned prompts: method(b) − method(a), by head.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> model = am.load()
    >>> found = am.compare(am.untrained(model), model, documents(6), am.attention_focus)
    >>> found.difference.shape == (len(found.statistics), model.n_layers, model.n_heads)
    True

    Two models with the same numbers of layers and heads, such as a model and its fine-tuned, quantised or earlier
    version, are compared on `inputs`. Two prompts, or two lists of prompts, are compared on `model`; the prompts of a
    pair must have the same number of tokens. Differences are paired text by text; with five texts or more they have t
    intervals.

    Heads of two models are matched within each layer by their patterns: the assignment has the least Jensen-Shannon
    divergence, and a head keeps its number unless its match has less than half the divergence of the head with that
    number. `matching` gives the head of b that matches each head of a; with `match=True`, differences are between
    matched heads.

    Args:
        a: a model, or prompts.
        b: another model, or other prompts.
        inputs: the texts, for two models.
        method: a method with results by head that can be subtracted, such as `am.attention_focus`,
            `am.residual_updates`, `am.ablate_heads`, `am.head_importance`.
        model: the model, for two prompts.
        statistic: the column of the method's table that the map shows; by default the first that differs.
        match: whether to undo a permutation of heads.
        options: options of the method. With `stack`, the heads of that stack are compared and matched.

    Returns:
        Differences b − a `[layer head]` of every column of the method's table, with intervals over texts, and the
        head of b that matches each head of a.

    Raises:
        InputError: for models of different shapes, texts or prompts of different lengths, texts of one token each,
            options that the method does not have, and methods whose results cannot be subtracted.

    """
    flag("match", match)
    if method is None or not callable(method):
        line = "am.compare(before, after, texts, am.attention_focus)"
        raise InputError(f"`method` must be a measurement such as am.attention_focus; got {shown(method)}. Try {line}.")
    of_models = isinstance(a, HookedModel)
    if of_models != isinstance(b, HookedModel):
        raise InputError("`a` and `b` must both be models, or both prompts.")
    if of_models:
        if inputs is None or model is not None:
            raise InputError("comparing two models needs `inputs` and no `model`.")
        texts = reread(inputs)
        runs = ((a, texts), (b, texts))
    else:
        require_model(model)
        if inputs is not None or match:
            raise InputError("comparing two prompts needs `model`, and neither `inputs` nor `match`.")
        runs = ((model, a), (model, b))  # type: ignore[assignment]
    Arguments.of(method).require(runs[0], options)
    label = options.get("stack")
    stack, theirs = (m.output_stack if label is None else m.stack(label) for m, _ in runs)  # type: ignore[union-attr]
    mine, yours = ((len(one.layers), one.n_heads) for one in (stack, theirs))
    if mine != yours:
        raise InputError(
            f"two models are compared head by head, so they must have the same shape; got {mine[0]} layers of "
            f"{mine[1]} heads and {yours[0]} layers of {yours[1]} heads."
        )
    first, second = (batches_of(m, texts, _TOKENS, options.get("bos")) for m, texts in runs)  # type: ignore[arg-type]
    _require_aligned(first, second, stack.label)
    one, other = (method(m, texts, **options) for m, texts in runs)
    if not isinstance(one, TextResult):
        raise InputError(
            "`method` must return a result per head that can be subtracted, as am.attention_focus does; got a "
            f"{type(one).__name__}."
        )
    of_first, of_second = ([part.batch for part in parts] for parts in (first, second))
    between, by_position = pattern_divergence(runs[0][0], of_first, runs[1][0], of_second, stack)  # type: ignore[arg-type]
    layers = stack.layers
    matching = matched(between) if of_models else torch.arange(between.shape[1]).expand(len(layers), -1).clone()
    if match:
        other = reordered(other, dict(zip(layers, matching.tolist(), strict=True)))
    origin = other.provenance
    # Aligned texts are pairs even if their tokens differ, between two prompts or between two models' tokenizers.
    other = replace(other, provenance=replace(origin, inputs=one.provenance.inputs))
    difference = other - one
    provenance = origin.minus(one.provenance)
    return _comparison(
        difference, one, other, statistic, layers=tuple(layers), matching=matching, divergence=between,
        by_position=by_position, undone=match, method=getattr(method, "__name__", "method"),
        **_names(a, b),
        texts=sum(len(part.documents) for part in first),
        provenance=replace(provenance, copies=difference.provenance.copies),
    )  # fmt: skip


def _comparison(difference: Any, one: Any, other: Any, statistic: str | None, **rest: Any) -> "Comparison":
    frames = [result.by_head() for result in (difference, one, other)]
    if not {"layer", "head"} <= {*frames[0].columns}:
        raise InputError(f"the results of {rest['method']} are not per head; subtract them with `-`.")
    columns = frames[0].select_dtypes("number").columns
    names = [name for name in columns if name not in _PLACES and not name.endswith(("_low", "_high", "agreeing"))]
    if not names:
        raise InputError(f"the results of {rest['method']} have no numbers per head to compare.")
    if statistic is not None:
        option("statistic", statistic, names)
    shape = rest["divergence"].shape[:2]

    def grid(frame: pd.DataFrame, suffix: str = "") -> Float[Tensor, "statistic layer head"]:
        values = torch.full((len(names), *shape), torch.nan, dtype=torch.float64)
        rows = torch.tensor([rest["layers"].index(layer) for layer in frame["layer"]])
        heads = torch.tensor(frame["head"].to_numpy())
        for number, name in enumerate(names):
            if f"{name}{suffix}" in frame:
                values[number, rows, heads] = torch.tensor(frame[f"{name}{suffix}"].to_numpy(dtype=float))
        return values

    difference = grid(frames[0])
    measured = [name for name, values in zip(names, difference, strict=True) if not bool(values.isnan().all())]
    changed = [name for name in measured if bool(difference[names.index(name)].nan_to_num().any())]
    with_interval = [name for name in names if f"{name}_low" in frames[0]]
    if len(with_interval) == 1:
        frames[0] = frames[0].rename(columns={"clear": f"{with_interval[0]}_clear"})
    return Comparison(
        statistics=tuple(names), shown=statistic or (changed or measured or names)[0], difference=difference,
        low=grid(frames[0], "_low"), high=grid(frames[0], "_high"),
        clear=grid(frames[0], "_clear").nan_to_num(0.0).bool(), of_a=grid(frames[1]), of_b=grid(frames[2]), **rest,
    )  # fmt: skip


@dataclass(frozen=True, repr=False)
class Comparison(PagedResult):
    """method(b) − method(a), head by head, with pointwise intervals of the paired differences and a test of whether
    they are clear.
    """

    _SUBTRACT = "compare the two results of interest"
    _AXES: ClassVar = {"layer": "layers", "statistic": "statistics"}

    method: str
    a: str
    b: str
    layers: tuple[int, ...]
    statistics: tuple[str, ...]
    """The columns of the method's table that were compared."""
    shown: str
    """The statistic that the map shows."""
    texts: int
    undone: bool
    """Whether the heads of b were reordered by `matching`."""
    difference: Float[Tensor, "statistic layer head"]
    low: Float[Tensor, "statistic layer head"]
    """The low end of the pointwise 95 % interval over texts; NaN for fewer than five texts."""
    high: Float[Tensor, "statistic layer head"]
    clear: Bool[Tensor, "statistic layer head"]
    """Whether more texts than chance allows change in the direction of the mean, corrected for all heads."""
    of_a: Float[Tensor, "statistic layer head"]
    of_b: Float[Tensor, "statistic layer head"]
    matching: Int[Tensor, "layer head"]
    """The head of b that matches each head of a."""
    divergence: Float[Tensor, "layer head other_head"]
    """The divergence between the patterns of heads of a and b, in nats, averaged over rows."""
    by_position: Float[Tensor, "layer head position"]
    """The divergence between heads with the same number in a and b, by position, averaged over texts; NaN at the first
    position.
    """
    provenance: Provenance

    @property
    def moved(self) -> tuple[tuple[int, int, int], ...]:
        """The heads of a that have another number in b: (layer, head in a, head in b)."""
        rows = enumerate(self.matching.tolist())
        return tuple(
            (self.layers[row], head, place) for row, order in rows for head, place in enumerate(order) if head != place
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per head: each statistic's difference, its interval and whether it is clear.

        The last columns are `matched_head` and `pattern_divergence`.
        """
        parts = {"": self.difference, "_low": self.low, "_high": self.high, "_clear": self.clear}
        columns = {
            f"{name}{suffix}": values[number]
            for number, name in enumerate(self.statistics)
            for suffix, values in parts.items()
        }
        columns |= {"matched_head": self.matching, "pattern_divergence": self._compared}
        return table_of({"layer": self.layers, "head": range(self.matching.shape[1])}, columns)

    @property
    def _compared(self) -> Float[Tensor, "layer head"]:
        if not self.undone:
            return self.divergence.diagonal(dim1=-2, dim2=-1)
        return self.divergence.gather(-1, self.matching[..., None])[..., 0]

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws layers × heads, coloured by the difference; pale where it is not clear.

        `figure` is the name of a statistic. Without it, and if that of the map was not measured, the colour is the
        divergence of patterns.
        """
        if figure is None and not self._is_measured:
            label = "divergence of patterns, nats"
            drawn = effect_map(self._compared, layers=self.layers, label=label, signed=False)
            return framed(drawn, self.layers, layer, head)
        name = self.shown if figure is None else option("figure", figure, self.statistics)
        number = self.statistics.index(name)
        value, low, high = (values[number].numpy() for values in (self.difference, self.low, self.high))
        known = bool(self.low[number].isfinite().any())
        drawn = effect_map(
            value, low, high, layers=self.layers, label=f"{name.replace('_', ' ')}: b − a",
            clear=self.clear[number].numpy() if known else None, signed=True,
        )  # fmt: skip
        return framed(drawn, self.layers, layer, head)

    @property
    def lead(self) -> str:
        number = self.statistics.index(self.shown)
        value, low, high = (values[number] for values in (self.difference, self.low, self.high))
        known, name = ~value.isnan(), self.shown.replace("_", " ")
        distinct = self.provenance.distinct(self.texts)
        opening = f"On {counted(self.texts, distinct)}, {self.b} against {self.a}"
        if not self._is_measured:
            row, head = divmod(int(self._compared.argmax()), value.shape[1])
            most = (
                f"patterns diverge most in L{self.layers[row]}H{head}, by {float(self._compared[row, head]):.3g} nats"
                if bool(self._compared.any())
                else "patterns are the same in every head"
            )
            return f"{opening}: {name} was not measured; {most}.{self._permuted}"
        if bool((value[known] == 0).all()):
            return f"{opening}: {name} is the same in every head.{self._permuted}"
        place = int(value.abs().nan_to_num(-1.0).argmax())
        row, head = divmod(place, value.shape[1])
        one, two, three = (float(values[row, head]) for values in (value, low, high))
        span = f" (95 % interval for this head alone: {two:+.3g} to {three:+.3g})" if two <= three else ""
        changed, heads = int(self.clear[number].sum()), int(known.sum())
        changing = f"{changed} of {counted(heads, noun='head')} change{'s' if changed == 1 else ''} clearly"
        some = f"; {changing}" if span else ""
        if span and distinct < (fewest := fewest_texts(heads)):
            some = f"; a clear change needs at least {fewest} texts"
        return with_minus_signs(
            f"{opening}: {name} changes most in L{self.layers[row]}H{head}, by {one:+.3g}{span}{some}"
            f"{no_interval(distinct)}.{self._permuted}"
        )

    @property
    def _is_measured(self) -> bool:
        """Whether the statistic of the map was measured; rows that it leaves out may be all that there are."""
        return not bool(self.difference[self.statistics.index(self.shown)].isnan().all())

    @property
    def _permuted(self) -> str:
        if not self.moved:
            return ""
        few = ", ".join(f"L{layer}H{head} is H{place}" for layer, head, place in self.moved[:4])
        more = f" and {len(self.moved) - 4} more" if len(self.moved) > 4 else ""
        done = "this comparison undoes the permutation" if self.undone else "match=True undoes it"
        return f" Judging by attention patterns, the heads of {self.b} are permuted ({few}{more}); {done}."

    @property
    def _title(self) -> str:
        return f"{self.method.replace('_', ' ').capitalize()}: {self.b} against {self.a}"

    def _sections(self) -> "Sequence[Section]":
        name = self.shown.replace("_", " ")
        reading = (
            f"Each cell is one head: {name} in {self.b} minus that in {self.a}, averaged over texts; pale where the "
            "change is not clear among all heads."
        )
        if not self._is_measured:
            reading = f"Each cell is one head: the divergence of its patterns, since {name} was not measured."
        caveat = (
            "A change is clear if more texts than expected by chance change in the direction of the mean (exact "
            "sign test at 5 %, corrected for all heads). Intervals are for each head alone."
        )
        return [Section("Differences", reading, {"differences": self.plot()}, "found.plot()", caveat=caveat)]


def _names(a: Any, b: Any) -> dict[str, str]:
    """The names of both sides in sentences: two models have theirs, unless these are the same."""
    if not isinstance(a, HookedModel):
        return {"a": "the first prompt", "b": "the second prompt"}
    one, other = map(short_name, (a.name, b.name))
    if one == other:
        return {"a": f"the first {one}", "b": f"the second {other}"}
    return {"a": one, "b": other}


def _require_aligned(first: Sequence[CorpusBatch], second: Sequence[CorpusBatch], stack: str) -> None:
    def lengths_of(parts: Sequence[CorpusBatch], side: Callable[[Batch, str], Batch]) -> list[int]:
        return by_text(parts, lambda part: side(part.batch, stack).lengths.tolist())

    for side in (Batch.keys, Batch.queries):
        lengths = [lengths_of(parts, side) for parts in (first, second)]
        if lengths[0] != lengths[1]:
            raise InputError(
                f"compared prompts must have the same number of tokens, text by text; got texts of {lengths[0]} and of "
                f"{lengths[1]} tokens. Use words with the same number of tokens, or token ids."
            )
    texts = [[part.documents.tolist() for part in parts] for parts in (first, second)]
    if texts[0] != texts[1]:
        raise InputError(
            "both sides of a comparison must have the same form, but only one of them is an indivisible batch. Pass "
            "two lists of texts, or two lists of token ids."
        )
