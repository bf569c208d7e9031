"""What is summed of what heads write into the residual stream: statistics of rows by text."""

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import InputError
from ..maths.compared import Compared, compared
from ..maths.updates import Writer, cosine
from ..model.block import attention_scale, before_mlp
from ..model.carried import values_read
from ..model.local_global import global_tokens
from ..model.observed import LayerEnd, RowBlock
from ..model.stack import Stack
from ..model.unembedding import Unembedding
from ..model.weights import tensors_hash
from .row_classes import row_classes
from .row_means import added, closed, sums_by_text
from .stream import Reducer, Run, State

STATISTICS: Final = (
    "magnitude", "orientation", "along", "across", "target_magnitude", "target_orientation",
    "magnitude_at_self", "magnitude_at_first", "magnitude_elsewhere",
)  # fmt: skip
"""What is measured for every head, row by row, in the order of the axis `statistic`."""

BLOCK_STATISTICS: Final = ("attn_magnitude", "attn_orientation", "mlp_magnitude", "mlp_orientation", "cancellation")
"""What is measured for a layer's whole attention and whole MLP, row by row."""


@dataclass(frozen=True)
class Towards:
    """The direction in the stream that each text's answer reads."""

    unembedding: Unembedding
    direction: Float[Tensor, "batch d_model"]


