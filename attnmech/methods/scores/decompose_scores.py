"""Attention scores as an exact sum of terms.

The equations are in `attnmech.maths.scores` (docs/formulas.md#attention-scores); the figures are figures 1 to 3 of
"Attention Focus Plots" (R. Claus).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch

from ...basics.arguments import flag, index_of, option
from ...basics.public import public
from ...draw.all_heads import model_view
from ...draw.attention_maps import attention_map
from ...draw.embed import View
from ...draw.figure_page import in_notebook_output
from ...draw.head_picker import head_picker
from ...draw.heads import HeadNumber, PageHeads
from ...draw.html_file import WritesHtml, returns_page
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
from ...results.by_layer import by_layer
from ...results.mean_qk import MeanQK
from .figures import key_terms_chart, score_shares_chart
from .section import LEDGERS, MAPS, score_sections
from .terms_of_scores import SplitScores
from .wavelengths import dimension_bars

RANKS: Final = 10  # the number of ranks from which the reader of a view of `score_shares` chooses


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
    audited: dict[int, ScoreAudit] = {}

    def read(block: RowBlock) -> None:
        if block.stack != blocks.label or block.layer not in chosen:
            return
        if block.layer not in audited:
            # Layers with the same mask share one tensor of visible keys.
            visible = block.mask.once("visible", lambda: block.mask.visible(range(block.mask.queries)))
            audited[block.layer] = ScoreAudit(
                model.stacks, block, block["attn_in"], visible, fold_norm=fold_norm, centre=centre
            )
        audited[block.layer].add(block)

    model.forward(batch, captures=captures, rows=[read])
    audits = [audited[layer] for layer in chosen]
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


@dataclass(frozen=True, repr=False)
class ScoreDecomposition(WritesHtml, SplitScores):
    """Attention scores as a sum of terms, with the proof that they add up.

    Scores are in the units of the softmax's input (natural log-odds).
    """

    FIGURES = (*MAPS, "score_shares", "key_terms", *LEDGERS, "dimensions")

    def _figure_place(self, *figure: str, **options: Any) -> Mapping[str, int]:
        return {"layer": self.layers[0], "head": 0, **super()._figure_place(*figure, **options)}

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
        """A figure of one head; returned, not shown.

        Figures: `attention_map` (figure 1; `attention_map_relative` shows scores minus the row's highest,
        `attention_map_probability` probabilities), `score_shares` (figure 2, of each row's highest score; the default),
        `key_terms` (figure 3), `row_ledger` (the sum of terms in one row; `row_ledger_mean` minus the row's mean,
        `row_ledger_runner_up` minus the key with the second highest probability) and `dimensions` (the score of one
        pair, dimension by dimension of the head). `query` is the token whose row is shown, by default the last real
        token; `key` is the other token of the pair, by default the key with the highest probability.
        """
        figure = "score_shares" if figure is None else option("figure", figure, self.FIGURES)
        index = 0 if layer is None else self._index(layer)
        heads = self.residual.shape[1]
        head = 0 if head is None else index_of("head", head, heads, f"this model has {heads} heads in each layer")
        view = self.select([self.layers[index]]).numbers(text, ranks=1)
        length = len(view.tokens)
        query = length - 1 if query is None else index_of("query", query, length, f"the text has {length} tokens")
        row, others = (0, head, query), view.keys or None
        if figure == "dimensions":
            key = int(view.pattern[row].argmax()) if key is None else index_of("key", key, len(view.key_tokens))
            at_queries = self.real[text].nonzero()[:, 0]
            at_keys = self.keys_seen(text).nonzero()[:, 0] if self._crosses else at_queries
            frame = self.dimensions(self.layers[index], head, int(at_queries[query]), int(at_keys[key]), text)
            named = f"query {token_labels(view.tokens)[query]}, key {token_labels(view.key_tokens)[key]}"
            total = signed(frame["product"].sum(), ".3f")
            return dimension_bars(frame, title=f"L{self.layers[index]}H{head}: {named}, together {total}")
        if figure in LEDGERS:
            terms, against = view.terms_of_row(*row), LEDGERS[figure]
            return row_ledger(
                terms, view.scores[row], view.pattern[row], view.tokens, query=query, against=against, keys=others
            )
        if figure in MAPS:
            scores, pattern = view.scores[0, head], view.pattern[0, head]
            return attention_map(scores, view.tokens, measure=MAPS[figure], pattern=pattern, keys=others)
        if figure == "key_terms":
            return key_terms_chart(view.key_terms, view.key_tokens).figure(layer=0, head=head)
        chart = score_shares_chart(view.ranked_share, view.ranked_key, view.tokens, others)
        return chart.figure(layer=0, head=head, rank=0)

    def show(
        self,
        figure: str | None = None,
        *,
        layer: int | None = None,
        head: int | None = None,
        query: int | None = None,
        key: int | None = None,
        text: int = 0,
    ) -> View:
        """Shows a figure of `plot`, by default "row_ledger", with controls for the layer and the head.

        "score_shares" also has a control for the rank of the key in its row, from 0, the highest score, to 9.

        >>> split.show(layer=2, head=6, query=5)      # doctest: +SKIP

        The view holds the figures of all heads. With many layers and a long text, show some of the layers:
        `split.select([0, 1]).show()`.
        """
        figure, heads = "row_ledger" if figure is None else figure, range(self.residual.shape[1])
        choices: dict[str, Sequence[int]] = {"layer": self.layers, "head": heads}
        chosen = {"layer": self.layers[0 if layer is None else self._index(layer)]}
        chosen["head"] = 0 if head is None else index_of("head", head, len(heads))
        figure_of: Callable[..., Any] = partial(self.plot, figure, query=query, key=key, text=text)
        if figure == "score_shares":
            view = self.numbers(text, ranks=RANKS)
            chart = score_shares_chart(view.ranked_share, view.ranked_key, view.tokens, view.keys or None)
            choices, chosen = choices | {"rank": range(view.ranked_key.shape[3])}, chosen | {"rank": 0}

            def figure_of(*, layer: int, head: int, rank: int) -> dict[str, Any]:
                return chart.values(layer=self.layers.index(layer), head=head, rank=rank)

        return head_picker(
            figure_of,
            choices,
            chosen=chosen,
            title=figure.replace("_", " ").capitalize(),
            reading=ROW_READING if figure in LEDGERS else "",
        ).of_model(self.provenance.model)

    def explain(self, layer: int, head: int, query: int, key: int | None = None, *, text: int = 0) -> str:
        """Writes the score of a pair as the sum of its terms in one line, with its probability.

        >>> print(split.explain(2, 6, query=15, key=4))      # doctest: +SKIP
        L2H6: ' song' (15) attends to ' blue' (4) with weight 0.9999, score 29.30: query_key +28.47, key_bias +0.89, ...

        Args:
            layer: the layer.
            head: the head.
            query: the position of the query token.
            key: the position of the key token; by default the key with the highest probability.
            text: which text.

        Raises:
            InputError: for a layer, head or position that does not exist, and for a key that the query cannot see.

        """
        index = self._index(layer)
        view = self.select([self.layers[index]]).numbers(text)
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

    @returns_page
    def to_html(self) -> str:
        """Returns an offline page with figures 1 to 3 of every head on the first text; `write_html(path)` saves it."""
        worst = float(self.residual[list(self.layers)].max())
        view = self.numbers()
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

    def _repr_html_(self) -> str:
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
