"""The drift of each token of a text, layer by layer, and the rows of the vocabulary nearest to it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...basics.arguments import index_of, option, whole_number
from ...basics.fields import check_entries, check_rows
from ...errors import MissingPointError
from ...maths.intervals import TextMeans
from ...maths.statistic import Statistic
from ...results.quantity import Places
from ...runs.summed import SummedTable
from .formulas import centred, churn, cosine_of
from .sums import STATISTICS, DriftStatistics
from .word_types import ORDINARY, WORD_TYPES

MOST_NAMED: Final = 10  # the largest number of nearest rows that are listed


@dataclass(frozen=True, repr=False)
class DriftByToken(DriftStatistics, SummedTable):
    """The means of drift, computed from sums over texts, and, for texts run together, the drift of every token."""

    _MAIN = "cosine"
    _AXES: ClassVar = {"statistic": STATISTICS, "type": WORD_TYPES, "layer": "layers"}
    anisotropy = Statistic(
        meaning="Mean cosine of two ordinary tokens of the same text and layer: (‖Σ ŷ‖² − n) / (n (n − 1)), over all "
        "pairs (Ethayarajh 2019, with all pairs instead of random ones).",
        unit="mean cosine",
        printed=True,
        bounds=(-1.0, 1.0),
    )

    _STATE: ClassVar[Mapping[str, Any]] = {
        "sums": Float[Tensor, "statistic type layer group"],
        "counts": Float[Tensor, "statistic type layer group"],
        "pairs": Float[Tensor, "layer group"],
        "pair_counts": Float[Tensor, "layer group"],
        "unit_counts": Float[Tensor, "layer group"],
        "squares": Float[Tensor, "layer group"],
        "units": Float[Tensor, "layer d_model"],
        "groups": Int[Tensor, " group"],
        "modulus": Int[Tensor, " 1"],
    }

    _BY_TOKEN: ClassVar[Mapping[str, Any]] = {
        "values": Float[Tensor, "statistic layer batch row"],
        "valid": Bool[Tensor, "statistic layer batch row"],
        "types": Int[Tensor, "batch row"],
        "nearest": Int[Tensor, "layer batch row k"],
        "products": Float[Tensor, "layer batch row row"],
    }
    """Further entries of `state`, for texts run together."""

    k: int
    """The number of nearest rows that churn compares."""
    tokens: tuple[tuple[str, ...], ...]
    """The tokens, for texts run together."""
    names: Mapping[int, str]
    """The strings of the nearest tokens, by id."""
    types: tuple[str, ...] = field(default=ORDINARY, kw_only=True)
    """The types of token over which means are taken; by default ordinary tokens, which are all but the first token of a
    text and special tokens."""

    @property
    def anisotropy_across(self) -> Float[Tensor, " layer"]:
        """Mean cosine of two ordinary tokens of different texts; NaN for one text."""
        within = self.state["pairs"].sum(dim=-1) + self.state["unit_counts"].sum(dim=-1)
        count = self.state["unit_counts"].sum(dim=-1) ** 2 - self.state["squares"].sum(dim=-1)
        across = (self.state["units"].square().sum(dim=-1) - within) / count
        return self._by_layer(across.masked_fill(count <= 0, torch.nan))

    def of_types(self, types: str | Iterable[str]) -> Self:
        """The same result over tokens of some types (see `by_type`).

        >>> drift.of_types("comma")["cosine"].interval()               # doctest: +SKIP
        """
        named = (types,) if isinstance(types, str) else tuple(types)
        return replace(self, types=tuple(option("types", name, WORD_TYPES) for name in named))

    def by_type(self, statistic: str) -> pd.DataFrame:
        """One row per layer and type of token that occurs: the mean, its interval, and the number of tokens."""
        rows = []
        for name in WORD_TYPES:
            quantity = self.of_types(name)[statistic]
            low, high = quantity.interval()
            for place, layer in enumerate(self.layers):
                count = int(quantity.means.below[place].sum())
                if count:
                    ends = {f"{statistic}_low": float(low[layer]), f"{statistic}_high": float(high[layer])}
                    value = {statistic: float(quantity.mean[layer])}
                    rows.append({"layer": layer, "type": name, **value, **ends, "tokens": count})
        return pd.DataFrame(rows)

    @property
    def _further(self) -> Mapping[str, Tensor]:
        return {"anisotropy_across": self.anisotropy_across}

    @property
    def _places(self) -> Places:
        return Places(
            {"layer": self.layers},
            (list(self.layers),),
            lambda place: f"layer {self.layers[place[0]]}",
            things="layers",
            layers=self.layers,
            spread=self._by_layer,
        )

    def _by_text(self, name: str) -> TextMeans:
        if name == "anisotropy":
            return TextMeans.of_ratio(self.state["pairs"], self.state["pair_counts"])
        place, chosen = STATISTICS.place(name), [WORD_TYPES.index(kind) for kind in self.types]
        sums, counts = (self.state[entry][place][chosen].sum(dim=0) for entry in ("sums", "counts"))
        return TextMeans.of_ratio(sums, counts)

    @property
    def _axis_lengths(self) -> Mapping[str, int]:
        rows = {"batch": len(self.tokens), "row": len(self.tokens[0])} if self.tokens else {}
        return {**super()._axis_lengths, "k": self.k, **rows}

    def _check(self) -> None:
        super()._check()
        check_entries("state", self.state, self._BY_TOKEN, self._axis_lengths)
        check_rows("tokens", self.tokens, len(self.tokens), self._axis_lengths.get("row"))

    def by_token(self, statistic: str) -> Float[Tensor, "layer batch position"]:
        """Returns a statistic of every token in the measured layers; NaN where undefined and at padding."""
        place = STATISTICS.place(option("statistic", statistic, STATISTICS))
        values: Tensor = self._kept("values")[place].masked_fill(~self._kept("valid")[place], torch.nan)
        return values

    def tokens_frame(self) -> pd.DataFrame:
        """One row per text, token and layer: the token's type and every statistic."""
        types = self._kept("types")
        values = [self.by_token(name) for name in STATISTICS]
        rows = []
        for text, position in (types >= 0).nonzero().tolist():
            own = self._real(text).index(position)
            for place, layer in enumerate(self.layers):
                description = {"text": text, "position": own, "token": self.tokens[text][position]}
                description |= {"type": WORD_TYPES[int(types[text, position])], "layer": layer}
                numbers = {
                    name: float(value[place, text, position]) for name, value in zip(STATISTICS, values, strict=True)
                }
                rows.append(description | numbers)
        return pd.DataFrame(rows)

    def nearest(self, text: int = 0, position: int = 0, count: int = MOST_NAMED) -> pd.DataFrame:
        """Lists the rows of the vocabulary nearest to a token, nearest first: one row per layer, with the own row's
        rank.
        """
        text, position = self._place(text, position)
        most = min(MOST_NAMED, self.k)
        count = min(whole_number("count", count, least=1, most=MOST_NAMED), most)
        ids = self._kept("nearest")[:, text, position, :count].tolist()
        rank = self.by_token("rank")[:, text, position].tolist()
        named = [[self.names[token] for token in row] for row in ids]
        rows = [
            {"layer": layer, "rank": own, **{str(place + 1): name for place, name in enumerate(names)}}
            for layer, own, names in zip(self.layers, rank, named, strict=True)
        ]
        return pd.DataFrame(rows)

    def pair(self, one: int, other: int, text: int = 0) -> pd.DataFrame:
        """Compares two tokens of a text, such as two occurrences of one word: one row per layer.

        The columns are the cosine of the two tokens; their cosine after the mean of the text's ordinary tokens is
        subtracted; the mean cosine of pairs in this layer (`anisotropy`); the share of their k nearest rows that they
        have in common (`shared`); and, for each token, the cosine and rank of its own row.
        """
        text, one = self._place(text, one)
        _, other = self._place(text, other)
        products = self._kept("products")[:, text]
        members = torch.isin(self._kept("types")[text], torch.tensor([WORD_TYPES.index(name) for name in ORDINARY]))
        nearest = self._kept("nearest")[:, text]
        columns: dict[str, Tensor] = {
            "cosine": cosine_of(products, one, other),
            "centred_cosine": cosine_of(centred(products, members), one, other),
            "anisotropy": self.anisotropy[list(self.layers)],
            "shared": 1 - churn(nearest[:, one], nearest[:, other]),
        }
        for name, place in (("one", one), ("other", other)):
            for statistic in ("cosine", "rank"):
                columns[f"{statistic}_{name}"] = self.by_token(statistic)[:, text, place]
        return pd.DataFrame({"layer": self.layers, **{name: column.tolist() for name, column in columns.items()}})

    def _place(self, text: Any, position: Any) -> tuple[int, int]:
        """A text, and the column of one of its tokens, which `position` counts without padding."""
        count = len(self._kept("types"))
        text = index_of("text", text, count, f"{count} texts were run")
        real = self._real(text)
        return text, real[index_of("position", position, len(real), f"the text has {len(real)} tokens")]

    def _real(self, text: int) -> list[int]:
        positions: list[int] = (self._kept("types")[text] >= 0).nonzero()[:, 0].tolist()
        return positions

    def _first(self, text: int) -> int:
        """The position of a text's first ordinary token; of its first token if none is ordinary."""
        types = self._kept("types")
        text = index_of("text", text, len(types), f"{len(types)} texts were run")
        kinds = types[text, self._real(text)].tolist()
        return next((place for place, kind in enumerate(kinds) if WORD_TYPES[kind] in ORDINARY), 0)

    def _kept(self, name: str) -> Tensor:
        if name in self.state:
            return self.state[name]
        if name == "products" and self.tokens:
            raise MissingPointError(
                "the text is too long for `pair`: the cosines of all pairs of its tokens were not stored. Pass a "
                "shorter text or fewer `layers`."
            )
        raise MissingPointError(
            "single tokens are stored only for a string or a list of texts, not for an iterator (a corpus)."
        )
