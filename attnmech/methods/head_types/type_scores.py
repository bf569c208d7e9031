"""Which types are claimed of which heads? The mass on the targets of each type against its baseline.

Formulas: docs/formulas.md#head-types.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...basics.arguments import option
from ...maths.intervals import LEVEL, TextMeans, checked_level, difference
from ...results.by_layer import by_layer
from ...runs.summed import Summed
from .formulas import ANSWERED, CONTENT, POSITIONAL, TYPES
from .sums import AROUND_KEY, AROUND_QUERY

TRIVIAL_MASS: Final = 0.3
"""A type is claimed only where the mean mass on its targets is at least this, …"""

TRIVIAL_TOP: Final = 0.5
"""… or where a target has the highest probability in at least this share of rows."""

SUFFICES: Final = 0.75
"""The position term alone explains a type where it would put at least this share of the mass there."""


class ByType(dict[str, Any]):
    """Numbers by type of head; for any other name, an error lists the types."""

    def __missing__(self, name: str) -> Any:
        return option("type", name, tuple(self))


@dataclass(frozen=True, repr=False)
class TypeScores(Summed):
    """The score of every type for each head, with its baseline, and what is claimed.

    Scores are masses from 0 to 1, by type and then `[layer head]`; NaN where no row has a target of that type.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "mass": Float[Tensor, "type layer head group"],
        "top": Float[Tensor, "type layer head group"],
        "alone": Float[Tensor, "positional layer head group"],
        "rest_with": Float[Tensor, "content layer head group"],
        "rest_without": Float[Tensor, "content layer head group"],
        "count": Float[Tensor, "type layer group"],
        "count_with": Float[Tensor, "content layer group"],
        "count_without": Float[Tensor, "content layer group"],
        "uniform": Float[Tensor, "positional layer group"],
        "at_distance": Float[Tensor, "content layer distance group"],
        "attended": Float[Tensor, "layer head distance"],
        "pairs": Float[Tensor, "layer distance"],
        "written_there": Float[Tensor, "answered layer head group"],
        "written_elsewhere": Float[Tensor, "answered layer head group"],
        "written_count": Float[Tensor, "answered layer group"],
        "copying": Float[Tensor, "layer head group"],
        "copying_count": Float[Tensor, "layer group"],
        "matching": Float[Tensor, "layer head group"],
        "matching_count": Float[Tensor, "layer group"],
        "breadth": Float[Tensor, "layer head group"],
        "breadth_count": Float[Tensor, "layer group"],
        "example": Float[Tensor, "type layer head"],
        "example_at": Int[Tensor, "type layer head 3"],
        "example_weight": Float[Tensor, "type layer head"],
        "example_ids": Int[Tensor, "type layer head place"],
        "groups": Int[Tensor, " group"],
        "modulus": Int[Tensor, " 1"],
    }
    """The types of the entries of `state`."""

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the axes of `state` that are known from elsewhere."""
        types = {"type": len(TYPES), "positional": len(POSITIONAL), "content": len(CONTENT)}
        return {**super().axis_lengths, **types, "place": len(AROUND_KEY) + len(AROUND_QUERY)}

    @cached_property
    def scores(self) -> ByType:
        """The mean mass on the targets of each type, over the rows that have one; `"broad"`: see `breadth`."""
        return ByType({**self._by_type(self._sums["mass"] / self._rows), "broad": self.breadth})

    @cached_property
    def baselines(self) -> ByType:
        """What uniform attention puts on targets given by position, and mean attention by distance on others."""
        return self._by_type(self._sums["baseline"] / self._rows)

    @cached_property
    def tops(self) -> ByType:
        """The share of rows with a target in which one has the highest probability."""
        return self._by_type(self._sums["top"] / self._rows)

    @cached_property
    def position_alone(self) -> ByType:
        """The mean mass that the position term alone would put on targets given by position; NaN for other types."""
        return self._by_type(self._sums["alone"] / self._rows)

    @cached_property
    def excess(self) -> ByType:
        """score − baseline."""
        return self._by_type(self._excess.mean)

    def simultaneous(self, level: float = LEVEL) -> ByType:
        """(low, high) of the excess by type, for all heads and types together; NaN under five texts."""
        level = checked_level(level)
        ends = self._ends if level == LEVEL else self._excess.simultaneous(level)
        low, high = (self._by_type(end) for end in ends)
        return ByType({name: (low[name], high[name]) for name in TYPES})

    @cached_property
    def writes(self) -> ByType:
        """What a head writes of its targets towards their answer, in logits, for "duplicate" and "induction".

            Σ_j∈targets p_ij ⟨v_j W_O, u_a⟩, averaged over the rows with a target

        The answer a is the row's own token for a duplicate, and the token at the last target for induction; u_a reads
        how far its logit is above the mean over the vocabulary, through the final norm with its scale frozen (before a
        soft cap). NaN where logits are not one norm and one matrix of the last stream, and without the last layer.

        Source: LOCOS, arXiv 2607.01002.
        """
        return self._answered("written_there")

    @cached_property
    def writes_elsewhere(self) -> ByType:
        """The same sum over the keys that are no targets."""
        return self._answered("written_elsewhere")

    @property
    def copying(self) -> Float[Tensor, "layer head"]:
        """Does OV copy? How the token at a key ranks among the text's others in what the head would write of that key.

        The share of the other tokens whose logit v_j W_O raises less: 1 if its own most, 0.5 by chance.
        """
        return self._mean_of("copying")

    @property
    def matching(self) -> Float[Tensor, "layer head"]:
        """Does QK match prefixes? The share of the other keys whose score is below the last induction target's."""
        return self._mean_of("matching")

    @property
    def breadth(self) -> Float[Tensor, "layer head"]:
        """Mean entropy of the rows over that of uniform attention: 1 where a head attends to all keys alike."""
        return self._mean_of("breadth")

    @cached_property
    def claimed(self) -> Bool[Tensor, "type layer head"]:
        """Which types are claimed of which of the measured layers' heads."""
        low, _ = self._ends
        mass, top = (self._sums[name] / self._rows for name in ("mass", "top"))
        return (low > 0) & ((mass >= TRIVIAL_MASS) | (top >= TRIVIAL_TOP))

    def to_frame(self) -> pd.DataFrame:
        """One row per claimed type of a head, the highest score first.

        `score_low` and `score_high` are the interval of score − baseline, for all heads and types together, on top of
        the baseline, cut to 0 and 1. `position_alone` is the score that the position term alone would give;
        `by_position_alone` says that it is at least three quarters, so that the head needs nothing else. `rows` is how
        many rows have a target.
        """
        return self._claims.copy()

    @cached_property
    def _claims(self) -> pd.DataFrame:
        low, high = self._ends
        rows = self._rows.expand_as(low)
        sums = {name: value / self._rows for name, value in self._sums.items()}
        found = [
            {
                "layer": self.layers[layer],
                "head": head,
                "type": TYPES[kind],
                "score": float(sums["mass"][place]),
                "baseline": float(sums["baseline"][place]),
                "score_low": float((sums["baseline"][place] + low[place]).clamp(0, 1)),
                "score_high": float((sums["baseline"][place] + high[place]).clamp(0, 1)),
                "top": float(sums["top"][place]),
                "position_alone": float(sums["alone"][place]),
                "by_position_alone": bool(sums["alone"][place] >= SUFFICES * sums["mass"][place]),
                "rows": int(rows[place]),
            }
            for place in map(tuple, self.claimed.nonzero().tolist())
            for kind, layer, head in [place]
        ]
        frame = pd.DataFrame(found, columns=_COLUMNS)
        return frame.sort_values("score", ascending=False, ignore_index=True)

    @cached_property
    def resting(self) -> pd.DataFrame:
        """For each claimed type that depends on tokens: does the head rest on the first token where it finds no target?

        Its mean mass on the first token on rows with and without a target, of those that see the first token, and the
        difference, without − with, paired by text, with an interval that holds for all claims together; NaN where every
        row has one.
        """
        here = self._claims[self._claims.type.isin(CONTENT)][["layer", "head", "type"]].reset_index(drop=True)
        places = [
            (CONTENT.index(kind), self.layers.index(layer), head)
            for kind, layer, head in zip(here.type, here.layer, here["head"], strict=True)
        ]
        if not places:
            return here.assign(with_target=[], without_target=[], difference=[], low=[], high=[])
        kinds, layers, heads = (list(each) for each in zip(*places, strict=True))
        by_text = {
            name: TextMeans.of_ratio(
                self.state[f"rest_{name}"][kinds, layers, heads], self.state[f"count_{name}"][kinds, layers]
            )
            for name in ("with", "without")
        }
        change = difference(by_text["without"], by_text["with"])
        low, high = change.simultaneous()
        return here.assign(
            with_target=by_text["with"].mean.tolist(),
            without_target=by_text["without"].mean.tolist(),
            difference=change.mean.tolist(),
            low=low.tolist(),
            high=high.tolist(),
        )

    def types_of(self, layer: int, head: int) -> tuple[str, ...]:
        """The types claimed of a head, the highest score first."""
        return self._by_head.get((layer, head), ())

    @cached_property
    def _by_head(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """The claimed types of each head that has one."""
        found: dict[tuple[int, int], tuple[str, ...]] = {}
        for layer, head, kind in zip(self._claims.layer, self._claims["head"], self._claims.type, strict=True):
            found[int(layer), int(head)] = (*found.get((int(layer), int(head)), ()), kind)
        return found

    @property
    def strongest(self) -> dict[tuple[int, int], str]:
        """The claimed type with the highest score, by (layer, head), of heads that have one."""
        first = self._claims.drop_duplicates(["layer", "head"])
        places = zip(first.layer, first["head"], strict=True)
        return {(int(layer), int(head)): kind for (layer, head), kind in zip(places, first.type, strict=True)}

    def by_head(self) -> pd.DataFrame:
        """One row per head: the types claimed, every score with its baseline, what it writes, whether it copies."""
        columns: dict[str, Any] = {}
        for name, score in self.scores.items():
            parts = {"": score}
            if name in TYPES:
                parts |= {"_baseline": self.baselines[name], "_top": self.tops[name]}
            if name in ANSWERED:
                parts |= {"_writes": self.writes[name], "_writes_elsewhere": self.writes_elsewhere[name]}
            columns |= {f"{name.replace(' ', '_')}{ending}": value for ending, value in parts.items()}
        columns |= {"copying": self.copying, "matching": self.matching}
        there = {name: value[list(self.layers)].flatten() for name, value in columns.items()}
        told = {name: value.tolist() for name, value in there.items() if not bool(value.isnan().all())}
        places = [(layer, head) for layer in self.layers for head in range(self._heads)]
        of_head = {"layer": [layer for layer, _ in places], "head": [head for _, head in places]}
        return pd.DataFrame(of_head | {"types": [", ".join(self.types_of(*place)) for place in places]} | told)

    @property
    def _heads(self) -> int:
        return int(self.state["mass"].shape[2])

    @cached_property
    def _intervals(self) -> ByType:
        """`simultaneous` at the level of claims."""
        return self.simultaneous()

    @cached_property
    def _sums(self) -> dict[str, Float[Tensor, "type layer head"]]:
        """Each measure summed over texts."""
        return {name: value.sum(dim=-1) for name, value in self._by_group.items()}

    @cached_property
    def _rows(self) -> Float[Tensor, "type layer 1"]:
        return self.state["count"].sum(dim=-1)[:, :, None]

    @cached_property
    def _by_group(self) -> dict[str, Float[Tensor, "type layer head group"]]:
        """Sums over the rows of each group of texts."""
        state = self.state
        by_distance = state["attended"] / state["pairs"][:, None].clamp_min(1)
        content = einsum(
            by_distance,
            state["at_distance"],
            "layer head distance, content layer distance group -> content layer head group",
        )
        positional = state["uniform"][:, :, None].expand(-1, -1, content.shape[2], -1)
        no_content = torch.full_like(content, torch.nan)
        return {
            "mass": state["mass"],
            "top": state["top"],
            "baseline": torch.cat((positional, content)),
            "alone": torch.cat((state["alone"], no_content)),
        }

    @cached_property
    def _excess(self) -> TextMeans:
        """score − baseline of all types and heads, over texts."""
        above = self._by_group["mass"] - self._by_group["baseline"]
        return TextMeans.of_ratio(above, self.state["count"][:, :, None])

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """The interval of the excess by which types are claimed."""
        return self._excess.simultaneous()

    def _answered(self, name: str) -> ByType:
        """A sum over rows with a target by what they are, of the types with an answer."""
        if not len(self.state[name]):
            nothing = torch.full((self.n_layers, self._heads), torch.nan)
            return ByType(dict.fromkeys(ANSWERED, nothing))
        means = self.state[name].sum(dim=-1) / self.state["written_count"].sum(dim=-1)[..., None]
        return ByType({kind: self._of_all(means[place]) for place, kind in enumerate(ANSWERED)})

    def _mean_of(self, name: str) -> Float[Tensor, "layer head"]:
        return self._of_all(self.state[name].sum(dim=-1) / self.state[f"{name}_count"].sum(dim=-1)[:, None])

    def _by_type(self, values: Float[Tensor, "type layer #head"]) -> ByType:
        return ByType({kind: self._of_all(values[place]) for place, kind in enumerate(TYPES)})

    def _of_all(self, values: Float[Tensor, " measured #head"]) -> Float[Tensor, "layer head"]:
        return by_layer(values.expand(-1, self._heads), self.layers, self.n_layers)


_COLUMNS: Final = [
    "layer", "head", "type", "score", "baseline", "score_low", "score_high", "top", "position_alone",
    "by_position_alone", "rows",
]  # fmt: skip
