"""What is a model built of? Its `Architecture`, read from one traced pass: names propose, data decide.

Queries, keys and values are found as columns of what the modules inside the attention return, W_O as the matrix that
reads z, norms and sums as what their inputs and outputs are. What is found here is a proposal: the certificate then
proves it on every layer, from the weights.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..batch import Batch
from ..errors import UnsupportedModelError, first_line
from .architectures import Architecture, Gate, has_module, submodule
from .attention import Site, attention_of_site
from .copies import copy_of, use_attention
from .in_force import InForce, Pass
from .mask import MaskRule, mask_rule
from .norms import kind_of
from .position import FORMS, Rotary, as_tables, tables_of
from .weights import Columns, Layout, Separate, bias_of, has_matrix

_IMPLEMENTATION: Final = "attnmech_structure"
_TEXTS: Final = 8
_LENGTH: Final = 11
"""Odd, and a number of heads that no model has."""
_SEED: Final = 31
_LEAST: Final = 1e-2
"""The least factor of what is added to the stream: with 0, any value would fit."""


_GATES: Final = ("sigmoid", "softplus", "silu", "tanh")
"""The functions that make gates, by their names in torch.nn.functional."""


class UnreadableError(UnsupportedModelError):
    """A model whose structure could not be read; the message says what was found and what is missing."""


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a module: what it was given and what it returned."""

    path: str
    module: nn.Module
    given: Tensor | None
    made: tuple[Tensor, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    order: int


@dataclass(frozen=True, eq=False)
class _Attended:
    """One call of the attention function: its inputs, and z, which it returned."""

    module: nn.Module
    q: Float[Tensor, "batch position head d_head"]
    k: Float[Tensor, "batch position kv_head d_head"]
    v: Float[Tensor, "batch position kv_head d_head"]
    z: Float[Tensor, "batch position head d_head"]
    mask: Any
    options: Mapping[str, Any]
    order: int


@dataclass(eq=False)
class _Trace:
    """What one pass of the probe showed."""

    in_force: InForce
    attended: list[_Attended] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    ticks: int = 0

    def tick(self) -> int:
        self.ticks += 1
        return self.ticks


_TRACED: ContextVar[_Trace] = ContextVar("traced")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention function of the traced pass: that of every other pass, and a record."""
    trace = _TRACED.get()
    module.attnmech_site = Site(trace.in_force, len(trace.attended))  # type: ignore[assignment]
    z, _ = attention_of_site(module, query, key, value, attention_mask, **options)
    by_token = [
        rearrange(each, "batch head position d -> batch position head d").clone() for each in (query, key, value)
    ]
    trace.attended.append(_Attended(module, *by_token, z.clone(), attention_mask, dict(options), trace.tick()))
    return z, None


AttentionInterface.register(_IMPLEMENTATION, _attention)
AttentionMaskInterface.register(_IMPLEMENTATION, mask_rule)


def read_structure(model: PreTrainedModel) -> Architecture:
    """The architecture of a model with one stack whose attention goes through transformers' interface.

    Raises `UnreadableError`, which says what was found and what is missing.
    """
    return _Reader(model).architecture()


class _Reader:
    def __init__(self, original: PreTrainedModel) -> None:
        self._model = use_attention(copy_of(original), _IMPLEMENTATION)
        self._base: nn.Module = self._model.base_model
        self._names = {id(module): name for name, module in self._base.named_modules()}
        embedding = self._model.get_input_embeddings()
        weight = getattr(embedding, "weight", None)
        if not isinstance(weight, torch.Tensor):
            raise UnreadableError(f"{type(original).__name__} has no token embedding.")
        self._rows, self._device = weight, weight.device
        self._tolerance = 64 * max(torch.finfo(weight.dtype).eps, torch.finfo(torch.float32).eps)

    # -- the pass ------------------------------------------------------------------------------------------

    def architecture(self) -> Architecture:
        """What all layers have in common."""
        first = self._run(2, ())
        self._blocks_path, self._attention_path, layers = self._blocks(first)
        self._blocks_list = submodule(self._base, self._blocks_path)
        trace = self._run(_LENGTH, layers)
        by_layer = dict(zip(layers, trace.attended, strict=True))
        found: dict[int, _Layer] = {layer: self._layer(layer, by_layer[layer], trace) for layer in layers}
        plans = {layer: each.plan for layer, each in found.items()}
        rotating = [layer for layer, plan in plans.items() if plan.rotary is not None]
        still = [layer for layer in layers if layer not in rotating] if rotating else []
        common = plans[rotating[-1] if rotating else layers[-1]]
        for layer, plan in plans.items():
            alike = replace(plan, rotary=common.rotary) if layer in still else plan
            if layer in still:
                alike = replace(alike, norm_after_rotary=common.norm_after_rotary)
            if layer in still and plan.qk_norm is None:
                alike = replace(alike, qk_norm=common.qk_norm, qk_norm_axes=common.qk_norm_axes)
            if plan.attn_norm is None and self._is_identity(layer, common.attn_norm):
                alike = replace(alike, attn_norm=common.attn_norm)
            if alike != common:
                self._refuse(f"layers {layers[0]} and {layer} are built differently ({_difference(common, alike)})")
        return replace(
            common,
            hybrid=len(layers) < len(self._blocks_list),
            unrotated=tuple(still),
            **self._ends(trace, layers),
        )

    def _is_identity(self, layer: int, path: str | None) -> bool:
        """Whether a layer has nothing where the others have a norm."""
        block = self._blocks_list[layer]
        return path is not None and has_module(block, path) and isinstance(submodule(block, path), nn.Identity)

    def _run(self, length: int, layers: Sequence[int]) -> _Trace:
        """One pass of random tokens; with `layers`, everything that happens in and around their blocks is recorded."""
        trace = _Trace(InForce())
        generator = torch.Generator().manual_seed(_SEED)
        vocabulary = len(self._rows)
        ids = torch.randint(min(10, vocabulary - 1), vocabulary, (_TEXTS, length), generator=generator).to(self._device)
        batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), (), None)
        handles = self._record(trace, layers) if layers else []
        token = _TRACED.set(trace)
        try:
            with torch.no_grad(), trace.in_force.unchecked(), trace.in_force.recording(Pass(batch)):
                output = self._model(input_ids=ids, use_cache=False, return_dict=True)
        except UnsupportedModelError:
            raise
        except Exception as error:  # whatever a model raises that cannot be run like this
            self._refuse(f"it does not run on plain token ids ({first_line(error)})")
        finally:
            _TRACED.reset(token)
            for handle in handles:
                handle.remove()
        self._ids, self._logits = ids, getattr(output, "logits", None)
        if not trace.attended:
            self._refuse("its attention does not go through transformers' attention interface")
        return trace

    def _record(self, trace: _Trace, layers: Sequence[int]) -> list[Any]:
        """Hooks on every module of the blocks with attention, and on the modules outside of blocks."""
        handles = []
        prefix = f"{self._blocks_path}."
        wanted = tuple(f"{prefix}{layer}" for layer in layers)

        def keep(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                given = next(_tensors((*args, kwargs.get("hidden_states"))), None)
                made = tuple(each.detach().clone() for each in _tensors(output))
                given = None if given is None else before.pop(path, given)
                trace.calls.append(_Call(path, module, given, made, args, kwargs, trace.tick()))

            return hook

        before: dict[str, Tensor] = {}

        def note(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                given = next(_tensors((*args, kwargs.get("hidden_states"))), None)
                if given is not None:
                    # A block may later add to this very tensor.
                    before[path] = given.detach().clone()

            return hook

        for path, module in self._base.named_modules():
            inside = path.startswith(prefix)
            if path and (not inside or path in wanted or path.startswith(tuple(f"{each}." for each in wanted))):
                if isinstance(module, nn.ModuleList):
                    continue
                handles.append(module.register_forward_pre_hook(note(path), with_kwargs=True))
                handles.append(module.register_forward_hook(keep(path), with_kwargs=True))
        return handles

    def _blocks(self, trace: _Trace) -> tuple[str, str, list[int]]:
        """The path of the list of blocks, that of the attention in a block, and the layers that have one."""
        places = []
        for each in trace.attended:
            name = self._names.get(id(each.module))
            place = None if name is None else self._place(name)
            if place is None:
                self._refuse(f"the attention {name or type(each.module).__name__!r} does not stand in a list of blocks")
            places.append(place)
        lists = Counter((blocks, rest) for blocks, _, rest in places)
        if len(lists) > 1:
            named = ", ".join(f"{blocks}.N.{rest}" for blocks, rest in lists)
            self._refuse(f"its attention stands in more than one place ({named})")
        layers = [layer for _, layer, _ in places]
        if len(set(layers)) < len(layers):
            twice = next(layer for layer, count in Counter(layers).items() if count > 1)
            self._refuse(f"block {twice} of {places[0][0]!r} runs more than once in a pass (shared blocks)")
        return places[0][0], places[0][2], layers

    def _place(self, name: str) -> tuple[str, int, str] | None:
        parts = name.split(".")
        for number, part in enumerate(parts):
            path = ".".join(parts[:number])
            if part.isdigit() and isinstance(submodule(self._base, path), nn.ModuleList):
                return path, int(part), ".".join(parts[number + 1 :])
        return None

    # -- one layer -----------------------------------------------------------------------------------------

    def _layer(self, layer: int, attended: _Attended, trace: _Trace) -> "_Layer":
        prefix = f"{self._blocks_path}.{layer}"
        calls = [
            replace(call, path=call.path[len(prefix) + 1 :])
            for call in trace.calls
            if call.path == prefix or call.path.startswith(f"{prefix}.")
        ]
        return _Layer(self, layer, self._attention_path, attended, calls)

    # -- around the blocks ---------------------------------------------------------------------------------

    def _ends(self, trace: _Trace, layers: Sequence[int]) -> dict[str, Any]:
        """Embedding, final norm and head."""
        prefix = f"{self._blocks_path}."
        outside = [call for call in trace.calls if not call.path.startswith(prefix)]
        last = (
            next(call for call in trace.calls if call.path == f"{prefix}{len(self._blocks_list) - 1}")
            if len(self._blocks_list) - 1 in layers
            else None
        )
        found: dict[str, Any] = {"position_limit": self._position_limit(), "embed_scale": self._embed_scale(outside)}
        if last is None:
            return found | {"head_refused": "its last block has no attention, so no point holds the stream at its end"}
        final = next((call for call in outside if call.given is not None and _same(call.given, last.made[0])), None)
        norm = None if final is None or final.given is None else kind_of(final.module, final.given)
        if final is None or norm is None or not final.made:
            return found | {"head_refused": "no norm stands between its last block and its unembedding"}
        found |= {"final_norm": final.path, "norm_offset": norm.offset}
        return found | self._head(final.made[0])

    def _head(self, normed: Tensor) -> dict[str, Any]:
        """Factor and soft cap of the logits; or why they are not W_U times the final norm's output."""
        refused = {"head_refused": "its head is not one matrix that reads its final norm"}
        head = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        weight = getattr(head, "weight", None)
        if self._logits is None or not isinstance(weight, torch.Tensor) or weight.shape[-1] != normed.shape[-1]:
            return refused
        if self._logits.shape != (*normed.shape[:-1], len(weight)):
            return refused
        plain = normed.double() @ weight.detach().double().T
        bias = bias_of(head)
        plain = plain if bias is None else plain + bias.detach().double()
        logits = self._logits.double()
        caps = [cap for name, cap in self._numbers() if "soft" in name and "cap" in name]
        for cap in (None, *caps):
            uncapped = logits if cap is None else cap * torch.atanh((logits / cap).clamp(-1 + 1e-9, 1 - 1e-9))
            scale = self._named(_factor(uncapped, plain))
            told = scale * plain if cap is None else cap * torch.tanh(scale * plain / cap)
            if bias is not None and scale != 1:
                continue
            if _close(told, logits, 16 * self._tolerance):
                return {"logit_scale": scale, "logit_softcap": cap}
        return refused

    def _embed_scale(self, outside: Sequence[_Call]) -> float:
        for call in outside:
            if getattr(call.module, "weight", None) is self._rows and call.made and call.made[0].ndim == 3:
                return self._named(_factor(call.made[0].double(), self._rows.detach()[self._ids].double()))
        return 1.0

    def _position_limit(self) -> int | None:
        """How many positions a model has, if it looks them up in a table."""
        blocks = f"{self._blocks_path}."
        for name, module in self._base.named_modules():
            if not isinstance(module, nn.Embedding) or module.weight is self._rows or name.startswith(blocks):
                continue
            if "pos" in name.lower():
                limit = int(getattr(self._config, "max_position_embeddings", None) or module.num_embeddings)
                offset = getattr(module, "padding_idx", None)
                return min(limit, module.num_embeddings) if offset is None else module.num_embeddings - offset - 1
        return None

    # -- what layers ask -----------------------------------------------------------------------------------

    @property
    def _config(self) -> Any:
        return self._model.config.get_text_config()

    @property
    def name(self) -> str:
        """What to call the family."""
        return str(self._model.config.model_type)

    @property
    def tolerance(self) -> float:
        """How far apart two computations of one value may be, as a share of it."""
        return self._tolerance

    @property
    def blocks_path(self) -> str:
        """The path of the list of blocks."""
        return self._blocks_path

    def _numbers(self) -> Iterator[tuple[str, float]]:
        for name, value in self._config.to_dict().items():
            if isinstance(value, int | float) and not isinstance(value, bool) and value:
                yield name, float(value)

    def _named(self, factor: float) -> float:
        """A measured factor as the number of the config that it is: 1, a number of the config, or 1 over it."""
        known = [
            1.0,
            *(
                each
                for _, value in self._numbers()
                for each in (value, 1 / value, value**0.5, value**-0.5)
                if value > 0
            ),
        ]
        near = min(known, key=lambda each: abs(each - factor))
        return near if abs(near - factor) <= 1e3 * self._tolerance * abs(factor) else factor

    def named(self, factor: float, d_head: int = 0) -> float:
        """A measured factor as the number that it is: 1, one of the config or of a head's dimension, or as measured."""
        scale = d_head**-0.5 if d_head else 1.0
        return scale if abs(factor - scale) <= 1e3 * self._tolerance * scale else self._named(factor)

    def _refuse(self, found: str) -> Any:
        raise UnreadableError(found)


class _Layer:
    """One block: its calls in order, and what they say of its structure."""

    def __init__(
        self, reader: _Reader, layer: int, attention: str, attended: _Attended, calls: Sequence[_Call]
    ) -> None:
        self._reader, self._layer, self._path, self._attended = reader, layer, attention, attended
        self._calls = list(calls)
        self._batch, self._length = attended.q.shape[:2]
        self._block = next(call for call in calls if call.path == "")
        self._own = next(call for call in calls if call.path == attention)
        inside = f"{attention}."
        self._before = [call for call in calls if call.path.startswith(inside) and call.order < attended.order]
        if self._own.given is None or self._block.given is None:
            self._refuse("its block or its attention takes no stream")
        self.plan = self._read()

    def _read(self) -> Architecture:
        attended = self._attended
        q, k, v = attended.q, attended.k, attended.v
        heads = q.shape[2]
        if v.shape[-1] != q.shape[-1] or k.shape[-1] != q.shape[-1]:
            self._refuse(
                f"its values have {v.shape[-1]} dimensions a head, its queries {q.shape[-1]} (latent attention)"
            )
        found = {name: self._source(name, value) for name, value in (("q", q), ("k", k), ("v", v))}
        kv_columns = rearrange(torch.tensor(found["k"].columns), "(head d) -> head d", head=k.shape[2]).tolist()
        kv_heads = len({tuple(each) for each in kv_columns})
        layout = self._layout(found, heads, k.shape[2], kv_heads)
        norms = (found["q"].norm, found["k"].norm)
        if (norms[0] is None) != (norms[1] is None):
            self._refuse("it has a norm of queries or of keys, but not of both")
        scale = self._reader.named(found["q"].scale, q.shape[-1])
        if found["v"].norm is not None:
            self._refuse("it has a norm of values")
        rotary = self._rotary(found)
        mask = attended.mask
        return self._around(
            Architecture(
                name=self._reader.name,
                blocks=self._reader.blocks_path,
                attention=self._path,
                qkv=layout,
                out="",
                mid_norm=None,
                mlp_out=None,
                n_heads=heads,
                n_kv_heads=kv_heads,
                qk_norm=None if norms[0] is None or norms[1] is None else (norms[0], norms[1]),
                **self._norm_axes(found["q"]),
                norm_after_rotary=rotary is not None and self._norm_is_after(found["q"]),
                query_scale=scale,
                rotary=rotary,
                causal=_is_causal(mask, self._length),
                trusted="eager"
                if attended.options.get("softcap") or attended.options.get("s_aux") is not None
                else None,
            )
        )

    # -- queries, keys, values -----------------------------------------------------------------------------

    def _source(self, name: str, value: Tensor) -> "_Source":
        """The columns of a projection that make q, k or v: at position 0, where rotary is the identity up to a factor."""
        target = rearrange(value, "batch position head d -> batch position (head d)")
        at_first = name != "v"
        norm: _Call | None = None
        wanted, order, scales = target, None, None
        for _ in range(2):
            matches = [(call, made, *found) for call, made, found in self._matches(wanted, at_first)]
            plain = [each for each in matches if has_matrix(each[0].module)]
            if plain:
                call, _made, columns, factor = plain[-1]
                if order is not None:
                    if norm is not None and name != "v" and order != list(range(len(order))):
                        self._refuse(f"the norm of its {name} is in another order than its heads")
                self._check_input(call, name)
                return _Source(
                    call.path[len(self._path) + 1 :],
                    tuple(columns),
                    norm and norm.path[len(self._path) + 1 :],
                    norm,
                    scales or factor,
                )
            normed = [each for each in matches if each[0].given is not None and each[0].module is not self._own.module]
            normed = [each for each in normed if self._canonical(each[0].given) is not None]
            if norm is not None or not normed:
                break
            norm, _made, order, scales = normed[-1]
            given = self._canonical(norm.given)
            assert given is not None
            wanted = given
        self._refuse(f"its {name} {'are' if name == 'v' else 'are'} not columns of one projection")
        raise AssertionError

    def _matches(self, target: Tensor, at_first: bool) -> Iterator[tuple[_Call, Tensor, tuple[list[int], float]]]:
        """The calls inside the attention whose output holds the target's columns, up to one factor."""
        for call in self._before:
            for made in call.made[:2]:
                value = self._canonical(made)
                if value is None or value.shape[-1] == 0:
                    continue
                found = _columns(target, value, at_first, self._reader.tolerance)
                if found is not None:
                    yield call, value, found

    def _canonical(self, value: Tensor | None) -> Float[Tensor, "batch position features"] | None:
        """A tensor with one row a token, whatever its heads' axis; None if it is no such thing."""
        if value is None or not value.is_floating_point():
            return None
        batch, length = self._batch, self._length
        if value.ndim == 2 and value.shape[0] == batch * length:
            return value.reshape(batch, length, -1)
        if value.ndim >= 3 and value.shape[:2] == (batch, length):
            return value.reshape(batch, length, -1)
        if value.ndim == 4 and value.shape[0] == batch and value.shape[2] == length:
            return rearrange(value, "batch head position d -> batch position (head d)")
        return None

    def _check_input(self, call: _Call, name: str) -> None:
        given, stream = self._canonical(call.given), self._canonical(self._own.given)
        if given is None or stream is None or not _same(given, stream):
            self._refuse(f"the projection {call.path!r} of its {name} does not read what its attention is given")

    def _layout(self, found: Mapping[str, "_Source"], heads: int, made: int, kv_heads: int) -> Layout:
        q, k, v = (found[name] for name in "qkv")
        if kv_heads < made:
            # Keys and values were repeated for their group of queries before the attention.
            group = made // kv_heads
            k, v = (
                replace(
                    each,
                    columns=tuple(
                        rearrange(torch.tensor(each.columns), "(kv group d) -> kv group d", kv=kv_heads, group=group)[
                            :, 0
                        ]
                        .flatten()
                        .tolist()
                    ),
                )
                for each in (k, v)
            )
        paths = (q.path, k.path, v.path)
        whole = all(list(each.columns) == list(range(len(each.columns))) for each in (q, k, v))
        if len(set(paths)) == 3 and whole:
            return Separate(*paths)
        return Columns(paths, (q.columns, k.columns, v.columns))

    def _norm_axes(self, query: "_Source") -> dict[str, str]:
        """The axes of what the norms of queries and keys are given."""
        if query.norm_call is None or query.norm_call.given is None:
            return {}
        shape = query.norm_call.given.shape
        if len(shape) == 3:
            return {"qk_norm_axes": "batch position (head d_head)"}
        if shape[1] != self._length:
            return {"qk_norm_axes": "batch head position d_head"}
        return {}

    # -- rotation ------------------------------------------------------------------------------------------

    def _rotary(self, found: Mapping[str, "_Source"]) -> Rotary | None:
        """How queries and keys were rotated between their projections (and norms) and the score."""
        pairs = []
        for name, value in (("q", self._attended.q), ("k", self._attended.k)):
            source = found[name]
            made, rotated = self._unrotated(source), value
            if self._norm_is_after(source):
                given = self._canonical(source.norm_call.given)  # type: ignore[union-attr]
                assert given is not None
                rotated = rearrange(given, "batch position (head d) -> batch position head d", d=value.shape[-1])
            made = rearrange(made, "batch position (head d) -> batch position head d", d=value.shape[-1])
            if made.shape[2] != rotated.shape[2]:
                made = made.repeat_interleave(rotated.shape[2] // made.shape[2], dim=2)
            pairs.append((made.double() * source.scale, rotated.double()))
        tolerance = 16 * self._reader.tolerance
        if all(_close(made, value, tolerance) for made, value in pairs):
            return None
        for path, tables in self._tables():
            cos, sin = (table[:, :, None].double() for table in tables)
            for form in FORMS:
                width = form.width(cos.shape[-1])
                for first in dict.fromkeys((0, pairs[0][0].shape[-1] - width)):
                    if first < 0 or width > pairs[0][0].shape[-1]:
                        continue
                    share = width / pairs[0][0].shape[-1]
                    rotary = replace(form, share=share, first=first, tables=path)
                    if all(_close(rotary(made, cos, sin), value, tolerance) for made, value in pairs):
                        return rotary
        self._refuse("its queries and keys are rotated in a way, or by tables, that were not found")
        raise AssertionError

    def _tables(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Cosine and sine among what the attention is given or, with its path, what a module inside it returns."""
        candidates = [("", tables_of(self._own.args, self._own.kwargs))]
        candidates += [(call.path[len(self._path) + 1 :], as_tables(call.made)) for call in self._before]
        for path, tables in candidates:
            if tables is not None and tables[0].shape[1] == self._length:
                yield path, tables

    def _norm_is_after(self, source: "_Source") -> bool:
        """Whether the norm of queries or keys reads them after the rotation."""
        if source.norm_call is None:
            return False
        given = self._canonical(source.norm_call.given)
        assert given is not None
        return not _close(self._projected(source), given, self._reader.tolerance)

    def _projected(self, source: "_Source") -> Tensor:
        path = f"{self._path}.{source.path}"
        call = next(call for call in self._before if call.path == path)
        made = self._canonical(call.made[0])
        assert made is not None
        return made[..., list(source.columns)]

    def _unrotated(self, source: "_Source") -> Tensor:
        """q or k as the projection or the norm made it."""
        if source.norm_call is None or self._norm_is_after(source):
            return self._projected(source)
        normed = self._canonical(source.norm_call.made[0])
        assert normed is not None
        return normed

    # -- the block -----------------------------------------------------------------------------------------

    def _around(self, plan: Architecture) -> Architecture:
        """The block around the attention: W_O, norms, MLP and sums."""
        stream, ended = self._canonical(self._block.given), self._canonical(self._block.made[0])
        assert stream is not None
        if ended is None or ended.shape != stream.shape:
            self._refuse("its block returns something else than its stream")
        out = self._out()
        raw = self._canonical(out.made[0])
        assert raw is not None and ended is not None
        attn_in = self._canonical(self._own.given)
        assert attn_in is not None
        plan = replace(plan, out=out.path, gate=self._gate(out))
        attn_norm = None
        if not _same(attn_in, stream):
            attn_norm = self._between(stream, attn_in, self._own.order)
            if attn_norm is None:
                self._refuse("what its attention is given is neither the stream nor a norm of it")
        written = [(out, raw)]
        written += [
            (call, value)
            for call in self._calls
            if call.order > out.order
            and (value := self._canonical(call.made[0] if call.made else None)) is not None
            and value.shape == stream.shape
            and self._reads(call, raw)
        ]
        later = [
            call
            for call in self._calls
            if call.order > self._attended.order and call.path and self._canonical(call.given) is not None
        ]
        middle = self._middle(stream, written, later)
        if middle is None:
            parallel = self._parallel(stream, written, later, ended)
            if parallel is None:
                self._refuse("no sum of the stream and what attention writes was found")
            writer, factor, mlp, mlp_factor = parallel
            return self._with(plan, attn_norm, writer, out, factor, None, mlp, mlp_factor, None)
        call, writer, factor = middle
        given = self._canonical(call.given)
        assert given is not None
        added = self._added(
            given, ended, [each for each in later if each.order >= call.order or each.path in call.path]
        )
        if added is not None:
            mlp, mlp_factor = added
            return self._with(plan, attn_norm, writer, out, factor, call.path, mlp, mlp_factor, None)
        normed = self._canonical(call.made[0])
        assert normed is not None
        for post in reversed(later):
            entered, left = self._canonical(post.given), self._canonical(post.made[0] if post.made else None)
            if entered is None or left is None or not _same(left, ended) or entered.shape != stream.shape:
                continue
            added = self._added(normed, entered, [each for each in later if call.order < each.order < post.order])
            if added is not None and attn_norm is None and factor == 1 and added[1] == 1:
                return self._with(plan, None, writer, out, factor, call.path, added[0], 1.0, post.path)
        self._refuse("its block does not end in a sum of the stream and what its MLP writes")
        raise AssertionError

    def _with(
        self, plan: Architecture, attn_norm: str | None, writer: _Call, out: _Call, factor: float, mid_norm: str | None,
        mlp: _Call, mlp_factor: float, post_norm: str | None,
    ) -> Architecture:  # fmt: skip
        return replace(
            plan,
            norm="pre" if post_norm is None else "post",
            attn_norm=attn_norm,
            attn_out="" if writer is out else writer.path,
            attn_scale=factor,
            mid_norm=mid_norm,
            mlp_out=mlp.path,
            mlp_scale=mlp_factor,
            post_norm=post_norm,
        )

    def _out(self) -> _Call:
        """The projection that reads z."""
        z = rearrange(self._attended.z, "batch position head d -> batch position (head d)")
        readers = []
        for call in self._calls:
            if call.order < self._attended.order or not has_matrix(call.module):
                continue
            given = self._canonical(call.given)
            if given is not None and given.shape == z.shape:
                readers.append(call)
                if _same(given, z):
                    return call
        if not readers:
            self._refuse("no matrix reads z, so W_O was not found")
        return readers[-1]

    def _gate(self, out: _Call) -> Gate | None:
        """What z is multiplied by before W_O; None if W_O reads z itself."""
        z = rearrange(self._attended.z, "batch position head d -> batch position (head d)")
        given = self._canonical(out.given)
        assert given is not None
        if _same(given, z):
            return None
        gate = torch.where(z == 0, 0.0, given.double() / z.double())
        stream = self._canonical(self._own.given)
        for call in self._calls:
            value = self._canonical(call.made[0] if call.made else None)
            if value is None or not has_matrix(call.module) or not call.path.startswith(f"{self._path}."):
                continue
            read = self._canonical(call.given)
            if read is None or stream is None or not _same(read, stream):
                continue
            for function in _GATES:
                made = getattr(nn.functional, function)(value.double())
                found = _columns(gate, made, False, self._reader.tolerance)
                if found is not None and found[1] == 1:
                    return Gate(call.path[len(self._path) + 1 :], tuple(found[0]), function)
        self._refuse(f"{out.path!r} reads neither z nor z times a gate that was found (a norm of z?)")
        raise AssertionError

    def _between(self, given: Tensor, made: Tensor, before: int) -> str | None:
        """The module that makes one tensor of another."""
        for call in self._calls:
            if call.order < before and call.made and self._reads(call, given):
                value = self._canonical(call.made[0])
                if value is not None and _same(value, made):
                    return call.path
        return None

    def _reads(self, call: _Call, value: Tensor) -> bool:
        given = self._canonical(call.given)
        return given is not None and _same(given, value)

    def _middle(
        self, stream: Tensor, written: Sequence[tuple[_Call, Tensor]], later: Sequence[_Call]
    ) -> tuple[_Call, _Call, float] | None:
        """The first module that reads stream + r · what attention writes, that write, and r."""
        for call in sorted(later, key=lambda each: each.order - 1000000 * (each.path == "")):
            given = self._canonical(call.given)
            if given is None or given.shape != stream.shape or _same(given, stream):
                continue
            for writer, value in written:
                factor = self._fits(given, stream, value)
                if factor is not None:
                    return call, writer, factor
        return None

    def _fits(self, total: Tensor, start: Tensor, added: Tensor) -> float | None:
        """r where total = start + r · added."""
        difference, added = (total.double() - start.double()), added.double()
        size = float(added.pow(2).sum())
        if size == 0:
            return None
        factor = float((difference * added).sum()) / size
        if abs(factor) < _LEAST:
            return None
        slack = self._reader.tolerance * (float(start.double().norm()) + abs(factor) * size**0.5)
        if float((difference - factor * added).norm()) > slack:
            return None
        return self._reader.named(factor)

    def _added(self, start: Tensor, total: Tensor, calls: Sequence[_Call]) -> tuple[_Call, float] | None:
        """The outermost module whose output was added, and its factor."""
        found = []
        for call in calls:
            for made in call.made[:1]:
                value = self._canonical(made)
                if value is not None and value.shape == start.shape and call.path:
                    factor = self._fits(total, start, value)
                    if factor is not None:
                        found.append((call, factor))
        return min(found, key=lambda each: (each[0].path.count("."), each[0].order), default=None)

    def _parallel(
        self, stream: Tensor, written: Sequence[tuple[_Call, Tensor]], later: Sequence[_Call], ended: Tensor
    ) -> tuple[_Call, float, _Call, float] | None:
        """A block that adds attention and MLP in one step: both writes and their factors."""
        for writer, value in written:
            for call in sorted(self._calls, key=lambda each: (each.path.count("."), each.order)):
                if not call.path or call.path == self._path or call.path.startswith(f"{self._path}."):
                    continue
                made = self._canonical(call.made[0] if call.made else None)
                if made is None or made.shape != stream.shape or _same(made, value):
                    continue
                factors = self._two(ended, stream, value, made)
                if factors is not None:
                    return writer, factors[0], call, factors[1]
        return None

    def _two(self, total: Tensor, start: Tensor, one: Tensor, other: Tensor) -> tuple[float, float] | None:
        """r and s where total = start + r · one + s · other."""
        columns = torch.stack([one.double().flatten(), other.double().flatten()], dim=1)
        difference = (total.double() - start.double()).flatten()
        found = torch.linalg.lstsq(columns, difference[:, None]).solution[:, 0]
        if bool((found.abs() < _LEAST).any()):
            return None
        slack = self._reader.tolerance * (float(start.double().norm()) + float((columns * found).norm()))
        if float((difference - columns @ found).norm()) > slack:
            return None
        return self._reader.named(float(found[0])), self._reader.named(float(found[1]))

    def _refuse(self, found: str) -> Any:
        raise UnreadableError(f"layer {self._layer}: {found}")


@dataclass(frozen=True)
class _Source:
    """Where queries, keys or values come from."""

    path: str
    columns: tuple[int, ...]
    norm: str | None
    norm_call: _Call | None
    scale: float


def _tensors(value: Any) -> Iterator[Tensor]:
    for each in value if isinstance(value, tuple | list) else (value,):
        if isinstance(each, torch.Tensor):
            yield each


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return one.shape == other.shape and float((one - other).norm()) <= tolerance * float(other.norm())


def _factor(total: Tensor, value: Tensor) -> float:
    return float((total * value).sum() / value.pow(2).sum())


def _columns(
    target: Float[Tensor, "batch position wanted"],
    source: Float[Tensor, "batch position there"],
    at_first: bool,
    tolerance: float,
) -> tuple[list[int], float] | None:
    """The column of `source` that each column of `target` is, up to one common factor; None if any is none."""
    wanted, there = (value[:, 0] if at_first else value.flatten(0, 1) for value in (target, source))
    wanted, there = wanted.double(), there.double()
    sizes, lengths = wanted.norm(dim=0), there.norm(dim=0)
    if not bool((sizes > 0).all()):
        return None
    alike = (wanted / sizes).T @ (there / lengths.clamp_min(torch.finfo(torch.float64).tiny))
    best = alike.max(dim=1)
    if bool((best.values < 1 - tolerance).any()):
        return None
    factors = sizes / lengths[best.indices]
    factor = float(factors.median())
    if bool(((factors - factor).abs() > tolerance * 64 * factor).any()):
        return None
    columns = best.indices.tolist()
    return columns, 1.0 if abs(factor - 1) <= 64 * tolerance else factor


def _is_causal(mask: Any, length: int) -> bool:
    if not isinstance(mask, MaskRule):
        return False
    seen = mask.visible(range(length))[0, 0]
    return not bool(seen.triu(1).any())


def _difference(one: Architecture, other: Architecture) -> str:
    names = [name for name in one.__dataclass_fields__ if getattr(one, name) != getattr(other, name)]
    return ", ".join(names)
