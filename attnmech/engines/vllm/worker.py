"""vLLM's worker, extended: takes sums of attention from the engine's own queries and paged cache, and scales heads."""

import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from vllm import __version__ as vllm_version
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType

from ...errors import InputError
from ..file import to_bytes
from ..focus import FocusTotals
from ..groups import Group, Kernel, Piece, attention_of, error_of, groups_of
from ..saved import LIMITS
from ..spans import SpanTotals
from .layout import Paged, layout_of

_STEPS_PER_PROOF: Final = 8  # rows of answers are proved in every eighth step, those of prompts in every step


class Heads:
    """What `worker_extension_cls="attnmech.engines.vllm.Heads"` adds to vLLM's workers."""

    def attnmech_start(self, options: str = "{}") -> None:
        """Begins to watch; `options` is JSON with `last` and `special`, the ids of special tokens.

        Raises `InputError` where the engine's numbers could not be read exactly.
        """
        hooks = _hooks_of(self)
        hooks.watch = Watch(self, **json.loads(options))
        hooks.install()

    def attnmech_take(self, idle: bool = False) -> bytes:
        """The sums over all requests that have ended since the start, as a safetensors file; with `idle`, all have.

        Raises `InputError` if a proof failed; then there are no sums.
        """
        watch = _hooks_of(self).watch
        if watch is None:
            raise InputError("this engine is not watched; start first.")
        return watch.taken(idle)

    def attnmech_stop(self) -> None:
        """Ends watching; the engine is as before."""
        hooks = _hooks_of(self)
        hooks.watch = None
        hooks.install()

    def attnmech_scale(self, factors: str = "[]") -> None:
        """Scales what heads give to W_O, in all requests; `factors` is JSON with [layer, head, factor], [] for none.

        Heads are numbered as in the model, on whichever worker they are.
        """
        hooks = _hooks_of(self)
        hooks.scale(json.loads(factors))
        hooks.install()


