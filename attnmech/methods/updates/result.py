"""Residual updates: the size and direction of what heads write into the residual stream.

Formulas: docs/formulas.md#residual-updates.

Figures 7 to 10 of "Attention Focus Plots" (R. Claus).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, Unpack, cast

import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...basics.arguments import index_of, option
from ...basics.axes import spread
from ...basics.nouns import TEXT, Nouns, counted
from ...basics.public import public
from ...batch import Batch
from ...draw.embed import View
from ...draw.head_picker import head_picker
from ...draw.numbers import UpdateNumbers
from ...draw.section import Section
from ...draw.text import percent, signed
from ...errors import InputError
from ...maths.groups import FIRST
from ...maths.intervals import TextMeans
from ...maths.statistic import UNBOUNDED, Statistic
from ...maths.update_statistics import STATISTICS, UpdateStatistics
from ...model.inputs.encoder import Inputs
from ...model.inputs.encoders import tokenized
from ...model.reading.unembedding import unembedding_of
from ...model.run.hooked import HookedModel, require_model
from ...results.quantity import Places, Quantity
from ...runs.answers import Answers, answer_ids
from ...runs.options import StreamOptions
from ...runs.reducer import Source, State
from ...runs.row_means import RowMeans
from ...runs.stream import stream
from ...runs.update_sums import BlockStatistics, Towards, UpdateSums
from . import figures as draw
from .section import SIDES, SUFFIXES

_ANSWERS: Final = "measure it with am.residual_updates(model, text, answers=[' Tom'])"


@public
def residual_updates(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    layers: Iterable[int] | None = None,
    answers: Answers = None,
    against: Answers = None,
    stack: str | None = None,
    **options: Unpack[StreamOptions],
) -> "ResidualUpdates":
    """Measures the size of each head's update relative to the residual stream, and its direction.

    >>> import attnmech as am
    >>> updates = am.residual_updates(am.load(), "Anna sang of shells.")
    >>> blocks = updates.blocks
    >>> updates.magnitude.shape, blocks.cancellation.shape
    (torch.Size([4, 8]), torch.Size([4, 1]))

    On the query side, u_i = Σ_j p_ij v_j W_O is compared with x_i, the stream as it enters the block (`resid_pre`). On
    the target side, u_j = v_j W_O of the key j to which row i attends most, without p, is compared with x_j. If a norm
    lies between attention and stream (Gemma 2), u includes the norm's scale at row i, frozen, so that Σ_h u plus the
    bias's contribution is `attn_out` in every model. Row 0, where a causal head has no choice, is left out of means;
    `ResidualUpdates.where` selects other rows.

    This takes one forward pass.

    Args:
        model: the model.
        inputs: texts, or an iterator of texts (a corpus); only sums are stored.
        layers: all by default.
        answers: one token per text (its text or id): `.logits`, with the mean `.logit` over texts, is then what each
            head adds to that token's logit at the text's last token, with the final norm's scale frozen. If the model
            soft-caps its logits (Gemma 2), these are pre-cap logits; see `updates["logit"].statistic.unit`.
        against: another token per text: `.logits` is then what each head adds to the logit difference.
        stack: "encoder", "decoder" or "cross" in a model with several stacks.
        options: `bos`, `keep_rows`, `truncate`, `shard`, `journal`, `engine` and `progress`, as in `am.stream`.

    Returns:
        ‖u‖ / ‖x‖ and cos(u, x) `[layer head]`, with intervals over texts; with `answers`, logits by head and text.

    Raises:
        InputError: with `answers`, if the model does not compute its logits with one norm and one matrix from the last
            stream (BERT).
        CertificateError: with `answers`, if the certificate disproves that computation.

    Source: "Attention Focus Plots", figures 7 to 10.
    """
    require_model(model)
    result: ResidualUpdates
    towards = None
    if answers is not None:
        inputs = model.encode(cast(Inputs, inputs), bos=options.get("bos"))
        towards = _directions(model, inputs, answers, against)
    elif against is not None:
        raise InputError("`against` needs `answers`, the tokens to compare with.")
    (result,) = stream(model, inputs, [UpdateReducer(towards)], layers=layers, stack=stack, **options)
    return result


def _directions(model: HookedModel, inputs: Batch, answers: Answers, against: Answers) -> "Towards":
    unembedding = unembedding_of(model)
    batch = inputs.queries(model.output_stack.label)
    prompts = tokenized(model.encoder, batch)
    model.points.resolve(["logits"], None, model.refused)
    tokens = [
        None if wanted is None else answer_ids(model, name, wanted, len(prompts), prompts)
        for name, wanted in (("answers", answers), ("against", against))
    ]
    assert tokens[0] is not None
    return Towards(unembedding, unembedding.direction(tokens[0], tokens[1]))


class UpdateReducer(UpdateSums):
    """Measures what heads write, layer by layer."""

    def finish(self, state: State, source: Source) -> "ResidualUpdates":
        return ResidualUpdates.of(state, source)


@dataclass(frozen=True, repr=False)
class ResidualUpdates(UpdateStatistics, RowMeans):
    """What a model's heads write into the residual stream, averaged over the rows of the texts.

    Magnitudes are in units of the stream's own norm, orientations are cosines.
    """

    _MAIN = "magnitude"
    FIGURES = tuple(
        f"{figure}{side}"
        for side in SUFFIXES
        for figure in ("magnitude", "orientation", "orientation_by_magnitude", "magnitude_by_position")
    )
    _BY_ROW = (*RowMeans._BY_ROW, "top_key", "block_values", "block_valid", "logits", "final_scale")
    _STATE: ClassVar[Mapping[str, Any]] = {
        **RowMeans._STATE,
        "top_key": Int[Tensor, "layer head batch row"],
        "block_sums": Float[Tensor, "block_statistic class layer 1 group"],
        "block_counts": Float[Tensor, "block_statistic class layer 1 group"],
        "block_values": Float[Tensor, "block_statistic layer 1 batch row"],
        "block_valid": Bool[Tensor, "block_statistic layer 1 batch row"],
        "logits": Float[Tensor, "layer head batch"],
        "final_scale": Float[Tensor, " batch"],
    }
    logit = Statistic(
        meaning="Mean of `logits` over texts, the head's direct logit attribution; with `answers` only.",
        tested=True,
        bounds=UNBOUNDED,
    )

    @property
    def _axis_lengths(self) -> Mapping[str, int]:
        return {**super()._axis_lengths, "statistic": len(STATISTICS)}

    @property
    def quantities(self) -> tuple[str, ...]:
        """The names of the statistics; "logit" with `answers` only."""
        return (*STATISTICS, *(["logit"] if all("logits" in part.state for part in self._measured()) else []))

    def __getitem__(self, name: str) -> Quantity:
        return self._quantity(name) if name == "logit" else super().__getitem__(name)

    def _statistic(self, name: str) -> Statistic:
        declared = super()._statistic(name)
        return replace(declared, unit=self._measured()[0]._logit_unit) if name == "logit" else declared

    def _by_text(self, name: str) -> TextMeans:
        if name != "logit" or self.parts is not None:
            return super()._by_text(name)
        return TextMeans.of_values(self._kept("logits", _ANSWERS) * self._kept("final_scale", _ANSWERS))

    @classmethod
    def reducer(cls) -> UpdateReducer:
        """The reducer that computes a `ResidualUpdates` in `am.stream`."""
        return UpdateReducer()

    @property
    def top_key(self) -> Int[Tensor, "layer head batch query"]:
        """The key to which each row attends most; −1 in rows without a choice and at padding."""
        return self._row("top_key")

    @property
    def logits(self) -> Float[Tensor, "layer head batch"]:
        """What each head adds to the answer's logit at the text's last token, or to the logit difference. The unit is
        `result["logit"].statistic.unit`: logits, or pre-cap logits if the model soft-caps its logits.
        """
        return self._by_layer(self._kept("logits", _ANSWERS) * self._kept("final_scale", _ANSWERS))

    @property
    def _logit_unit(self) -> str:
        """The unit of `logits`: "logits", or "pre-cap logits" if the model soft-caps them (Gemma 2)."""
        self._kept("logits", _ANSWERS)
        listed = self.provenance.options["reducers"]
        return str(next(description["logit_unit"] for _, description in listed if "logit_unit" in description))

    @property
    def blocks(self) -> "BlockUpdates":
        """What attention as a whole and the MLP add to the stream, and how much heads cancel each other."""
        if self.parts is not None:
            one, other = (part.blocks for part in self.parts)
            return one - other
        names = ("sums", "counts", "values", "valid")
        state = {name: self.state[f"block_{name}"] for name in names if f"block_{name}" in self.state}
        if "sums" not in state:
            raise InputError("`blocks` is not available for individually chosen rows; use `.blocks.where(rows=...)`.")
        state |= {name: self.state[name] for name in ("classes", "groups", "modulus", FIRST) if name in self.state}
        shared = ("layers", "n_layers", "documents", "truncated", "chosen", "tokens", "provenance")
        return BlockUpdates(state=state, **{name: getattr(self, name) for name in shared})

    def plot(
        self, figure: str | None = None, *, layer: int | None = None, head: int | None = None, text: int = 0
    ) -> "go.Figure":
        """Draws figure 7 (`magnitude`), 8 (`orientation`), 9 (`orientation_by_magnitude`) or 10
        (`magnitude_by_position`).

        The figure shows one layer (the first if `layer` is None) of one text; `head` highlights a head. A name that
        ends in `_of_target`, such as `magnitude_of_target`, shows what the value of the most attended key would write.
        The figure is returned, not shown. `figure` may also be another statistic, such as "along" or
        "magnitude_at_first", as a map of layers × heads. A difference has only such maps; plot the other figures for
        its two `parts`.
        """
        figure = "magnitude" if figure is None else figure
        if self._is_map(figure):
            return self._map(figure, layer, head)
        option("figure", figure, dict.fromkeys((*(self.FIGURES if self.parts is None else ()), *self.quantities)))
        name, of_target, _ = figure.partition(SUFFIXES[1])
        place, side = 0 if layer is None else self._place_of(layer), int(bool(of_target))
        view = update_numbers(self, text)
        magnitude, orientation = view.magnitude[side, place], view.orientation[side, place]
        options: dict[str, Any] = {"side": SIDES[side], "head": head}
        if name == "magnitude":
            return draw.of_one_layer(draw.magnitude_histograms_chart, magnitude, **options)
        if name == "orientation":
            return draw.of_one_layer(draw.orientation_histograms_chart, orientation, **options)
        options |= {"attended": view.attended[place], "tokens": view.tokens}
        if name == "orientation_by_magnitude":
            return draw.of_one_layer(draw.orientation_by_magnitude_chart, magnitude, orientation, **options)
        return draw.of_one_layer(draw.magnitude_by_position_chart, magnitude, **options)

    def show(
        self, figure: str | None = None, *, layer: int | None = None, head: int | None = None, text: int = 0
    ) -> View:
        """Shows a figure of `plot` about one layer, by default "magnitude", with a control for the layer.

        >>> updates.show("orientation_of_target", layer=2)      # doctest: +SKIP

        The view holds the figures of all layers measured.
        """
        figure = "magnitude" if figure is None else figure
        if self._is_map(figure):
            raise InputError("this figure is a map of all layers, without a layer to choose; use .plot().")
        return head_picker(
            partial(self.plot, figure, head=head, text=text),
            {"layer": self.layers},
            chosen={"layer": self.layers[0 if layer is None else self._place_of(layer)]},
            title=figure.replace("_", " ").capitalize(),
            reading="",
        ).of_model(self.provenance.model)

    def _figure_place(self, *figure: str, **options: Any) -> Mapping[str, int]:
        of_all = any(map(self._is_map, (*figure, options.get("figure"))))
        first = {} if of_all or self.parts is not None else {"layer": self.layers[0]}
        return {**first, **super()._figure_place(*figure, **options)}

    def _is_map(self, figure: str | None) -> bool:
        return figure in self.quantities and (self.parts is not None or figure not in self.FIGURES)

    def _sections(self) -> "Sequence[Section]":
        if self.parts is not None:
            return self._difference_sections({name: name for name in ("magnitude", "orientation")})
        if "values" not in self.state or len(self.tokens) > 1:
            return ()
        shown = [self.layers[place] for place in spread(len(self.layers), 4)]
        return [
            Section(
                f"Updates along the text, layer {layer}",
                "Each point is ‖u‖ / ‖x‖ of one head at one token, marked by the key with the head's highest "
                "attention.",
                {f"magnitude-by-position-{layer}": self.plot("magnitude_by_position", layer=layer)},
                f'updates.plot("magnitude_by_position", layer={layer})',
            )
            for layer in shown
        ]

    @property
    def lead(self) -> str:
        return self.finding()

    def finding(self, nouns: Nouns = TEXT) -> str:
        """The main finding in one sentence, with `nouns` as the words for the input."""
        if self.parts is not None:
            return self._difference_lead("magnitude")
        if not bool(self.magnitude.isfinite().any()):
            return f"There is no {nouns.token} after the first, so updates are not measured."
        first, elsewhere = self.magnitude_at_first, self.magnitude_elsewhere
        both = ~(first.isnan() | elsewhere.isnan())
        smaller = int((first < elsewhere)[both].sum())
        answers = ""
        if "logits" in self.state:
            layer, head = divmod(int(self.logit.abs().nan_to_num(0.0).argmax()), self.logit.shape[1])
            written = signed(float(self.logit[layer, head]), ".2f")
            answers = (
                f" The largest contribution to the answers is that of L{layer}H{head}: {written} "
                f"{self._logit_unit} on average."
            )
        return (
            f"On average, a head's update has {percent(float(self.magnitude.nanmean()), 0)} of the norm of the "
            f"residual stream. Heads that write less where they attend most to the {nouns.first}: {smaller} of the "
            f"{int(both.sum())} with rows of both kinds.{answers}"
        )

    def __repr__(self) -> str:
        if self.parts is not None or bool(self.magnitude.isnan().all()):
            return super().__repr__()
        layers, heads = len(self.layers), self.magnitude.shape[1]
        return (
            f"ResidualUpdates({self._texts}, {counted(layers, noun='layer')} × {counted(heads, noun='head')}; mean "
            f"magnitude {float(self.magnitude.nanmean()):.3g} of the stream's norm, mean cosine "
            f"{float(self.orientation.nanmean()):+.2f})"
        )


@public
@dataclass(frozen=True, repr=False)
class BlockUpdates(BlockStatistics, RowMeans):
    """What a layer's attention as a whole and its MLP add to the stream; means are `[layer 1]`.

    `attn_magnitude` ‖attn_out‖ / ‖x‖ and `attn_orientation` cos(attn_out, x) compare attention's output with the stream
    that enters the block; `mlp_magnitude` and `mlp_orientation` compare the MLP's output with the stream to which it is
    added. `cancellation` is ‖Σ_h u_h‖ / Σ_h ‖u_h‖: 1 where all heads write in one direction, near 0 where they cancel.
    """

    _MAIN = "attn_magnitude"

    @property
    def _places(self) -> Places:
        index = (self.layers, [0] * len(self.layers))
        return replace(super()._places, columns={"layer": self.layers}, index=index, things="layers")


def update_numbers(
    updates: ResidualUpdates, text: int = 0, layers: Sequence[int] = (), nouns: Nouns = TEXT
) -> UpdateNumbers:
    """Returns the numbers of figures 7 to 10 for one text, in all layers or some, as arrays. `nouns` are the
    figures' words for the input.
    """
    real = updates._row("classes").any(dim=1)
    text = index_of("text", text, len(real), f"{len(real)} texts were run")
    if updates.provenance.options.get("stack") == "cross":
        raise InputError("figures 7 to 10 show self-attention; this is cross-attention. Use .to_frame().")
    here = real[text].nonzero()[:, 0]
    layers = layers or updates.layers
    places = [updates._place_of(layer) for layer in layers]
    key = updates.top_key[places][:, :, text][..., here]

    def by_side(*statistics: str) -> Any:
        rows = torch.stack([updates.by_row(statistic)[places] for statistic in statistics])
        return rows[:, :, :, text][..., here].float().numpy()

    return UpdateNumbers(
        tokens=tuple(updates.tokens[text][place] for place in here.tolist()),
        layers=tuple(layers),
        magnitude=by_side("magnitude", "target_magnitude"),
        orientation=by_side("orientation", "target_orientation"),
        attended=torch.where(key >= 0, key - int(here[0]), -1).int().numpy(),
        nouns=nouns,
    )
