"""Sums, by text, statistics of the vectors that heads write into the residual stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import InputError
from ..maths.float64 import put
from ..maths.statistic import POSITIVE, Statistic, Statistics
from ..maths.sums_by_text import counts_by_text, sums_by_text
from ..maths.update_statistics import STATISTICS, AgainstStream, LayerRows, update_statistics
from ..maths.updates import StreamPair, Writer, compared, cosine
from ..model.attention.local_global import global_tokens
from ..model.attention.observed import LayerEnd, RowBlock
from ..model.parts.hashes import tensors_hash
from ..model.reading.unembedding import Unembedding
from ..model.stack.block import attention_scale, before_mlp
from ..model.stack.carried import values_read
from .reducer import HeldLayers, Reducer, Run, State
from .row_means import closed, sum_of_states
from .token_types import row_classes


class BlockStatistics:
    """What a layer's whole attention and whole MLP write on each row."""

    attn_magnitude = Statistic(meaning="Mean of ‖attn_out‖ / ‖x‖, where x is the stream before it.", bounds=POSITIVE)
    attn_orientation = Statistic(meaning="Mean of cos(attn_out, x).", bounds=(-1.0, 1.0))
    mlp_magnitude = Statistic(meaning="Mean of ‖mlp_out‖ / ‖x‖, where x is the stream before it.", bounds=POSITIVE)
    mlp_orientation = Statistic(meaning="Mean of cos(mlp_out, x).", bounds=(-1.0, 1.0))
    cancellation = Statistic(meaning="Mean of ‖Σ_h u_h‖ / Σ_h ‖u_h‖: 1 where all heads write one direction.")


BLOCK_STATISTICS: Final = Statistics(BlockStatistics, Statistic)  # of a layer's whole attention and MLP, row by row


@dataclass(frozen=True)
class Towards:
    """The direction in the stream from which each text's answer is read."""

    unembedding: Unembedding
    direction: Float[Tensor, "batch d_model"]


