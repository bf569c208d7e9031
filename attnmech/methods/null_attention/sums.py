"""Measures each text's sink: the attention that it receives, what its value writes, and what heads write.

One pass measures everything; it stores only what each key receives and the key to which each row attends most.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from ...basics.arguments import shown
from ...batch import Batch
from ...errors import InputError
from ...maths.float64 import as_float64, put
from ...maths.received import received_by_key
from ...maths.updates import Writer
from ...model.attention.observed import LayerEnd, RowBlock
from ...model.inputs.encoder import Inputs
from ...model.inputs.encoders import special_keys
from ...model.run.hooked import HookedModel
from ...model.stack.block import attention_scale
from ...model.stack.carried import values_read
from ...runs.corpus import is_one_batch
from ...runs.reducer import Reducer, Run, Source, State
from ...runs.stream import stream
from ...runs.workers import Workers
from .formulas import most_attended, sink_mass, value_ratio

Target: TypeAlias = Literal["first", "most_attended", "special"]

SINKS: Final[Mapping[str, str]] = {
    "first": "the first token",
    "most_attended": "the most attended key",
    "special": "the special tokens",
}
"""The possible sinks, with the words for them."""

FACTS: Final = ("sink_mass", "value_ratio", "update_at_sink", "update_elsewhere")  # in the order of the axis `fact`


@dataclass(frozen=True)
class Sinks:
    """The measurements of the sinks of some texts."""

    facts: Float[Tensor, "fact layer head text"]  # `FACTS`; NaN where a text has no row or token that defines one
    keys: Bool[Tensor, "#layer #head text key"]  # True at the sink
    mean_value: Float[Tensor, "layer head d_value"]  # the mean v over all tokens but the sink; NaN if there are none


def sinks_of(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    sink: str,
    *,
    layers: Sequence[int],
    stack: str | None = None,
    bos: bool | None = None,
    engine: str | Workers = "local",
) -> Sinks:
    """Measures the sinks of texts in batches, and numbers the texts as a sweep over the same inputs does.

    Raises `InputError` for an unknown sink, and with sink "special" for a text without special tokens.
    """
    if not isinstance(sink, str) or sink not in SINKS:
        known = ", ".join(f'"{name}" ({words})' for name, words in SINKS.items())
        raise InputError(f"`sink` must be one of {known}; got {shown(sink)}.")
    label = model.stack(stack).label if stack else model.output_stack.label
    if sink == "special" and not special_keys(model.encoder, label):
        raise InputError('sink="special" needs a tokenizer with special tokens; use sink="first".')
    whole = is_one_batch(model, inputs) or not isinstance(inputs, Iterable)
    documents: Any = [inputs] if whole else inputs
    sinks: Sinks
    (sinks,) = stream(model, iter(documents), [SinkReducer(sink)], layers=layers, stack=stack, bos=bos, engine=engine)
    return sinks


@dataclass(frozen=True)
class SinkReducer(Reducer):
    """Measures the sinks of each text, layer by layer."""

    sink: str
    points = ("resid_pre", "z", "v", "attn_raw", "attn_out")

    def start(self, run: Run) -> State:
        """Sums of 0 for each key, and empty tensors for each row's most attended key and the facts of each text."""
        batch = run.batch.key_tokens(run.stack.label)
        layers, heads, (texts, width) = run.n_layers, run.n_heads, batch.ids.shape
        precision = torch.promote_types(run.model.dtype, torch.float32)
        state = {
            "documents": run.documents.clone(),
            "known": self._known(batch, run),
            "received": torch.zeros(layers, texts, heads, width, dtype=precision),
            "top_key": torch.full((layers, texts, heads, width), -1, dtype=torch.int32),
            "facts": torch.zeros(len(FACTS), layers, heads, texts, dtype=torch.float64),
            "defined": torch.zeros(len(FACTS), layers, heads, texts, dtype=torch.bool),
            "value_sums": torch.zeros(layers, heads, run.stack.d_value, dtype=torch.float64),
            "value_counts": torch.zeros(layers, heads, dtype=torch.float64),
        }
        if self.sink == "most_attended":
            state["most"] = torch.zeros(layers, heads, texts, width, dtype=torch.bool)
        return {name: put(value, run.model.device) for name, value in state.items()}

    def _known(self, batch: Batch, run: Run) -> Bool[Tensor, "batch key"]:
        """The sinks known before the pass; all False if the sink is the most attended key."""
        if self.sink == "most_attended":
            return torch.zeros_like(batch.mask)
        if self.sink == "first":
            return batch.first
        special = batch.is_special & batch.mask
        without = (~special.any(dim=1)).nonzero()
        if len(without):
            raise InputError(
                f'sink="special" needs a special token in every text; text {int(run.documents[int(without[0])])} has '
                "none. bos=True puts one at the beginning."
            )
        return special

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Adds what each key receives from other rows outside the sink, and notes each row's most attended key."""
        rows = slice(block.rows.start, block.rows.stop)
        counted = block.real & ~state["known"][:, rows]
        received = received_by_key(block.pattern, counted[:, None])[:, :, 0]
        own = block.pattern.diagonal(offset=rows.start, dim1=-2, dim2=-1)
        there = own.shape[-1]
        received[..., rows.start : rows.start + there] -= own * counted[:, None, :there]
        width = min(received.shape[-1], state["received"].shape[-1])
        state["received"][block.index][..., :width] += received[..., :width]
        choice = counted & (block.visible[:, 0].sum(dim=-1) > 1)
        key = block.top.key.masked_fill(~choice[:, None], -1)
        # Keys that are not tokens cannot be sinks.
        key = key.masked_fill(key >= state["received"].shape[-1], -1)
        state["top_key"][block.index][..., rows] = key.int()

    def add_layer(self, state: State, end: LayerEnd, run: Run) -> None:
        """Measures the facts of a layer, after all attention to its keys has been summed."""
        layer, real = end.index, end.real
        # Subtracting a row's weight on itself leaves rounding errors.
        received = state["received"][layer].clamp_min(0.0)
        sink = state["known"][:, None]
        if "most" in state:
            sink = torch.zeros_like(received, dtype=torch.bool)
            sink.scatter_(-1, most_attended(received, real)[..., None], True)
            state["most"][layer] = sink.transpose(0, 1)
        others = real[:, None] & ~sink
        scale = attention_scale(run.stack, end, received.dtype)
        W_O = scale.folded(run.stack.weights(end.layer).W_O.detach().to(received.dtype))
        x, z, v = (end[name].to(received.dtype) for name in ("resid_pre", "z", "v"))
        writer = Writer(W_O)
        values = repeat(v, "batch key kv d_head -> batch key (kv group) d_head", group=len(W_O) // v.shape[2])
        gamma = run.stack.gamma_of_z(end.layer)
        read = values_read(values, run.stack)
        written = writer.norm(read if gamma is None else read * gamma.to(read))

        key = state["top_key"][layer].long()
        stream_norm = torch.linalg.vector_norm(x, dim=-1)[:, None]
        update = writer.norm(z) * scale.by_token[:, None] / stream_norm
        looking = (key >= 0) & others & (stream_norm > 0)
        at_sink = sink.expand_as(key).gather(-1, key.clamp(min=0))
        measured = {
            "sink_mass": (sink_mass(received, sink, others), others.any(dim=-1)),
            "value_ratio": (value_ratio(written, received, sink, others), others.any(dim=-1)),
            "update_at_sink": _mean_where(update, looking & at_sink),
            "update_elsewhere": _mean_where(update, looking & ~at_sink),
        }
        for place, name in enumerate(FACTS):
            value, defined = measured[name]
            known = defined.expand_as(value)
            state["facts"][place, layer] = value.masked_fill(~known, 0.0).T
            state["defined"][place, layer] = known.T
        counted = as_float64(others.expand_as(key))
        state["value_sums"][layer] = einsum(
            as_float64(values), counted, "batch key head d_head, batch head key -> head d_head"
        )
        state["value_counts"][layer] = counted.sum(dim=(0, 2))

    def close(self, state: State, run: Run) -> State:
        """The facts and sinks of each text, and the sums of values."""
        kept = {name: state[name] for name in ("documents", "facts", "defined", "value_sums", "value_counts")}
        return kept | {"keys": state["most"] if "most" in state else state["known"][None, None]}

    def merge(self, one: State, other: State) -> State:
        """The texts of both, and the sums of both."""
        longest = max(one["keys"].shape[-1], other["keys"].shape[-1])
        keys = [
            torch.nn.functional.pad(state["keys"], (0, longest - state["keys"].shape[-1])) for state in (one, other)
        ]
        return {
            **{name: torch.cat((one[name], other[name]), dim=-1) for name in ("documents", "facts", "defined")},
            **{name: one[name] + other[name] for name in ("value_sums", "value_counts")},
            "keys": torch.cat(keys, dim=2),
        }

    def finish(self, state: State, source: Source) -> Sinks:
        """The result, with the texts in order."""
        order = state["documents"].argsort()
        return Sinks(
            state["facts"].masked_fill(~state["defined"], torch.nan)[..., order],
            state["keys"][:, :, order],
            state["value_sums"] / state["value_counts"][..., None],
        )


def _mean_where(
    values: Float[Tensor, "batch head row"], chosen: Bool[Tensor, "batch head row"]
) -> tuple[Float[Tensor, "batch head"], Bool[Tensor, "batch head"]]:
    count = chosen.sum(dim=-1)
    return values.masked_fill(~chosen, 0.0).sum(dim=-1) / count.clamp_min(1), count > 0
