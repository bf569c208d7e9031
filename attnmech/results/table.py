"""Results whose numbers are means over texts at heads or other places: tables, intervals, figures and differences."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..basics.arguments import index_of, member, option, shown, whole_number
from ..basics.nouns import counted
from ..draw.chart import at_head, heads_of_map
from ..draw.head_maps import effect_map
from ..errors import InputError
from ..maths.intervals import LEVEL, TextMeans
from ..maths.statistic import UNBOUNDED, Statistic
from .by_layer import OfLayers
from .quantity import Places, Quantity
from .result import PagedResult
from .sentences import about_largest, for_map, interval_note


def framed(figure: "go.Figure", layers: tuple[int, ...], layer: int | None, head: int | None) -> "go.Figure":
    """A map of layers × heads with a frame around one head, if `layer` and `head` name it."""
    if layer is None or head is None:
        return figure
    place = layers.index(member("layer", layer, layers, "the layers measured"))
    head = index_of("head", head, heads_of_map(figure))
    return at_head(figure, layers, layers).figure(layer=place, head=head)


def require_no_head(layer: int | None, head: int | None) -> None:
    """Raises `InputError` if a head is named for a figure that has no cell for it."""
    if layer is not None or head is not None:
        raise InputError("this figure is not a map of heads; leave out `layer` and `head`.")


def require_one_figure(figure: object) -> None:
    """Raises `InputError` if a figure is named where there is only one."""
    if figure is not None:
        raise InputError(f"this result has one figure; leave out `figure`, got {shown(figure)}.")


class WithQuantities(PagedResult):
    """A result whose statistics are means over texts: `result["NAME"]` is one of them, as a `Quantity`."""

    _SAMPLE: ClassVar[str] = "text"  # what the means are taken over: "text", "pair", "answer"

    def __getitem__(self, name: str) -> Quantity:
        """A statistic with its intervals and tests."""
        return self._quantity(option("statistic", name, dict.fromkeys(self.quantities)))

    __iter__ = None  # otherwise Python would iterate over result[0], result[1], ...

    @property
    def quantities(self) -> tuple[str, ...]:
        """The names of the statistics."""
        return tuple(self.STATISTICS)

    def _ipython_key_completions_(self) -> Sequence[str]:
        return self.quantities

    @cached_property
    def _known(self) -> dict[str, Quantity]:
        return {}

    def _quantity(self, name: str) -> Quantity:
        if name not in self._known:
            self._known[name] = self._measured_quantity(name)
        return self._known[name]

    @abstractmethod
    def _measured_quantity(self, name: str) -> Quantity:
        """A statistic, computed."""

    def _value_of(self, statistic: str) -> Tensor:
        return self._quantity(statistic).mean

    @property
    @abstractmethod
    def _n_texts(self) -> int:
        """The number of texts on which the result was measured."""

    @property
    def _n_distinct(self) -> int:
        """The number of texts if copies count once."""
        return self.provenance.distinct(self._n_texts)

    @property
    def _texts(self) -> str:
        return counted(self._n_texts, self._n_distinct, self._SAMPLE)

    @property
    def note(self) -> str:
        """A note on the intervals, or on why there are none."""
        distinct = self._n_distinct
        return interval_note(distinct, self._n_texts - distinct, self._SAMPLE)


class AgainstBaseline(WithQuantities, OfLayers):
    """A result that compares each head with a baseline, in one statistic for each of several things, such as relations.

    Intervals and tests of a statistic hold for all heads and all statistics together.
    """

    _MEASURE: ClassVar[str]  # what is compared with the baseline

    @property
    @abstractmethod
    def _excess(self) -> TextMeans:
        """Measure − baseline, `[statistic layer head text]`."""

    def _baseline_in_words(self, name: str) -> str:
        return "baseline"

    def _measured_quantity(self, name: str) -> Quantity:
        part, means = self.quantities.index(name), self._excess
        every = TextMeans(means.above[part], means.below[part])
        label = f"{self._MEASURE} − {self._baseline_in_words(name)}"
        statistic = Statistic(name=name, meaning=f"{self._MEASURE} − baseline.", label=label, tested=True)
        places = Places.of_heads(self.layers, means.above.shape[2], self.n_layers)
        return Quantity(statistic, every, means, places, (-1.0, 1.0), part)

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws layers × heads: measure − baseline in one of `quantities`, such as a relation or "women → work", by
        default the first; returned, not shown.
        """
        quantity = self[self.quantities[0] if figure is None else figure]
        shown = for_map(quantity.own, range(len(self.layers)))
        return framed(effect_map(**shown, layers=self.layers, label=quantity.statistic.axis), self.layers, layer, head)