@dataclass(frozen=True)
class UpdateSums(Reducer):
    """Measures what every head writes, layer by layer."""

    towards: Towards | None = None
    points = ("resid_pre", "z", "v", "attn_raw", "attn_out")
    optional_points = ("resid_mid", "mlp_out", "resid_post")

    @property
    def options(self) -> dict[str, str]:
        """The answers, if there are any, identified by their directions."""
        if self.towards is None:
            return {"towards": "none"}
        towards = tensors_hash({"direction": self.towards.direction})
        return {"towards": towards, "logit_unit": self.towards.unembedding.unit}

    def start(self, run: Run) -> State:
        batch = run.batch.queries(run.stack.label)
        texts, rows = batch.ids.shape
        heads, layers = run.n_heads, run.n_layers
        precision = torch.promote_types(run.model.dtype, torch.float32)
        state = {
            "classes": row_classes(batch),
            "top_key": torch.full((layers, heads, texts, rows), -1, dtype=torch.int32),
            "values": torch.zeros(len(STATISTICS), layers, heads, texts, rows, dtype=precision),
            "valid": torch.zeros(len(STATISTICS), layers, heads, texts, rows, dtype=torch.bool),
            "block_values": torch.zeros(len(BLOCK_STATISTICS), layers, 1, texts, rows, dtype=precision),
            "block_valid": torch.zeros(len(BLOCK_STATISTICS), layers, 1, texts, rows, dtype=torch.bool),
        }
        if self.towards is not None:
            if run.corpus or run.layers[-1] != run.model.last_stream[1] or run.stack is not run.model.output_stack:
                raise InputError("`answers` needs a list of texts, not a corpus, and the model's last layer.")
            state["logits"] = torch.zeros(layers, heads, texts, dtype=precision)
            state["final_scale"] = torch.zeros(texts, dtype=precision)
        return {name: put(value, run.model.device) for name, value in state.items()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Records the key to which each row attends most; −1 at rows without a choice of keys, and at padding."""
        choice = block.mask.once(("choice", block.rows), lambda: block.real & (block.visible[:, 0].sum(dim=-1) > 1))
        run.between.setdefault((id(state["classes"]), block.index), []).append((block.top.key, choice))

    def add_layer(self, state: State, end: LayerEnd, run: Run) -> None:
        """Measures the vectors that a layer's heads wrote, and the output of its whole attention and its whole MLP."""
        precision = state["values"].dtype
        scale = attention_scale(run.stack, end, precision)
        weights = run.stack.weights(end.layer)
        W_O = scale.folded(weights.W_O.detach().to(precision))
        x, z, v, out = (end[name].to(precision) for name in ("resid_pre", "z", "v", "attn_out"))
        constant = None if weights.b_O is None else scale.folded(weights.b_O.detach().to(precision))
        writer, read = Writer(W_O), self._read(v, end.layer, run)
        # By the stack's name, because the notes at the end of a decoder's layer are those of its cross-attention.
        key_stream = x if end.stack != "cross" or end.notes.key_input is None else end.notes.key_input.to(precision)
        (norm, product), *of_keys = writer.against(x, z, *(read if key_stream is x else ()))
        of_keys = of_keys or writer.against(key_stream, *read)
        attention = compared(out, x, constant, scale.by_token)
        key_norm = attention.stream if key_stream is x else torch.linalg.vector_norm(key_stream, dim=-1)
        top, choice = (
            torch.cat(blocks_of_rows, dim=-1)
            for blocks_of_rows in zip(*run.between.pop((id(state["classes"]), end.index)), strict=True)
        )
        mlp = None
        if "mlp_out" in end:
            mlp = compared(end["mlp_out"].to(precision), before_mlp(run.stack, end).to(precision))
        of_layer = _OfLayer(
            AgainstStream(norm, product, attention.stream),
            tuple(AgainstStream(*of_values, key_norm) for of_values in of_keys),
            torch.where(choice[:, None], top, -1),
            scale.by_token, attention, mlp, norm.sum(dim=1) * scale.by_token,
        )  # fmt: skip
        one = state["values"][:, 0]
        if layers := self._held(state, run).add(of_layer.kind, end.index, of_layer, one.nbytes, one.device):
            self._add_rows(state, layers, run)
        if self.towards is not None:
            texts = torch.arange(len(x), device=x.device)
            last = end.real.shape[1] - 1 - end.real.int().flip(1).argmax(dim=1)
            at_last = einsum(z[texts, last], W_O, "batch head d_head, head d_head d_model -> batch head d_model")
            towards = einsum(at_last, self.towards.direction, "batch head d_model, batch d_model -> head batch")
            state["logits"][end.index] = towards * scale.by_token[texts, last]
            if end.index == run.n_layers - 1:
                state["final_scale"][:] = self.towards.unembedding.scale(end["resid_post"][texts, last])

    def _held(self, state: State, run: Run) -> "HeldLayers[tuple[int, bool], _OfLayer]":
        return HeldLayers.of(state, run)

    def _add_rows(self, state: State, layers: "dict[int, _OfLayer]", run: Run) -> None:
        at, held = torch.tensor(list(layers), device=state["classes"].device), list(layers.values())
        real, label = run.batch.queries(run.stack.label).mask, run.stack.label
        by_token, parts = torch.stack([layer.by_token for layer in held]), torch.stack([layer.parts for layer in held])
        rows = LayerRows(
            torch.stack([layer.key for layer in held]), real, run.batch.keys(label).begins, by_token,
            aligned=label != "cross", by_global=global_tokens(run.batch) if len(held[0].read) > 1 else None,
        )  # fmt: skip
        read = [_stacked(of_values) for of_values in zip(*(layer.read for layer in held), strict=True)]
        values, valid = update_statistics(_stacked([layer.written for layer in held]), read, rows)
        mlps = [layer.mlp for layer in held if layer.mlp is not None]
        attention, mlp = _stacked([layer.attention for layer in held]), _stacked(mlps) if mlps else None
        of_blocks = _whole_blocks(attention, mlp, parts, real)
        state["top_key"].index_copy_(0, at, rows.key.transpose(1, 2).int())
        for name, value in zip(
            ("values", "valid", "block_values", "block_valid"), (values, valid, *of_blocks), strict=True
        ):
            state[name].index_copy_(1, at, value)

    def _read(self, v: Tensor, layer: int, run: Run) -> list[Float[Tensor, "batch key some_head d_value"]]:
        """The values that rows read and, if global tokens have separate values, the values that their rows read."""
        if (gamma := run.stack.gamma_of_z(layer)) is not None:
            group = run.n_heads // v.shape[2]
            v = repeat(v, "batch key kv d_head -> batch key (kv group) d_head", group=group) * gamma.to(v)
        both = (False, True) if run.stack.architecture.windows else (False,)
        return [values_read(v, run.stack, by_global=by_global) for by_global in both]

    def close(self, state: State, run: Run) -> State:
        """Sums over the rows of each of the batch's texts."""
        for _, layers in self._held(state, run).rest():
            self._add_rows(state, layers, run)
        sums = {}
        for prefix in ("", "block_"):
            sums[f"{prefix}sums"] = sums_by_text(state[f"{prefix}values"], state["classes"])
            sums[f"{prefix}counts"] = counts_by_text(state[f"{prefix}valid"], state["classes"])
        return closed(sums if run.corpus else sums | state, run)

    def merge(self, one: State, other: State) -> State:
        return sum_of_states(one, other)


@dataclass(frozen=True)
class _OfLayer:
    """What the heads of a layer wrote and read, its attention and its MLP, against the stream."""

    written: AgainstStream
    read: tuple[AgainstStream, ...]
    key: Int[Tensor, "batch head row"]  # the key that each row attends to most; −1 where it has no choice
    by_token: Float[Tensor, "batch position"]
    attention: StreamPair
    mlp: StreamPair | None
    parts: Float[Tensor, "batch position"]  # the sums of the heads' norms

    @property
    def kind(self) -> tuple[int, bool]:
        """The key shared by layers that are compared together."""
        return len(self.read), self.mlp is not None


Compared = TypeVar("Compared", AgainstStream, StreamPair)


def _stacked(layers: Sequence[Compared]) -> Compared:
    """The same of several layers, with an axis of layers."""
    return type(layers[0])(*(torch.stack([vars(layer)[name] for layer in layers]) for name in vars(layers[0])))


def _whole_blocks(
    attention: StreamPair,
    mlp: StreamPair | None,
    parts: Float[Tensor, "layer batch position"],
    real: Bool[Tensor, "batch position"],
) -> tuple[Float[Tensor, "statistic layer 1 batch position"], Bool[Tensor, "statistic layer 1 batch position"]]:
    """Each of `BLOCK_STATISTICS`, 0 where it is undefined, and where it is defined."""
    statistics = _against("attn", attention, real) | {
        "cancellation": (attention.rest / parts.clamp_min(torch.finfo(parts.dtype).tiny), real & (parts > 0))
    }
    none = torch.zeros_like(parts), torch.zeros_like(parts, dtype=torch.bool)
    statistics |= {"mlp_magnitude": none, "mlp_orientation": none} if mlp is None else _against("mlp", mlp, real)
    values, valid = (
        torch.stack([statistics[name][place] for name in BLOCK_STATISTICS])[:, :, None] for place in (0, 1)
    )
    return values.masked_fill_(~valid, 0.0), valid


def _against(name: str, block: StreamPair, real: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The magnitude and the orientation of a block's update, by name."""
    magnitude = block.norm / block.stream.clamp_min(torch.finfo(block.norm.dtype).tiny)
    orientation = cosine(block.product, block.norm, block.stream)
    return {
        f"{name}_magnitude": (magnitude, real & (block.stream > 0)),
        f"{name}_orientation": (orientation, real & (block.norm * block.stream > 0)),
    }
