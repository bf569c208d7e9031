"""The attention on the targets of each type, compared with its baseline, and the types that are claimed.

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
from ...maths.intervals import TextMeans, difference
from ...results.by_layer import table_of
from ...results.table import AgainstBaseline
from ...runs.summed import OverGroups
from .formulas import ANSWERED, CONTENT, POSITIONAL, TYPES
from .sums import AROUND_KEY, AROUND_QUERY

TRIVIAL_MASS: Final = 0.3  # a claim needs at least this mean attention on the type's targets, or `TRIVIAL_TOP`
TRIVIAL_TOP: Final = 0.5  # or a target with the highest probability in at least this share of rows
SUFFICES: Final = 0.75  # the share of attention on targets that the position term alone must give to explain a type


class ByType(dict[str, Any]):
    """Numbers by type of head. An unknown name raises an error that lists the types."""

    def __missing__(self, name: str) -> Any:
        return option("type", name, tuple(self))


@dataclass(frozen=True, repr=False)
class TypeScores(AgainstBaseline, OverGroups):
    """The score of every type for each head, with its baseline, and the claims.

    Scores are shares from 0 to 1, by type and then `[layer head]`; NaN if no row has a target of that type.
    """

    _MEASURE = "score"
    _AXES: ClassVar = {
        "layer": "layers", "type": TYPES, "positional": POSITIONAL, "content": CONTENT,
        "place": (*AROUND_KEY, *AROUND_QUERY),
    }  # fmt: skip
    _STATE: ClassVar[Mapping[str, Any]] = {
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

    @cached_property
    def scores(self) -> ByType:
        """The mean attention on the targets of each type, over the rows with a target; `"broad"` is `breadth`."""
        return ByType({**self._by_type(self._sums["mass"] / self._rows), "broad": self.breadth})

    @cached_property
    def baselines(self) -> ByType:
        """The mean attention on targets under uniform attention (positional types) or mean attention by distance
        (others).
        """
        return self._by_type(self._sums["baseline"] / self._rows)

    @cached_property
    def tops(self) -> ByType:
        """Among the rows with a target, the share in which a target has the highest probability."""
        return self._by_type(self._sums["top"] / self._rows)

    @cached_property
    def position_alone(self) -> ByType:
        """The mean attention on targets if the score were the position term alone; NaN for types that need tokens."""
        return self._by_type(self._sums["alone"] / self._rows)

    @cached_property
    def excess(self) -> ByType:
        """score − baseline."""
        return self._by_type(self._excess.mean)

    @property
    def quantities(self) -> tuple[str, ...]:
        """The types: each has score − baseline, with intervals and tests for all heads and types together."""
        return TYPES

    @cached_property
    def writes(self) -> ByType:
        """How much a head adds to the answer's logit through its targets, for "duplicate" and "induction".

            Σ_j∈targets p_ij ⟨v_j W_O, u_a⟩, averaged over the rows with a target

        The answer a is the row's own token for a duplicate, and the token at the last target for induction. u_a reads
        how far the logit of a is above the mean over the vocabulary, through the final norm with its scale frozen
        (before a soft cap). NaN if logits are not one norm and one matrix applied to the final stream, or if the last
        layer was not measured.

        Source: LOCOS, arXiv 2607.01002.
        """
        return self._answered("written_there")

    @cached_property
    def writes_elsewhere(self) -> ByType:
        """The sum of `writes`, over the keys that are not targets."""
        return self._answered("written_elsewhere")

    @property
    def copying(self) -> Float[Tensor, "layer head"]:
        """How well OV copies: the share of the text's other tokens whose logits v_j W_O raises less than the logit of
        key j's own token. 1 if no other token is raised more, 0.5 by chance.
        """
        return self._mean_of("copying")

    @property
    def matching(self) -> Float[Tensor, "layer head"]:
        """How well QK matches prefixes: the share of other keys that score lower than the last induction target."""
        return self._mean_of("matching")

    @property
    def breadth(self) -> Float[Tensor, "layer head"]:
        """The mean of row entropy / entropy of uniform attention: 1 if a head attends equally to all keys."""
        return self._mean_of("breadth")

    @cached_property
    def claimed(self) -> Bool[Tensor, "type layer head"]:
        """Whether each type is claimed for each head of the measured layers."""
        low, _ = self._ends
        mass, top = (self._sums[name] / self._rows for name in ("mass", "top"))
        return (low > 0) & ((mass >= TRIVIAL_MASS) | (top >= TRIVIAL_TOP))

    def to_frame(self) -> pd.DataFrame:
        """One row per claimed type of a head, the highest score first.

        `score_low` and `score_high` are the baseline plus the interval of score − baseline, for all heads and types
        together, clipped to 0 and 1. `position_alone` is the score that the position term alone would give;
        `by_position_alone` is True if that is at least three quarters of the score, so that position suffices. `rows`
        is the number of rows with a target.
        """
        return self._claims.copy()

    @cached_property
    def _claims(self) -> pd.DataFrame:
        sums = {name: value / self._rows for name, value in self._sums.items()}
        low, high = ((sums["baseline"] + end).clamp(0, 1) for end in self._ends)
        columns = {
            "score": sums["mass"],
            "baseline": sums["baseline"],
            "score_low": low,
            "score_high": high,
            "top": sums["top"],
            "position_alone": sums["alone"],
            "by_position_alone": sums["alone"] >= SUFFICES * sums["mass"],
            "rows": self._rows.long(),
        }
        frame = table_of({"type": TYPES, "layer": self.layers, "head": range(self._heads)}, columns)
        claims = frame.loc[self.claimed.flatten().numpy(), _COLUMNS]
        return claims.sort_values("score", ascending=False, ignore_index=True)

    @cached_property
    def resting(self) -> pd.DataFrame:
        """Tests whether heads rest on the first token where their type has no target, for claimed types that depend on
        tokens.

        The columns are the mean attention to the first token in rows with and in rows without a target (among rows that
        see the first token), and the difference (without minus with), paired by text, with an interval that holds for
        all claims together; NaN if every row has a target.
        """
        here = self._claims[self._claims.type.isin(CONTENT)][["layer", "head", "type"]].reset_index(drop=True)
        places = [
            (CONTENT.index(kind), self.layers.index(layer), head)
            for kind, layer, head in zip(here.type, here.layer, here["head"], strict=True)
        ]
        if not places:
            return here.assign(with_target=[], without_target=[], difference=[], low=[], high=[])
        kinds, layers, heads = (list(indices) for indices in zip(*places, strict=True))
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
        """The claimed types of a head, the highest score first."""
        return self._by_head.get((layer, head), ())

    @cached_property
    def _by_head(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """The claimed types of each head with a claim."""
        types: dict[tuple[int, int], tuple[str, ...]] = {}
        for layer, head, kind in zip(self._claims.layer, self._claims["head"], self._claims.type, strict=True):
            types[int(layer), int(head)] = (*types.get((int(layer), int(head)), ()), kind)
        return types

    @property
    def main_types(self) -> dict[tuple[int, int], str]:
        """The claimed type with the highest score of each head with a claim, by (layer, head)."""
        return {place: kinds[0] for place, kinds in self._by_head.items()}

    def by_head(self) -> pd.DataFrame:
        """One row per head: its claimed types, all scores with baselines, what it writes, and whether it copies."""
        columns: dict[str, Any] = {}
        for name, score in self.scores.items():
            parts = {"": score}
            if name in TYPES:
                parts |= {"_baseline": self.baselines[name], "_top": self.tops[name]}
            if name in ANSWERED:
                parts |= {"_writes": self.writes[name], "_writes_elsewhere": self.writes_elsewhere[name]}
            columns |= {f"{name.replace(' ', '_')}{ending}": value for ending, value in parts.items()}
        columns |= {"copying": self.copying, "matching": self.matching}
        measured = {name: value[list(self.layers)] for name, value in columns.items()}
        known = {name: value for name, value in measured.items() if not bool(value.isnan().all())}
        frame = table_of({"layer": self.layers, "head": range(self._heads)}, known)
        places = zip(frame["layer"], frame["head"], strict=True)
        frame.insert(2, "types", [", ".join(self.types_of(*place)) for place in places])
        return frame

    @property
    def _heads(self) -> int:
        return int(self.state["mass"].shape[2])

    @cached_property
    def _sums(self) -> dict[str, Float[Tensor, "type layer head"]]:
        return {name: value.sum(dim=-1) for name, value in self._by_group.items()}

    @cached_property
    def _rows(self) -> Float[Tensor, "type layer 1"]:
        return self.state["count"].sum(dim=-1)[:, :, None]

    @cached_property
    def _by_group(self) -> dict[str, Float[Tensor, "type layer head group"]]:
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
        """The interval of the excess that decides claims."""
        return self._excess.simultaneous()

    def _answered(self, name: str) -> ByType:
        """A mean over the rows with a target, for the types with an answer."""
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
        return self._by_layer(values.expand(-1, self._heads))


_COLUMNS: Final = [
    "layer", "head", "type", "score", "baseline", "score_low", "score_high", "top", "position_alone",
    "by_position_alone", "rows",
]  # fmt: skip