class Table(WithQuantities):
    """A result whose statistics are means over texts at each of its places, such as heads.

    `result.NAME` is the mean of a statistic, a tensor; `result["NAME"]` is the statistic as a `Quantity`, with its
    intervals and tests. `interval`, `simultaneous`, `clear` and their like, without a name, are those of the main
    statistic.
    """

    _MAIN: ClassVar[str]  # the main statistic

    def _measured_quantity(self, name: str) -> Quantity:
        every = self._by_text(name)
        means = self._distinct_means(name, every)
        return Quantity(self._statistic(name), every, means, self._places_of(name), self._bounds_of(name))

    def _statistic(self, name: str) -> Statistic:
        """The declaration of a statistic, with this result's unit."""
        return self.STATISTICS[name]

    @abstractmethod
    def _by_text(self, name: str) -> TextMeans:
        """The means of a statistic at the places measured, copies of texts included."""

    def _distinct_means(self, name: str, every: TextMeans) -> TextMeans:
        """The same means over distinct texts."""
        return every.merged(self.provenance.copies)

    @property
    @abstractmethod
    def _places(self) -> Places:
        """Where the means stand."""

    def _places_of(self, name: str) -> Places:
        return self._places

    def _bounds_of(self, name: str) -> tuple[float, float]:
        return self.STATISTICS[name].bounds

    @property
    def _main(self) -> Quantity:
        return self._quantity(self._MAIN)

    def interval(self, level: float = LEVEL) -> tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]:
        """Low and high end of the pointwise t interval of the main statistic; NaN for fewer than five texts."""
        return self._main.interval(self._level(level))

    def simultaneous(self, level: float = LEVEL) -> tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]:
        """Simultaneous intervals of the main statistic: they hold for all places together, and therefore also for the
        place with the largest value.
        """
        return self._main.simultaneous(self._level(level))

    def _level(self, level: Any) -> Any:
        if isinstance(level, str) and level in self.quantities:
            raise InputError(f'the verbs of a statistic are those of result["{level}"], such as .interval().')
        return level

    @property
    def clear(self) -> Bool[Tensor, "*place"]:
        """`Quantity.clear` of the main statistic: whether more texts than chance allows have the sign of the mean."""
        return self._main.clear

    @property
    def clear_size(self) -> Bool[Tensor, "*place"]:
        """`Quantity.clear_size` of the main statistic: whether its simultaneous 95 % interval excludes 0."""
        return self._main.clear_size

    @property
    def agreeing(self) -> Int[Tensor, "*place"]:
        """The number of texts on which the main statistic has the sign of its mean."""
        return self._main.agreeing

    @property
    def one_text(self) -> Bool[Tensor, "*place"]:
        """Whether one text carries more than half of Σ |value| of the main statistic."""
        return self._main.one_text

    def to_frame(self) -> pd.DataFrame:
        """One row per head, or other place: every statistic, and the ends `_low` and `_high` of its interval.

        For statistics that are compared with 0, and in a difference, also `agreeing`, `clear`, `clear_size` and
        `one_text` (see `Quantity`). `attrs["intervals"]` says what the columns mean, or why there are no intervals.
        """
        columns: dict[str, Tensor] = {}
        for name in self._columns_of:
            columns |= self._quantity(name).columns(self._clarity_prefix(name))
        columns |= self._further
        places = self._places
        frame = pd.DataFrame({**places.columns, **{name: places.in_rows(value) for name, value in columns.items()}})
        frame.attrs["intervals"] = self.note
        return frame

    @property
    def _columns_of(self) -> Sequence[str]:
        """The statistics that are columns of the table."""
        return self.quantities

    def _clarity_prefix(self, name: str) -> str | None:
        """The beginning of the names of the columns `clear` and the like; None for a statistic without them."""
        if not self.STATISTICS[name].tested:
            return None
        return "" if name == self._MAIN else f"{name}_"

    @property
    def _further(self) -> Mapping[str, Tensor]:
        """Further columns of the table, `[*place]`."""
        return {}

    def strongest(self, count: int = 10, by: str | None = None) -> pd.DataFrame:
        """The rows of `to_frame` with the largest values of the main statistic, or of `by`, clear ones first.

        A statistic that is compared with 0 counts by its size, of either sign; others by their value.
        """
        count = whole_number("count", count, least=1)
        frame = self.to_frame()
        if isinstance(by, str) and by in self.STATISTICS:
            self._quantity(by)  # where the call did not measure it, the error says how to
        name = self._MAIN if by is None else option("by", by, dict.fromkeys(self._columns_of))
        prefix = self._clarity_prefix(name)
        keys = frame[[name]].assign(unclear=False, size=-frame[name])
        if prefix is not None:
            keys = keys.assign(unclear=~frame[f"{prefix}clear"], size=-frame[name].abs())
        rows = frame.loc[keys.sort_values(["unclear", "size"]).index].head(count).reset_index(drop=True)
        rows.attrs = frame.attrs
        return rows

    def _label_of(self, name: str) -> str:
        """The label of a statistic's scale, with its unit."""
        return self._statistic(name).axis

    @property
    def _labels(self) -> Mapping[str, str]:
        return {name: self._label_of(name) for name in self.quantities}

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws a statistic, by default the main one, as a map of layers × heads; hovering shows intervals.

        Means that are not clear among all places are pale. `layer` and `head` name a head to frame. The figure is
        returned, not shown.
        """
        return self._map(self._MAIN if figure is None else option("figure", figure, self.quantities), layer, head)

    def _map(self, name: str, layer: int | None = None, head: int | None = None, **look: Any) -> "go.Figure":
        """A statistic as a map of layers × heads, with a frame around one head if `layer` and `head` name it."""
        quantity = self._quantity(name)
        if bool(quantity.means.mean.isnan().all()):
            raise InputError(f'"{name}" is not defined on any row of these texts.')
        layers, rows = self._rows_of_map
        shown = for_map(quantity.means, rows)
        if self._clarity_prefix(name) is None and quantity.bounds[0] >= 0:
            shown |= {"clear": None, "signed": False}  # all numbers are above 0, so whether they are clear says nothing
        return framed(effect_map(**shown, layers=layers, label=self._label_of(name), **look), layers, layer, head)

    @property
    def _rows_of_map(self) -> tuple[tuple[int, ...], Sequence[int]]:
        """The layers of a map, and their rows among the means."""
        layers = tuple(self._places.layers)
        return layers, range(len(layers))

    def _largest(self, name: str, **words: Any) -> str:
        places = self._places_of(name)
        words = {"things": places.things, "sample": self._SAMPLE} | words
        return about_largest(self._quantity(name).means, places.named, **words)


@dataclass(frozen=True, repr=False)
class TextResult(Table):
    """A result measured over texts; two of the same kind can be subtracted."""

    parts: "tuple[Self, Self] | None" = field(default=None, kw_only=True, metadata={"saved": False})
    """The two results of a difference `one - other`; None for a measured result."""

    def _measured(self) -> "Sequence[Self]":
        return (self,) if self.parts is None else self.parts

    def __sub__(self, other: Any) -> Self:
        """Subtracts another result of the same kind: for another model, checkpoint or text, or under hooks.

        >>> change = am.ablate_heads(tuned, texts) - am.ablate_heads(base, texts)       # doctest: +SKIP
        >>> change.effect, change.interval()                                            # doctest: +SKIP

        The difference is a result of the same kind: its numbers are those of the first minus those of the second, head
        by head, NaN where only one of them has a number. If both results are on the same texts (the same token ids, or
        the same shards of a corpus), texts are paired: differences are taken text by text, over the texts that both
        have, and intervals are those of the paired differences. On different texts, intervals are NaN. `parts` holds
        the two results.

        Raises `InputError` if the two results do not measure the same thing: if their kinds, metrics, methods or
        options differ, if their models have different numbers of layers or heads, or if one is a difference already.
        """
        kind = type(self).__name__
        if type(other) is not type(self):
            raise InputError(f"only another {kind} can be subtracted from a {kind}; got {type(other).__name__}.")
        if self.parts is not None or other.parts is not None:
            raise InputError("a difference cannot be subtracted again; subtract two measured results.")
        for name, mine in self._comparable().items():
            yours = other._comparable().get(name)
            if mine != yours:
                raise InputError(
                    f"to be subtracted, two results must have the same {name}; got {mine!r} and {yours!r}. Measure "
                    "both in the same way."
                )
        difference = self._minus(other, self.provenance.same_texts(other.provenance))
        origin: dict[str, Any] = {"provenance": self.provenance.minus(other.provenance)}
        return replace(difference, parts=(self, other), **origin)

    @property
    def _two(self) -> tuple[Self, Self]:
        assert self.parts is not None
        return self.parts

    @property
    def paired(self) -> bool:
        """Whether this is a text-by-text difference of two results on the same texts."""
        return self.parts is not None and self.parts[0].provenance.same_texts(self.parts[1].provenance)

    @abstractmethod
    def _comparable(self) -> dict[str, Any]:
        """The properties that another result must share with this one to be subtracted, by name."""

    @abstractmethod
    def _minus(self, other: Self, paired: bool) -> Self:
        """The numbers of the difference."""

    @property
    def _texts(self) -> str:
        measured = (self,) if self.parts is None or self.paired else self.parts
        return " against ".join(counted(part._n_texts, part._n_distinct, self._SAMPLE) for part in measured)

    def _bounds_of(self, name: str) -> tuple[float, float]:
        return super()._bounds_of(name) if self.parts is None else UNBOUNDED

    def _clarity_prefix(self, name: str) -> str | None:
        return (
            f"{name}_" if self.parts is not None and not self.STATISTICS[name].tested else super()._clarity_prefix(name)
        )

    def _label_of(self, name: str) -> str:
        label = super()._label_of(name)
        return label if self.parts is None else f"difference: {label}"

    @property
    def _unpaired(self) -> str:
        """Why a difference has no intervals; empty if it has."""
        unpaired = self.parts is not None and not self.paired
        return "the two are on different texts, so a difference has no interval" if unpaired else ""

    @property
    def note(self) -> str:
        return f"No intervals: {self._unpaired}." if self._unpaired else super().note

    def _largest(self, name: str, **words: Any) -> str:
        if why := self._unpaired:
            words["no_interval_as"] = f"; {why}"
        return super()._largest(name, **words)

    @property
    def _opening(self) -> str:
        """The beginning of a sentence about a difference; empty for a measured result."""
        if self.parts is None:
            return ""
        one, other = (part.provenance for part in self.parts)
        return f"Difference of two results ({one.versus(other)}): "

    @property
    def _heading(self) -> str:
        return self._title if self.parts is None else f"Difference: {self._title}"

    def _written(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self.parts is None:
            return super()._written()
        written = [part._written() for part in self.parts]
        tensors = {f"{place} {name}": x for place, (own, _) in enumerate(written) for name, x in own.items()}
        return tensors, {"difference": [facts for _, facts in written]}

    @classmethod
    def _read(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Self:
        if "difference" not in header:
            return super()._read(tensors, header)
        parts = []
        for place, own in enumerate(header["difference"]):
            beginning = f"{place} "
            named = {name.removeprefix(beginning): x for name, x in tensors.items() if name.startswith(beginning)}
            parts.append(cls._read(named, own))
        return parts[0] - parts[1]
