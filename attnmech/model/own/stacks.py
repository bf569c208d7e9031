"""Sorts the traced calls of a user's module into stacks and layers, and reads the architecture of each."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import torch
from einops import rearrange
from torch import Tensor, nn

from ...errors import InputError, UnsupportedModelError
from ..parts.modules import has_module, submodule
from ..parts.weights import Separate
from ..structure.architecture import Architecture
from ..structure.block_structure import BlockReader, UnreadableError
from ..structure.traced import Attended, Call, Factors, calls_within, same
from .attention import described_as
from .module import Layer, OwnModule, blocks_of
from .trace import Traced, Use, above, named, parent

_PROJECTIONS: Final = Separate("q_proj", "k_proj", "v_proj")
_OWN_OUTPUT: Final = "its output is what the module returns"


def stacks_of(plain: OwnModule, trace: Traced) -> tuple[list[Layer], tuple[Architecture, ...]]:
    """The layers, one for each use of attention, in the order of the pass, and the architecture of each stack."""
    labels = _labels(trace.uses)
    order = [label for label in ("", "encoder", "decoder", "cross") if label in labels]
    layers: list[Layer | None] = [None] * len(labels)
    plans: list[Architecture] = []
    for label in order:
        places = [place for place, own_label in enumerate(labels) if own_label == label]
        uses = [trace.uses[place] for place in places]
        _require_alike(label, uses)
        plan, blocks = _plan(plain, trace, label, uses)
        if label == "cross" and any(other.interposed for other in plans):
            plan = replace(plan, attn_out=plan.out)
        plans.append(plan)
        for place, use, block in zip(places, uses, blocks, strict=True):
            layers[place] = Layer(label, block, use.path)
    return [layer for layer in layers if layer is not None], tuple(plans)


def _labels(uses: Sequence[Use]) -> list[str]:
    """The stack of each use: "" if all uses are self-attention over one sequence; else "encoder", "decoder" or "cross".

    Cross-attention shows which sequence makes the queries and which the keys. If both have the same length,
    self-attention before the first cross-attention and outside its block belongs to the encoder.
    """
    crossing = [use for use in uses if not use.own]
    if not crossing:
        if len({use.queries for use in uses}) > 1:
            raise UnsupportedModelError(
                "self-attention must run over one sequence; here it runs over "
                + ", ".join(f"{use.queries} positions in {named(use.path)}" for use in _each_length(uses))
                + ". Load the parts of the module one by one."
            )
        return [""] * len(uses)
    shapes = {(use.queries, use.keys) for use in crossing}
    if len(shapes) > 1:
        raise UnsupportedModelError(
            "cross-attention must run between two sequences; here it runs from "
            + ", ".join(f"{use.queries} to {use.keys} positions in {named(use.path)}" for use in _each_length(crossing))
            + ". Load the parts of the module one by one."
        )
    ((to, source),) = shapes
    first = min(use.order for use in crossing)
    blocks = {parent(use.path) for use in crossing}
    labels = []
    for use in uses:
        if not use.own:
            labels.append("cross")
        elif use.queries not in (to, source):
            raise UnsupportedModelError(
                f"self-attention in {named(use.path)} runs over {use.queries} positions, but cross-attention from {to} "
                f"to {source}. Load the parts of the module one by one."
            )
        elif to != source:
            labels.append("decoder" if use.queries == to else "encoder")
        else:
            labels.append("encoder" if use.order < first and parent(use.path) not in blocks else "decoder")
    return labels


def _each_length(uses: Sequence[Use]) -> list[Use]:
    return list({(use.queries, use.keys): use for use in uses}.values())


def _require_alike(label: str, uses: Sequence[Use]) -> None:
    for use in uses[1:]:
        if use.sizes != uses[0].sizes:
            (heads, width, more), (others, wide, further) = uses[0].sizes, use.sizes
            of_stack = f"the {label} stack" if label else "the module"
            raise UnsupportedModelError(
                f"all layers of {of_stack} must have the same heads; {named(uses[0].path)} has {heads} of {width} "
                f"dimensions{_with(more)}, {named(use.path)} {others} of {wide}{_with(further)}. Load the parts of the "
                "module one by one."
            )


def _with(labels: Any) -> str:
    return f" and the keys {', '.join(labels)}" if labels else ""


def _plan(plain: OwnModule, trace: Traced, label: str, uses: Sequence[Use]) -> tuple[Architecture, list[str]]:
    if any(use.product is not None for use in uses):
        return _plan_of_products(plain, trace, label, uses)
    heads, causal = uses[0].sizes[0], label != "cross" and all(_is_causal(use) for use in uses)
    start = _start(plain, label, "core", "out_proj")
    start = replace(start, n_heads=heads, n_kv_heads=heads, causal=causal)
    blocks = [block for block in [_block(plain, trace, start, use, len(uses)) for use in uses] if block is not None]
    if len(blocks) < len(uses) or len({replace(plan, chained=True) for plan, _ in blocks}) > 1:
        return start, [use.path for use in uses]
    paths = [path for _, path in blocks]
    plan = replace(blocks[0][0], chained=_is_chained(trace, paths))
    return plan, paths


def _start(plain: OwnModule, label: str, attention: str, out: str) -> Architecture:
    """The architecture of a stack, with only its attention."""
    return Architecture(
        name=type(plain.module).__name__, stack=label, blocks=blocks_of(label), attention=attention, qkv=_PROJECTIONS,
        out=out, mid_norm=None, mlp_out=None, streams=False, hands_on=True, reads="tensors", head_refused=_OWN_OUTPUT,
    )  # fmt: skip


def _block(
    plain: OwnModule, trace: Traced, start: Architecture, use: Use, layers: int
) -> tuple[Architecture, str] | None:
    """The nearest module around an attention that takes and returns a stream, with at most one cross-attention."""
    for path in above(use.path):
        others = [other for other in trace.uses if other is not use and other.path.startswith(f"{path}.")]
        if others and (len(others) > 1 or others[0].own or not use.own):
            return None
        below = use.path[len(path) + 1 :]
        inside = calls_within(trace.calls, path)
        own = next((call for call in inside if not call.path), None)
        if own is None:
            continue
        if own.input is not None and own.input.is_nested and isinstance(own.module, nn.TransformerEncoderLayer):
            raise UnsupportedModelError(
                f"{named(path)} is given a nested tensor; only nn.TransformerEncoder may be. Put the layer into one, "
                "or give padded texts with src_key_padding_mask."
            )
        plan = replace(
            start, streams=True, attention=f"{below}.core", out=f"{below}.out_proj",
            batch_first=use.batch_first,
        )  # fmt: skip
        try:
            crossed = others[0].path[len(path) + 1 :] if others else ""
            return _OwnBlockReader(plan, use, below, inside, plain, crossed).plan, path
        except (UnreadableError, StopIteration):
            if others:
                return None
    return None


def _is_causal(use: Use) -> bool:
    return use.masked is not None and use.masked.rule.causal


def _is_chained(trace: Traced, paths: Sequence[str]) -> bool:
    """Whether each block reads the output of the previous block."""
    by_path = {call.path: call for call in trace.calls}
    calls = [by_path[path] for path in paths]
    return all(before.made and same(before.made[0], after.input) for before, after in pairwise(calls))


def _plan_of_products(
    plain: OwnModule, trace: Traced, label: str, uses: Sequence[Use]
) -> tuple[Architecture, list[str]]:
    """The architecture of a stack whose layers are the user's own attention code, each with one attention product."""
    first = uses[0]
    where = named(first.path)
    if any(use.product is None for use in uses) or label not in ("", "encoder", "decoder"):
        raise UnsupportedModelError(
            f"{where} has its own attention code, which is read only for self-attention, and only if all layers of the "
            "stack have it. Load the parts of the module one by one."
        )
    twice = next((path for path, count in Counter(use.path for use in uses).items() if count > 1), None)
    if twice is not None:
        raise UnsupportedModelError(
            f"{named(twice)} calls scaled_dot_product_attention more than once in a pass; put each call into a "
            f"separate module."
        )
    start = _start(plain, label, "", "")
    blocks = [
        _block_of_product(plain, trace, start, use, [other.path for other in uses if other is not use]) for use in uses
    ]
    if (
        any(path != use.path for (_, path), use in zip(blocks, uses, strict=True))
        and len({replace(plan, chained=True) for plan, _ in blocks}) > 1
    ):
        blocks = [_block_of_product(plain, trace, start, use, None) for use in uses]
    plans = {replace(plan, causal=all(_is_causal(use) for use in uses)) for plan, _ in blocks}
    if len(plans) > 1:
        raise UnsupportedModelError(f"the layers of {type(plain.module).__name__} are built in different ways.")
    (plan,) = plans
    plain.products += tuple(use.path for use in uses)
    paths = [path for _, path in blocks]
    return replace(plan, chained=not plan.streams or _is_chained(trace, paths)), paths