@dataclass
class Hooks:
    """The hooks on the kernels of a worker's attention layers."""

    worker: Any
    layers: Mapping[int, Attention]
    watch: "Watch | None" = None
    factors: dict[int, Tensor] = field(default_factory=dict)  # of each head of a layer, on this worker
    scaled: Sequence[tuple[int, int, float]] = ()  # the factors of all workers: layer, head, factor

    def install(self) -> None:
        """Puts hooks where they are needed, and takes away all others."""
        runner = self.worker.model_runner
        for layer in self.layers.values():
            vars(layer.impl).pop("forward", None)
        vars(runner).pop("execute_model", None)
        for number, layer in self.layers.items():
            if self.watch is not None or number in self.factors:
                layer.impl.forward = self._hooked(number, layer.impl.forward)
        if self.watch is not None:
            runner.execute_model = self.watch.stepwise(runner.execute_model)

    def _hooked(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(
            layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
            output: Tensor, **options: Any,
        ) -> Any:  # fmt: skip
            result = forward(layer, query, key, value, kv_cache, attn_metadata, output=output, **options)
            if attn_metadata is None:  # a dry run
                return result
            if self.watch is not None:
                self.watch.see(number, layer, query, attn_metadata, output)
            if number in self.factors:
                output.view(len(output), layer.num_heads, -1).mul_(self.factors[number].to(output)[:, None])
            return result

        return run

    def scale(self, factors: Sequence[tuple[int, int, float]]) -> None:
        if self.watch is not None:
            raise InputError("heads cannot be scaled while the engine is watched; scale first, then watch.")
        workers = self.worker.vllm_config.parallel_config.tensor_parallel_size
        made: dict[int, Tensor] = {}
        for number, head, factor in factors:
            layer = self.layers.get(number)
            if layer is None or not 0 <= head < layer.num_heads * workers:
                most = max(layer.num_heads for layer in self.layers.values()) * workers
                raise InputError(
                    f"this model has heads 0 to {most - 1} in the layers {sorted(self.layers)}; got L{number}H{head}."
                )
            own = head - get_tensor_model_parallel_rank() * layer.num_heads
            ones = made.setdefault(number, torch.ones(layer.num_heads, device=layer.kv_cache.device))
            if 0 <= own < layer.num_heads:
                ones[own] *= factor
        self.factors, self.scaled = made, factors


def _hooks_of(worker: Any) -> Hooks:
    """The hooks of a worker, which are kept with it."""
    if not hasattr(worker, "attnmech"):
        config = worker.vllm_config
        layers = {
            extract_layer_index(name): layer
            for name, layer in config.compilation_config.static_forward_context.items()
            if isinstance(layer, Attention)
        }
        worker.attnmech = Hooks(worker, layers)
    hooks: Hooks = worker.attnmech
    return hooks


@dataclass
class Request:
    """A request that has not ended."""

    prompt: Sequence[int]
    ignored: bool  # whether it had begun to write when watching began
    done: int = 0  # the position up to which rows have been seen, or left out
    seen: int = 0
    written: dict[int, int] = field(default_factory=dict)  # the generated tokens, by position

    @property
    def ids(self) -> list[int]:
        """The tokens up to the last that was seen."""
        return [self.prompt[at] if at < len(self.prompt) else self.written[at] for at in range(self.done)]


class Watch:
    """Adds up what heads do in the requests that pass through a worker."""

    def __init__(self, worker: Any, *, last: int = 8, special: Sequence[int] = ()) -> None:
        hooks = _hooks_of(worker)
        if whys := refusals(worker.vllm_config, hooks.layers):
            raise InputError(f"this engine cannot be watched: {'; '.join(whys)}.")
        self._runner, self._config = worker.model_runner, worker.vllm_config
        self._layers = hooks.layers
        self._numbers = sorted(hooks.layers)
        self._device = hooks.layers[self._numbers[0]].kv_cache.device
        self._special = torch.tensor(list(special), dtype=torch.long, device=self._device)
        self._caches: dict[int, tuple[Paged, Paged]] = {
            number: layout_of(layer, self._config.cache_config.num_gpu_blocks) for number, layer in hooks.layers.items()
        }
        self._kernels = {number: _kernel_of(layer) for number, layer in hooks.layers.items()}
        heads = {layer.num_heads for layer in hooks.layers.values()}
        if len(heads) > 1:
            raise InputError(f"this engine cannot be watched: its layers have {sorted(heads)} heads.")
        self._heads = heads.pop()
        self.totals = FocusTotals(len(self._numbers), self._heads, self._device, last=last)
        self.spans = SpanTotals(len(self._numbers), self._heads, self._device)
        self._last = last
        self._requests: dict[str, Request] = {}
        self._errors = torch.zeros(len(self._numbers), device=self._device)
        self._failed = self._refused = ""
        self._seen = self._unseen = self._again = self._proved = self._steps_of_answers = 0
        self._step: _Step | None = None
        self._edits = [f"L{layer}H{head} scaled by {factor:g}" for layer, head, factor in hooks.scaled]

    def stepwise(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        """The runner's `execute_model`, with the requests of each step counted."""

        def run(scheduled: Any, *arguments: Any, **options: Any) -> Any:
            self._step = None
            with self._guarded():
                for request in sorted(scheduled.finished_req_ids):
                    self._end(request)
            result = execute(scheduled, *arguments, **options)
            with self._guarded():
                self._close_step(scheduled.num_scheduled_tokens)
            return result

        return run

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """What fails within ends watching, not the service."""
        try:
            with torch.inference_mode():
                yield
        except Exception as error:
            self._failed = self._failed or f"{type(error).__name__}: {error}"

    def see(self, number: int, layer: Any, query: Tensor, metadata: Any, output: Tensor) -> None:
        """Adds a layer's rows of one step."""
        if not self._failed:
            with self._guarded():
                self._see(number, layer, query, metadata, output)

    def _see(self, number: int, layer: Any, query: Tensor, metadata: Any, output: Tensor) -> None:
        if self._step is None:
            self._step = self._begun(metadata)
        step, (keys, values), kernel = self._step, self._caches[number], self._kernels[number]
        heads, place = layer.num_heads, self._numbers.index(number)
        q, z = (tensor.view(len(tensor), heads, -1) for tensor in (query, output))
        for group in step.groups:
            requests = torch.tensor([piece.request for piece in group.pieces], device=self._device)
            table, positions = metadata.block_table[requests].long(), group.positions(kernel.window)
            at = group.once("rows", partial(step.rows_of, group, self._device))
            attention = attention_of(group, q[at], keys.read(table, positions), kernel)
            if group in step.proved:
                error = error_of(group, attention, values.read(table, positions), z[at])
                self._errors[place] = torch.maximum(self._errors[place], error)  # which keeps NaN
            special = group.once("special", lambda: torch.isin(step.ids[at], self._special))  # noqa: B023 - called here
            names = [step.names[piece.request] for piece in group.pieces]
            slots = group.once("slots", partial(self.totals.slots, names))
            self.totals.add(place, group, attention, kernel.window, special, slots)
            self.spans.add(place, group, names, attention)
        step.layers.add(number)

    def _begun(self, metadata: Any) -> "_Step":
        """The step that a first layer has reached: its requests, and the groups of rows that are still to be added."""
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        names = list(self._runner.input_batch.req_ids)
        ids = self._runner.input_ids.gpu[: starts[len(names)]].long()
        here = ids.tolist()
        pieces, counts, of_prompts = [], {}, set()
        for place, name in enumerate(names):
            start, stop = starts[place], starts[place + 1]
            rows = range(lengths[place] - (stop - start), lengths[place])
            counts[name] = len(rows)
            request = self._requests.get(name)
            if request is None:
                prompt = self._runner.requests[name].prompt_token_ids
                if prompt is None:
                    raise InputError("prompts must be tokens, not embeddings")
                request = self._requests[name] = Request(prompt, ignored=rows.start > len(prompt))
                self._begin_spans(name, rows.start)
            if request.ignored:
                continue
            request.written |= {at: here[start + offset] for offset, at in enumerate(rows) if at >= len(request.prompt)}
            # Rows that were evicted are computed again; rows that the prefix cache holds are not computed.
            fresh = range(max(rows.start, request.done), rows.stop)
            self._again += len(rows) - len(fresh)
            if fresh:
                self._unseen += fresh.start - request.done
                pieces.append(Piece(place, fresh))
                if fresh.start < len(request.prompt):
                    of_prompts.add(place)
                request.seen += len(fresh)
                self._seen += len(fresh)
                request.done = fresh.stop
        groups = groups_of(pieces, self._heads, self._device)
        proved = [group for group in groups if any(piece.request in of_prompts for piece in group.pieces)]
        if len(proved) < len(groups):
            if self._steps_of_answers % _STEPS_PER_PROOF == 0:
                proved = groups
            self._steps_of_answers += 1
        self._proved += sum(len(piece.rows) for group in proved for piece in group.pieces)
        return _Step(names, starts, lengths, ids, counts, groups, proved)

    def _begin_spans(self, name: str, start: int) -> None:
        """Reads the spans that a caller has given to a request: `extra_args={"attnmech_spans": [0, 12, 40]}`."""
        state = self._runner.requests[name]
        params = state.sampling_params
        starts = (params.extra_args or {}).get("attnmech_spans") if params else None
        if starts is None:
            return
        try:
            if start:
                raise InputError("a request with spans needs all its rows; give it skip_reading_prefix_cache=True.")
            self.spans.begin(name, starts, len(state.prompt_token_ids) + (params.max_tokens or 0))
        except (InputError, TypeError) as error:  # the request of a caller must not end what others measure
            self._refused = str(error)

    def _close_step(self, scheduled: Mapping[str, int]) -> None:
        """Checks that all rows that the engine ran have passed through Python."""
        step = self._step
        if self._failed or not scheduled:
            return
        if step is None or step.layers != set(self._numbers) or step.counts != dict(scheduled):
            ran = 0 if step is None else sum(step.counts.values())
            self._failed = (
                f"the engine ran {sum(scheduled.values())} rows in {len(self._numbers)} layers, and attnmech saw {ran} "
                f"in {0 if step is None else len(step.layers)}, as with CUDA graphs of whole steps"
            )

    def _end(self, name: str) -> None:
        request = self._requests.pop(name, None)
        if request is not None and request.seen and not self._failed:
            self.totals.end(name, request.ids)
            self.spans.end(name, request.ids)

    @torch.inference_mode()
    def taken(self, idle: bool) -> bytes:
        """The file of this worker: the sums over requests that have ended, and their origin."""
        for name in [name for name in self._requests if idle or name not in self._runner.requests]:
            self._end(name)
        dtype = self._config.model_config.dtype
        precision = str(dtype).removeprefix("torch.")
        errors = self._errors.tolist()
        worst = max(range(len(errors)), key=lambda place: math.inf if math.isnan(errors[place]) else errors[place])
        limit = LIMITS[dtype]
        if not self._failed and not errors[worst] <= limit:
            self._failed = (
                f"in layer {self._numbers[worst]}, pattern times values differs from the kernel's output by "
                f"{errors[worst]:.1e} of its largest entry; {limit:.0e} is allowed in {precision}"
            )
        if self._failed:
            raise InputError(f"the engine's attention could not be proved, so there are no sums: {self._failed}.")
        if not self.totals.documents:
            raise InputError("no request has ended since the start; take the sums after some requests.")
        layer = self._layers[self._numbers[0]]
        header = {
            "model": self._config.model_config.model,
            "layers": self._numbers,
            "windows": [self._kernels[number].window for number in self._numbers],
            "n_layers": self._config.model_config.hf_text_config.num_hidden_layers,
            "documents": self.totals.documents,
            "last": self._last,
            "rank": get_tensor_model_parallel_rank(),
            "edits": self._edits,
            "refused spans": self._refused,
            "options": {
                "engine": f"vLLM {vllm_version}, {layer.attn_backend.get_name()}, {precision}",
                "proof": {
                    "rows": self._seen,
                    "rows proved": self._proved,
                    "rows left out (prefix cache)": self._unseen,
                    "rows computed again (preemption)": self._again,
                    "largest error by layer": [float(f"{error:.1e}") for error in errors],
                },
            },
            "versions": {
                "vllm": vllm_version, "torch": torch.__version__, "python": platform.python_version(),
            },
        }  # fmt: skip
        return to_bytes(self.totals.state() | self.spans.state(), header)


@dataclass
class _Step:
    names: Sequence[str]
    starts: Sequence[int]  # the first row of each request in the step's tensors
    lengths: Sequence[int]  # the number of tokens of each request, those of the step included
    ids: Tensor  # the token of each row
    counts: dict[str, int]  # the number of rows of each request, those that are computed again included
    groups: Sequence[Group]
    proved: Sequence[Group]  # the groups whose rows are proved
    layers: set[int] = field(default_factory=set)

    def rows_of(self, group: Group, device: torch.device) -> Tensor:
        """The index of a group's rows in the step's tensors; that of a piece's first row where it has none."""
        rows = []
        for piece in group.pieces:
            begin, stop = self.starts[piece.request + 1] - self.lengths[piece.request], piece.rows.stop
            rows.append([begin + max(piece.rows.start, row) for row in range(stop - len(group.rows), stop)])
        return torch.tensor(rows, device=device)


def _kernel_of(layer: Any) -> Kernel:
    impl = layer.impl
    return Kernel(
        scale=impl.scale,
        window=layer.sliding_window,
        softcap=float(getattr(impl, "logits_soft_cap", 0) or 0),
        slopes=getattr(impl, "alibi_slopes", None),
        sink=getattr(impl, "sinks", None),
    )


def refusals(config: Any, layers: Mapping[int, Any]) -> list[str]:
    """Why an engine's attention cannot be read exactly; empty if it can."""
    parallel, whys = config.parallel_config, []
    if not layers:
        return ["it has no attention layer with queries and keys of each head (latent attention is not supported)"]
    if config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        whys.append('CUDA graphs of whole steps hide it; serve with compilation_config={"cudagraph_mode": "PIECEWISE"}')
    if config.speculative_config is not None:
        whys.append("speculative decoding computes rows that it rejects")
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        whys.append("pipeline and data parallel engines are not supported; tensor parallel ones are")
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        whys.append("context parallel engines keep a text's keys on several workers")
    for number, layer in layers.items():
        impl = layer.impl
        if layer.attn_type != AttentionType.DECODER:
            whys.append(f"layer {number} is not the self-attention of a decoder")
        if layer.attn_backend.forward_includes_kv_cache_update:
            whys.append(f"the backend {layer.attn_backend.get_name()} writes its cache inside its kernel")
        if layer.use_alibi_sqrt:
            whys.append(f"layer {number} has ALiBi with square roots")
        if layer.use_mm_prefix:
            whys.append("images in prompts are read in both directions")
        if getattr(impl, "kv_sharing_target_layer_name", None):
            whys.append(f"layer {number} reads the cache of another layer")
        if whys:
            break
    return whys
