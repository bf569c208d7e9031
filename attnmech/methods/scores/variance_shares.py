"""Variance shares: how much of the variance of scores along a row comes from position, the key, or query and key
together.

Formulas: docs/formulas.md#shares-of-variance.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Unpack

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import flag
from ...basics.public import public
from ...draw.section import Section
from ...draw.style import term_style
from ...draw.text import percent
from ...maths.float64 import as_float64, put
from ...maths.groups import FIRST
from ...maths.ranks import rank_correlation
from ...maths.statistic import UNBOUNDED, Statistic, Statistics
from ...maths.variance_shares import row_covariances
from ...model.attention.observed import RowBlock
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...model.stack.centring import Centre, checked_centre, require_means_of
from ...results.mean_qk import MeanQK
from ...runs.options import StreamOptions
from ...runs.reducer import Reducer, Run, Source, State
from ...runs.row_means import RowMeans, closed, of_groups, sum_of_states
from ...runs.score_audits import ScoreAudits, require_whole
from ...runs.stream import stream
from ...runs.token_types import ROW_CLASSES, row_classes


def _share(term: str, meaning: str) -> Statistic:
    return Statistic(
        meaning=f"The share that comes from {meaning}.", label=f"share of {term_style(term).label}", bounds=UNBOUNDED
    )


class ScoreShares:
    """Every possible term of scores."""

    position = _share(
        "position", "the keys' positions (with rotary or ALiBi, their distances), whatever the tokens are"
    )
    key_bias = _share("key_bias", "the key, whatever the query is")
    query_key = _share("query_key", "the match of query and key")
    query_bias = _share("query_bias", "the query at each distance, whatever the key is")
    constant = _share("constant", "the product of the biases at each distance")
    softcap = _share("softcap", "the soft cap's reduction of the score")
    content_to_position = _share("content_to_position", "the distances that the query's content prefers")
    position_to_content = _share("position_to_content", "the distances that the key's content prefers")


ALL_TERMS: Final = tuple(Statistics(ScoreShares, Statistic))  # the terms, in the order of the axis `statistic`


@public
def variance_shares(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    layers: Iterable[int] | None = None,
    centre: Centre | None = "mean",
    first_key: bool = True,
    stack: str | None = None,
    **options: Unpack[StreamOptions],
) -> "VarianceShares":
    """Computes each term's share of the variance of scores along a row, for each head, over texts.

    share_t = Σ_rows Σ_j (t_ij − t̄_i)(s_ij − s̄_i) / Σ_rows Σ_j (s_ij − s̄_i)²

    over the keys j that row i sees. The shares of a head add up to 1; where terms work against each other, a share may
    be negative or exceed 1.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> result = am.variance_shares(am.load(), documents(6))
    >>> result.shares.shape                                                         # [term layer head]
    torch.Size([8, 4, 8])

    Args:
        model: the model.
        inputs: texts, or an iterator of texts (a corpus); only sums are stored.
        layers: all by default.
        centre: where queries and keys are split, as in `am.decompose_scores`; None for the model's own biases.
        first_key: whether the first token of a text counts as a key; many heads rest on it, with scores far from the
            others.
        stack: "encoder", "decoder" or "cross" in a model with several stacks.
        options: `bos`, `keep_rows`, `truncate`, `shard`, `journal`, `engine` and `progress`, as in `am.stream`.

    Returns:
        Shares by head, with intervals over texts; NaN where no row sees two keys with different scores.

    Raises:
        ExactnessError: if the terms do not add up to the scores that the model used.
        InputError: for means computed with another model, and for texts to which the reference means do not apply.

    """
    require_model(model)
    flag("first_key", first_key)
    centre = checked_centre(centre)
    blocks = model.stack(stack)
    if isinstance(centre, MeanQK):
        require_means_of(centre, model.weights_hash, blocks, model.points.check_layers(layers, blocks.label))
    result: VarianceShares
    reducer = VarianceReducer(centre, first_key)
    (result,) = stream(model, inputs, [reducer], layers=layers, stack=stack, **options)
    return result


@dataclass(frozen=True)
class VarianceReducer(Reducer):
    """Sums the covariances of terms and scores, row by row."""

    centre: Centre | None = "mean"
    first_key: bool = True

    points = ("attn_in",)

    @property
    def options(self) -> dict[str, str]:
        """The reference and whether first keys count."""
        return {"centre": str(self.centre), "first_key": str(self.first_key)}

    def start(self, run: Run) -> State:
        """Sums of 0 for each text: each term's covariance with the scores, and the scores' variance."""
        require_whole(run, self.centre)
        texts = len(run.batch.ids)
        shape = len(ROW_CLASSES), run.n_layers, run.n_heads, texts
        state = {
            "classes": row_classes(run.batch.queries(run.stack.label)),
            "sums": torch.zeros(len(ALL_TERMS), *shape, dtype=torch.float64),
            "variance": torch.zeros(shape, dtype=torch.float64),
        }
        return {name: put(value, run.model.device) for name, value in state.items()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Adds the sums of a block of rows, and checks the sum of its terms against the scores."""
        rows, width = slice(block.rows.start, block.rows.stop), block.scores.shape[-1]
        audits = ScoreAudits.of(run, self)
        parts = audits.parts(run, block, self.centre)
        names = [name for name in parts.names() if name != "mask"]
        terms = {name: parts.term(name, rows)[..., :width] for name in names}
        total = torch.zeros_like(block.scores).add(sum(terms.values()))
        audits.add(block, total)

        seen = block.visible & block.real[:, None, :, None]
        if not self.first_key:
            seen = seen & ~block.batch.keys(block.stack).first[:, None, None, :width]
        of_terms, variance = row_covariances(terms, total, seen)
        classes = as_float64(state["classes"][:, :, rows])
        state["variance"][:, block.index] += _by_class(variance, classes)
        for name, covariance in of_terms.items():
            state["sums"][ALL_TERMS.index(name), :, block.index] += _by_class(covariance, classes)

    def close(self, state: State, run: Run) -> State:
        """Sums over the batch's texts."""
        variance = state["variance"]
        return closed({"sums": state["sums"], "counts": variance.expand(len(ALL_TERMS), *variance.shape)}, run)

    def merge(self, one: State, other: State) -> State:
        return sum_of_states(one, other)

    def finish(self, state: State, source: Source) -> "VarianceShares":
        return VarianceShares.of(state, source, centre=str(self.centre), first_key=self.first_key)