def _block_of_product(
    plain: OwnModule, trace: Traced, start: Architecture, use: Use, others: Sequence[str] | None
) -> tuple[Architecture, str]:
    """The nearest block around the user's attention; the attention itself if there is no block, or `others` is None."""
    factors = Factors(plain.config, torch.finfo(use.z.dtype).eps)
    product = use.product
    assert product is not None
    q, k, v = (
        rearrange(value, "batch head position d -> batch position head d")
        for value in (product.q, product.k, product.v)
    )
    z = rearrange(use.z, "batch query (head d) -> batch query head d", head=product.q.shape[1])
    attended = Attended(plain.get_submodule(use.path), q, k, v, z, product.masked.rule, {}, use.order)

    for path in above(use.path) if others is not None else ():
        if any(other.startswith(f"{path}.") for other in others or ()):
            break
        if not any(call.path == path for call in trace.calls):
            continue
        try:
            whole = replace(start, streams=True, attention=use.path[len(path) + 1 :])
            plan = BlockReader(whole, attended, calls_within(trace.calls, path), factors).plan
        except (UnreadableError, StopIteration):
            continue
        return plan, path
    try:
        return BlockReader(start, attended, calls_within(trace.calls, use.path), factors).plan, use.path
    except (UnreadableError, StopIteration) as error:
        raise UnsupportedModelError(
            f"{named(use.path)} calls scaled_dot_product_attention, but how it makes its queries, keys and values "
            f"cannot be read: {error}."
        ) from error


