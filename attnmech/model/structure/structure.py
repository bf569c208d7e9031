"""Reads a model's `Architecture` from one traced pass: names propose, data decide.

The architecture found here is a proposal, which the certificate then proves on every layer, from the weights.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...basics.messages import first_line
from ...errors import UnsupportedModelError
from ...maths.float64 import as_float64
from ..attention.postponed import through, through_attend, watching_for_products
from ..parts.modules import submodule
from ..parts.norms import NormKind, kind_of
from ..parts.weights import Separate, as_stored, bias_of
from .architecture import Architecture
from .block_structure import BlockReader, UnreadableError
from .copies import cannot_run, copy_of, use_attention
from .refused import NO_STREAM
from .signals import Signal, signal_config, signal_of
from .text_part import placeholders_of, text_ids, text_modules
from .traced import TRACED, Attended, Call, Factors, Trace, distance, factor_of, same, trace_pass, traced_attention

TEXTS: Final = 8
_LENGTH: Final = 11  # of the traced texts: no model has so many heads, so axes cannot be confused
SEED: Final = 31
_ROWS: Final = 4096  # the number of rows of the unembedding that are read at a time
_STEEP: Final = 0.1  # logits are used to read their factor only where the slope of the soft cap is at least this


def read_structure(model: PreTrainedModel) -> Architecture:
    """The architecture of a model with one stack; raises `UnreadableError` with what was found and is missing."""
    signal = signal_of(model)
    try:
        return Reader(model, signal).architecture()
    except UnreadableError:
        if signal is not None or "position_ids" not in inspect.signature(model.forward).parameters:
            raise
        # A rotation is the identity at position 0; some models count from 1 (PaliGemma).
        with suppress(UnreadableError):
            return Reader(model, None, from_zero=True).architecture()
        raise


class Reader:
    """Reads a model with one stack; `encoder_decoder.py` reads one with three."""

    def __init__(self, original: PreTrainedModel, signal: Signal | None, *, from_zero: bool = False) -> None:
        self._signal = signal
        self._from_zero = from_zero  # whether positions are given, from 0, instead of counted by the model
        config = original.config.get_text_config() if self._signal is None else original.config
        if any(getattr(settings, "clip_qkv", None) for settings in (config, getattr(config, "attn_config", None))):
            raise UnreadableError("it clips its queries, keys and values (clip_qkv), which are then not a sum of terms")
        self._original = original
        self._model = use_attention(copy_of(original), TRACED)
        self._base: nn.Module = self._model.base_model
        self._multiplies = False
        self._paths = {id(module): path for path, module in self._base.named_modules()}
        rows = getattr(self._model.get_input_embeddings(), "weight", None) if self._signal is None else None
        if rows is None and self._signal is not None:
            rows = next(self._model.parameters())[:0]  # no token's row is looked up
        if not isinstance(rows, torch.Tensor):
            raise UnreadableError("it has no token embedding")
        self._rows = rows
        # Even float64 models compute norms and rotations in float32.
        epsilon = max(torch.finfo(rows.dtype).eps, torch.finfo(torch.float32).eps)
        config = self._model.config.get_text_config() if self._signal is None else signal_config(self._model)
        self._factors = Factors(config, epsilon)
        self._ids = self._random_ids(_LENGTH)

    def architecture(self) -> Architecture:
        """The architecture common to all layers, with the parts outside the blocks."""
        list_path, attention, layers = self._one_place(self._first_pass().attended, "its attention")
        blocks = submodule(self._base, list_path)
        assert isinstance(blocks, nn.ModuleList)
        others = {f"{list_path}.{place}": block for place, block in enumerate(blocks) if place not in layers}
        no_stream = NO_STREAM.get(self._original.config.model_type, "")
        start = Architecture(
            name=family(self._model), blocks=list_path, attention=attention, mid_norm=None, mlp_out=None,
            streams=not no_stream, no_stream=no_stream, hands_on=bool(no_stream),
            qkv=Separate("", "", ""), out="", hybrid=len(layers) < len(blocks),
            replacement=through_attend if self._multiplies else None,
            reads="tokens" if self._signal is None else self._signal.reads,
        )  # fmt: skip
        paths = {f"{list_path}.{layer}": layer for layer in layers}
        plans: dict[int, Architecture] = {}
        unread: dict[str, Exception] = {}

        def read(trace: Trace, path: str) -> None:
            """Reads a block as it ends: the calls of all blocks of a large model would not fit into memory."""
            if path in paths:
                try:
                    plans[paths[path]] = BlockReader(start, *trace.take(path), self._factors).plan
                except Exception as error:  # judged after the pass, which would mistake it for the model's error
                    unread[f"layer {paths[path]}"] = error

        trace = self._run(self._recorded(list_path, layers) | others, read)
        common = common_plan(plans, unread)
        self._require_one_stream(trace, list_path, layers)
        if common.no_stream:
            outside = [call for call in trace.calls if not call.path.startswith(f"{list_path}.")]
            limit, scale = self._position_limit(list_path, outside), self._embed_scale(outside)
            return replace(common, head_refused=common.no_stream, position_limit=limit, embed_scale=scale)
        ran = [place for place in range(len(blocks)) if trace.call(f"{list_path}.{place}") is not None]
        idle = tuple(place for place in range(len(blocks)) if place not in ran)
        common = replace(common, idle=idle, hybrid=ran != layers)
        whole = layers[-1] == ran[-1]
        return replace(common, **self._ends(trace, list_path, ran[0], f"{list_path}.{layers[-1]}" if whole else None))

    def _first_pass(self) -> Trace:
        """Traces calls of transformers' attention interface or, if there are none, products in the model's own code."""
        try:
            return self._run({})
        except UnreadableError:
            with suppress(UnreadableError), watching_for_products(self._model) as seen:
                self._run({})
            if not seen.modules:
                raise
        for module in dict.fromkeys(seen.modules):
            through(traced_attention, module)
        self._multiplies = True
        return self._run({})

    def _require_one_stream(self, trace: Trace, list_path: str, layers: Sequence[int]) -> None:
        calls = [trace.call(f"{list_path}.{layer}") for layer in layers]
        for layer, (before, after) in enumerate(pairwise(calls) if self._signal is not None else ()):
            if before is not None and after is not None and not same(before.made[0], after.input):
                raise UnreadableError(
                    f"block {layer + 1} does not receive the output of block {layer}: "
                    f"something is added to the stream between them (position embeddings)"
                )

    def _run(
        self, recorded: Mapping[str, nn.Module], ended: Callable[[Trace, str], None] = lambda trace, path: None
    ) -> Trace:
        try:
            trace = trace_pass(self._model, self._inputs(), recorded, ended)
        except UnsupportedModelError:
            raise
        except Exception as error:  # models raise many kinds of errors if they cannot run like this
            self._require_that_it_runs()
            raise UnreadableError(
                f"it does not run on {'token ids' if self._signal is None else self._signal.argument} alone with "
                f"attnmech's attention ({first_line(error)})"
            ) from error
        if not trace.n_attended:
            raise UnreadableError("its attention does not go through transformers' attention interface")
        return trace

    def _random_ids(self, length: int) -> Int[Tensor, "batch position"]:
        if self._signal is not None:
            return torch.zeros(0, 0, dtype=torch.long)
        generator = torch.Generator().manual_seed(SEED)
        known = text_ids(len(self._rows), placeholders_of(self._original.config, None))
        drawn = torch.randint(min(10, len(known) - 1), len(known), (TEXTS, length), generator=generator)
        return known[drawn].to(self._rows.device)

    def _inputs(self) -> dict[str, Any]:
        if self._signal is not None:
            return {**self._signal.noise(TEXTS, SEED, self._rows)}
        counted = torch.arange(self._ids.shape[1], device=self._ids.device)[None]
        positions = {"position_ids": counted} if self._from_zero else {}
        return {"input_ids": self._ids, "use_cache": False, **positions}

    def _require_that_it_runs(self) -> None:
        """Raises `WeightsError` if transformers itself cannot run the model, whatever its attention."""
        try:
            with torch.no_grad():
                self._plain()(**self._inputs())
        except Exception as error:  # transformers raises many kinds of errors for wrong sizes and precisions
            raise cannot_run(self._original, error) from error

    def _plain(self) -> nn.Module:
        """A copy of the model with transformers' own attention."""
        return copy_of(self._original)

    def _recorded(self, list_path: str, layers: Sequence[int]) -> dict[str, nn.Module]:
        """The modules in blocks with attention, and those outside the blocks."""
        wanted = tuple(f"{list_path}.{layer}" for layer in layers)
        within = tuple(f"{path}." for path in wanted)
        return {
            path: module
            for path, module in self._base.named_modules()
            if path
            and not isinstance(module, nn.ModuleList)
            and (not path.startswith(f"{list_path}.") or path in wanted or path.startswith(within))
        }

    def _one_place(self, calls: Sequence[Attended], what: str) -> tuple[str, str, list[int]]:
        """The path of the blocks, that of attention in a block, and the layers, of some calls (`what` in the error)."""
        places = [self._place(attended) for attended in calls]
        lists = list(dict.fromkeys((path, attention) for path, _, attention in places))
        if len(lists) > 1:
            named = ", ".join(f"{path}.N.{attention}" for path, attention in lists)
            raise UnreadableError(f"{what} is in more than one place ({named})")
        layers = [layer for _, layer, _ in places]
        twice = next((layer for layer, count in Counter(layers).items() if count > 1), None)
        if twice is not None:
            raise UnreadableError(f"block {twice} of {lists[0][0]!r} attends more than once in a pass (shared blocks)")
        return lists[0][0], lists[0][1], layers

    def _place(self, attended: Attended) -> tuple[str, int, str]:
        path = self._paths.get(id(attended.module), "")
        parts = path.split(".")
        for number, part in enumerate(parts):
            above = ".".join(parts[:number])
            if part.isdigit() and isinstance(submodule(self._base, above), nn.ModuleList):
                return above, int(part), ".".join(parts[number + 1 :])
        raise UnreadableError(f"its attention {path or type(attended.module).__name__!r} is not in a list of blocks")

    def _ends(self, trace: Trace, list_path: str, first: int, last: str | None) -> dict[str, Any]:
        """Reads the embedding, the final norm and the head."""
        outside = [call for call in trace.calls if not call.path.startswith(f"{list_path}.")]
        block = trace.call(f"{list_path}.{first}")
        entering = None if block is None else block.input
        ends: dict[str, Any] = {"embed_norm": self._norm_before(entering, outside)}
        if self._signal is None:
            ends |= {
                "position_limit": self._position_limit(list_path, outside), "embed_scale": self._embed_scale(outside),
                "stream_scale": self._stream_scale(block, outside),
            }  # fmt: skip
            projection = self._projection(entering, outside)
            if projection is not None:
                ends["embed_projection"] = projection.path
                ends["narrow_norm"] = self._norm_before(projection.input, outside)
        if last is None:
            return ends | {"head_refused": "its last block has no attention, so no point holds its output"}
        end = trace.call(last)
        ended = None if end is None else end.output
        final = next((call for call in outside if call.made and same(call.input, ended)), None)
        norm = None if final is None else self._kind_of(final)
        if final is None or norm is None:
            return ends | {"head_refused": "there is no norm between its last block and its unembedding"}
        return ends | {"final_norm": final.path, "norm_offset": norm.offset} | self._head(trace, final.made[0])

    def _head(self, trace: Trace, normed: Float[Tensor, "batch position d_model"]) -> dict[str, Any]:
        """The factor and the soft cap of the logits, or why they are not the final norm's output times W_U."""
        refused = {"head_refused": "its head is not one matrix that reads its final norm"}
        if self._signal is not None:
            return {"head_refused": "its head unembeds no tokens"}
        head = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        weight = None if head is None else as_stored(head, "weight")
        logits = getattr(trace.output, "logits", None)
        if weight is None or not isinstance(logits, torch.Tensor):
            return refused
        if weight.ndim != 2 or logits.shape != (*normed.shape[:-1], len(weight)) or weight.shape[1] != normed.shape[-1]:
            return refused
        # In parts: in float64, the matrix of a large vocabulary may be larger than everything else.
        parts = [as_float64(normed) @ as_float64(part).T for part in torch.split(weight.detach(), _ROWS)]
        logits, plain, bias = as_float64(logits), torch.cat(parts, dim=-1), bias_of(head)
        if bias is not None:
            plain = plain + as_float64(bias.detach())
        added = self._added_to_logits(len(weight))
        if added:
            bias = self._model.get_buffer(added)
            plain = plain + as_float64(bias)
        caps = [value for name, value in self._factors.numbers.items() if "soft" in name and "cap" in name]
        fits: list[tuple[float, float, float | None]] = []
        for cap in (None, *caps):
            # Logits that a cap has flattened say nothing about their factor.
            slope = torch.ones_like(logits) if cap is None else (1 - (logits / cap) ** 2).clamp_min(0)
            uncapped = logits if cap is None else cap * torch.atanh((logits / cap).clamp(-0.999, 0.999))
            steep = slope > _STEEP
            scale = self._factors.named(factor_of(uncapped[steep], plain[steep])) if steep.any() else 1.0
            computed = scale * plain if cap is None else cap * torch.tanh(scale * plain / cap)
            known = scale == 1 or (bias is None and self._factors.knows(scale))
            if known:
                fits.append((distance(computed, logits), scale, cap))
        # In 16 bits, small logits fit with a cap and without it, one of the two better.
        apart, scale, cap = min(fits, key=lambda fit: fit[0], default=(torch.inf, 1.0, None))
        fitting = apart <= 64 * self._factors.epsilon
        return {"logit_scale": scale, "logit_softcap": cap, "logit_bias": added} if fitting else refused

    def _added_to_logits(self, vocabulary: int) -> str:
        """The name of the buffer beside the head that holds one number per token; empty if there is none."""
        if self._model is self._base:
            return ""
        buffers = self._model.named_buffers(recurse=False)
        return next((name for name, value in buffers if value.shape in ((vocabulary,), (1, vocabulary))), "")

    def _embed_scale(self, outside: Sequence[Call]) -> float:
        rows, call = self._rows.detach()[self._ids], self._embedding(outside)
        if call is None:
            return 1.0
        scale = self._factors.named(factor_of(as_float64(call.made[0]), as_float64(rows)))
        return scale if self._factors.knows(scale) else 1.0

    def _embedding(self, outside: Sequence[Call]) -> Call | None:
        """The call that embeds the token ids."""
        shape = (*self._ids.shape, self._rows.shape[1])
        for call in outside:
            if getattr(call.module, "weight", None) is self._rows and call.made[0].shape == shape:
                return call
        return None

    def _norm_before(self, normed: Tensor | None, outside: Sequence[Call]) -> str | None:
        """The norm that returned a tensor, if there is one."""
        for call in outside:
            made = same(call.output, normed) and not same(call.input, normed)
            if made and self._kind_of(call) is not None:
                return call.path
        return None

    def _projection(self, entering: Tensor | None, outside: Sequence[Call]) -> Call | None:
        """The call of the matrix that projects a factorised embedding to the stream, if there is one."""
        width = self._rows.shape[1]
        for call in outside:
            if isinstance(call.module, nn.Linear) and call.module.in_features == width and same(call.made[0], entering):
                return call
        return None

    def _stream_scale(self, block: Call | None, outside: Sequence[Call]) -> float:
        """The factor between the token embedding and the stream; 1 if the stream holds anything else as well."""
        embedding = self._embedding(outside)
        if embedding is None or block is None or block.input is None or block.input.shape != embedding.made[0].shape:
            return 1.0
        stream, embedded = as_float64(block.input), as_float64(embedding.made[0])
        factor = self._factors.named(factor_of(stream, embedded))
        return factor if distance(factor * embedded, stream) <= 4 * self._factors.epsilon else 1.0

    def _kind_of(self, call: Call) -> NormKind | None:
        is_stream = call.input is not None and call.input.is_floating_point() and call.input.ndim == 3
        return kind_of(call.module, call.input) if is_stream and call.input is not None else None

    def _position_limit(self, list_path: str, outside: Sequence[Call]) -> int | None:
        """The number of positions in the table of a model that looks them up; None for any other model."""
        for call in outside:
            table, places = call.module, call.input
            if isinstance(table, nn.Embedding) and table.weight is not self._rows and self._are_positions(places):
                assert places is not None
                return table.num_embeddings - int(places.flatten()[0])
        for table in self._position_tables(list_path):
            limit = int(self._factors.numbers.get("max_position_embeddings", table.num_embeddings))
            # Families that count positions from the padding's id leave that many rows of the table unused.
            skipped = 0 if table.padding_idx is None else table.padding_idx + 1
            return min(limit, table.num_embeddings - skipped)
        return None

    def _are_positions(self, ids: Tensor | None) -> bool:
        """Whether ids count up by one in every text."""
        if ids is None or ids.is_floating_point() or ids.shape[-1] != self._ids.shape[1]:
            return False
        return bool((ids.diff(dim=-1) == 1).all())

    def _position_tables(self, list_path: str) -> Iterator[nn.Embedding]:
        beside = f"{list_path.rpartition('.')[0]}."
        modules = text_modules(self._base, [list_path])
        for path, module in sorted(modules, key=lambda named: not named[0].startswith(beside)):
            a_table = isinstance(module, nn.Embedding) and module.weight is not self._rows
            if a_table and "pos" in path.lower() and not path.startswith(f"{list_path}."):
                assert isinstance(module, nn.Embedding)
                yield module


def family(model: nn.Module) -> str:
    """The name of a model's class without its task: "Llama" for LlamaForCausalLM."""
    return re.sub(r"(For[A-Z]\w*|LMHead\w*|Model)$", "", type(model).__name__)


def common_plan(plans: Mapping[int, Architecture], unread: Mapping[str, Exception]) -> Architecture:
    """The plan of most layers, with those that do not rotate; the certificate decides whether the others fit.

    Raises an error of the blocks that could not be read, if none was, or if it is not about their structure.
    """
    for block, error in unread.items():
        if not isinstance(error, UnreadableError):
            raise error
        if not plans:
            raise UnreadableError(f"{block}: {error}") from error
    rotating = [plan for plan in plans.values() if plan.rotary is not None]
    (common, _), *_ = Counter(rotating or plans.values()).most_common(1)
    still = tuple(layer for layer, plan in plans.items() if rotating and plan.rotary is None)
    # A layer whose norm is nn.Identity reads as having none.
    norms = Counter(plan.attn_norm for plan in plans.values() if plan.attn_norm is not None)
    return replace(common, unrotated=still, attn_norm=norms.most_common(1)[0][0] if norms else None)
