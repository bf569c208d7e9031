"""Reads the three stacks of an encoder-decoder from a traced pass, as `structure.py` reads one stack.

The inputs of encoder and decoder differ in length, so the lengths in a call of the attention function show whose call
it is: queries and keys of one length are self-attention, queries of the decoder over keys of the encoder are
cross-attention. The encoder reads tokens or sound, the decoder tokens.

Cross-attention reads the stream between self-attention and MLP, x' = x + attn_out or the norm of that, and adds to it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...maths.float64 import as_float64
from ..parts.modules import KEY_STATES
from ..parts.weights import Separate, at_home
from .architecture import Architecture
from .block_structure import BlockReader, UnreadableError
from .copies import copy_of
from .signals import KINDS, signal_of
from .structure import SEED, TEXTS, Reader, common_plan, family
from .traced import Attended, Call, Factors, Trace, calls_within, distance, factor_of, same


class CrossReader(BlockReader):
    """Reads cross-attention, at `start.within` in the decoder's block of `calls`, as if it were a block."""

    def __init__(self, start: Architecture, attended: Attended, calls: Sequence[Call], factors: Factors) -> None:
        own = calls_within(calls, start.within)
        self.call = next(call for call in own if not call.path)  # that of the cross-attention
        self.states = _states(self.call, attended)  # keys and values are made from them
        super().__init__(start, attended, own, factors)

    def _attention(self, plan: Architecture) -> Architecture:
        heads, d_head = self._attended.q.shape[2:]
        q = self._source("q", self._attended.q)
        self._length, self._attn_in = self.states.shape[1], self.states
        k, v = self._source("k", self._attended.k), self._source("v", self._attended.v)
        if any(source.norm is not None or source.latent is not None for source in (q, k, v)):
            raise UnreadableError("its cross-attention has norms or latents of queries, keys or values")
        rotary, scale = self._rotary(q, k)
        if rotary is not None:
            raise UnreadableError("its cross-attention rotates queries and keys")
        self._length, self._attn_in = self._attended.q.shape[1], self._stream
        query_scale = self._factors.named(q.factor / scale, d_head)
        bias = self._attended.options.get("position_bias")
        plan = replace(plan, n_heads=heads, query_scale=query_scale, causal=False)
        plan = replace(plan, positioned=bias is None or bool(bias.any()))
        return self._with_layout(plan, q, k, v)

    def _around(self, plan: Architecture) -> Architecture:
        out = self._out()
        return replace(plan, out=out.path, attn_out=out.path, gate=self._gate(out))


def _states(own: Call, attended: Attended) -> Float[Tensor, "batch key features"]:
    for name in KEY_STATES:
        states = own.kwargs.get(name)
        if isinstance(states, Tensor) and states.shape[:2] == attended.k.shape[:2]:
            return states.detach().clone()
    raise UnreadableError(f"its cross-attention does not take the encoder's states as {' or '.join(KEY_STATES)}")


_LENGTH: Final = 13  # the length of the decoder's texts: neither that of the encoder's, nor any model's number of heads
_LABELS: Final = ("encoder", "decoder", "cross")
_SAME: Final = 1e-3  # the largest relative distance between two tensors that differ only by rounding
_NO_HEAD: Final = "its stream goes to the decoder, not to the unembedding"


@dataclass(frozen=True)
class _Place:
    """The place of a stack's attention: the list of blocks, the path within a block, and the layers with attention."""

    blocks: str
    attention: str
    layers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.blocks}.N.{self.attention}"

    def by_path(self) -> dict[str, int]:
        return {f"{self.blocks}.{layer}": layer for layer in self.layers}


