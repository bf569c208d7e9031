"""Where does a user's module attend? Its stacks and layers, read from one traced call of `example`."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import AttnmechError, InputError, UnsupportedModelError, first_line
from .architectures import Architecture, has_module, submodule
from .attention import IMPLEMENTATION, Site
from .block_structure import BlockReader, Factors, UnreadableError
from .copies import copy_of
from .in_force import Pass
from .own_attention import ProductCall, described_as, is_causal, no_tokens, watching_products
from .own_call import CallForm
from .own_module import EachUse, Layer, OwnModule, blocks_of, first_output
from .replaced_mha import Masked, OurMultiheadAttention, further_keys
from .traced import Attended, Call, Trace, recording, same, tensors_of
from .weights import Separate

_PROJECTIONS: Final = Separate("q_proj", "k_proj", "v_proj")
_OWN_OUTPUT: Final = "its output is what the module returns"
_MOST_SHARED: Final = 8
"""How deep modules that are called several times may be nested."""


@dataclass(frozen=True, eq=False)
class Use:
    """One call of an attention in the traced pass: of an `nn.MultiheadAttention`, or of the user's own code."""

    path: str
    batched: bool
    own: bool
    """Whether queries and keys are made of the same tensor: self-attention."""
    z: Float[Tensor, "batch query features"]
    """What W_O reads; of attention that is only named, what it returns."""
    keys: int
    """The number of keys that are made of what it is given."""
    order: int
    masked: Masked | None = None
    mha: OurMultiheadAttention | None = None
    product: ProductCall | None = None
    given: tuple[Any, Any, Any] | None = None
    """The arguments and the output of attention that is only named."""

    @property
    def texts(self) -> int:
        """The number of sequences."""
        return len(self.z)

    @property
    def queries(self) -> int:
        """The number of queries."""
        return self.z.shape[1]

    @property
    def sizes(self) -> tuple[int, int, tuple[str, ...]]:
        """The number of heads, their dimensions together, and the labels of the keys that are no tokens."""
        if self.mha is not None:
            return self.mha.heads, self.mha.original.embed_dim, further_keys(self.mha.original)
        heads = 0 if self.product is None else self.product.q.shape[1]
        return heads, self.z.shape[-1], ()

    @property
    def batch_first(self) -> bool:
        """Whether what it is given has texts first."""
        return not self.batched or self.mha is None or self.mha.original.batch_first


@dataclass(eq=False)
class Traced(Trace):
    """What a pass of a user's module showed."""

    uses: list[Use] = None  # type: ignore[assignment]


def read_own(
    module: nn.Module, example: Any, architecture: Architecture | None = None
) -> tuple[OwnModule, tuple[Architecture, ...]]:
    """A private copy of a user's module, with the architecture of each of its stacks, read or as the user names it.

    Raises `InputError` for an example that does not run or without a batch axis, `UnsupportedModelError` for a module
    that does not attend, or in a way that is no list of layers; each says what was found.
    """
    plain = _private(module, CallForm.of(example))
    if architecture is not None:
        plain.named = _named(plain, architecture)
    output = _run_plain(plain, example)
    form, axis = _with_batch(plain, example, output)
    plain.form, plain.output_axis = form, axis
    rows = form.perturbed(form.rows(example))
    _unroll(plain, rows)
    trace = traced(plain, rows)
    if architecture is not None:
        return plain, (_described(plain, trace, architecture),)
    layers, plans = _stacks(plain, trace)
    plain.build(layers)
    return plain, plans


def _private(module: nn.Module, form: CallForm) -> OwnModule:
    if isinstance(module, torch.jit.ScriptModule) or any(
        isinstance(part, torch.jit.ScriptModule) for part in module.modules()
    ):
        raise UnsupportedModelError(
            f"{type(module).__name__} is scripted or traced by torch.jit, and nothing inside it can be replaced; give "
            "the Python module that it was made from."
        )
    if next(module.parameters(), None) is None:
        raise UnsupportedModelError(f"{type(module).__name__} is a module without attention: it has no parameters.")
    found = copy_of(OwnModule(module, form))
    assert isinstance(found, OwnModule)
    return found


