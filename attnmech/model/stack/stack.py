"""A column of blocks: their weights, and their activation points wired to `in_force`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ...maths.norms import FrozenNorm
from ...points import full_name
from ..attention.attend import Site
from ..attention.in_force import InForce
from ..attention.observed import Notes
from ..attention.running import Kind, StackTraits
from ..parts.calls import KEY_STATES, first_tensor
from ..parts.gates import Gate, NormGate
from ..parts.modules import has_module, submodule
from ..parts.norms import epsilon_of, frozen_norm, weight_of
from ..parts.position import Rotation, as_tables, tables_for, tables_of
from ..parts.weights import AttentionWeights, Columns, Expanded, attention_weights, bias_of, select
from ..structure.architecture import Architecture


class Stack:
    """The blocks of a model, or one column of them if a model has several.

    Making one puts our attention into the blocks and connects every point of every block to `in_force`, once and for
    all; `in_force` decides whether a value is edited or kept.
    """

    def __init__(self, base: nn.Module, architecture: Architecture, in_force: InForce) -> None:
        self.architecture = architecture
        self._base = base
        self._in_force = in_force
        found = submodule(base, architecture.blocks)
        assert isinstance(found, nn.ModuleList)
        self.places = found
        """All blocks, also those without attention."""
        self.blocks = {
            layer: submodule(block, architecture.within)
            for layer, block in enumerate(found)
            if not architecture.hybrid or _has_attention(block, architecture)
        }
        self.layers = tuple(self.blocks)
        """The layers with attention, as the model numbers them: some in a hybrid, else all."""
        self.n_layers = len(self.blocks)
        self.n_heads, self.n_kv_heads = architecture.n_heads, architecture.n_kv_heads
        if self.n_layers == 0:
            raise UnsupportedModelError("expected a model with at least one layer with attention; this one has none.")
        # First, since a replacement may hold the projections under names of its own.
        for layer in self.layers:
            self._use_our_attention(layer, found[layer])
        self._read_sizes()
        self._returns: dict[int, int | None] = {}
        if not architecture.within:
            for place, block in enumerate(found):
                self._wire_part(place, block)
        for layer, block in self.blocks.items():
            self._wire_stream(layer, block)
            self._wire_projections(layer, block)
            self._wire_qk_norm(layer, block)
            self._wire_v_norm(layer, submodule(block, architecture.attention))
            self._wire_output(layer, block)
        if not architecture.within:
            self._wire_end(found)

    @property
    def column(self) -> StackTraits:
        """The facts that the running certificate's identities depend on."""
        plan = self.architecture
        chained = plan.chained and not plan.within
        return StackTraits(
            plan.stack, plan.norm == "post", plan.mlp_out is not None, plan.interposed, chained, bool(plan.mixer)
        )

    @property
    def label(self) -> str:
        """The label: encoder, decoder or cross; empty if the model has one stack."""
        return self.architecture.stack

    def point(self, name: str) -> str:
        """The full name of a point of this stack: "pattern", or "cross.pattern" if there are several."""
        return full_name(self.label, name)

    def module(self, layer: int, path: str) -> nn.Module:
        """A module of one block, by its dotted path."""
        return submodule(self.blocks[layer], path)

    def weights(self, layer: int) -> AttentionWeights:
        """The attention weights of a layer, as views of the model's parameters."""
        plan = self.architecture
        attention = self.module(layer, plan.attention)
        return attention_weights(
            [submodule(attention, path) for path in plan.qkv.paths],
            plan.qkv,
            self.module(layer, plan.out),
            plan.n_heads,
            plan.n_kv_heads,
        )

    def gamma_of_z(self, layer: int) -> Float[Tensor, "head d_value"] | None:
        """The γ of a norm between attention and W_O (BitNet); None without one.

        What a head writes of a key is then (γ ⊙ v_j) W_O, up to a factor for each query.
        """
        gate = self.architecture.gate
        if not isinstance(gate, NormGate):
            return None
        gamma = self.module(layer, f"{self.architecture.attention}.{gate.path}").weight
        assert isinstance(gamma, torch.Tensor)
        return rearrange(gamma.detach() + gate.offset, "(head d_value) -> head d_value", head=self.n_heads)

    def input_shift(self, layer: int) -> Float[Tensor, " d_model"] | None:
        """The shift β of the norm whose output is `attn_in`; None if that norm has none (RMSNorm).

        In a post-norm model that is the last norm of the layer below or, in layer 0, of the embedding.
        """
        plan = self.architecture
        if plan.attn_norm is not None:
            return bias_of(self.module(layer, plan.attn_norm))
        if layer > 0 and plan.post_norm is not None:
            return bias_of(self.module(layer - 1, plan.post_norm))
        if layer == 0 and plan.embed_norm is not None:
            return bias_of(submodule(self._base, plan.embed_norm))
        return None

    def rotation(self, layer: int, notes: Notes) -> Rotation | None:
        """How a layer rotates its queries and keys, by the tables of its notes; None if it does not."""
        rotary = self.architecture.rotary
        if rotary is None or layer in self.architecture.unrotated:
            return None
        assert notes.rotary is not None
        cos, sin = (table[:, None] for table in notes.rotary)
        return Rotation(rotary, cos, sin)

    def sizes(self, point: str) -> dict[str, int]:
        """The lengths of the axes of a point, without its stack, that the stack fixes."""
        return {
            "head": self.n_heads,
            "kv_head": self.n_kv_heads,
            "d_head": self.d_value if point in ("v", "gate", "z") else self.d_head,
            "d_latent": self.d_latent,
            "d_model": self.d_in if point == "attn_in" else self.d_model,
        }

    def _read_sizes(self) -> None:
        # Every layer's, so that one that is quantised or does not fit its config is named here.
        each = {layer: self.weights(layer) for layer in self.layers}
        first = each[self.layers[0]]
        for layer, weights in each.items():
            if weights.W_Q.shape != first.W_Q.shape or weights.W_O.shape != first.W_O.shape:
                raise UnsupportedModelError(
                    "a model whose layers have heads of different sizes is not supported: d_head is "
                    f"{first.W_Q.shape[-1]} in layer {self.layers[0]}, {weights.W_Q.shape[-1]} in layer {layer}."
                )
        self.d_head = first.W_Q.shape[-1]
        _, self.d_value, self.d_model = first.W_O.shape
        self.d_in = self.d_model if self.architecture.expanded is not None else first.W_Q.shape[1]
        self.d_latent = 0 if self.architecture.expanded is None else first.W_V.shape[1]

    def _use_our_attention(self, layer: int, whole: nn.Module) -> None:
        """Puts our attention into a layer; `whole` is the module of `blocks` that holds its block."""
        plan = self.architecture
        if plan.replacement is not None:
            path = plan.replaced or plan.attention
            replaced = plan.replacement(submodule(self.blocks[layer], path))
            whole.set_submodule(".".join(filter(None, (plan.within, path))), replaced)
            self.blocks[layer] = submodule(whole, plan.within)
        attention = submodule(self.blocks[layer], plan.attention)
        site = Site(self._in_force, layer, self.label, plan.n_kv_heads, plan.gate is not None)
        attention.attnmech_site = site  # type: ignore[assignment]

    def _wire_part(self, place: int, block: nn.Module) -> None:
        """Lets a pass skip the block, or keep its incoming stream (`Part`)."""
        in_force, forward = self._in_force, block.forward

        def at_start(module: nn.Module, args: Any, kwargs: Any) -> None:
            part = in_force.under_way.part
            if part is not None and place in part.keep and part.runs(place):
                part.kept[place] = self._turned(_stream_of(args, kwargs)).detach().clone()

        @wraps(forward)
        def through_or_past(*args: Any, **kwargs: Any) -> Any:
            part = in_force.under_way.part
            if part is None or part.runs(place):
                output = forward(*args, **kwargs)
                self._returns.setdefault(place, None if isinstance(output, torch.Tensor) else len(output))
                return output
            given = part.stream if place == part.start - 1 else None
            return self._passed_on(place, _stream_of(args, kwargs) if given is None else self._turned(given))

        block.register_forward_pre_hook(at_start, with_kwargs=True)
        block.forward = through_or_past

    def _passed_on(self, place: int, stream: Tensor) -> Any:
        """A stream as the block returns its own."""
        returns = self._returns[place]
        return stream if returns is None else (stream, *(None for _ in range(returns - 1)))

    @contextmanager
    def alone(self, layer: int, blocks: nn.ModuleList) -> Iterator[None]:
        """Has all but one of the blocks of a plain copy pass the stream on; ours must have run before."""

        def past(place: int) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._passed_on(place, _stream_of(args, kwargs))

        others = [(place, block) for place, block in enumerate(blocks) if place != layer]
        kept = [block.__dict__.get("forward") for _, block in others]
        try:
            for place, block in others:
                block.forward = past(place)
            yield
        finally:
            for (_, block), forward in zip(others, kept, strict=True):
                if forward is None:
                    block.__dict__.pop("forward", None)
                else:
                    block.forward = forward

    def _wire_end(self, blocks: nn.ModuleList) -> None:
        """Keeps the output of a part's last block, after hooks there."""
        in_force, end = self._in_force, len(blocks)

        def at_end(place: int) -> Callable[..., None]:
            def keep(module: nn.Module, args: Any, output: Any) -> None:
                part = in_force.under_way.part
                if part is not None and end in part.keep and place == part.stop - 1 and part.runs(place):
                    part.kept[end] = self._turned(first_tensor(output)).detach().clone()

            return keep

        for place, block in enumerate(blocks):
            block.register_forward_hook(at_end(place))

    def _wire_stream(self, layer: int, block: nn.Module) -> None:
        in_force = self._in_force

        def at_resid_pre(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if in_force.passes_by(layer):
                return None
            in_force.begin_layer()
            if not streams:
                return None
            return _with_stream(args, kwargs, lambda x: self._visit("resid_pre", layer, x, "pre_in", "pre"))

        def at_resid_post(module: nn.Module, args: Any, output: Any) -> Any:
            if in_force.passes_by(layer):
                return None
            value = first_tensor(output)
            visited = self._visit("resid_post", layer, value, "post_in", "post") if streams else value
            in_force.end_layer(self.label, layer)
            return None if visited is value else _with_first(output, visited)

        def at_resid_mid(module: nn.Module, args: Any) -> None:
            value = args[0]
            by_token = self._by_token(value)
            visited = by_token
            if in_force.wants(self.point("resid_mid"), layer):
                visited = in_force.visit(self.point("resid_mid"), layer, by_token)
            if visited is not by_token:
                in_force.hold("mid_in", self.label, layer, by_token.detach().clone())
                in_force.hold("mid", self.label, layer, visited)
                # The block continues with this very tensor as its stream, so the norm's input alone is not enough.
                value.copy_(self._as_given(visited, value))
            elif post_norm is not None:
                in_force.hold("mid_in", self.label, layer, by_token)

        def at_mid_normed(module: nn.Module, args: Any, output: Tensor) -> None:
            by_token = self._by_token(output)
            in_force.hold("mid_normed", self.label, layer, by_token)
            if self.architecture.interposed:
                in_force.note(before_mlp=by_token)

        def at_end(module: nn.Module, args: Any) -> None:
            in_force.hold("end_in", self.label, layer, self._by_token(args[0]))

        streams = self.architecture.streams
        mid_norm, post_norm = self.architecture.mid_norm, self.architecture.post_norm
        block.register_forward_pre_hook(at_resid_pre, with_kwargs=True)
        block.register_forward_hook(at_resid_post)
        if mid_norm is not None:
            submodule(block, mid_norm).register_forward_pre_hook(at_resid_mid)
        if mid_norm is not None and post_norm is not None:
            submodule(block, self.architecture.interposed_norm or mid_norm).register_forward_hook(at_mid_normed)
            submodule(block, post_norm).register_forward_pre_hook(at_end)

    def _visit(self, name: str, layer: int, value: Tensor, before: Kind | None, after: Kind) -> Tensor:
        """Visits a point of the stream, and records its value before and after for the running certificate."""
        by_token = value if self.architecture.batch_first and value.ndim == 3 else self._by_token(value)
        visited = self._in_force.visit(self.point(name), layer, by_token)
        if before is not None and visited is not by_token:
            self._in_force.hold(before, self.label, layer, by_token)
        self._in_force.hold(after, self.label, layer, visited)
        return value if visited is by_token else self._as_given(visited, value)

    def _turned(self, value: Tensor) -> Tensor:
        """A stream with texts first from one with positions first, or back."""
        return value if self.architecture.batch_first else value.transpose(0, 1)

    def _by_token(self, value: Tensor) -> Tensor:
        """`[batch position d_model]`, also in blocks that use one row per token (OPT), or have positions first."""
        if value.ndim == 3:
            return value if self.architecture.batch_first else value.transpose(0, 1)
        return value.reshape(*self._in_force.under_way.batch.queries(self.label).ids.shape, value.shape[-1])

    def _as_given(self, value: Tensor, like: Tensor) -> Tensor:
        """A value by token with the axes that the model gave it in."""
        return value.reshape(like.shape) if self.architecture.batch_first or like.ndim != 3 else value.transpose(0, 1)

    def _wire_projections(self, layer: int, block: nn.Module) -> None:
        in_force, plan = self._in_force, self.architecture
        layout = plan.qkv
        attention = submodule(block, plan.attention)

        def at_all(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            names = [self.point(name) for name in "qkv"]
            if not any(in_force.wants(name, layer) for name in names):
                return None
            assert not isinstance(layout, Expanded)
            parts = layout.split([output], plan.n_heads, plan.n_kv_heads, rest="batch position")
            q, k, v = (in_force.visit(name, layer, part) for name, part in zip(names, parts, strict=True))
            changed = in_force.under_way.gradients or any(in_force.edits(name, layer) for name in names)
            return layout.join((q, k, v))[0] if changed else None  # type: ignore[union-attr]

        def at_one(name: str, heads: int) -> Callable[..., Tensor | None]:
            def at_projection(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
                if not in_force.wants(name, layer):
                    return None
                by_head = rearrange(output, "batch position (head d_head) -> batch position head d_head", head=heads)
                visited = in_force.visit(name, layer, by_head)
                return rearrange(visited, "batch position head d_head -> batch position (head d_head)")

            return at_projection

        def at_columns(parts: Mapping[str, tuple[int, ...]]) -> Callable[..., Tensor | None]:
            def at_projection(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
                changed = output
                for name, columns in parts.items():
                    point, heads = self.point(name), plan.n_heads if name == "q" else plan.n_kv_heads
                    if not in_force.wants(point, layer):
                        continue
                    value = select(self._by_token(changed), columns)
                    by_head = rearrange(value, "batch position (head d) -> batch position head d", head=heads)
                    visited = in_force.visit(point, layer, by_head)
                    if in_force.under_way.gradients or in_force.edits(point, layer):
                        changed = self._by_token(changed).clone()
                        changed[..., list(columns)] = rearrange(
                            visited, "batch position head d -> batch position (head d)"
                        )
                return None if changed is output else changed.reshape(output.shape)

            return at_projection

        self._wire_attn_in(layer, attention)
        self._wire_tables(attention)
        for path in dict.fromkeys(layout.paths):
            self._wire_unread(layer, submodule(attention, path))
        if isinstance(layout, Expanded):
            self._wire_latents(layer, attention, layout)
            submodule(attention, layout.q).register_forward_hook(at_columns({"q": layout.columns[0]}))
            submodule(attention, layout.kv).register_forward_hook(at_columns({"v": layout.columns[2]}))
        elif isinstance(layout, Columns):
            for path in layout.paths:
                taken = {name: own for name, own in layout.taken(path).items() if name != "v" or not plan.v_norm}
                submodule(attention, path).register_forward_hook(at_columns(taken))
        elif len(layout.paths) == 1:
            submodule(attention, layout.paths[0]).register_forward_hook(at_all)
        else:
            counts = (plan.n_heads, plan.n_kv_heads, plan.n_kv_heads)
            for path, name, heads in zip(layout.paths, "qk" if plan.v_norm else "qkv", counts, strict=not plan.v_norm):
                submodule(attention, path).register_forward_hook(at_one(self.point(name), heads))
        if not plan.v_norm:
            self._wire_values(layer, attention)

    def _wire_values(self, layer: int, attention: nn.Module) -> None:
        """Shows v, after what acts on it, to the running certificate."""
        in_force, plan, layout = self._in_force, self.architecture, self.architecture.qkv

        def at_v(module: nn.Module, args: Any, output: Tensor) -> None:
            if not in_force.compares_values(layer):
                return
            by_token = self._by_token(output) if isinstance(layout, Columns | Expanded) else output
            in_force.hold_made(self.label, layer, layout.values(by_token, plan.n_heads, plan.n_kv_heads))

        submodule(attention, layout.path_of_values).register_forward_hook(at_v)

    def _wire_unread(self, layer: int, projection: nn.Module) -> None:
        """Lets a projection do nothing in a pass that begins after this layer's attention: nobody reads its output."""
        in_force, forward = self._in_force, projection.forward

        @wraps(forward)
        def made_or_not(*args: Any, **kwargs: Any) -> Any:
            if not args or in_force.given_z(layer) is None:
                return forward(*args, **kwargs)
            given, *others = args
            one = forward(given[(slice(1),) * (given.ndim - 1)], *others, **kwargs)
            return one.expand(*given.shape[:-1], -1).contiguous()

        projection.forward = made_or_not

    def _wire_attn_in(self, layer: int, attention: nn.Module) -> None:
        """Visits `attn_in`, and notes what else the attention is given."""
        in_force, plan = self._in_force, self.architecture
        patches = plan.reads == "pixels"

        def at_attn_in(module: nn.Module, args: Any, kwargs: Any) -> Any:
            rotates = plan.rotary is not None and not plan.rotary.tables
            if rotates and (tables := tables_of(args, kwargs)) is not None:
                in_force.note(rotary=tables_for(tables, _stream_of(args, kwargs).shape[1]) if patches else tables)
            for given, note in (*((name, "key_input") for name in KEY_STATES), ("value_states", "value_input")):
                if kwargs.get(given) is not None:
                    in_force.note(**{note: kwargs[given]})
            args, kwargs = _with_stream(args, kwargs, lambda x: in_force.visit(self.point("attn_in"), layer, x))
            if in_force.scales_in(self.label, layer):
                in_force.note(attn_in=_stream_of(args, kwargs))
            return args, kwargs

        attention.register_forward_pre_hook(at_attn_in, with_kwargs=True)

    def _wire_v_norm(self, layer: int, attention: nn.Module) -> None:
        """Visits v where a norm returns it."""
        in_force, plan = self._in_force, self.architecture
        if not plan.v_norm:
            return

        def at_v_norm(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            wants = in_force.wants(self.point("v"), layer)
            if not wants and not in_force.compares_values(layer):
                return None
            by_head = "batch position head d_head"
            visited = rearrange(output, f"{plan.v_norm_axes} -> {by_head}", head=plan.n_kv_heads)
            visited = in_force.visit(self.point("v"), layer, visited) if wants else visited
            if in_force.compares_values(layer):
                in_force.hold_made(self.label, layer, visited)
            if not wants:
                return None
            return rearrange(visited, f"{by_head} -> {plan.v_norm_axes}").reshape(output.shape)

        submodule(attention, plan.v_norm).register_forward_hook(at_v_norm)

    def _wire_latents(self, layer: int, attention: nn.Module, layout: Expanded) -> None:
        """Visits the latent, and k, whose columns two projections make."""
        in_force, name, plan = self._in_force, self.point("k"), self.architecture

        def at_query_latent(module: nn.Module, args: Any) -> None:
            in_force.note(query_latent=self._by_token(args[0]))

        def at_shared(module: nn.Module, args: Any, output: Tensor) -> None:
            in_force.note(shared=self._by_token(output))

        def at_latent(module: nn.Module, args: Any) -> Any:
            visited = in_force.visit(self.point("latent"), layer, self._by_token(args[0]))
            in_force.note(latent=visited)
            return (visited.reshape(args[0].shape), *args[1:])

        def at_keys(module: nn.Module, args: Any, output: Tensor) -> None:
            if not in_force.wants(name, layer):
                return
            notes = in_force.under_way.notes
            assert notes.shared is not None
            keys = layout.keys(self._by_token(output), notes.shared)
            visited = in_force.visit(
                name, layer, rearrange(keys, "batch position (head d) -> batch position head d", head=plan.n_kv_heads)
            )
            if in_force.under_way.gradients or in_force.edits(name, layer):
                # Heads share a part of the keys, so the projections' outputs cannot hold what each head's became.
                by_head = rearrange(visited, "batch position head d -> batch head position d")
                rotate = self.rotation(layer, notes)
                in_force.note(edited_key=by_head if rotate is None else rotate(by_head).to(by_head))

        if layout.query_latent is not None:
            submodule(attention, layout.q).register_forward_pre_hook(at_query_latent)
        submodule(attention, layout.latent.projection).register_forward_hook(at_shared)
        submodule(attention, layout.kv).register_forward_pre_hook(at_latent)
        submodule(attention, layout.kv).register_forward_hook(at_keys)

    def _wire_qk_norm(self, layer: int, block: nn.Module) -> None:
        plan, in_force = self.architecture, self._in_force
        attention = submodule(block, plan.attention)
        if plan.qk_norm is None or (layer in plan.unrotated and not has_module(attention, plan.qk_norm[0])):
            return
        kinds = {"query_norm": self.n_heads, "key_norm": self.n_kv_heads}
        by_path = dict(zip(("query_norm", "key_norm"), plan.qk_norm, strict=True))

        def noting(path: str) -> Callable[..., None]:
            mine = [kind for kind, own in by_path.items() if own == path]

            def at_norm(module: nn.Module, args: Any, output: Tensor) -> None:
                if not (in_force.under_way.watch.rows or in_force.scales_in(self.label, layer)):
                    return
                # One module for both is called for the queries first.
                kind = next((kind for kind in mine if getattr(in_force.under_way.notes, kind) is None), mine[-1])
                in_force.note(**{kind: self._frozen_by_head(module, args[0], output, kinds[kind])})

            return at_norm

        for path in dict.fromkeys(plan.qk_norm):
            submodule(attention, path).register_forward_hook(noting(path))

    def _wire_tables(self, attention: nn.Module) -> None:
        """Notes the rotary tables where a module inside the attention returns them."""
        rotary = self.architecture.rotary
        if rotary is None or not rotary.tables:
            return

        def at_tables(module: nn.Module, args: Any, output: Any) -> None:
            self._in_force.note(rotary=as_tables(output))

        submodule(attention, rotary.tables).register_forward_hook(at_tables)

    def _frozen_by_head(self, norm: nn.Module, given: Tensor, made: Tensor, heads: int) -> FrozenNorm:
        """A norm of queries or keys, frozen at what it did to them, with the axes of the points q and k."""
        pattern = f"{self.architecture.qk_norm_axes} -> batch position head d_head"
        frozen = frozen_norm(norm, given, torch.promote_types(given.dtype, torch.float32), made)
        multiplier, shift = (
            None if each is None else rearrange(each.expand_as(given), pattern, head=heads)
            for each in (frozen.multiplier, frozen.shift)
        )
        assert multiplier is not None
        whole = "(head d_head)" in self.architecture.qk_norm_axes
        return FrozenNorm(multiplier, frozen.centred, shift, axes=(-2, -1) if whole else (-1,))

    def _wire_output(self, layer: int, block: nn.Module) -> None:
        in_force, plan = self._in_force, self.architecture

        def at_attn_raw(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if in_force.wants(self.point("result"), layer):
                output = self._through_results(layer, args[0], output)
            if (balance := in_force.under_way.balance) is not None:
                if in_force.edits(self.point("result"), layer):
                    balance.skip("heads", self.label, layer, "an edit of `result` stands between them")
                else:
                    balance.hold_written(self.label, layer, module, output)
            return in_force.visit(self.point("attn_raw"), layer, output)

        def at_attn_out(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            added = _times(plan.attn_scale, output)
            visited = in_force.visit(self.point("attn_out"), layer, added)
            if separate or in_force.wants(self.point("attn_raw"), layer) or visited is not output:
                in_force.hold("out", self.label, layer, visited)
            return output if visited is added else _times(1 / plan.attn_scale, visited)

        separate = plan.attn_out not in ("", plan.out)
        submodule(block, plan.out).register_forward_hook(at_attn_raw)
        submodule(block, plan.attn_out or plan.out).register_forward_hook(at_attn_out)
        self._wire_gate(layer, block)
        self._wire_added(layer, block)

    def _wire_gate(self, layer: int, block: nn.Module) -> None:
        """Visits the gate, and z behind it."""
        in_force, plan = self._in_force, self.architecture
        if plan.gate is None:
            return

        def at_gate(module: nn.Module, args: Any, output: Tensor) -> None:
            assert isinstance(plan.gate, Gate)
            if in_force.wants(self.point("gate"), layer) or in_force.under_way.gradients:
                in_force.note(gate=plan.gate.of(self._by_token(output), plan.n_heads))

        def at_norm_of_z(module: nn.Module, args: Any) -> None:
            ungated = in_force.under_way.notes.ungated
            assert isinstance(plan.gate, NormGate) and ungated is not None
            if in_force.wants(self.point("gate"), layer) or in_force.under_way.gradients:
                in_force.note(gate=plan.gate.of(weight_of(module, args[0]), epsilon_of(module), ungated))

        def at_z(module: nn.Module, args: Any) -> Any:
            given, notes, gate = args[0], in_force.under_way.notes, self.point("gate")
            assert notes.ungated is not None
            z = given.reshape(notes.ungated.shape)
            if in_force.wants(gate, layer):
                assert notes.gate is not None
                visited = in_force.visit(gate, layer, notes.gate)
                if in_force.under_way.gradients or in_force.edits(gate, layer):
                    z = (visited * notes.ungated).to(z.dtype)
            z = in_force.visit(self.point("z"), layer, z)
            in_force.hold_z(self.label, layer, z)
            return (z.reshape(given.shape), *args[1:])

        if isinstance(plan.gate, NormGate):
            submodule(block, f"{plan.attention}.{plan.gate.path}").register_forward_pre_hook(at_norm_of_z)
        elif isinstance(plan.gate, Gate):
            submodule(block, f"{plan.attention}.{plan.gate.path}").register_forward_hook(at_gate)
        submodule(block, plan.out).register_forward_pre_hook(at_z)

    def _wire_added(self, layer: int, block: nn.Module) -> None:
        """Visits what the MLP, and a mixer beside attention, add to the stream."""
        in_force, plan, point = self._in_force, self.architecture, self.point("mlp_out")

        def at_written(name: str, kind: Kind, factor: float) -> Callable[..., Any]:
            def at_module(module: nn.Module, args: Any, output: Any) -> Any:
                value = first_tensor(output)
                added = _times(factor, self._by_token(value))
                visited = in_force.visit(self.point(name), layer, added)
                in_force.hold(kind, self.label, layer, visited)
                if visited is added:
                    return None
                return _with_first(output, self._as_given(_times(1 / factor, visited), value))

            return at_module

        def in_one() -> bool:
            """Whether the last of several modules is to return what all of them add, and the others nothing."""
            return in_force.under_way.gradients or in_force.edits(point, layer)

        def at_further(module: nn.Module, args: Any, output: Any) -> Any:
            value = first_tensor(output)
            before, by_token = in_force.under_way.notes.mlp_part, self._by_token(value)
            in_force.note(mlp_part=by_token if before is None else before + by_token)
            return _with_first(output, torch.zeros_like(value)) if in_one() else None

        def at_last(module: nn.Module, args: Any, output: Any) -> Any:
            value, further = first_tensor(output), in_force.under_way.notes.mlp_part
            assert further is not None
            total = self._by_token(value) + further
            visited = in_force.visit(point, layer, _times(plan.mlp_scale, total))
            in_force.hold("mlp", self.label, layer, visited)
            if not in_one():
                return None
            return _with_first(output, self._as_given(_times(1 / plan.mlp_scale, visited), value))

        if plan.mixer:
            at_mixer = at_written("mixer_out", "mixer", plan.mixer_scale)
            submodule(block, plan.mixer).register_forward_hook(at_mixer)
        for path in plan.mlp_further:
            submodule(block, path).register_forward_hook(at_further)
        if plan.mlp_out is not None:
            at_mlp = at_last if plan.mlp_further else at_written("mlp_out", "mlp", plan.mlp_scale)
            submodule(block, plan.mlp_out).register_forward_hook(at_mlp)

    def _through_results(self, layer: int, merged: Tensor, output: Tensor) -> Tensor:
        """Visits `result`; attn_raw is computed from it if it was edited or will be differentiated."""
        weights = self.weights(layer)
        z = rearrange(
            merged, "batch position (head d_head) -> batch position head d_head", head=self.architecture.n_heads
        )
        result = einsum(
            z, weights.W_O, "batch position head d_head, head d_head d_model -> batch position head d_model"
        )
        visited = self._in_force.visit(self.point("result"), layer, result, owned=True)
        if not (self._in_force.under_way.gradients or self._in_force.edits(self.point("result"), layer)):
            return output
        total = visited.sum(dim=2)
        return total if weights.b_O is None else total + weights.b_O


def _has_attention(block: nn.Module, plan: Architecture) -> bool:
    """Whether a hybrid's block has the projections of its attention."""
    return all(has_module(block, f"{plan.attention}.{path}") for path in plan.qkv.paths)


def _times(factor: float, value: Tensor) -> Tensor:
    return value if factor == 1 else factor * value


def _with_first(output: Any, first: Tensor) -> Any:
    return first if isinstance(output, torch.Tensor) else (first, *output[1:])


def _stream_of(args: Any, kwargs: Any) -> Tensor:
    """The input stream of a block."""
    stream = args[0] if args else kwargs[_stream_name(kwargs)]
    assert isinstance(stream, torch.Tensor)
    return stream


def _with_stream(args: Any, kwargs: Any, change: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = _stream_name(kwargs)
    return args, {**kwargs, name: change(kwargs[name])}


def _stream_name(kwargs: Any) -> str:
    """The argument that is the stream: transformers' name, or the first tensor of a block of another kind."""
    if "hidden_states" in kwargs:
        return "hidden_states"
    return next(str(name) for name, value in kwargs.items() if isinstance(value, torch.Tensor))
