"""Attention scores as an exact sum of terms.

The equations are in `attnmech.maths.scores` (docs/formulas.md#attention-scores); the figures are figures 1 to 3 of
"Attention Focus Plots" (R. Claus).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch

from ...basics.arguments import flag, index_of, option
from ...basics.public import public
from ...draw.all_heads import model_view
from ...draw.attention_maps import attention_map
from ...draw.chart import Chart
from ...draw.embed import View
from ...draw.figure_page import in_notebook_output
from ...draw.head_picker import head_picker
from ...draw.heads import HeadNumber, PageHeads
from ...draw.html_file import returns_page, write_page
from ...draw.ledger import ROW_READING, row_ledger, widest_row
from ...draw.numbers import ScoreNumbers, TableRow
from ...draw.page import Page, render_page
from ...draw.section import Section
from ...draw.style import term_style
from ...draw.text import signed, token_labels
from ...errors import InputError, UnsupportedModelError
from ...model.attention.observed import RowBlock
from ...model.inputs.encoder import Inputs
from ...model.parts.hashes import batch_hash
from ...model.run.hooked import HookedModel, require_model
from ...model.stack.centring import Centre, checked_centre, reference_of, require_means_of
from ...model.stack.ledger import ScoreAudit
from ...model.stack.stack import Stack
from ...results.by_layer import by_layer
from ...results.mean_qk import MeanQK
from .figures import key_terms_chart, score_shares_chart
from .section import score_sections
from .terms_of_scores import SplitScores
from .wavelength_figures import dimension_bars

RANKS: Final = 10
"""The number of ranks from which the reader of a view of `score_shares` chooses."""


@public
def decompose_scores(
    model: HookedModel,
    inputs: Inputs,
    *,
    layers: Iterable[int] | None = None,
    centre: Centre | None = None,
    fold_norm: bool = False,
    stack: str | None = None,
    bos: bool | None = None,
) -> "ScoreDecomposition":
    """Splits every attention score into query-key, bias and position terms that add up to it.

    score_ij = query_key + key_bias + query_bias + constant + position + mask, and in DeBERTa content_to_position and
    position_to_content (equations in `attnmech.maths.scores`). Every term is computed from `attn_in`, the weights and
    the model's own position tensors; none is a remainder. The sum of the terms is checked against the scores that the
    model used, for every visible pair of real tokens.

    >>> import attnmech as am
    >>> split = am.decompose_scores(am.load(), "Anna sang of shells.")
    >>> split.terms["key_bias"].shape        # [batch layer head query key]; 1 on an axis along which it is constant
    torch.Size([1, 4, 8, 1, 6])
    >>> split.contrast(query=5, key_a=2, key_b=0).explain(layer=1, head=3)     # doctest: +SKIP

    Args:
        model: the model.
        inputs: one text or several.
        layers: all by default.
        centre: splits queries and keys at reference means instead of at their biases, so that models without biases and
            models with rotary positions have all four terms. "mean" takes each text's own means (over its tokens except
            the first and special ones; imprecise under 64 tokens); "position" takes, at each position, the means over
            the other texts (at least 50 texts); `am.mean_qk(model, corpus)` gives fixed means; a text that belongs to
            that corpus is split at the means of the rest.
        fold_norm: whether the shift β of the norm before attention counts as bias: q = W_Q(γ⊙n) + (W_Qβ + b_Q).
        stack: which attention to decompose in a model with several stacks: "encoder", "decoder" or "cross".
        bos: whether each text begins with the tokenizer's BOS or CLS token.

    Returns:
        The terms, in units of the softmax's input, and their residual by head. The result stores each layer's queries
        and keys, and one tensor of visible keys for all layers with the same mask; terms are computed on demand.

    Raises:
        ExactnessError: if the sum differs from a score by more than the rounding of that cell's sum explains
            (`attnmech.maths.scores.score_rounding`).
        CertificateError: if the model's certificate does not prove `attn_in` and `scores`.
        InputError: for invalid inputs and layers, and for texts to which the reference means do not apply.

    Source: "Attention Focus Plots" (the terms); Song & Zhong 2023, arXiv 2310.04861 (means by position).
    """
    require_model(model)
    flag("fold_norm", fold_norm)
    blocks = model.stack(stack)
    centre = checked_centre(centre)
    if fold_norm and centre is not None:
        raise InputError(
            "fold_norm=True moves β to the biases, and `centre` replaces the biases with means; give only one of the "
            "two."
        )
    if fold_norm and blocks.architecture.expanded is not None:
        raise UnsupportedModelError(
            f"fold_norm=True needs queries and keys that are linear in attn_in; {model.name} "
            f"({blocks.architecture.name}) expands them from latents, which have a norm of their own. Leave fold_norm "
            "out."
        )
    chosen = model.points.check_layers(layers, blocks.label)
    captures = model.points.resolve([blocks.point("attn_in")], chosen, model.refused)
    model.points.resolve([blocks.point("scores")], chosen, model.refused)
    if isinstance(centre, MeanQK):
        require_means_of(centre, model.weights_hash, blocks, chosen)
    batch = model.encode(inputs, bos=bos)
    queries, keys = batch.queries(blocks.label), batch.keys(blocks.label)
    ledgers = _Ledgers(model, blocks, chosen, fold_norm, centre)
    model.forward(batch, captures=captures, rows=[ledgers])
    audits = [ledgers.audits[layer] for layer in chosen]
    for audit in audits:
        audit.require_exact()
    options = {"layers": chosen, "bos": batch.bos, "fold_norm": fold_norm, "stack": blocks.label or "self"}
    if centre is not None:
        options["centre"] = str(centre)
    residual, largest = (
        by_layer(torch.stack(values), chosen, len(blocks.places))
        for values in ([audit.residual for audit in audits], [audit.largest for audit in audits])
    )
    return ScoreDecomposition(
        layers=tuple(chosen),
        parts=tuple(audit.parts for audit in audits),
        residual=residual,
        largest=largest,
        real=queries.mask,
        tokens=queries.tokens,
        key_tokens=keys.tokens,
        reference=None if centre is None else reference_of(centre, batch, blocks),
        provenance=model.provenance(batch_hash(batch), queries.tokens, options),
    )


class _Ledgers:
    """Builds each layer's ledger and checks it against the scores as the model runs."""

    def __init__(
        self, model: HookedModel, stack: Stack, layers: list[int], fold_norm: bool, centre: Centre | None
    ) -> None:
        self.model, self.stack, self.layers, self.fold_norm, self.centre = model, stack, layers, fold_norm, centre
        self.audits: dict[int, ScoreAudit] = {}

    def __call__(self, block: RowBlock) -> None:
        layer = block.layer
        if block.stack != self.stack.label or layer not in self.layers:
            return
        if layer not in self.audits:
            # Layers with the same mask share one tensor of visible keys.
            visible = block.mask.once("visible", lambda: block.mask.visible(range(block.mask.queries)))
            self.audits[layer] = ScoreAudit(
                self.model.stacks, block, block["attn_in"], visible, fold_norm=self.fold_norm, centre=self.centre
            )
        self.audits[layer].add(block)


