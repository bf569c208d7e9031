"""Residual drift: how far a token's stream moves from its own embedding, layer by layer.

Formulas: docs/formulas.md#residual-drift.

After "More Attention to Attention" (the attention-encodings demo).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Unpack

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch

from ...basics.arguments import flag, option, optional_flag, shown, whole_number
from ...basics.public import public
from ...draw.lines import lines_by_layer
from ...draw.section import Section
from ...draw.text import quoted, shorten, visible_token, with_minus_signs
from ...errors import InputError
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.sentences import no_interval
from ...results.table import require_no_head
from ...runs.options import StreamOptions
from ...runs.reducer import Source, State
from ...runs.stream import stream
from ...runs.words import texts_by_id
from .by_token import MOST_NAMED, DriftByToken
from .formulas import SIMILARITIES
from .section import NAMED, PLACE_WORDS, DriftNumbers, labels_of, nearest_chart, reading_of
from .sums import OWN_LIST, PLACES, ComparedRows, DriftSums, merged_sums, stream_points
from .verdicts import MOVEMENTS, DriftVerdicts, Movement
from .word_types import WORD_TYPES, checked_words

NEAREST: Final = "nearest"  # the figure of one token: the table of its nearest rows


@public
def residual_drift(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    at: str = "resid_mid",
    similarity: str = "cosine",
    k: int = 100,
    position: bool = False,
    embed_norm: bool | None = None,
    function_words: Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    **options: Unpack[StreamOptions],
) -> "ResidualDrift":
    """Measures how far each token's stream is from its own row of the vocabulary, and which rows are nearest.

    For the stream y of token t and the rows e_v of the token embedding, it measures in every layer the cosine of y and
    e_t; the rank #{v: s(y, e_v) > s(y, e_t)}; and the churn 1 − |K_(l−1) ∩ K_l| / k, where K_l are the k rows nearest
    to y in layer l. Rank and churn use the similarity s.

    >>> import attnmech as am
    >>> drift = am.residual_drift(am.load(), "Anna gave an old anchor to Tom.")
    >>> drift.cosine.shape, drift.by_token("rank").shape                   # [layer], [layer batch position]
    (torch.Size([4]), torch.Size([4, 1, 9]))

    Streams of a layer point in similar directions, so compare a cosine with two baselines: the mean cosine of y to all
    rows (`vocabulary_cosine`), and the mean cosine of pairs of tokens in the same layer (`anisotropy`). The centred
    cosine subtracts the mean of the text's ordinary tokens from y and the mean of the rows from e_t.

    Args:
        model: the model.
        inputs: texts, or an iterator of texts (a corpus); only sums of a corpus are stored.
        at: "resid_mid", attention + residual, before the norm that follows in a post-norm model (BERT); or
            "resid_post", the stream as it leaves the block.
        similarity: s: "cosine", "centred cosine" or "dot" (the logit lens without its norm, if embeddings are tied).
        k: the number of nearest rows compared between layers.
        position: whether to add to the rows the other embeddings at the token's place, those of its position and token
            type. The token's own row is then the input of layer 0.
        embed_norm: whether rows pass through the norm after the embedding (BERT, BLOOM); None applies the norm if the
            model has one.
        function_words: the words that count as function words; by default a closed list of English words.
        layers: all by default. Steps and churn compare consecutive layers only.
        stack: "encoder" or "decoder" in a model with both.
        options: `bos`, `keep_rows`, `truncate`, `shard`, `journal`, `engine` and `progress`, as in `am.stream`.

    Returns:
        Means by layer and type of token with intervals over texts and, for texts run together, values of every token.

    Raises:
        InputError: for a model without a token embedding (images); for an embedding with parts other than factor,
            projection, positions and norm; if the model lacks what `position` or `embed_norm` requires; for `k` above
            the size of the vocabulary; and for cross-attention, which has no separate stream.

    Source: "More Attention to Attention" (attention-encodings); anisotropy: Ethayarajh 2019, arXiv 1909.00512.

    """
    require_model(model)
    reducer = ResidualDrift.reducer(
        model, at=at, similarity=similarity, k=k, position=position, embed_norm=embed_norm,
        function_words=function_words, stack=stack,
    )  # fmt: skip
    result: ResidualDrift
    (result,) = stream(model, inputs, [reducer], layers=layers, stack=stack, **options)
    return result


@dataclass(frozen=True, eq=False)
class DriftReducer(DriftSums):
    """Sums drift over a pass and builds the result."""

    def finish(self, state: State, source: Source) -> "ResidualDrift":
        names: dict[int, str] = {}
        tokens: tuple[tuple[str, ...], ...] = ()
        if source.batch is not None:
            batch = source.batch.queries(source.stack.label)
            tokens = batch.tokens
            names = texts_by_id(source.model, state["nearest"][..., :MOST_NAMED], source.stack.label)
        reference = self.reference
        return ResidualDrift.of(
            state, source, at=self.at, similarity=reference.similarity, k=reference.k, position=reference.positioned,
            embed_norm=reference.normed, vocabulary=len(reference.vocabulary),
            vocabulary_anisotropy=reference.moments(None).pair_cosine, tokens=tokens, names=names,
            attention_layers=source.stack.layers,
        )  # fmt: skip


@dataclass(frozen=True, repr=False)
class ResidualDrift(DriftByToken):
    """How far tokens are from their own embeddings, layer by layer.

    Every statistic in `STATISTICS` is a property `[layer]`: its mean over ordinary tokens, which are all tokens except
    the first of a text and special tokens.
    """

    _TITLE = "Drift from the embedding in {model}"
    _SUBTRACT = "subtract what you compare: one.cosine - other.cosine"
    FIGURES = ("cosine", "rank", "churn", NEAREST)

    at: str
    """The point at which the stream was measured: resid_mid or resid_post."""
    similarity: str
    """The similarity by which rows are ranked."""
    position: bool
    """Whether the other embeddings at the token's place were added to the rows."""
    embed_norm: bool
    """Whether rows passed through the norm after the embedding."""
    vocabulary: int
    """The number of rows."""
    vocabulary_anisotropy: float
    """The mean cosine of two different rows."""
    attention_layers: tuple[int, ...]
    """All layers of the model's stack that have attention."""

    @classmethod
    def reducer(
        cls,
        model: HookedModel,
        *,
        at: str = "resid_mid",
        similarity: str = "cosine",
        k: int = 100,
        position: bool = False,
        embed_norm: bool | None = None,
        function_words: Iterable[str] | None = None,
        stack: str | None = None,
    ) -> DriftReducer:
        """The reducer that computes a `ResidualDrift` in `am.stream`; arguments are those of `am.residual_drift`."""
        require_model(model)
        option("at", at, PLACES)
        option("similarity", similarity, SIMILARITIES)
        k = whole_number("k", k, least=1)
        chosen = model.stack(stack)
        points = stream_points(model, chosen, at)
        reference = ComparedRows.of(
            model, chosen, similarity, k, flag("position", position), optional_flag("embed_norm", embed_norm)
        )
        return DriftReducer(reference, at, points, checked_words(function_words))

    def _merge(self, one: State, other: State) -> State:
        return merged_sums(one, other)

    def verdicts(self, untrained: "ResidualDrift | None" = None) -> DriftVerdicts:
        """Says in which layers tokens move by cosine, by rank and by churn, and whether the three metrics agree over
        layers.

        >>> import attnmech as am
        >>> model, text = am.load(), "Anna gave an old anchor to Tom."
        >>> drift = am.residual_drift(model, text)
        >>> random = am.residual_drift(am.untrained(model), text)
        >>> drift.verdicts(random).agreement.columns.tolist()
        ['of', 'one', 'other', 'rho', 'p_shuffled', 'rho_untrained']

        The movement m_l of a layer is the mean of |Δ cosine|, |Δ log10(1 + rank)| or churn since the layer below. The
        depth of a metric's movement is Σ w_l m_l / Σ m_l, with w_l from 0 at the first step to 1 at the last. Its story
        is "early" or "late" if the interval of the depth over texts, for all three metrics together, lies below or
        above ½. Otherwise the story is "in the middle" or "at both ends" if the interval of Σ |2w − 1| m / Σ m lies
        below or above its value for equal steps, and "undecided" if neither holds.

        Args:
            untrained: the same measurement on a model of the same config with random weights, `am.untrained(model)`.

        """
        if untrained is not None and not isinstance(untrained, ResidualDrift):
            raise InputError(
                f"`untrained` must be the result of am.residual_drift on am.untrained(model); got {shown(untrained)}."
            )
        if untrained is not None and (untrained.layers, untrained.similarity, untrained.at) != (
            self.layers, self.similarity, self.at,
        ):  # fmt: skip
            raise InputError("`untrained` must have the same layers, `similarity` and `at` as this result.")
        return DriftVerdicts.of(
            self._movement, None if untrained is None else untrained._movement, len(self.state["groups"])
        )

    @property
    def _order(self) -> list[int]:
        return sorted(range(len(self.layers)), key=lambda place: self.layers[place])

    @property
    def _movement(self) -> Movement:
        means = {name: self[statistic].means for name, statistic in MOVEMENTS.items()}
        order = self._order
        steps = [place for place in order if float(means["churn"].below[place].sum()) > 0]
        levels = {"cosine": self["cosine"], "rank": self["log_rank"]}
        return Movement(
            tuple(self.layers[place] for place in steps),
            {name: mean.above[steps] for name, mean in means.items()},
            {name: mean.below[steps] for name, mean in means.items()},
            {name: level.means.mean[order].numpy() for name, level in levels.items()},
        )

    def plot(
        self,
        figure: str | None = None,
        *,
        layer: int | None = None,
        head: int | None = None,
        query: int | None = None,
        key: int | None = None,
        text: int = 0,
    ) -> "go.Figure":
        """Draws cosine, rank or churn over the layers, for one token of a text or for all tokens; returned, not shown.

        "nearest" draws the table of the rows nearest to one token (by default the first ordinary token), layer by
        layer. `query` is the token's position in the text. For a corpus, and for several texts if no token is chosen,
        the lines are types of token, with intervals over texts.
        """
        require_no_head(layer, head)
        if key is not None:
            raise InputError("a token's drift has no key; leave out `key`.")
        figure = "cosine" if figure is None else option("figure", figure, self.FIGURES)
        if figure == NEAREST:
            place = self._place(text, self._first(text) if query is None else query)[1]
            return nearest_chart(drift_numbers(self, text)).figure(query=self._real(text).index(place))
        label, log = labels_of(self.vocabulary, self.k)[figure], figure == "rank"
        order, layers = self._order, sorted(self.layers)
        baselines = self._baselines(order) if figure == "cosine" else {}
        if query is None and (not self.tokens or len(self.tokens) > 1):
            of_types = {name: self.of_types(name)["log_rank" if log else figure] for name in WORD_TYPES}
            there = {name: means for name, means in of_types.items() if float(means.means.below.sum()) > 0}
            lines = torch.stack([torch.stack((means.mean, *means.interval())) for means in there.values()], dim=1)
            # The mean of log10(1 + rank) is shown as a rank.
            values, low, high = (10**lines - 1 if log else lines)[:, :, layers].numpy()
            names = list(there)
            return lines_by_layer(
                values, layers, names, label=label, low=low, high=high, baselines=baselines, logarithmic=log
            )
        text, _ = self._place(text, 0 if query is None else query)
        real = self._real(text)
        places = real if query is None else [self._place(text, query)[1]]
        rows = self.by_token(figure)[order][:, text][:, places].T.numpy()
        names = [f"{real.index(place)} {shorten(visible_token(self.tokens[text][place]))}" for place in places]
        return lines_by_layer(rows, layers, names, label=label, baselines=baselines, logarithmic=log)

    def _baselines(self, order: list[int]) -> dict[str, Any]:
        return {
            "two tokens of a text": self["anisotropy"].means.mean[order].numpy(),
            "any row of the vocabulary": self["vocabulary_cosine"].means.mean[order].numpy(),
        }

    def _sections(self) -> Sequence[Section]:
        made = [
            Section(
                heading,
                reading_of(name, self.at, self.k, len(self.tokens)),
                {f"drift-{name}": self.plot(name)},
                f'drift.plot("{name}")',
            )
            for name, heading in _HEADINGS.items()
        ]
        if self.tokens:
            first = self._first(0)
            token = self.tokens[0][self._place(0, first)[1]]
            made.append(
                Section(
                    f"Vocabulary rows nearest to token {first}",
                    f"For token {first}, {quoted(token)}, in each layer: the number of rows more similar to its stream "
                    "than its own row, and the nearest rows, nearest first, with its own row in bold.",
                    {"drift-nearest": self.plot(NEAREST, query=first)},
                    f'drift.plot("{NEAREST}", query={first})',
                )
            )
        listed = self.provenance.options.get("reducers", [])
        own = any(reducer[1].get("function_words", OWN_LIST) != OWN_LIST for reducer in listed)
        whose = "in your list" if own else "in a closed list of English words"
        words = "" if len(self.tokens) == 1 else f" Function words are the words {whose}."
        alike = "Residual streams of one layer point in similar directions, so compare each cosine with the grey lines."
        return [replace(made[0], finding=self.verdicts().lead, caveat=f"{alike}{words}"), *made[1:]]

    @property
    def lead(self) -> str:
        layers = [layer for layer in self.layers if bool(torch.isfinite(self.cosine[layer]))]
        if not layers:
            return f"On {self._texts}, there is no ordinary token to measure."
        first, last = min(layers), max(layers)
        pairs = [float(self.anisotropy[layer]) for layer in (first, last)]
        of_pairs = "" if any(map(math.isnan, pairs)) else f" (two tokens of a text: {pairs[0]:.2f} and {pairs[1]:.2f})"
        rank = [10 ** float(self.log_rank[layer]) - 1 for layer in (first, last)]
        return with_minus_signs(
            f"On {self._texts}, the mean cosine between a token's stream ({PLACE_WORDS[self.at]}) and its own "
            f"embedding is {float(self.cosine[first]):.2f} in layer {first} and {float(self.cosine[last]):.2f} in "
            f"layer {last}{of_pairs}; {rank[0]:,.0f} and {rank[1]:,.0f} of {self.vocabulary:,} rows are more similar "
            f"(geometric mean){no_interval(len(self.state['groups']))}."
        )