def _by_class(
    value: Float[Tensor, "batch head row"], classes: Float[Tensor, "batch class row"]
) -> Float[Tensor, "class head batch"]:
    return einsum(as_float64(value), classes, "batch head row, batch kind row -> kind head batch")


@dataclass(frozen=True, repr=False)
class VarianceShares(ScoreShares, RowMeans):
    """Each term's share of the variance of scores along a row, for each head. The shares of a head add up to 1; they
    are NaN where no row sees two keys with different scores. Texts are weighted by the variance of their scores.
    """

    _MAIN = "position"

    centre: str
    """The means at which queries and keys are split; "None" if they are split at the model's own biases."""
    first_key: bool
    """Whether the first token of a text counts as a key."""

    @property
    def terms(self) -> tuple[str, ...]:
        """The terms that vary along a row in at least one head."""
        there = self.state["sums"].flatten(1).any(dim=1).tolist() if self.parts is None else [True] * len(ALL_TERMS)
        return tuple(name for name, occurs in zip(ALL_TERMS, there, strict=True) if occurs)

    @property
    def shares(self) -> Float[Tensor, "term layer head"]:
        """The shares, in the order of `ALL_TERMS`: position, key_bias, query_key, query_bias, constant, softcap,
        content_to_position, position_to_content.
        """
        return torch.stack([self[name].mean for name in ALL_TERMS])

    @property
    def half_shares(self) -> tuple[Float[Tensor, "term layer head"], Float[Tensor, "term layer head"]]:
        """The shares on every other text (or group of texts), and on the rest; copies of a text are in one half."""
        first = self.provenance.copies or self.state.get(FIRST, torch.arange(len(self.state["groups"]))).tolist()
        rank = {number: place for place, number in enumerate(sorted(set(first)))}
        halves = []
        for odd in (0, 1):
            here = [place for place, number in enumerate(first) if rank[number] % 2 == odd]
            means = [of_groups(self._by_text(name), here).mean for name in ALL_TERMS]
            halves.append(torch.stack([self._by_layer(mean) for mean in means]))
        return halves[0], halves[1]

    @property
    def agreement(self) -> dict[str, float]:
        """Spearman's rank correlation over heads of each term's shares on the two halves; NaN below two texts."""
        halves = torch.stack(self.half_shares, dim=1)
        known = torch.isfinite(halves).all(dim=1)
        pairs = {name: halves[ALL_TERMS.index(name)][:, known[ALL_TERMS.index(name)]] for name in self.terms}
        return {name: rank_correlation(*pair) for name, pair in pairs.items()}

    @property
    def _columns_of(self) -> Sequence[str]:
        return self.terms

    def _sections(self) -> "Sequence[Section]":
        if self.parts is not None:
            return self._difference_sections({name: name for name in ALL_TERMS})
        return [
            Section(
                f"Share of {term_style(name).label}",
                "Each cell is one head. Its colour is a share of the variance of scores along a row. "
                f"{self.STATISTICS[name].meaning} The shares of a head add up to 1; terms that work against each other "
                "have shares below 0 or above 1.",
                {f"share-{name}": self.plot(name)},
                f'shares.plot("{name}")',
            )
            for name in self.terms
        ]

    @property
    def lead(self) -> str:
        if self.parts is not None:
            return self._difference_lead("position")
        means = {name: float(self[name].mean.nanmean()) for name in self.terms}
        listed = ", ".join(f"{term_style(name).label} {percent(share)}" for name, share in means.items())
        return f"On {self._texts}, the variance of scores along a row divides as follows (mean over heads): {listed}."

    def _comparable(self) -> dict[str, Any]:
        return super()._comparable() | {"centre": self.centre, "first_key": self.first_key}
