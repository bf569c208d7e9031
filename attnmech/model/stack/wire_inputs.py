"""Connects the inputs of attention (`attn_in`, latents, q, k and v), and notes their norms and rotations."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ...maths.norms import FrozenNorm
from ..parts.modules import KEY_STATES, has_module, stream_of, submodule, with_stream
from ..parts.norms import frozen_norm
from ..parts.position import as_tables, query_factor, tables_for, tables_of
from ..parts.weights import Columns, Expanded, Fused, Layout, select
from .stack import Stack


def wire_projections(stack: Stack, layer: int, block: nn.Module) -> None:
    """Connects `attn_in`, latents, q, k and v where the modules of the attention take or return them."""
    in_force, plan = stack.in_force, stack.architecture
    layout = plan.qkv
    attention = submodule(block, plan.attention)

    def at_columns(taken: Callable[[int], Mapping[str, tuple[int, ...]]]) -> Callable[..., Tensor | None]:
        def at_projection(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            changed = output
            for name, columns in taken(output.shape[-1]).items():
                point, heads = stack.point(name), plan.n_heads if name == "q" else plan.n_kv_heads
                wants, balance = in_force.wants(point, layer), in_force.balance if name == "v" else None
                if not wants and balance is None:
                    continue
                visited = _by_head(layout, name, _by_token(stack, changed), columns, heads)
                visited = in_force.visit(point, layer, visited) if wants else visited
                if balance is not None:
                    balance.hold_made(stack.label, layer, visited)
                if wants and (in_force.under_way.gradients or in_force.edits(point, layer)):
                    changed = _by_token(stack, changed).clone()
                    changed[..., list(columns)] = rearrange(visited, "batch position head d -> batch position (head d)")
            return None if changed is output else changed.reshape(output.shape)

        return at_projection

    _wire_attn_in(stack, layer, attention)
    _wire_tables(stack, attention)
    if isinstance(layout, Expanded):
        _wire_latents(stack, layer, attention, layout)
        submodule(attention, layout.q).register_forward_hook(at_columns(lambda _: {"q": layout.columns[0]}))
        submodule(attention, layout.kv).register_forward_hook(at_columns(lambda _: {"v": layout.columns[2]}))
    else:
        for path in dict.fromkeys(layout.paths):
            taken = cache(partial(_columns_of, layout, path, plan.n_heads, "qk" if plan.v_norm else "qkv"))
            submodule(attention, path).register_forward_hook(at_columns(taken))


def _by_token(stack: Stack, output: Tensor) -> Tensor:
    """The output of a projection with texts first; replaced attention (XLNet) has them first already."""
    return stack.by_token(output) if isinstance(stack.architecture.qkv, Columns | Expanded) else output


def _by_head(layout: Layout | Expanded, name: str, output: Tensor, columns: tuple[int, ...], heads: int) -> Tensor:
    """q, k or v by head, from the output of its projection; a view of it, unless the columns are in another order."""
    if isinstance(layout, Fused):
        return layout.split([output], heads, heads, rest="batch position")["qkv".index(name)]
    return rearrange(select(output, columns), "batch position (head d) -> batch position head d", head=heads)


def _columns_of(layout: Layout, path: str, heads: int, names: str, width: int) -> dict[str, tuple[int, ...]]:
    """The columns, in the output of a projection, of those among q, k and v that hooks of the projection show."""
    return {name: columns for name, columns in layout.taken(path, width, heads).items() if name in names}


def _wire_attn_in(stack: Stack, layer: int, attention: nn.Module) -> None:
    """Connects `attn_in`, and notes the other arguments of the attention."""
    in_force, plan = stack.in_force, stack.architecture
    patches, factor = plan.reads == "pixels", query_factor(attention)

    def at_attn_in(module: nn.Module, args: Any, kwargs: Any) -> Any:
        rotates = plan.rotary is not None and not plan.rotary.tables
        if rotates and (tables := tables_of(args, kwargs)) is not None:
            in_force.note(rotary=tables_for(tables, stream_of(args, kwargs).shape[1]) if patches else tables)
        for argument, note in (*((name, "key_input") for name in KEY_STATES), ("value_states", "value_input")):
            if kwargs.get(argument) is not None:
                in_force.note(**{note: kwargs[argument]})
        if factor is not None and _splits_scores(stack, layer):
            x = stream_of(args, kwargs)
            by_token = factor(x, kwargs.get("position_ids"), in_force.under_way.past)[..., None, None]
            frozen = FrozenNorm(by_token.expand(*x.shape[:2], plan.n_heads, stack.d_head), centred=False)
            in_force.note(make_query_norm=lambda: frozen)
        args, kwargs = with_stream(args, kwargs, lambda x: in_force.visit(stack.point("attn_in"), layer, x))
        if in_force.scales_in(stack.label, layer):
            in_force.note(attn_in=stream_of(args, kwargs))
        return args, kwargs

    attention.register_forward_pre_hook(at_attn_in, with_kwargs=True)


def _wire_latents(stack: Stack, layer: int, attention: nn.Module, layout: Expanded) -> None:
    """Connects the latent, and k, which is made by two projections."""
    in_force, name, plan = stack.in_force, stack.point("k"), stack.architecture

    def at_query_latent(module: nn.Module, args: Any) -> None:
        in_force.note(query_latent=stack.by_token(args[0]))

    def at_shared(module: nn.Module, args: Any, output: Tensor) -> None:
        in_force.note(shared=stack.by_token(output))

    def at_latent(module: nn.Module, args: Any) -> Any:
        visited = in_force.visit(stack.point("latent"), layer, stack.by_token(args[0]))
        in_force.note(latent=visited)
        return (visited.reshape(args[0].shape), *args[1:])

    def at_keys(module: nn.Module, args: Any, output: Tensor) -> None:
        if not in_force.wants(name, layer):
            return
        notes, output = in_force.whole_notes(stack.label, layer), stack.by_token(output)
        assert notes.shared is not None
        # A cache holds either latents, which are expanded again in each pass, or keys.
        rows = slice(-output.shape[1], None)
        keys = layout.keys(output, notes.shared[:, rows])
        visited = in_force.visit(
            name, layer, rearrange(keys, "batch position (head d) -> batch position head d", head=plan.n_kv_heads)
        )
        if in_force.under_way.gradients or in_force.edits(name, layer):
            # Heads share a part of the keys, so the projections' outputs cannot hold edited keys of single heads.
            by_head = rearrange(visited, "batch position head d -> batch head position d")
            rotate = stack.rotation(layer, notes)
            edited = by_head if rotate is None else rotate.at(rows)(by_head).to(by_head)
            in_force.note(edited_key=in_force.joined("edited key", edited, stack=stack.label, layer=layer, axis=2))

    if layout.query_latent is not None:
        submodule(attention, layout.q).register_forward_pre_hook(at_query_latent)
    submodule(attention, layout.latent.projection).register_forward_hook(at_shared)
    submodule(attention, layout.kv).register_forward_pre_hook(at_latent)
    submodule(attention, layout.kv).register_forward_hook(at_keys)


def wire_v_norm(stack: Stack, layer: int, attention: nn.Module) -> None:
    in_force, plan = stack.in_force, stack.architecture
    if not plan.v_norm:
        return

    def at_v_norm(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        wants, balance = in_force.wants(stack.point("v"), layer), in_force.balance
        if not wants and balance is None:
            return None
        by_head = "batch position head d_head"
        visited = rearrange(output, f"{plan.v_norm_axes} -> {by_head}", head=plan.n_kv_heads)
        visited = in_force.visit(stack.point("v"), layer, visited) if wants else visited
        if balance is not None:
            balance.hold_made(stack.label, layer, visited)
        if not wants:
            return None
        return rearrange(visited, f"{by_head} -> {plan.v_norm_axes}").reshape(output.shape)

    submodule(attention, plan.v_norm).register_forward_hook(at_v_norm)


def wire_qk_norm(stack: Stack, layer: int, block: nn.Module) -> None:
    """Notes the norms of queries and keys, frozen at their scales."""
    plan, in_force = stack.architecture, stack.in_force
    attention = submodule(block, plan.attention)
    if plan.qk_norm is None or (layer in plan.unrotated and not has_module(attention, plan.qk_norm[0])):
        return
    kinds = {"make_query_norm": stack.n_heads, "make_key_norm": stack.n_kv_heads}
    by_path = dict(zip(kinds, plan.qk_norm, strict=True))

    def noting(path: str) -> Callable[..., None]:
        mine = [kind for kind, own in by_path.items() if own == path]

        def at_norm(module: nn.Module, args: Any, output: Tensor) -> None:
            if not _splits_scores(stack, layer):
                return
            # A single module for both is called for the queries first.
            kind = next((kind for kind in mine if getattr(in_force.under_way.notes, kind) is None), mine[-1])
            # Copies, since the model may change both in place.
            frozen = partial(_frozen_by_head, stack, module, args[0].clone(), output.clone(), kinds[kind])
            in_force.note(**{kind: cache(frozen)})

        return at_norm

    for path in dict.fromkeys(plan.qk_norm):
        submodule(attention, path).register_forward_hook(noting(path))


def _splits_scores(stack: Stack, layer: int) -> bool:
    """Whether the running pass may split the scores of a layer into terms."""
    return bool(stack.in_force.under_way.watch.rows) or stack.in_force.scales_in(stack.label, layer)


def _frozen_by_head(stack: Stack, norm: nn.Module, value: Tensor, made: Tensor, heads: int) -> FrozenNorm:
    """A norm of queries or keys, frozen at its scales, with the axes of the points q and k."""
    pattern = f"{stack.architecture.qk_norm_axes} -> batch position head d_head"
    frozen = frozen_norm(norm, value, torch.promote_types(value.dtype, torch.float32), made)
    multiplier, shift = (
        None if factor is None else rearrange(factor.expand_as(value), pattern, head=heads)
        for factor in (frozen.multiplier, frozen.shift)
    )
    assert multiplier is not None
    whole = "(head d_head)" in stack.architecture.qk_norm_axes
    return FrozenNorm(multiplier, frozen.centred, shift, axes=(-2, -1) if whole else (-1,))


def _wire_tables(stack: Stack, attention: nn.Module) -> None:
    """Notes the rotary tables where a module inside the attention returns them."""
    rotary = stack.architecture.rotary
    if rotary is None or not rotary.tables:
        return

    def at_tables(module: nn.Module, args: Any, output: Any) -> None:
        stack.in_force.note(rotary=as_tables(output))

    submodule(attention, rotary.tables).register_forward_hook(at_tables)