def named_by_user(plan: OwnModule, architecture: Architecture) -> tuple[str, ...]:
    """The paths of the attention modules that a user's architecture names."""
    blocks = f"module.{architecture.blocks}" if architecture.blocks else "module"
    block_list = submodule(plan, blocks)
    if not isinstance(block_list, nn.ModuleList):
        raise UnsupportedModelError(
            f"`blocks` of `architecture` must name an nn.ModuleList of blocks; {architecture.blocks!r} is a "
            f"{type(block_list).__name__}."
        )
    for number, block in enumerate(block_list):
        for path in (architecture.attention, architecture.out):
            if not has_module(block, path):
                raise UnsupportedModelError(
                    f"`architecture` names a module {path!r}, which block {number} of {architecture.blocks!r} does not "
                    "have."
                )
    return tuple(f"{blocks}.{number}.{architecture.attention}" for number in range(len(block_list)))


def described_stack(plain: OwnModule, trace: Traced, architecture: Architecture) -> Architecture:
    """A user's architecture, completed with what the traced pass shows of the attention."""
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
        raise InputError("`architecture` must give `n_heads`, since there is no config that gives it.")
    plan = replace(
        architecture, blocks=blocks, n_heads=heads, n_kv_heads=architecture.n_kv_heads or heads, hands_on=True,
        reads="tensors", head_refused=_OWN_OUTPUT,
    )  # fmt: skip
    if all(use.product is not None for use in uses):
        plain.products = tuple(plain.named)
        plan = replace(plan, causal=all(_is_causal(use) for use in uses))
    else:
        for use in uses:
            assert use.observed is not None
            how, returns = described_as(plain.get_submodule(use.path), plan, *use.observed)
            plain.described[use.path] = (plan, how, returns)
        plan = replace(plan, causal=all(how.causal for _, how, _ in plain.described.values()))
    for number, path in enumerate(plain.named):
        plain.layers = (*plain.layers, Layer("", f"{blocks}.{number}", path))
    return plan


class _OwnBlockReader(BlockReader):
    """Reads the norms, sums and MLP of a block whose attention is known."""

    def __init__(
        self, start: Architecture, use: Use, below: str, calls: Sequence[Call], plain: OwnModule, crossed: str
    ) -> None:
        z = rearrange(use.z, "batch query (head d_head) -> batch query head d_head", head=start.n_heads)
        assert use.mha is not None
        attended = Attended(use.mha, z, z, z, z, None, {}, use.order)
        inside = f"{below}."
        # Inside the attention, texts are the first axis already.
        turned = [
            call if start.batch_first or call.path.startswith(inside) else replace(call, **self._by_text(call, use))
            for call in calls
        ]
        factors = Factors(plain.config, torch.finfo(z.dtype).eps)
        cross = next(call for call in turned if call.path == crossed) if crossed else None
        super().__init__(start, attended, turned, factors, cross)

    @staticmethod
    def _by_text(call: Call, use: Use) -> dict[str, Any]:
        """The tensors of a call, with texts as their first axis."""
        shape = use.queries, use.texts

        def turned(value: Tensor | None) -> Tensor | None:
            return (
                value.transpose(0, 1) if value is not None and value.ndim == 3 and value.shape[:2] == shape else value
            )

        return {"input": turned(call.input), "made": tuple(turned(value) for value in call.made)}

    def _attention(self, plan: Architecture) -> Architecture:
        return plan