@dataclass(frozen=True, repr=False)
class ScoreDecomposition(SplitScores):
    """Attention scores as a sum of terms, with the proof that they add up.

    Scores are in the units of the softmax's input (natural log-odds).
    """

    FIGURES = ("attention_map", "score_shares", "key_terms", "row_ledger", "dimensions")

    def _figure_place(self, *figure: str, **options: Any) -> Mapping[str, int]:
        return {"layer": self.layers[0], "head": 0, **super()._figure_place(*figure, **options)}

    def plot(
        self,
        figure: str = "score_shares",
        *,
        layer: int | None = None,
        head: int = 0,
        rank: int = 0,
        query: int | None = None,
        key: int | None = None,
        sequence: int = 0,
        measure: str = "score",
        against: str = "zero",
    ) -> "go.Figure":
        """A figure of one head; returned, not shown.

        Figures: `attention_map` (figure 1), `score_shares` (figure 2), `key_terms` (figure 3), `row_ledger` (the sum
        of terms in one row) and `dimensions` (the score of one pair, dimension by dimension of the head). `query` is
        the token whose row is shown, by default the last real token; `key` is the other token of the pair, by default
        the key with the highest probability. `measure` selects what the cells of figure 1 show: "score", "relative"
        (minus the row's highest) or "probability". `against` selects the baseline of a row's terms: "zero", the row's
        "mean", or the "runner_up", the key with the second highest probability.
        """
        index = 0 if layer is None else self._index(layer)
        option("figure", figure, self.FIGURES)
        rank = index_of("rank", rank, len(self.key_tokens[0]), "0 is the highest score")
        heads = self.residual.shape[1]
        head = index_of("head", head, heads, f"this model has {heads} heads in each layer")
        view = self.select([self.layers[index]]).numbers(sequence, ranks=rank + 1)
        length = len(view.tokens)
        query = length - 1 if query is None else index_of("query", query, length, f"the text has {length} tokens")
        row, others = (0, head, query), view.keys or None
        if figure == "dimensions":
            key = int(view.pattern[row].argmax()) if key is None else index_of("key", key, len(view.key_tokens))
            return self._dimension_bars(self.layers[index], head, query, key, sequence, view)
        if figure == "row_ledger":
            terms = view.terms_of_row(*row)
            return row_ledger(
                terms, view.scores[row], view.pattern[row], view.tokens, query=query, against=against, keys=others
            )
        if figure == "attention_map":
            scores, pattern = view.scores[0, head], view.pattern[0, head]
            return attention_map(scores, view.tokens, measure=measure, pattern=pattern, keys=others)
        if figure == "key_terms":
            return key_terms_chart(view.key_terms, view.key_tokens).figure(layer=0, head=head)
        index_of("rank", rank, view.ranked_key.shape[-1], "of this text")
        chart = score_shares_chart(view.ranked_share, view.ranked_key, view.tokens, others)
        return chart.figure(layer=0, head=head, rank=rank)

    def show(self, figure: str = "row_ledger", *, layer: int | None = None, head: int = 0, **options: Any) -> View:
        """Shows a figure of `plot` with controls for the layer and the head; `options` are those of `plot`.

        "score_shares" also has a control for the rank of the key in its row, from 0, the highest score, to 9; `rank` is
        the first one shown.

        >>> split.show(layer=2, head=6, query=5)      # doctest: +SKIP
        >>> split.show("score_shares", rank=1)        # doctest: +SKIP

        The view holds the figures of all heads. With many layers and a long text, show some of the layers:
        `split.select([0, 1]).show()`.
        """
        first = self.layers[0 if layer is None else self._index(layer)]
        heads = range(self.residual.shape[1])
        choices: dict[str, Sequence[int]] = {"layer": self.layers, "head": heads}
        chosen = {"layer": first, "head": index_of("head", head, len(heads))}
        figure_of: Callable[..., Any] = partial(self.plot, figure, **options)
        if figure == "score_shares":
            figure_of(**chosen)  # raises for options that it does not take
            rank = options.get("rank", 0)
            view = self.numbers(options.get("sequence", 0), ranks=max(RANKS, rank + 1))
            chart = score_shares_chart(view.ranked_share, view.ranked_key, view.tokens, view.keys or None)
            choices, chosen = choices | {"rank": range(view.ranked_key.shape[3])}, chosen | {"rank": rank}
            figure_of = partial(_values_at, chart, self.layers)
        return head_picker(
            figure_of,
            choices,
            chosen=chosen,
            title=figure.replace("_", " ").capitalize(),
            reading=ROW_READING if figure == "row_ledger" else "",
        ).of_model(self.provenance.model)

    def explain(self, layer: int, head: int, query: int, key: int | None = None, *, sequence: int = 0) -> str:
        """Writes the score of a pair as the sum of its terms in one line, with its probability.

        >>> print(split.explain(2, 6, query=15, key=4))      # doctest: +SKIP
        L2H6: ' song' (15) attends to ' blue' (4) with weight 0.9999, score 29.30: query_key +28.47, key_bias +0.89, ...

        Args:
            layer: the layer.
            head: the head.
            query: the position of the query token.
            key: the position of the key token; by default the key with the highest probability.
            sequence: which text.

        Raises:
            InputError: for a layer, head or position that does not exist, and for a key that the query cannot see.

        """
        index = self._index(layer)
        view = self.select([self.layers[index]]).numbers(sequence)
        head = index_of("head", head, view.scores.shape[1])
        query = index_of("query", query, len(view.tokens))
        row = (0, head, query)
        key = int(view.pattern[row].argmax()) if key is None else index_of("key", key, len(view.key_tokens))
        score = float(view.scores[row][key])
        if math.isnan(score):
            raise InputError(f"token {query} cannot see key {key} in this text.")
        terms = {name: float(term[key]) for name, term in view.terms_of_row(*row).items()}
        because = ", ".join(
            f"{name} {value:+.2f}" for name, value in sorted(terms.items(), key=lambda item: -abs(item[1]))
        )
        probability = f"{float(view.pattern[row][key]):.4f}"
        return (
            f"L{layer}H{head}: {view.tokens[query]!r} ({query}) attends to {view.key_tokens[key]!r} ({key}) "
            f"with weight {probability}, score {score:.2f}: {because}"
        )

    def _dimension_bars(
        self, layer: int, head: int, query: int, key: int, sequence: int, view: "ScoreNumbers"
    ) -> "go.Figure":
        """Draws `dimension_bars` for two of the text's real tokens."""
        here = self.real[sequence].nonzero()[:, 0]
        at_keys = self.keys_seen(sequence).nonzero()[:, 0] if self._crosses else here
        frame = self.dimensions(layer, head, int(here[query]), int(at_keys[key]), sequence)
        q, k, product, turns = (column.to_numpy() for _, column in frame.items())
        query_label, key_label = token_labels(view.tokens)[query], token_labels(view.key_tokens)[key]
        title = f"L{layer}H{head}: query {query_label}, key {key_label}, together {signed(product.sum(), '.3f')}"
        return dimension_bars(q, k, product, turns, title=title)

    @returns_page
    def to_html(self, *, sequence: int = 0) -> str:
        """Returns an offline page with figures 1 to 3 of every head on one text; `write_html(path)` saves that page."""
        worst = float(self.residual[list(self.layers)].max())
        view = self.numbers(sequence)
        shown = 'acts.show("pattern", layer={layer}, head={head}, view="{figure}")'
        return render_page(
            Page(
                title=f"Attention scores of {self.provenance.short_name}",
                headline=f"Every score is the sum of its terms; the largest difference is {worst:.1e}.",
                heads=PageHeads(view.layers, view.scores.shape[1], head_numbers(self, view)),
                view=view,
                nouns=view.nouns,
                sections=score_sections(view, "split", shown),
                facts=[TableRow("largest residual", f"{worst:.1e}", "ok")],
                checks=[],
                provenance=self.provenance.entries,
                start=(view.layers[0], 0, widest_row(view.scores[0, 0], view.pattern[0, 0])),
            )
        )

    def write_html(self, path: str | Path, *, sequence: int = 0) -> Path:
        """Writes the page of `to_html` to a file, completely or not at all; returns the path."""
        return write_page(path, lambda: self.to_html(sequence=sequence))

    def _repr_html_(self) -> str:
        """All heads as maps, above the table; only the table if keys are not tokens or are too many for a view."""
        if self.tokens != self.key_tokens and not self._crosses:
            return super()._repr_html_()
        view = self.numbers()
        try:
            maps = model_view(
                view.pattern,
                view.tokens,
                layers=view.layers,
                keys=view.keys or None,
                sums_to_one=False,
                title="Attention",
            )
        except InputError:
            return super()._repr_html_()
        section = Section("", maps.reading, {"all-heads": maps})
        lead = " ".join((repr(self), *self._softmax_note))
        return in_notebook_output(title="Attention scores", lead=lead, sections=[section], frame=self.to_frame())


def _values_at(chart: Chart, layers: Sequence[int], *, layer: int, head: int, rank: int) -> dict[str, Any]:
    """The properties of a chart's figure for a layer, a head and a rank."""
    return chart.values(layer=layers.index(layer), head=head, rank=rank)


def head_numbers(split: ScoreDecomposition, view: ScoreNumbers) -> list[HeadNumber]:
    """The mean share of each term in a row's highest score, for the map of heads of a page."""
    frame = split.to_frame()
    shape = view.scores.shape[:2]
    return [
        HeadNumber(
            name,
            f"{term_style(name.removesuffix('_share')).label}, share of the highest score",
            "why there",
            frame[name].to_numpy(float).reshape(shape),
        )
        for name in map(str, frame.filter(like="_share"))
    ]