_HEADINGS: Final = {
    "cosine": "Cosine to the token's own embedding",
    "rank": "Rank of the token's own embedding",
    "churn": "Churn of the nearest rows",
}


def drift_numbers(drift: ResidualDrift, text: int = 0) -> DriftNumbers:
    """The numbers that a page shows for each token of a text."""
    order, real = drift._order, drift._real(text)
    cosine, rank, churned = (
        drift.by_token(name)[order][:, text][:, real].T.numpy() for name in ("cosine", "rank", "churn")
    )
    means = {name: drift[name].means.mean[order].numpy() for name in ("cosine", "churn")}
    means["rank"] = 10 ** drift["log_rank"].means.mean[order].numpy() - 1
    ids = drift._kept("nearest")[order][:, text][:, real][..., :NAMED].transpose(0, 1)
    known = {token: place for place, token in enumerate(drift.names)}
    baselines = drift._baselines(order)
    return DriftNumbers(
        layers=tuple(sorted(drift.layers)),
        tokens=tuple(drift.tokens[text][place] for place in real),
        vocabulary=drift.vocabulary,
        k=drift.k,
        cosine=cosine,
        rank=rank,
        churn=churned,
        means=means,
        between_tokens=baselines["two tokens of a text"],
        to_any_row=baselines["any row of the vocabulary"],
        nearest=np.vectorize(known.__getitem__, otypes=[np.int64])(ids.numpy()),
        names=tuple(drift.names.values()),
    )
