"""How far does a token's stream move from its own embedding, layer by layer (formulas §4)?

After "More Attention to Attention" (the attention-encodings demo).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...basics.arguments import flag, option, optional_flag, shown, whole_number
from ...basics.fields import check_entries, check_rows
from ...draw.lines import lines_by_layer
from ...draw.section import Section
from ...draw.text import quoted, shorten, visible_token
from ...errors import InputError, MissingPointError, index_of
from ...maths.intervals import LEAST_TEXTS, LEVEL, TextMeans, checked_level
from ...maths.statistic import WithStatistics
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results import by_layer
from ...runs.claims import interval_note, no_interval
from ...runs.stream import Reducer, Source, State, stream
from ...runs.summed import Summed
from .formulas import METRICS, churn
from .section import NAMED, DriftNumbers, drift_section, nearest_chart
from .sums import OWN_LIST, PLACES, STATISTICS, DriftSums, Reference, stream_points
from .verdicts import MOVEMENTS, DriftVerdicts, Movement
from .word_types import ORDINARY, WORD_TYPES, checked_words

FIGURES: Final = ("cosine", "rank", "churn")

NEAREST: Final = "nearest"
"""A figure of one token: the table of its nearest rows."""

_NAMED: Final = 10
"""How many of the nearest rows are named."""

_PLACE_WORDS: Final = {"resid_mid": "attention + residual", "resid_post": "the stream as it leaves each block"}


def residual_drift(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    at: str = "resid_mid",
    metric: str = "cosine",
    k: int = 100,
    position: bool = False,
    embed_norm: bool | None = None,
    function_words: Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    bos: bool | None = None,
    **corpus: Any,
) -> "ResidualDrift":
    """How far each token's stream is from its own row of the vocabulary, and which rows are nearest, layer by layer.

    With y the stream of token t and e_v the rows of the token embedding: the cosine of y and e_t; the rank
    #{v: s(y, e_v) > s(y, e_t)}; and the churn 1 − |K_(l−1) ∩ K_l| / k of the k rows nearest to y from one layer to the
    next, under the similarity s.

    >>> import attnmech as am
    >>> drift = am.residual_drift(am.load(), "Anna gave an old anchor to Tom.")
    >>> drift.cosine.shape, drift.by_token("rank").shape                   # [layer], [layer batch position]
    (torch.Size([4]), torch.Size([4, 1, 9]))

    A cosine is to be read against two others: the mean cosine of y to all rows (`vocabulary_cosine`), and that of
    pairs of tokens of the same layer (`anisotropy`), since streams all point in much the same direction. The centred
    cosine takes off the mean of the text's ordinary tokens from y and that of the rows from e_t.

    Args:
        model: the model.
        inputs: texts, or an iterator of texts (a corpus), of which only sums are kept.
        at: "resid_mid", attention + residual, before the norm that follows in a post-norm model (BERT); or
            "resid_post", the stream as it leaves the block.
        metric: s: "cosine", "centred cosine" or "dot" (the logit lens where embeddings are tied, without its norm).
        k: how many nearest rows are compared between layers.
        position: whether rows have what else is embedded at the token's place, its position and token type, added.
            Then the token's own row is what enters layer 0.
        embed_norm: whether rows go through the norm of the embedding (BERT, BLOOM); None where the model has one.
        function_words: those that count as function words, instead of a closed list of English ones.
        layers: by default all. Steps and churn are those between layers that follow each other.
        stack: "encoder" or "decoder" in a model with both.
        bos: whether each text begins with the tokenizer's first token.
        corpus: `truncate`, `shard`, `journal` and `progress`, as in `am.stream`.

    Returns:
        Means by layer and type of token with intervals over texts and, for texts that run together, every token.

    Raises:
        InputError: for a model without an embedding of tokens (images), whose embedding is made otherwise than by
            factor, projection, positions and norm, or without what `position` or `embed_norm` ask for; for `k` above
            the size of the vocabulary; for cross-attention, which has no stream of its own.

    Source: "More Attention to Attention" (attention-encodings); anisotropy: Ethayarajh 2019, arXiv 1909.00512.

    """
    require_model(model)
    reducer = ResidualDrift.reducer(
        model, at=at, metric=metric, k=k, position=position, embed_norm=embed_norm, function_words=function_words,
        stack=stack,
    )  # fmt: skip
    result: ResidualDrift
    (result,) = stream(model, inputs, [reducer], layers=layers, stack=stack, bos=bos, **corpus)
    return result


@dataclass(frozen=True, eq=False)
class DriftReducer(DriftSums):
    """Sums drift over a pass, and makes the result."""

    def finish(self, state: State, source: Source) -> "ResidualDrift":
        """The result."""
        names: dict[int, str] = {}
        tokens: tuple[tuple[str, ...], ...] = ()
        if source.batch is not None:
            batch = source.batch.queries(source.stack.label)
            tokens = batch.tokens
            ids = torch.unique(state["nearest"][..., :_NAMED]).tolist()
            label = source.stack.label
            names = {each: source.model.position_texts([each], label)[0] for each in ids if each >= 0}
        found = self.reference
        return ResidualDrift.of(
            state, source, at=self.at, metric=found.metric, k=found.k, position=found.positioned,
            embed_norm=found.normed, vocabulary=len(found.vocabulary),
            vocabulary_anisotropy=self.vocabulary_pair_cosine(), tokens=tokens, names=names,
            attention_layers=source.stack.layers,
        )  # fmt: skip


@dataclass(frozen=True, repr=False)
class ResidualDrift(WithStatistics, Summed):
    """How far tokens are from their own embeddings, layer by layer.

    Each of `STATISTICS` is a property `[layer]`: its mean over ordinary tokens, all but the first of a text and special
    tokens.
    """

    SUBTRACT = "subtract what you compare: one.cosine - other.cosine"

    STATISTICS = STATISTICS

    STATE: ClassVar[Mapping[str, Any]] = {
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
    """The types of the entries of `state`."""

    BY_TOKEN: ClassVar[Mapping[str, Any]] = {
        "values": Float[Tensor, "statistic layer batch row"],
        "valid": Bool[Tensor, "statistic layer batch row"],
        "types": Int[Tensor, "batch row"],
        "nearest": Int[Tensor, "layer batch row k"],
        "products": Float[Tensor, "layer batch row row"],
    }
    """Further entries, for texts that were run together."""

    at: str
    """Where the stream was measured: resid_mid or resid_post."""
    metric: str
    """The similarity by which rows are ranked."""
    k: int
    position: bool
    """Whether rows have the embedding of the token's position added."""
    embed_norm: bool
    """Whether rows went through the norm of the embedding."""
    vocabulary: int
    """The number of rows."""
    vocabulary_anisotropy: float
    """The mean cosine of two different rows."""
    tokens: tuple[tuple[str, ...], ...]
    """The tokens, for texts that were run together."""
    names: Mapping[int, str]
    """The texts of the nearest tokens, by id."""
    attention_layers: tuple[int, ...]
    """All layers of the model's stack that have attention."""

    @classmethod
    def reducer(
        cls,
        model: HookedModel,
        *,
        at: str = "resid_mid",
        metric: str = "cosine",
        k: int = 100,
        position: bool = False,
        embed_norm: bool | None = None,
        function_words: Iterable[str] | None = None,
        stack: str | None = None,
    ) -> DriftReducer:
        """The reducer that computes a `ResidualDrift` in `am.stream`; arguments are those of `am.residual_drift`."""
        require_model(model)
        option("at", at, PLACES)
        option("metric", metric, METRICS)
        k = whole_number("k", k, least=1)
        chosen = model.stack(stack)
        points = stream_points(model, chosen, at)
        reference = Reference.of(
            model, chosen, metric, k, flag("position", position), optional_flag("embed_norm", embed_norm)
        )
        return DriftReducer(reference, at, points, checked_words(function_words))

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the axes of `state` that are known from elsewhere."""
        rows = {"batch": len(self.tokens), "row": len(self.tokens[0])} if self.tokens else {}
        return {
            "statistic": len(STATISTICS), "type": len(WORD_TYPES), "layer": len(self.layers), "k": self.k, **rows
        }  # fmt: skip

    def _check(self) -> None:
        super()._check()
        check_entries("state", self.state, self.BY_TOKEN, self.axis_lengths)
        check_rows("tokens", self.tokens, len(self.tokens), self.axis_lengths.get("row"))

    @property
    def _reducer(self) -> Reducer:
        return _Merging()

    def merged(self, *others: "ResidualDrift") -> "ResidualDrift":
        """The result over several shards of a corpus, as if they had been one run.

        Raises `InputError` for results on texts that were run together, and otherwise as other results do.
        """
        if any(isinstance(each, ResidualDrift) and each.tokens for each in (self, *others)):
            raise InputError("results on texts that were run together cannot be merged; merge those of a corpus.")
        return super().merged(*others)

    # -- means by layer ---------------------------------------------------------------------------------------

    @property
    def anisotropy(self) -> Float[Tensor, " layer"]:
        """Mean cosine of two ordinary tokens of the same text and layer: (‖Σ ŷ‖² − n) / (n (n − 1)), over all pairs.

        Source: Ethayarajh 2019, with all pairs instead of random ones.
        """
        return self._by_layer(self._pairs.mean)

    @property
    def anisotropy_across(self) -> Float[Tensor, " layer"]:
        """Mean cosine of two ordinary tokens of different texts; NaN for one text."""
        within = self.state["pairs"].sum(dim=-1) + self.state["unit_counts"].sum(dim=-1)
        count = self.state["unit_counts"].sum(dim=-1) ** 2 - self.state["squares"].sum(dim=-1)
        across = (self.state["units"].square().sum(dim=-1) - within) / count
        return self._by_layer(across.masked_fill(count <= 0, torch.nan))

    def mean(self, statistic: str, types: str | Iterable[str] | None = None) -> Float[Tensor, " layer"]:
        """The mean of a statistic over tokens, by default ordinary ones, or over those of some types (`by_type`)."""
        return self._by_layer(self._means(statistic, types).mean)

    def _value_of(self, statistic: str) -> Float[Tensor, " layer"]:
        return self.mean(statistic)

    def interval(
        self, statistic: str, types: str | Iterable[str] | None = None, level: float = LEVEL
    ) -> tuple[Float[Tensor, " layer"], Float[Tensor, " layer"]]:
        """Low and high end of the pointwise t interval of `mean` over texts; NaN for fewer than five texts."""
        low, high = self._bounded(statistic, self._means(statistic, types).interval(checked_level(level)))
        return self._by_layer(low), self._by_layer(high)

    def _bounded(self, statistic: str, ends: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """An interval within what a statistic can be."""
        lowest, highest = STATISTICS[statistic].bounds
        return ends[0].clamp(lowest, highest), ends[1].clamp(lowest, highest)

    def by_type(self, statistic: str) -> pd.DataFrame:
        """One row per layer and type of token that occurs: the mean, its interval, and the number of tokens."""
        rows = []
        for name in WORD_TYPES:
            means = self._means(statistic, name)
            low, high = self._bounded(statistic, means.interval())
            for place, layer in enumerate(self.layers):
                count = int(means.below[place].sum())
                if count:
                    ends = {f"{statistic}_low": float(low[place]), f"{statistic}_high": float(high[place])}
                    value = {statistic: float(means.mean[place])}
                    rows.append({"layer": layer, "type": name, **value, **ends, "tokens": count})
        return pd.DataFrame(rows)

    def to_frame(self) -> pd.DataFrame:
        """One row per layer: every statistic of ordinary tokens with its interval, and the cosines of pairs."""
        columns: dict[str, Tensor] = {}
        for name in STATISTICS:
            columns |= {name: self.mean(name)} | self._ends(name, self.interval(name))
        ends = [self._by_layer(end) for end in self._pairs.interval()]
        columns |= {"anisotropy": self.anisotropy} | self._ends("anisotropy", ends)
        columns["anisotropy_across"] = self.anisotropy_across
        chosen = list(self.layers)
        frame = pd.DataFrame({"layer": chosen, **{name: each[chosen].tolist() for name, each in columns.items()}})
        frame.attrs["intervals"] = interval_note(len(self.state["groups"]))
        return frame

    def _ends(self, name: str, ends: Sequence[Tensor]) -> dict[str, Tensor]:
        """The columns of an interval; none for fewer than five texts."""
        return dict(zip((f"{name}_low", f"{name}_high"), ends, strict=True)) if self._has_intervals else {}

    @property
    def _has_intervals(self) -> bool:
        return self._texts_counted >= LEAST_TEXTS

    # -- token by token ---------------------------------------------------------------------------------------

    def by_token(self, statistic: str) -> Float[Tensor, "layer batch position"]:
        """A statistic of every token in the layers measured; NaN where it is not defined, and at padding."""
        place = STATISTICS.place(option("statistic", statistic, STATISTICS))
        found: Tensor = self._kept("values")[place].masked_fill(~self._kept("valid")[place], torch.nan)
        return found

    def tokens_frame(self) -> pd.DataFrame:
        """One row per text, token and layer: its type, and every statistic."""
        types = self._kept("types")
        values = [self.by_token(name) for name in STATISTICS]
        rows = []
        for text, position in (types >= 0).nonzero().tolist():
            for place, layer in enumerate(self.layers):
                about = {"text": text, "position": position, "token": self.tokens[text][position]}
                about |= {"type": WORD_TYPES[int(types[text, position])], "layer": layer}
                numbers = {
                    name: float(each[place, text, position]) for name, each in zip(STATISTICS, values, strict=True)
                }
                rows.append(about | numbers)
        return pd.DataFrame(rows)

    def nearest(self, text: int = 0, position: int = 0, count: int = _NAMED) -> pd.DataFrame:
        """The rows of the vocabulary nearest to a token, nearest first: one row per layer, with the own row's rank."""
        text, position = self._place(text, position)
        most = min(_NAMED, self.k)
        count = min(whole_number("count", count, least=1, most=_NAMED), most)
        ids = self._kept("nearest")[:, text, position, :count].tolist()
        rank = self.by_token("rank")[:, text, position].tolist()
        named = [[self.names[token] for token in row] for row in ids]
        rows = [
            {"layer": layer, "rank": own, **{str(place + 1): name for place, name in enumerate(names)}}
            for layer, own, names in zip(self.layers, rank, named, strict=True)
        ]
        return pd.DataFrame(rows)

    def pair(self, one: int, other: int, text: int = 0) -> pd.DataFrame:
        """Two tokens of a text against each other, such as two occurrences of one word: one row per layer.

        Their cosine, the same after the mean of the text's ordinary tokens is taken off, the mean cosine of pairs in
        this layer (`anisotropy`), the share of their k nearest rows that they have in common, and cosine and rank of
        each with its own row.
        """
        text, one = self._place(text, one)
        _, other = self._place(text, other)
        products = self._kept("products")[:, text]
        members = torch.isin(self._kept("types")[text], torch.tensor([WORD_TYPES.index(name) for name in ORDINARY]))
        nearest = self._kept("nearest")[:, text]
        columns: dict[str, Tensor] = {
            "cosine": _cosine(products, one, other),
            "centred_cosine": _cosine(_centred(products, members), one, other),
            "anisotropy": self.anisotropy[list(self.layers)],
            "shared": 1 - churn(nearest[:, one], nearest[:, other]),
        }
        for name, place in (("one", one), ("other", other)):
            for statistic in ("cosine", "rank"):
                columns[f"{statistic}_{name}"] = self.by_token(statistic)[:, text, place]
        return pd.DataFrame({"layer": self.layers, **{name: each.tolist() for name, each in columns.items()}})

    def _place(self, text: Any, position: Any) -> tuple[int, int]:
        types = self._kept("types")
        text = index_of("text", text, len(types), f"{len(types)} texts were run")
        length = len(self.tokens[text])
        position = index_of("position", position, length, f"the text has {length} tokens")
        if types[text, position] < 0:
            raise InputError(f"position {position} of text {text} is padding; give the position of a token.")
        return text, position

    # -- which story is true ----------------------------------------------------------------------------------

    def verdicts(self, untrained: "ResidualDrift | None" = None) -> DriftVerdicts:
        """Where tokens move by cosine, by rank and by churn, and whether the three agree over layers.

        >>> import attnmech as am
        >>> model, text = am.load(), "Anna gave an old anchor to Tom."
        >>> drift = am.residual_drift(model, text)
        >>> random = am.residual_drift(am.untrained(model), text)
        >>> drift.verdicts(random).agreement.columns.tolist()
        ['of', 'one', 'other', 'rho', 'p_shuffled', 'rho_untrained']

        The movement m_l of a layer is the mean of |Δ cosine|, |Δ log10(1 + rank)| or churn since the layer below; its
        depth Σ w_l m_l / Σ m_l is 0 if all of it is the first step and 1 if all is the last. A story is "early" or
        "late" where the depth's interval over texts, for all three metrics at once, lies below or above ½; "in the
        middle" or "at both ends" where that of Σ |2w − 1| m / Σ m excludes its value for even steps; else "undecided".

        Args:
            untrained: the same measured on a model of the same config with random weights, `am.untrained(model)`.

        """
        if untrained is not None and not isinstance(untrained, ResidualDrift):
            raise InputError(
                f"`untrained` must be what am.residual_drift measured on am.untrained(model); got {shown(untrained)}."
            )
        if untrained is not None and (untrained.layers, untrained.metric, untrained.at) != (
            self.layers, self.metric, self.at,
        ):  # fmt: skip
            raise InputError("`untrained` must have the same layers, `metric` and `at`; measure both in the same way.")
        return DriftVerdicts.of(self._movement, None if untrained is None else untrained._movement, self._texts_counted)

    @property
    def _movement(self) -> Movement:
        means = {name: self._means(statistic, None) for name, statistic in MOVEMENTS.items()}
        order = sorted(range(len(self.layers)), key=lambda place: self.layers[place])
        steps = [place for place in order if float(means["churn"].below[place].sum()) > 0]
        levels = {name: self._means(statistic, None).mean[order].numpy() for name, statistic in _LEVELS.items()}
        return Movement(
            tuple(self.layers[place] for place in steps),
            {name: each.above[steps] for name, each in means.items()},
            {name: each.below[steps] for name, each in means.items()},
            levels,
        )

    # -- figures ----------------------------------------------------------------------------------------------

    def plot(self, figure: str = "cosine", *, token: int | None = None, text: int = 0) -> "go.Figure":
        """Cosine, rank or churn over the layers, for one token of a text or for all; returned, not shown.

        "nearest" is the table of the rows nearest to one token, by default the first ordinary one, layer by layer.
        `token` is a position in the text. For a corpus, and for several texts unless a `text` is chosen by its token,
        the lines are types of token, with intervals over texts.
        """
        if option("figure", figure, (*FIGURES, NEAREST)) == NEAREST:
            place = self._place(text, self._first(text) if token is None else token)[1]
            return nearest_chart(self.token_numbers(text)).figure(query=self._real(text).index(place))
        label, log = self._label(figure), figure == "rank"
        order = sorted(range(len(self.layers)), key=lambda place: self.layers[place])
        layers = [self.layers[place] for place in order]
        baselines = self._baselines(order) if figure == "cosine" else {}
        if token is None and (not self.tokens or len(self.tokens) > 1):
            names, values, low, high = self._lines_of_types(figure, order)
            return lines_by_layer(
                values, layers, names, label=label, low=low, high=high, baselines=baselines, logarithmic=log
            )
        text, _ = self._place(text, token if token is not None else self._real(text)[0])
        places = self._real(text) if token is None else [self._place(text, token)[1]]
        rows = self.by_token(figure)[order][:, text][:, places].T.numpy()
        names = [f"{place} {shorten(visible_token(self.tokens[text][place]))}" for place in places]
        return lines_by_layer(rows, layers, names, label=label, baselines=baselines, logarithmic=log)

    def _real(self, text: int) -> list[int]:
        found: list[int] = (self._kept("types")[text] >= 0).nonzero()[:, 0].tolist()
        return found

    def _first(self, text: int) -> int:
        """The first ordinary token of a text; the first of all if there is none."""
        types = self._kept("types")[index_of("text", text, len(self.tokens), f"{len(self.tokens)} texts were run")]
        named = (place for place, kind in enumerate(types.tolist()) if kind >= 0 and WORD_TYPES[kind] in ORDINARY)
        return next(named, self._real(text)[0])

    def _lines_of_types(self, figure: str, order: list[int]) -> tuple[list[str], Any, Any, Any]:
        statistic = "log_rank" if figure == "rank" else figure
        names: list[str] = []
        values: list[Any] = []
        lows: list[Any] = []
        highs: list[Any] = []
        for name in WORD_TYPES:
            means = self._means(statistic, name)
            if float(means.below.sum()) > 0:
                ends = [means.mean, *self._bounded(statistic, means.interval())]
                # The mean of log10(1 + rank) is shown as the rank that has it.
                mean, low, high = (10**each - 1 if figure == "rank" else each for each in ends)
                names.append(name)
                for made, each in zip((values, lows, highs), (mean, low, high), strict=True):
                    made.append(each[order].numpy())
        return names, np.stack(values), np.stack(lows), np.stack(highs)

    def _baselines(self, order: list[int]) -> dict[str, Any]:
        return {
            "two tokens of a text": self._pairs.mean[order].numpy(),
            "any row of the vocabulary": self._means("vocabulary_cosine", None).mean[order].numpy(),
        }

    def _label(self, figure: str) -> str:
        if figure == "cosine":
            return STATISTICS["cosine"].axis
        if figure == "rank":
            return f"1 + rows more similar than the own (of {self.vocabulary:,})"
        return f"share of the {self.k} nearest rows that are new"

    @property
    def section(self) -> Section:
        """The three figures with what they say, for a page."""
        return Section(
            "How far tokens move from their embeddings",
            " ".join(self._reading(name) for name in FIGURES),
            {f"drift-{name}": self.plot(name) for name in FIGURES},
            'drift.plot("cosine")',
            name="drift",
            contents="Drift",
            finding=self.verdicts().lead,
            caveat=self._caveat,
        )

    def token_section(self, call: str, layers: Sequence[int]) -> Section:
        """The drift of a chosen token, for a page on which `layers` can be chosen; `call` gives this result."""
        return drift_section(self.token_numbers(), call, layers)

    def token_numbers(self, text: int = 0) -> DriftNumbers:
        """What a page shows of each token of a text."""
        order, real = sorted(range(len(self.layers)), key=lambda place: self.layers[place]), self._real(text)
        cosine, rank, churned = (
            self.by_token(name)[order][:, text][:, real].T.numpy() for name in ("cosine", "rank", "churn")
        )
        means = {name: self._means(name, None).mean[order].numpy() for name in ("cosine", "log_rank", "churn")}
        ids = self._kept("nearest")[order][:, text][:, real][..., :NAMED].transpose(0, 1)
        known = {token: place for place, token in enumerate(self.names)}
        baselines = self._baselines(order)
        return DriftNumbers(
            layers=tuple(self.layers[place] for place in order),
            tokens=tuple(self.tokens[text][place] for place in real),
            vocabulary=self.vocabulary,
            k=self.k,
            cosine=cosine,
            rank=rank,
            churn=churned,
            means={"cosine": means["cosine"], "rank": 10 ** means["log_rank"] - 1, "churn": means["churn"]},
            between_tokens=baselines["two tokens of a text"],
            to_any_row=baselines["any row of the vocabulary"],
            nearest=np.vectorize(known.__getitem__, otypes=[np.int64])(ids.numpy()),
            names=tuple(self.names.values()),
        )

    def _sections(self) -> Sequence[Section]:
        made = [
            Section(heading, self._reading(name), {f"drift-{name}": self.plot(name)}, f'drift.plot("{name}")')
            for name, heading in _HEADINGS.items()
        ]
        if self.tokens:
            first = self._first(0)
            made.append(
                Section(
                    f"The rows nearest to token {first}",
                    f"For token {first}, {quoted(self.tokens[0][first])}, layer by layer: how many rows are more "
                    "similar to its stream than its own, and the nearest rows, nearest first, with its own in bold.",
                    {"drift-nearest": self.plot(NEAREST, token=first)},
                    f'drift.plot("{NEAREST}", token={first})',
                )
            )
        return [replace(made[0], finding=self.verdicts().lead, caveat=self._caveat), *made[1:]]

    def _reading(self, figure: str) -> str:
        """How to read one of the figures."""
        of = "token" if len(self.tokens) == 1 else "type of token, with 95 % intervals over texts"
        if figure == "cosine":
            return (
                f"One line for each {of}: the cosine of the stream ({_PLACE_WORDS[self.at]}) and the token's own row "
                "of the embedding. In grey, the mean cosine of two tokens of a text, and of a token and any row."
            )
        if figure == "rank":
            mean = "" if len(self.tokens) == 1 else " Geometric means of 1 + rank."
            return f"1 + the number of rows more similar to the stream than the token's own, on a log axis.{mean}"
        return f"Of the {self.k} rows nearest to the stream, the share that was not among those of the layer below."

    @property
    def _caveat(self) -> str:
        listed = self.provenance.options.get("reducers", [])
        own = any(each[1].get("function_words", OWN_LIST) != OWN_LIST for each in listed)
        whose = "in your list" if own else "in a closed list of English ones"
        words = "" if len(self.tokens) == 1 else f" Function words are those {whose}."
        return (
            "Streams of one layer point in much the same direction, so a cosine says little by itself: compare it with "
            f"the grey lines.{words}"
        )

    @property
    def _title(self) -> str:
        return f"Drift from the embedding in {self.provenance.model}"

    @property
    def lead(self) -> str:
        layers = [layer for layer in self.layers if bool(torch.isfinite(self.cosine[layer]))]
        texts = "1 text" if self.documents == 1 else f"{self.documents} texts"
        if not layers:
            return f"On {texts} there is no ordinary token, so nothing is said by layer."
        first, last = min(layers), max(layers)
        rank = [10 ** float(self.mean("log_rank")[layer]) - 1 for layer in (first, last)]
        return (
            f"On {texts}, measured at {_PLACE_WORDS[self.at]}: the cosine to the own embedding goes from "
            f"{float(self.cosine[first]):.2f} in layer {first} to {float(self.cosine[last]):.2f} in layer {last} (two "
            f"tokens of a text: {float(self.anisotropy[first]):.2f} and {float(self.anisotropy[last]):.2f}); of "
            f"{self.vocabulary:,} rows, {rank[0]:,.0f} and {rank[1]:,.0f} are more similar than the own one (geometric "
            f"mean){no_interval(self._texts_counted)}."
        )

    # -- the numbers behind it --------------------------------------------------------------------------------

    @property
    def _texts_counted(self) -> int:
        return len(self.state["groups"])

    @cached_property
    def _pairs(self) -> TextMeans:
        return TextMeans.of_ratio(self.state["pairs"], self.state["pair_counts"])

    def _means(self, statistic: str, types: str | Iterable[str] | None) -> TextMeans:
        place = STATISTICS.place(option("statistic", statistic, STATISTICS))
        named = ORDINARY if types is None else (types,) if isinstance(types, str) else tuple(types)
        chosen = [WORD_TYPES.index(option("types", name, WORD_TYPES)) for name in named]
        sums, counts = (self.state[name][place][chosen].sum(dim=0) for name in ("sums", "counts"))
        return TextMeans.of_ratio(sums, counts)

    def _by_layer(self, measured: Tensor) -> Tensor:
        return by_layer(measured, self.layers, self.n_layers)

    def _kept(self, name: str) -> Tensor:
        if name in self.state:
            return self.state[name]
        if name == "products" and self.tokens:
            raise MissingPointError(
                "the text is too long for `pair`: the products of all pairs of its tokens were not kept. Give a "
                "shorter text or fewer `layers`."
            )
        raise MissingPointError(
            "single tokens are kept for texts that run together (a string or a list), not a corpus."
        )


_LEVELS: Final = {"cosine": "cosine", "rank": "log_rank"}

_HEADINGS: Final = {
    "cosine": "Cosine to the own embedding",
    "rank": "Rank of the own embedding",
    "churn": "Churn of the nearest rows",
}


class _Merging(DriftSums):
    """Joins the states of shards."""

    def __init__(self) -> None:
        """It needs no reference."""


def _centred(products: Float[Tensor, "layer row row"], members: Bool[Tensor, " row"]) -> Float[Tensor, "layer row row"]:
    """The products of streams minus the mean of some of them, from the products of the streams."""
    with_mean = products[:, :, members].mean(dim=-1)
    square = with_mean[:, members].mean(dim=-1)
    return products - with_mean[:, :, None] - with_mean[:, None, :] + square[:, None, None]


def _cosine(products: Float[Tensor, "layer row row"], one: int, other: int) -> Float[Tensor, " layer"]:
    norms = (products[:, one, one] * products[:, other, other]).clamp_min(0).sqrt()
    return torch.where(norms > 0, products[:, one, other] / norms, torch.nan).clamp(-1, 1)
