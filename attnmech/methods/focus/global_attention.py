"""Measures how much heads attend to global tokens and within their window (Longformer, Beltagy et al. 2020)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, Unpack

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...basics.public import public
from ...draw.section import Section
from ...draw.text import percent
from ...errors import InputError
from ...maths.float64 import put
from ...maths.statistic import Statistic, Statistics
from ...maths.sums_by_text import counts_by_text, sums_by_text
from ...model.attention.local_global import global_tokens
from ...model.attention.observed import RowBlock
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...runs.options import StreamOptions
from ...runs.reducer import Reducer, Run, Source, State
from ...runs.row_means import RowMeans, closed, sum_of_states
from ...runs.stream import stream
from ...runs.token_types import ROW_CLASSES, row_classes


class GlobalMasses:
    """The masses of each row on global tokens and in the window."""

    global_mass = Statistic(
        meaning="Mean attention of local tokens to the global ones.",
        label="attention of local tokens to global ones",
    )
    window_mass = Statistic(
        meaning="Mean attention of local tokens to the other keys of their windows.",
        label="attention in the window",
    )
    uniform_global_mass = Statistic(
        meaning="`global_mass` if every row attended uniformly to the keys that it sees.",
    )
    among_global = Statistic(meaning="Mean attention of global tokens to global tokens.")


MASSES: Final = Statistics(GlobalMasses, Statistic)
"""The masses measured on every row, in the order of the axis `statistic`."""


@public
def global_attention(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    **options: Unpack[StreamOptions],
) -> "GlobalAttention":
    """Measures the shares of each head's attention that go to global tokens and to the other keys in its window.

    >>> mass = am.global_attention(model, {"input_ids": ids, "global_attention_mask": chosen})     # doctest: +SKIP
    >>> mass.global_mass, mass.window_mass, mass.uniform_global_mass                                 # doctest: +SKIP

    On the row of a local token i, `global_mass` is Σ p_ij over the global tokens j, `window_mass` over all other keys;
    they add up to 1. `uniform_global_mass` is the mass on global tokens if i attended uniformly to the keys that it
    sees. On rows of global tokens, `among_global` is Σ p_ij over global tokens. All rows count, including the first of
    each text; `GlobalAttention.where` selects other rows.

    This takes one forward pass, with memory in proportion to the window.

    Args:
        model: the model.
        inputs: texts, or an iterator of texts (a corpus). Token ids may come with a `global_attention_mask` (1 at
            global tokens, 0 elsewhere). For strings, the global tokens are those of transformers in a model of this
            class: the first token for sequence classification, otherwise none.
        layers: all by default.
        stack: "encoder", "decoder" or "cross" in a model with several stacks.
        options: `bos`, `keep_rows`, `truncate`, `shard`, `journal`, `engine` and `progress`, as in `am.stream`.

    Returns:
        Shares of attention `[layer head]`, with intervals over texts.

    Raises:
        InputError: for a model without global tokens.
    """
    require_model(model)
    result: GlobalAttention
    (result,) = stream(model, inputs, [GlobalReducer()], layers=layers, stack=stack, **options)
    return result


@dataclass(frozen=True)
class GlobalReducer(Reducer):
    """Sums the masses of the rows, block by block."""

    def start(self, run: Run) -> State:
        """Sums of 0 for each mass, by text and class of row."""
        if not run.stack.architecture.windows:
            raise InputError(
                f"{run.model.name} has no global tokens: every layer has one kind of attention. Use "
                "am.attention_focus(model, texts) instead."
            )
        batch = run.batch.queries(run.stack.label)
        texts, rows = batch.ids.shape
        layers, heads = run.n_layers, run.n_heads
        state = {
            "classes": row_classes(batch),
            "global": global_tokens(run.batch),
            "sums": torch.zeros(len(MASSES), len(ROW_CLASSES), layers, heads, texts, dtype=torch.float64),
            "counts": torch.zeros(len(MASSES), len(ROW_CLASSES), layers, 1, texts, dtype=torch.float64),
        }
        if not run.corpus:
            precision = torch.promote_types(run.model.dtype, torch.float32)
            state["values"] = torch.zeros(len(MASSES), layers, heads, texts, rows, dtype=precision)
            state["valid"] = torch.zeros(len(MASSES), layers, 1, texts, rows, dtype=torch.bool)
        return {name: put(value, run.model.device) for name, value in state.items()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Adds the masses of the block's rows."""
        layer, rows, chosen = block.index, slice(block.rows.start, block.rows.stop), state["global"]
        pattern = block.attention.pattern
        keys = chosen[:, : pattern.shape[-1]] if block.keys is None else chosen[:, block.keys]
        visible = block.mask.visible_at(block.rows, block.keys)[..., : pattern.shape[-1]]
        values, valid = masses(pattern, visible, chosen[:, rows], keys, block.real)
        by_head = values.transpose(1, 2)
        classes = state["classes"][:, :, rows]
        state["sums"][:, :, layer] += sums_by_text(by_head, classes)
        state["counts"][:, :, layer] += counts_by_text(valid[:, None], classes)
        if "values" in state:
            state["values"][:, layer, :, :, rows] = by_head
            state["valid"][:, layer, 0, :, rows] = valid

    def close(self, state: State, run: Run) -> State:
        """The sums by text, without the tokens."""
        names = ("sums", "counts", *(() if run.corpus else RowMeans._BY_ROW))
        return closed({name: state[name] for name in names}, run)

    def merge(self, one: State, other: State) -> State:
        """The sum of both."""
        return sum_of_states(one, other)

    def finish(self, state: State, source: Source) -> "GlobalAttention":
        """The result, over all rows."""
        return GlobalAttention.of(state, source)