class StacksReader(Reader):
    """Reads the stacks of one model; raises `UnreadableError` with what is missing."""

    def __init__(self, original: PreTrainedModel) -> None:
        super().__init__(original, None)
        if KINDS.get(original.main_input_name) == "pixels":
            raise UnreadableError(
                "its encoder reads images; only encoder-decoders whose encoder reads text or sound are read"
            )
        self._heard = signal_of(original)  # the kind of input that the encoder takes; None for tokens
        self._of_encoder = self._ids if self._heard is None else self._ids[:, :0]
        frames = getattr(original.config, "max_source_positions", 0)
        self._of_decoder = self._random_ids(_LENGTH if self._heard is None or frames != _LENGTH else _LENGTH + 1)
        self._plans: dict[str, dict[int, Architecture]] = {label: {} for label in _LABELS}
        self._unread: dict[str, Exception] = {}
        self._crossed: Tensor | None = None  # the encoder's states, from which cross-attention makes keys and values

    def _inputs(self) -> dict[str, Any]:
        inputs = {"decoder_input_ids": self._of_decoder, "use_cache": False}
        if self._heard is None:
            return {"input_ids": self._of_encoder, **inputs}
        return {**self._heard.noise(TEXTS, SEED, self._rows), **inputs}

    def _plain(self) -> nn.Module:
        """A copy of the stacks; heads may refuse the texts, and are not run."""
        return copy_of(self._original).base_model

    def architectures(self) -> tuple[Architecture, ...]:
        """The architectures of the three stacks, in the order in which the certificate names them."""
        tokens = getattr(self._model.config, "decoder_vocab_size", None) or len(self._rows)
        if tokens != len(self._rows):
            raise UnreadableError(
                f"its encoder has {len(self._rows)} tokens and its decoder {tokens}; attnmech needs one vocabulary"
            )
        places = self._places_of_stacks(self._run({}))
        named = self._base.named_modules()
        modules = {path: module for path, module in named if path and not isinstance(module, nn.ModuleList)}
        trace = self._run(modules, self._reading(places))
        self._require_one_embedding(trace)
        encoder, decoder, cross = (common_plan(self._plans[label], self._unread) for label in _LABELS)
        self._ids = self._of_encoder
        crossed_norm = self._norm_of_states(trace, places["encoder"])
        ends = self._ends_of(trace, places["encoder"]) | {"final_norm": crossed_norm, "head_refused": _NO_HEAD}
        if self._heard is not None:
            ends["position_limit"] = None
        encoder = replace(encoder, **ends)
        self._ids = self._of_decoder
        decoder = replace(decoder, **self._ends_of(trace, places["decoder"]))
        return encoder, decoder, cross

    def _places_of_stacks(self, trace: Trace) -> dict[str, _Place]:
        by_label: dict[str, list[Attended]] = {label: [] for label in _LABELS}
        for attended in trace.attended:
            by_label[self._label_of(attended)].append(attended)
        places = {}
        for label, calls in by_label.items():
            if not calls:
                raise UnreadableError(f"no attention of the {label} goes through transformers' attention interface")
            blocks, attention, layers = self._one_place(calls, f"the attention of its {label}")
            places[label] = _Place(blocks, attention, tuple(layers))
        if (places["decoder"].blocks, places["decoder"].layers) != (places["cross"].blocks, places["cross"].layers):
            raise UnreadableError(f"cross-attention ({places['cross']}) is not in each block of {places['decoder']}")
        return places

    def _label_of(self, attended: Attended) -> str:
        target = self._of_decoder.shape[1]
        queries, keys = attended.q.shape[1], attended.k.shape[1]
        if queries == keys:
            return "decoder" if keys == target else "encoder"
        if queries != target:
            raise UnreadableError(
                f"it attends from {queries} to {keys} positions, given "
                f"{'a text' if self._heard is None else 'a recording'} and a decoder's text of {target} tokens"
            )
        return "cross"

    def _require_one_embedding(self, trace: Trace) -> None:
        for call in trace.calls:
            table, ids = call.module, call.input
            if not isinstance(table, nn.Embedding) or table.weight is self._rows or not same(ids, self._of_decoder):
                continue
            assert ids is not None
            if int(ids.max()) >= len(table.weight):
                continue
            rows = as_float64(at_home(table, table.weight).detach()[ids])
            if distance(factor_of(as_float64(call.made[0]), rows) * rows, as_float64(call.made[0])) < _SAME:
                raise UnreadableError("its encoder and its decoder embed tokens with different matrices")

    def _reading(self, places: Mapping[str, _Place]) -> Callable[[Trace, str], None]:
        """Returns the function that reads a block, of the encoder or the decoder, as it ends."""
        encoder, decoder = places["encoder"].by_path(), places["decoder"].by_path()

        def read(trace: Trace, path: str) -> None:
            if path not in encoder and path not in decoder:
                return
            try:
                if path in encoder:
                    start = self._start("encoder", places["encoder"])
                    self._plans["encoder"][encoder[path]] = BlockReader(start, *trace.take(path), self._factors).plan
                else:
                    self._read_decoder(trace, path, decoder[path], places)
            except Exception as error:  # judged after the pass, which would mistake it for the model's error
                self._unread[path] = error

        return read

    def _read_decoder(self, trace: Trace, path: str, layer: int, places: Mapping[str, _Place]) -> None:
        crossing = trace.attended.pop()
        attended, calls = trace.take(path)
        cross = CrossReader(self._start("cross", places["cross"]), crossing, calls, self._factors)
        start = self._start("decoder", places["decoder"])
        self._plans["decoder"][layer] = BlockReader(start, attended, calls, self._factors, cross.call).plan
        self._plans["cross"][layer] = cross.plan
        self._crossed = cross.states

    def _start(self, label: str, place: _Place) -> Architecture:
        plan = Architecture(
            name=family(self._model), stack=label, blocks=place.blocks, attention=place.attention, mid_norm=None,
            mlp_out=None, qkv=Separate("", "", ""), out="", hands_on=True,
        )  # fmt: skip
        if label == "encoder" and self._heard is not None:
            plan = replace(plan, reads=self._heard.reads)
        return plan if label != "cross" else replace(plan, within=place.attention, attention="", streams=False)

    def _ends_of(self, trace: Trace, place: _Place) -> dict[str, Any]:
        blocks = self._base.get_submodule(place.blocks)
        assert isinstance(blocks, nn.ModuleList)
        if len(blocks) > len(place.layers):
            raise UnreadableError(f"only some blocks of {place.blocks!r} attend")
        ends = self._ends(trace, place.blocks, 0, f"{place.blocks}.{len(blocks) - 1}")
        if ends["embed_scale"] == ends["stream_scale"] == 1:
            ends["embed_scale"] = self._scale_beside_positions(trace, f"{place.blocks}.0", ends["embed_norm"])
        return ends

    def _scale_beside_positions(self, trace: Trace, block: str, norm: str | None) -> float:
        """The factor between a token's row and its part of the stream, in a model that adds positions as well (Marian).

        The positions do not depend on the text, so differences between texts at one position show the factor.
        """
        entered = trace.call(block if norm is None else norm)
        rows = as_float64(self._rows.detach()[self._ids])
        if entered is None or entered.input is None or entered.input.shape != rows.shape:
            return 1.0
        stream, rows = (value[1:] - value[:1] for value in (as_float64(entered.input), rows))
        factor = self._factors.named(factor_of(stream, rows))
        exact = self._factors.knows(factor) and distance(factor * rows, stream) <= _SAME
        return factor if exact else 1.0

    def _norm_of_states(self, trace: Trace, encoder: _Place) -> str | None:
        """The norm between the encoder's last block and cross-attention; None if there is none."""
        last = trace.call(f"{encoder.blocks}.{encoder.layers[-1]}")
        assert last is not None
        if same(last.made[0], self._crossed):
            return None
        for call in trace.calls:
            between = same(call.input, last.made[0]) and same(call.output, self._crossed)
            if between and self._kind_of(call) is not None:
                return call.path
        raise UnreadableError(
            "its cross-attention reads neither the output of its encoder's last block nor a norm of it"
        )