@dataclass(frozen=True)
class UpdateSums(Reducer):
    """Measures what every head writes, layer by layer."""

    gathered: ClassVar[bool] = True
    borrows: ClassVar[bool] = True
    towards: Towards | None = None
    points = ("resid_pre", "z", "v", "attn_raw", "attn_out")
    optional_points = ("resid_mid", "mlp_out", "resid_post")

    @property
    def options(self) -> dict[str, str]:
        """The answers, if any, identified by their directions."""
        if self.towards is None:
            return {"towards": "none"}
        towards = tensors_hash({"direction": self.towards.direction})
        return {"towards": towards, "logit_unit": self.towards.unembedding.unit}

    def start(self, run: Run) -> State:
        """The rows of every layer, empty."""
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
        return {name: value.to(run.model.device) for name, value in state.items()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Notes which key each row attends to most; −1 where it has no choice."""
        choice = block.mask.once(("choice", block.rows), lambda: block.real & (block.visible[:, 0].sum(dim=-1) > 1))
        run.between.setdefault((id(state["classes"]), block.index), []).append((block.top_key, choice))

    def add_layer(self, state: State, end: LayerEnd, run: Run) -> None:
        """Measures what a layer's heads wrote, and what its attention and MLP did as wholes."""
        precision = state["values"].dtype
        scale = attention_scale(run.stack, end, precision)
        weights = run.stack.weights(end.layer)
        W_O = scale.folded(weights.W_O.detach().to(precision))
        x, z, v, out = (end[name].to(precision) for name in ("resid_pre", "z", "v", "attn_out"))
        constant = None if weights.b_O is None else scale.folded(weights.b_O.detach().to(precision))
        attention = compared(out, x, constant, scale.by_token)
        stream_norm = attention.stream[:, None]
        writer, read = Writer(W_O), self._read(v, end.layer, run)
        # By the stack's name: at the end of a decoder's layer the notes are those of its cross-attention.
        key_stream = x if end.stack != "cross" or end.notes.key_input is None else end.notes.key_input.to(precision)
        (norm, product), *of_keys = writer.against(x, z, *(read if key_stream is x else ()))
        norm, product = norm * scale.by_token[:, None], product * scale.by_token[:, None]
        magnitude, orientation = norm / stream_norm, cosine(product, norm, stream_norm)
        real = end.real[:, None] & (stream_norm > 0)

        top, choice = (
            torch.cat(each, dim=-1) for each in zip(*run.between.pop((id(state["classes"]), end.index)), strict=True)
        )
        key = top.masked_fill(~choice[:, None], -1)
        state["top_key"][end.index] = key.transpose(0, 1)
        key_norm = stream_norm if key_stream is x else torch.linalg.vector_norm(key_stream, dim=-1)[:, None]
        attended = [
            _attended(*each, key_norm, key, scale.by_token) for each in of_keys or writer.against(key_stream, *read)
        ]
        target = attended[0]
        for of_global in attended[1:]:
            target = target.but(global_tokens(run.batch)[:, None], of_global)
        seen = real & (key >= 0)
        at_first = key == run.batch.keys(end.stack).begins[:, None, None]
        at_self = key == torch.arange(key.shape[-1], device=key.device)
        if end.stack == "cross":
            at_self = torch.zeros_like(at_self)
        found = {
            "magnitude": (magnitude, real),
            "orientation": (orientation, real & (norm > 0)),
            "along": (magnitude * orientation, real),
            "across": (magnitude * (1 - orientation**2).clamp_min(0).sqrt(), real),
            "target_magnitude": (target.magnitude, real & target.compared),
            "target_orientation": (target.orientation, real & target.directed),
            "magnitude_at_self": (magnitude, seen & at_self),
            "magnitude_at_first": (magnitude, seen & at_first & ~at_self),
            "magnitude_elsewhere": (magnitude, seen & ~at_first & ~at_self),
        }
        _keep(state["values"], state["valid"], end.index, [found[name] for name in STATISTICS])
        if self.towards is not None:
            texts = torch.arange(len(x), device=x.device)
            last = end.real.shape[1] - 1 - end.real.int().flip(1).argmax(dim=1)
            written = einsum(z[texts, last], W_O, "batch head d_head, head d_head d_model -> batch head d_model")
            towards = einsum(written, self.towards.direction, "batch head d_model, batch d_model -> head batch")
            state["logits"][end.index] = towards * scale.by_token[texts, last]
            if end.index == run.n_layers - 1:
                state["final_scale"][:] = self.towards.unembedding.scale(end["resid_post"][texts, last])
        blocks = _whole_blocks(run.stack, end, attention, norm.sum(dim=1))
        _keep(state["block_values"], state["block_valid"], end.index, [blocks[name] for name in BLOCK_STATISTICS])

    def _read(self, v: Tensor, layer: int, run: Run) -> list[Float[Tensor, "batch key some_head d_value"]]:
        """The values that rows read, and those that the rows of global tokens read where these have their own."""
        if (gamma := run.stack.gamma_of_z(layer)) is not None:
            group = run.n_heads // v.shape[2]
            v = repeat(v, "batch key kv d_head -> batch key (kv group) d_head", group=group) * gamma.to(v)
        both = (False, True) if run.stack.architecture.windows else (False,)
        return [values_read(v, run.stack, by_global=by_global) for by_global in both]

    def close(self, state: State, run: Run) -> State:
        """Sums over the rows of each of the batch's texts."""
        sums = {}
        for prefix in ("", "block_"):
            by_text = sums_by_text(state[f"{prefix}values"], state[f"{prefix}valid"], state["classes"])
            sums[f"{prefix}sums"], sums[f"{prefix}counts"] = by_text
        return closed(sums if run.corpus else sums | state, run)

    def merge(self, one: State, other: State) -> State:
        """The sum of both."""
        return added(one, other)


@dataclass(frozen=True)
class _Attended:
    """What the key that each row attends to most would write, against the stream there."""

    magnitude: Float[Tensor, "batch head query"]
    orientation: Float[Tensor, "batch head query"]
    compared: Bool[Tensor, "batch head query"]
    """Whether there is such a key, with a nonzero stream."""
    directed: Bool[Tensor, "batch head query"]
    """Whether, in addition, its value is nonzero."""

    def but(self, rows: Bool[Tensor, "batch 1 query"], other: "_Attended") -> "_Attended":
        """The same with other numbers in some rows."""
        return _Attended(*(torch.where(rows, vars(other)[name], value) for name, value in vars(self).items()))


def _attended(
    norm: Float[Tensor, "batch head key"],
    product: Float[Tensor, "batch head key"],
    stream: Float[Tensor, "batch 1 key"],
    key: Int[Tensor, "batch head query"],
    by_token: Float[Tensor, "batch query"],
) -> _Attended:
    """v_j W_O against x_j, for the key j that each row attends to most."""
    magnitude, orientation = norm / stream, cosine(product, norm, stream)
    at = key.clamp(min=0)
    compared = (key >= 0) & (stream > 0).expand_as(norm).gather(-1, at)
    directed = compared & (norm > 0).gather(-1, at)
    return _Attended(magnitude.gather(-1, at) * by_token[:, None], orientation.gather(-1, at), compared, directed)


def _whole_blocks(
    stack: Stack, end: LayerEnd, attention: Compared, parts: Float[Tensor, "batch position"]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Each of `BLOCK_STATISTICS` as values and where they are defined; `parts` are the sums of the heads' norms."""
    found = _against("attn", attention, end.real) | {
        "cancellation": (attention.rest / parts.clamp_min(torch.finfo(parts.dtype).tiny), end.real & (parts > 0)),
    }
    none = torch.zeros_like(parts), torch.zeros_like(end.real)
    found |= {"mlp_magnitude": none, "mlp_orientation": none}
    if "mlp_out" in end:
        mlp = compared(end["mlp_out"].to(parts.dtype), before_mlp(stack, end).to(parts.dtype))
        found |= _against("mlp", mlp, end.real)
    return {name: (value[:, None], valid[:, None]) for name, (value, valid) in found.items()}


def _against(name: str, block: Compared, real: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Magnitude and orientation of a block's update, by their names."""
    magnitude = block.norm / block.stream.clamp_min(torch.finfo(block.norm.dtype).tiny)
    orientation = cosine(block.product, block.norm, block.stream)
    return {
        f"{name}_magnitude": (magnitude, real & (block.stream > 0)),
        f"{name}_orientation": (orientation, real & (block.norm * block.stream > 0)),
    }


def _keep(values: Tensor, valid: Tensor, layer: int, found: list[tuple[Tensor, Tensor]]) -> None:
    kept = torch.stack([defined.expand_as(value) for value, defined in found])
    values[:, layer] = torch.stack([value for value, _ in found]).masked_fill_(~kept, 0.0).transpose(1, 2)
    valid[:, layer] = kept.transpose(1, 2)