@dataclass(frozen=True, repr=False)
class GlobalAttention(GlobalMasses, RowMeans):
    """How much heads attend to global tokens and within their window, averaged over the rows of the texts.

    Shares of a row's attention, from 0 to 1; NaN where no row defines a mass.
    """

    _MAIN = "global_mass"
    FIGURES = ("global_mass", "window_mass")

    @classmethod
    def of(cls, state: State, source: Source, **more: Any) -> Self:
        """The result of a state; the first row of each text counts."""
        return super().of(state, source, **more).where(first_row=True)

    def _sections(self) -> "Sequence[Section]":
        if self.parts is not None:
            return self._difference_sections({name: name for name in self.FIGURES})
        reading = "Each cell is one head: a mean over the rows of local tokens. The two maps sum to 1."
        figures = {name: self.plot(name) for name in self.FIGURES}
        return [Section("Attention to global tokens", reading, figures, "mass.plot()")]

    @property
    def lead(self) -> str:
        if self.parts is not None:
            return self._difference_lead("global_mass")
        mean = self.global_mass
        if mean.isnan().all():
            return f"{self._opening}No local token of {self._texts} sees a global token."
        layer, head = divmod(int(mean.nan_to_num(-1).argmax()), mean.shape[1])
        share, chance, most = (
            percent(float(value), 0)
            for value in (mean.nanmean(), self.uniform_global_mass.nanmean(), mean[layer, head])
        )
        return (
            f"Local tokens give {share} of their attention to global tokens, averaged over heads; uniform attention "
            f"would give {chance}. L{layer}H{head} gives the most ({most})."
        )

    def __repr__(self) -> str:
        if self.parts is not None:
            return super().__repr__()
        to_global, rest = (percent(float(value.nanmean()), 0) for value in (self.global_mass, self.window_mass))
        return f"GlobalAttention({self._texts}; mean over heads: {to_global} on global tokens, {rest} in the window)"


def masses(
    pattern: Float[Tensor, "batch head row key"],
    visible: Bool[Tensor, "batch 1 row key"],
    global_rows: Bool[Tensor, "batch row"],
    global_keys: Bool[Tensor, "batch key"],
    real: Bool[Tensor, "batch row"],
) -> tuple[Float[Tensor, "statistic batch head row"], Bool[Tensor, "statistic batch row"]]:
    """Returns all `MASSES` on each row, 0 where undefined, and the rows on which each mass is defined.

    On a local row that sees a global token and other keys:

        global_mass   Σ_{j global} p_ij        window_mass   Σ_{j not global} p_ij
        uniform_global_mass   (number of global tokens) / (number of keys that the row sees)

    and on the row of a global token, which sees every key, among_global: Σ_{j global} p_ij. A global token inside the
    window counts as global; the model also attends to it only once.
    """
    chosen = global_keys[:, None, None]
    seen = visible[:, 0]
    both, others = ((seen & keys[:, None]).sum(dim=-1) for keys in (global_keys, ~global_keys))
    local = real & ~global_rows & (both > 0) & (others > 0)
    to_global, to_others = ((pattern * keys.to(pattern)).sum(dim=-1) for keys in (chosen, ~chosen))
    uniform = (both / (both + others).clamp_min(1)).to(pattern)[:, None].expand_as(to_global)
    values = torch.stack((to_global, to_others, uniform, to_global))
    valid = torch.stack((local, local, local, real & global_rows & (others > 0)))
    return values.masked_fill(~valid[:, :, None], 0.0), valid