def _run_plain(plain: OwnModule, example: Any) -> Tensor:
    """What the module returns for its example, called as the user does."""
    form = plain.form
    try:
        with torch.no_grad():
            return first_output(plain.module(*_called(form, example)[0], **_called(form, example)[1]))
    except AttnmechError:
        raise
    except Exception as error:  # whatever a module raises that is called in a wrong way
        _check_masks(plain, example)
        raise InputError(
            f"{type(plain.module).__name__} does not run on `example`: {type(error).__name__}: {first_line(error)}. "
            "Give what the module is called with: a tensor, a tuple of arguments, or a mapping of keyword arguments."
        ) from error


def _check_masks(plain: OwnModule, example: Any) -> None:
    """Raises `InputError` for a mask of a wrong shape, of which torch's own message may tell nothing."""
    try:
        traced(plain, plain.form.rows(example))
    except InputError as error:
        raise InputError(f"{type(plain.module).__name__} does not run on `example`: {error}") from error
    except Exception:  # the module's own error is told
        return


def _called(form: CallForm, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return form.arguments(form.rows(example))


# -- the pass --------------------------------------------------------------------------------------------------


def traced(plain: OwnModule, rows: Mapping[str, Tensor]) -> Traced:
    """One pass of a copy that attends through `attend`: every call of a module, and of an attention."""
    copied = copy_of(plain)
    assert isinstance(copied, OwnModule)
    copied.own_attention(IMPLEMENTATION)
    trace = Traced()
    trace.uses = []
    named = {path: part for path, part in copied.named_modules() if path and not isinstance(part, nn.ModuleList)}
    with (
        torch.no_grad(),
        _watching(trace, named, plain.named),
        recording(trace, named, lambda *_: None),
        trace.in_force.unchecked(),
        trace.in_force.recording(Pass(no_tokens())),
    ):
        trace.output = copied(rows)
    return trace


@contextmanager
def _watching(trace: Traced, named: Mapping[str, nn.Module], attending: Sequence[str]) -> Iterator[None]:
    """Records every attention; of modules that the user names, `attending`, each call."""
    active: list[str] = []
    handles = []

    def entering(path: str) -> Callable[..., None]:
        return lambda *_: active.append(path)

    def leaving(module: nn.Module, args: Any, output: Any) -> None:
        active.pop()

    def product(made: ProductCall, z: Tensor) -> None:
        if attending and (above := [path for path in reversed(active) if path in attending]):
            products[above[0]] = made
        elif not attending:
            merged = rearrange(z, "batch head query d -> batch query (head d)").clone()
            own = made.q.shape[2] == made.k.shape[2]
            trace.uses.append(
                Use(active[-1], True, own, merged, made.k.shape[2], trace.tick(), made.masked, product=made)
            )

    products: dict[str, ProductCall] = {}

    def at_named(path: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            x, made = (next(tensors_of(each)) for each in ((*args, *kwargs.values()), output))
            call, given = products.pop(path, None), (args, kwargs, output)
            masked = None if call is None else call.masked
            trace.uses.append(Use(path, True, True, made, x.shape[1], trace.tick(), masked, product=call, given=given))

        return keep

    for path, module in named.items():
        handles += [module.register_forward_pre_hook(entering(path)), module.register_forward_hook(leaving)]
        if path in attending:
            handles.append(module.register_forward_hook(at_named(path), with_kwargs=True))
        if isinstance(module, OurMultiheadAttention):
            module.core.attnmech_site = Site(trace.in_force, 0)
            handles += _watch(trace, path, module)
    try:
        with watching_products(product):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(trace: Traced, path: str, module: OurMultiheadAttention) -> list[Any]:
    called: list[Mapping[str, Any]] = []
    names = ("query", "key", "value", "key_padding_mask")

    def at_call(_: nn.Module, args: Any, kwargs: Any) -> None:
        called.append(dict(zip(names, args, strict=False)) | kwargs)

    def at_core(core: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        given = called.pop()
        keys = args[0] if kwargs["key_value_states"] is None else kwargs["key_value_states"]
        trace.uses.append(
            Use(
                path, given["query"].ndim == 3, given["query"] is given["key"], output.clone(), keys.shape[1],
                trace.tick(), kwargs["masked"], mha=module,
            )
        )  # fmt: skip

    return [
        module.register_forward_pre_hook(at_call, with_kwargs=True),
        module.core.register_forward_hook(at_core, with_kwargs=True),
    ]


# -- the batch -------------------------------------------------------------------------------------------------


def _with_batch(plain: OwnModule, example: Any, output: Tensor) -> tuple[CallForm, int | None]:
    """The form with the batch axis of every tensor, and that of the output: proved by a batch of twice the example."""
    form = plain.form
    tensors = form.tensors(example)
    first = traced(plain, form.rows(example))
    _require_attention(plain, first)
    texts = {use.texts for use in first.uses}
    if len(texts) > 1:
        one, other = next((a, b) for a in first.uses for b in first.uses if a.texts != b.texts)
        raise UnsupportedModelError(
            f"all attention must run on the same batch; {_own(one.path)} runs on {one.texts} sequences and "
            f"{_own(other.path)} on {other.texts}. Load the parts of the module one by one."
        )
    (count,) = texts
    batched = any(use.batched for use in first.uses)
    why = ""
    for candidate in form.candidates(tensors, count, batched=batched):
        try:
            axis = _proven(plain, candidate, example, first, output)
        except Exception as error:  # whatever the module raises where the reading is wrong
            why = why or first_line(error)
            continue
        return candidate, axis
    raise UnsupportedModelError(
        f"no batch axis was found in `example`: its attention runs on {count} sequences, and no axis of that length "
        f"can be repeated{f' ({why})' if why else ''}. Give an example with one row per text; a module that folds "
        "other axes into the batch can be loaded below that step."
    )


class _WrongReadingError(Exception):
    pass


def _proven(plain: OwnModule, form: CallForm, example: Any, first: Traced, output: Tensor) -> int | None:
    rows = form.rows(example)
    twice = {name: torch.cat((value, value)) if form.is_by_text(name) else value for name, value in rows.items()}
    plain_form, plain.form = plain.form, form
    try:
        found = traced(plain, twice)
    finally:
        plain.form = plain_form
    if len(found.uses) != len(first.uses):
        raise _WrongReadingError
    for one, two in zip(first.uses, found.uses, strict=True):
        if two.z.shape != (2 * one.texts, *one.z.shape[1:]):
            raise _WrongReadingError
        for half in two.z.chunk(2):
            if not torch.allclose(half, one.z, rtol=1e-3, atol=1e-4, equal_nan=True):
                raise _WrongReadingError
    whole = first_output(found.output.whole)
    if whole.ndim == output.ndim + 1:  # the axis was put in
        grown = [at for at in range(whole.ndim) if whole.shape[at] == 2 and _without(whole.shape, at) == output.shape]
    else:
        grown = [
            at for at in range(min(whole.ndim, output.ndim)) if whole.shape[at] == 2 * output.shape[at]
            and _without(whole.shape, at) == _without(output.shape, at)
        ]  # fmt: skip
    return grown[0] if grown else None


def _without(shape: Sequence[int], at: int) -> tuple[int, ...]:
    return (*shape[:at], *shape[at + 1 :])


def _require_attention(plain: OwnModule, trace: Traced) -> None:
    if trace.uses:
        return
    kind = type(plain.module).__name__
    if any(isinstance(part, nn.MultiheadAttention) for part in plain.modules()):
        raise UnsupportedModelError(f"{kind} holds an nn.MultiheadAttention, but `example` never reaches it.")
    raise UnsupportedModelError(
        f"{kind} is a module without attention: it holds no nn.MultiheadAttention, and makes no call of "
        "scaled_dot_product_attention. If it attends with code of its own, "
        "describe it: am.load(module, example=..., architecture=am.Architecture(...))."
    )


# -- modules that are called several times ---------------------------------------------------------------------


def _unroll(plain: OwnModule, rows: Mapping[str, Tensor]) -> None:
    """Makes of a module that the pass calls several times a copy for each call, if it attends."""
    for _ in range(_MOST_SHARED):
        trace = traced(plain, rows)
        attending = {path for use in trace.uses for path in (use.path, *_above(use.path))}
        counts = Counter(
            call.path for call in trace.calls if call.path in attending and not isinstance(call.module, EachUse)
        )
        twice = sorted((path for path, count in counts.items() if count > 1), key=lambda path: path.count("."))
        if not twice:
            return
        shared = plain.get_submodule(twice[0])
        each = EachUse(shared, counts[twice[0]], _own(twice[0]))
        for path, part in list(plain.named_modules(remove_duplicate=False)):
            if part is shared:
                plain.set_submodule(path, each)
    raise UnsupportedModelError(
        f"modules that are called several times are nested more than {_MOST_SHARED} deep in "
        f"{type(plain.module).__name__}; load its parts one by one."
    )


def _above(path: str) -> list[str]:
    """The paths of the modules that hold one, the nearest first."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def _parent(path: str) -> str:
    return next(iter(_above(path)), "")


def _own(path: str) -> str:
    """A path as the user knows it."""
    return re.sub(r"\.uses\.\d+", "", path.removeprefix("module").removeprefix(".")) or "the module itself"


# -- stacks ----------------------------------------------------------------------------------------------------


def _stacks(plain: OwnModule, trace: Traced) -> tuple[list[Layer], tuple[Architecture, ...]]:
    """Each use as a layer of a stack, in the order of the pass, and the architecture of each stack."""
    labels = _labels(trace.uses)
    order = [label for label in ("", "encoder", "decoder", "cross") if label in labels]
    layers: list[Layer | None] = [None] * len(labels)
    plans = []
    for label in order:
        places = [place for place, each in enumerate(labels) if each == label]
        uses = [trace.uses[place] for place in places]
        _require_alike(label, uses)
        plan, blocks = _plan(plain, trace, label, uses)
        plans.append(plan)
        for place, use, block in zip(places, uses, blocks, strict=True):
            layers[place] = Layer(label, block, use.path)
    return [layer for layer in layers if layer is not None], tuple(plans)


def _labels(uses: Sequence[Use]) -> list[str]:
    """The stack of each use: "" where all is self-attention over one sequence; else encoder, decoder or cross.

    Cross-attention says which sequence makes the queries and which the keys. Where both have one length,
    self-attention before the first cross-attention, outside its block, is the encoder's.
    """
    crossing = [use for use in uses if not use.own]
    if not crossing:
        lengths = {use.queries for use in uses}
        if len(lengths) > 1:
            raise UnsupportedModelError(
                "self-attention must run over one sequence; here it runs over "
                + ", ".join(f"{use.queries} positions in {_own(use.path)}" for use in _each_length(uses))
                + ". Load the parts of the module one by one."
            )
        return [""] * len(uses)
    shapes = {(use.queries, use.keys) for use in crossing}
    if len(shapes) > 1:
        raise UnsupportedModelError(
            "cross-attention must run between two sequences; here it runs from "
            + ", ".join(f"{use.queries} to {use.keys} positions in {_own(use.path)}" for use in _each_length(crossing))
            + ". Load the parts of the module one by one."
        )
    ((to, source),) = shapes
    first = min(use.order for use in crossing)
    blocks = {_parent(use.path) for use in crossing}
    found = []
    for use in uses:
        if not use.own:
            found.append("cross")
        elif use.queries not in (to, source):
            raise UnsupportedModelError(
                f"self-attention in {_own(use.path)} runs over {use.queries} positions, but cross-attention from {to} "
                f"to {source}. Load the parts of the module one by one."
            )
        elif to != source:
            found.append("decoder" if use.queries == to else "encoder")
        else:
            found.append("encoder" if use.order < first and _parent(use.path) not in blocks else "decoder")
    return found


def _each_length(uses: Sequence[Use]) -> list[Use]:
    return list({(use.queries, use.keys): use for use in uses}.values())


def _require_alike(label: str, uses: Sequence[Use]) -> None:
    """Raises `UnsupportedModelError` unless all layers of a stack have the same sizes."""
    for use in uses[1:]:
        if use.sizes != uses[0].sizes:
            (heads, width, more), (others, wide, further) = uses[0].sizes, use.sizes
            of_stack = f"the {label} stack" if label else "the module"
            raise UnsupportedModelError(
                f"all layers of {of_stack} must have the same heads; {_own(uses[0].path)} has {heads} of {width} "
                f"dimensions{_with(more)}, {_own(use.path)} {others} of {wide}{_with(further)}. Load the parts of the "
                "module one by one."
            )


def _with(labels: Any) -> str:
    return f" and the keys {', '.join(labels)}" if labels else ""


def _plan(plain: OwnModule, trace: Traced, label: str, uses: Sequence[Use]) -> tuple[Architecture, list[str]]:
    """The architecture of a stack, and the path of each layer's block."""
    if any(use.product is not None for use in uses):
        return _plan_of_products(plain, trace, label, uses)
    heads = uses[0].sizes[0]
    start = Architecture(
        name=type(plain.module).__name__, stack=label, blocks=blocks_of(label), attention="core", qkv=_PROJECTIONS,
        out="out_proj", mid_norm=None, mlp_out=None, streams=False, hands_on=True, reads="tensors",
        n_heads=heads, n_kv_heads=heads, head_refused=_OWN_OUTPUT,
        causal=label != "cross" and all(_is_causal(use) for use in uses),
    )  # fmt: skip
    read = [_block(plain, trace, start, use, len(uses)) for use in uses]
    found = [each for each in read if each is not None]
    if len(found) < len(uses) or len({replace(plan, chained=True) for plan, _ in found}) > 1:
        alone = replace(start, attn_out="out_proj") if label == "cross" and _in_torch_decoder(plain, uses) else start
        return alone, [use.path for use in uses]
    paths = [path for _, path in found]
    plan = replace(found[0][0], chained=_is_chained(trace, paths))
    return plan, paths


def _block(
    plain: OwnModule, trace: Traced, start: Architecture, use: Use, layers: int
) -> tuple[Architecture, str] | None:
    """The block around an attention: the nearest module that takes and returns a stream; None if there is none."""
    others = [each.path for each in trace.uses if each is not use]
    for path in _above(use.path):
        if any(other.startswith(f"{path}.") for other in others):
            return _torch_decoder(plain, trace, start, use, path)
        below = use.path[len(path) + 1 :]
        inside = [call for call in trace.calls if call.path == path or call.path.startswith(f"{path}.")]
        own = next((call for call in inside if call.path == path), None)
        if own is None:
            continue
        if own.given is not None and own.given.is_nested and isinstance(own.module, nn.TransformerEncoderLayer):
            raise UnsupportedModelError(
                f"{_own(path)} is given a nested tensor; only nn.TransformerEncoder may be. Put the layer into one, or "
                "give padded texts with src_key_padding_mask."
            )
        plan = replace(
            start, streams=True, attention=f"{below}.core", out=f"{below}.out_proj",
            batch_first=use.batch_first,
        )  # fmt: skip
        try:
            return _OwnBlockReader(plan, use, path, inside, plain).plan, path
        except (UnreadableError, StopIteration):
            continue
    return None


def _torch_decoder(
    plain: OwnModule, trace: Traced, start: Architecture, use: Use, path: str
) -> tuple[Architecture, str] | None:
    """The self-attention of torch's decoder layer, between whose attention and MLP stands cross-attention."""
    layer = plain.get_submodule(path)
    if not _is_torch_decoder(layer) or use.path != f"{path}.self_attn":
        return None
    plan = replace(
        start, streams=True, attention="self_attn.core", out="self_attn.out_proj", mlp_out="linear2",
        interposed="cross", batch_first=use.batch_first,
    )  # fmt: skip
    if layer.norm_first:
        return replace(plan, attn_norm="norm1", mid_norm="norm2"), path
    return replace(plan, norm="post", mid_norm="norm1", interposed_norm="norm2", post_norm="norm3"), path


def _is_torch_decoder(layer: nn.Module) -> bool:
    """Whether a module computes what torch's decoder layer does."""
    kind = nn.TransformerDecoderLayer
    own = (type(layer).forward, type(layer)._sa_block, type(layer)._mha_block, type(layer)._ff_block) if isinstance(
        layer, kind
    ) else ()  # fmt: skip
    return own == (kind.forward, kind._sa_block, kind._mha_block, kind._ff_block)


def _in_torch_decoder(plain: OwnModule, uses: Sequence[Use]) -> bool:
    return all(_is_torch_decoder(plain.get_submodule(_parent(use.path))) for use in uses)


def _is_causal(use: Use) -> bool:
    return use.masked is not None and is_causal(use.masked.rule)


def _is_chained(trace: Traced, paths: Sequence[str]) -> bool:
    """Whether each block is given what the one before returned."""
    by_path = {call.path: call for call in trace.calls}
    calls = [by_path[path] for path in paths]
    return all(before.made and same(before.made[0], after.given) for before, after in pairwise(calls))


def _plan_of_products(
    plain: OwnModule, trace: Traced, label: str, uses: Sequence[Use]
) -> tuple[Architecture, list[str]]:
    """The architecture of a stack whose attention is the user's own code, with one product each."""
    first = uses[0]
    where = _own(first.path)
    if any(use.product is None for use in uses) or label not in ("", "encoder", "decoder"):
        raise UnsupportedModelError(
            f"{where} attends with code of its own; that is read for self-attention, in all layers of a stack. Load "
            "the parts of the module one by one."
        )
    twice = next((path for path, count in Counter(use.path for use in uses).items() if count > 1), None)
    if twice is not None:
        raise UnsupportedModelError(
            f"{_own(twice)} calls scaled_dot_product_attention more than once in a pass; put each into a module of its "
            "own."
        )
    start = Architecture(
        name=type(plain.module).__name__, stack=label, blocks=blocks_of(label), attention="", qkv=_PROJECTIONS, out="",
        mid_norm=None, mlp_out=None, streams=False, hands_on=True, reads="tensors", head_refused=_OWN_OUTPUT,
    )  # fmt: skip
    found = [
        _block_of_product(plain, trace, start, use, [each.path for each in uses if each is not use]) for use in uses
    ]
    if (
        any(path != use.path for (_, path), use in zip(found, uses, strict=True))
        and len({replace(plan, chained=True) for plan, _ in found}) > 1
    ):
        found = [_block_of_product(plain, trace, start, use, None) for use in uses]
    plans = {replace(plan, causal=all(_is_causal(use) for use in uses)) for plan, _ in found}
    if len(plans) > 1:
        raise UnsupportedModelError(f"the layers of {type(plain.module).__name__} are built in different ways.")
    (plan,) = plans
    plain.products += tuple(use.path for use in uses)
    paths = [path for _, path in found]
    return replace(plan, chained=not plan.streams or _is_chained(trace, paths)), paths


def _block_of_product(
    plain: OwnModule, trace: Traced, start: Architecture, use: Use, others: Sequence[str] | None
) -> tuple[Architecture, str]:
    """The nearest block around attention of own code, or (`others` None, or without a block) the attention itself."""
    factors = Factors(plain.config, torch.finfo(use.z.dtype).eps)
    product = use.product
    assert product is not None
    q, k, v = (
        rearrange(each, "batch head position d -> batch position head d") for each in (product.q, product.k, product.v)
    )
    z = rearrange(use.z, "batch query (head d) -> batch query head d", head=product.q.shape[1])
    attended = Attended(plain.get_submodule(use.path), q, k, v, z, product.masked.rule, {}, use.order)

    def calls(path: str) -> list[Call]:
        inside = [call for call in trace.calls if call.path == path or call.path.startswith(f"{path}.")]
        return [replace(call, path=call.path[len(path) + 1 :] if call.path != path else "") for call in inside]

    for path in _above(use.path) if others is not None else ():
        if any(other.startswith(f"{path}.") for other in others or ()):
            break
        if not any(call.path == path for call in trace.calls):
            continue
        try:
            plan = BlockReader(
                replace(start, streams=True, attention=use.path[len(path) + 1 :]), attended, calls(path), factors
            ).plan
        except (UnreadableError, StopIteration):
            continue
        return plan, path
    try:
        return _AloneReader(start, attended, calls(use.path), factors).plan, use.path
    except (UnreadableError, StopIteration) as error:
        raise UnsupportedModelError(
            f"{_own(use.path)} calls scaled_dot_product_attention, but what it makes its queries, keys and values of "
            f"cannot be read: {error}."
        ) from error


class _AloneReader(BlockReader):
    """Reads an attention that stands in no block."""

    def _around(self, plan: Architecture) -> Architecture:
        out = self._out()
        return replace(plan, out=out.path, gate=self._gate(out))


def _named(plan: OwnModule, architecture: Architecture) -> tuple[str, ...]:
    """The paths of the attention modules that a user's architecture names."""
    blocks = f"module.{architecture.blocks}" if architecture.blocks else "module"
    found = submodule(plan, blocks)
    if not isinstance(found, nn.ModuleList):
        raise UnsupportedModelError(
            f"`blocks` of `architecture` must name an nn.ModuleList of blocks; {architecture.blocks!r} is a "
            f"{type(found).__name__}."
        )
    for number, block in enumerate(found):
        for path in (architecture.attention, architecture.out):
            if not has_module(block, path):
                raise UnsupportedModelError(
                    f"`architecture` names a module {path!r}, which block {number} of {architecture.blocks!r} does not "
                    "have."
                )
    return tuple(f"{blocks}.{number}.{architecture.attention}" for number in range(len(found)))


def _described(plain: OwnModule, trace: Traced, architecture: Architecture) -> Architecture:
    """A user's architecture, completed by what the traced pass shows of its attention."""
    blocks = f"module.{architecture.blocks}"
    by_path = {use.path: use for use in trace.uses}
    uses = [by_path[path] for path in plain.named if path in by_path]
    if len(uses) < len(plain.named) or len(trace.uses) > len(uses):
        raise UnsupportedModelError(
            f"each attention that `architecture` names must be called once in a pass; {len(trace.uses)} calls of "
            f"{len(plain.named)} were seen."
        )
    heads = architecture.n_heads or uses[0].sizes[0]
    if not heads:
        raise InputError("`architecture` must say `n_heads`: there is no config that does.")
    plan = replace(
        architecture, blocks=blocks, n_heads=heads, n_kv_heads=architecture.n_kv_heads or heads, hands_on=True,
        reads="tensors", head_refused=_OWN_OUTPUT,
    )  # fmt: skip
    if all(use.product is not None for use in uses):
        plain.products = tuple(plain.named)
        plan = replace(plan, causal=all(_is_causal(use) for use in uses))
    else:
        for use in uses:
            assert use.given is not None
            how, returns = described_as(plain.get_submodule(use.path), plan, *use.given)
            plain.described[use.path] = (plan, how, returns)
        plan = replace(plan, causal=all(how.causal for _, how, _ in plain.described.values()))
    for number, path in enumerate(plain.named):
        plain.layers = (*plain.layers, Layer("", f"{blocks}.{number}", path))
    return plan


class _OwnBlockReader(BlockReader):
    """Reads norms, sums and MLP of a block whose attention is known."""

    def __init__(self, start: Architecture, use: Use, path: str, calls: Sequence[Call], plain: OwnModule) -> None:
        z = rearrange(use.z, "batch query (head d_head) -> batch query head d_head", head=start.n_heads)
        inside = f"{use.path}."
        assert use.mha is not None
        attended = Attended(use.mha, z, z, z, z, None, {}, use.order)
        turned = [
            replace(call, path=call.path[len(path) + 1 :] if call.path != path else "", **self._by_text(call, use))
            if not call.path.startswith(inside) and not start.batch_first
            else replace(call, path=call.path[len(path) + 1 :] if call.path != path else "")
            for call in calls
        ]
        factors = Factors(plain.config, torch.finfo(z.dtype).eps)
        super().__init__(start, attended, turned, factors)

    @staticmethod
    def _by_text(call: Call, use: Use) -> dict[str, Any]:
        """The tensors of a call with texts first."""
        shape = use.queries, use.texts

        def turned(value: Tensor | None) -> Tensor | None:
            return (
                value.transpose(0, 1) if value is not None and value.ndim == 3 and value.shape[:2] == shape else value
            )

        return {"given": turned(call.given), "made": tuple(turned(each) for each in call.made)}

    def _attention(self, plan: Architecture) -> Architecture:
        return plan
