"""Defines a stack: its blocks, with their weights, sizes and layout."""

from collections.abc import Callable, Mapping
from itertools import groupby

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ...basics.nouns import counted
from ...errors import InputError, UnsupportedModelError
from ...points import full_name
from ..attention.attend import Site
from ..attention.identities import StackTraits
from ..attention.in_force import InForce
from ..attention.observed import Notes
from ..parts.gates import NormGate
from ..parts.modules import has_module, submodule
from ..parts.position import Rotation
from ..parts.weights import AttentionWeights, as_stored, attention_weights, bias_of, matrix_of, sized_matrix
from ..structure.architecture import Architecture


class Stack:
    """The blocks of a model or, if a model has several stacks, the blocks of one.

    The constructor puts attnmech's attention into the blocks; `wired_stack` connects their points to `in_force`.
    """

    def __init__(self, base: nn.Module, architecture: Architecture, in_force: InForce) -> None:
        self.architecture = architecture
        self._base = base
        self.in_force = in_force
        blocks = submodule(base, architecture.blocks)
        assert isinstance(blocks, nn.ModuleList)
        self.places = blocks  # all blocks, including those without attention
        # In a hybrid, only some blocks have the projections of attention.
        paths = [f"{architecture.attention}.{path}" for path in architecture.qkv.paths if architecture.hybrid]
        self.blocks = {
            layer: submodule(block, architecture.within)
            for layer, block in enumerate(blocks)
            if layer not in architecture.idle and all(has_module(block, path) for path in paths)
        }
        self.layers = tuple(self.blocks)  # those with attention: some in a hybrid, else all that run
        self.running = [place for place in range(len(blocks)) if place not in architecture.idle]
        """The numbers of the blocks that run."""
        self.n_layers = len(self.blocks)
        self.n_heads, self.n_kv_heads = architecture.n_heads, architecture.n_kv_heads
        if self.n_layers == 0:
            raise UnsupportedModelError("expected a model with at least one layer with attention; this one has none.")
        # Before anything else, since a replacement may rename the projections.
        for layer in self.layers:
            self._use_our_attention(layer, blocks[layer])
        self._read_sizes()
        self.returns: dict[int, int | None] = {}  # the length of a block's tuple; None for a tensor

    @property
    def column(self) -> StackTraits:
        """The traits on which the identities of the running certificate depend."""
        plan = self.architecture
        chained = plan.chained and not plan.within
        return StackTraits(
            plan.stack, plan.norm == "post", plan.mlp_out is not None, plan.interposed, chained, bool(plan.mixer)
        )

    @property
    def label(self) -> str:
        """The label: encoder, decoder or cross; empty if the model has one stack."""
        return self.architecture.stack

    @property
    def shape(self) -> str:
        """The numbers of layers and heads: "12 layers × 12 heads (4 kv heads)"."""
        label = f"{self.label} " if self.label else ""
        kv = "" if self.n_kv_heads == self.n_heads else f" ({self.n_kv_heads} kv heads)"
        kind = " with attention" if self.architecture.hybrid else ""
        return f"{label}{counted(self.n_layers, noun='layer')}{kind} × {counted(self.n_heads, noun='head')}{kv}"

    def before(self, place: int) -> int:
        """The last block that runs before a place; −1 before the first."""
        return max((other for other in self.running if other < place), default=-1)

    def point(self, name: str) -> str:
        """The full name of a point of this stack: "pattern", or "cross.pattern" in a model with several stacks."""
        return full_name(self.label, name)

    def module(self, layer: int, path: str) -> nn.Module:
        return submodule(self.blocks[layer], path)

    def weights(self, layer: int) -> AttentionWeights:
        """The attention weights of a layer, as views of the model's parameters; packed ones are unpacked."""
        return self._weights(layer, matrix_of)

    def _weights(self, layer: int, matrix: Callable[[nn.Module], Tensor]) -> AttentionWeights:
        plan = self.architecture
        attention = self.module(layer, plan.attention)
        return attention_weights(
            [submodule(attention, path) for path in plan.qkv.paths],
            plan.qkv,
            self.module(layer, plan.out),
            plan.n_heads,
            plan.n_kv_heads,
            matrix,
        )

    def gamma_of_z(self, layer: int) -> Float[Tensor, "head d_value"] | None:
        """The γ of a norm between attention and W_O (BitNet); None without one.

        A head then writes (γ ⊙ v_j) W_O for a key, up to a factor for each query.
        """
        gate = self.architecture.gate
        if not isinstance(gate, NormGate):
            return None
        gamma = as_stored(self.module(layer, f"{self.architecture.attention}.{gate.path}"), "weight")
        assert gamma is not None
        return rearrange(gamma.detach() + gate.offset, "(head d_value) -> head d_value", head=self.n_heads)

    def input_shift(self, layer: int) -> Float[Tensor, " d_model"] | None:
        """The shift β of the norm that returns `attn_in`; None if that norm has none (RMSNorm).

        In a post-norm model, this norm is the last one of the layer below or, for layer 0, the norm of the embedding.
        """
        plan = self.architecture
        if plan.attn_norm is not None:
            return bias_of(self.module(layer, plan.attn_norm))
        if layer > 0 and plan.post_norm is not None:
            return bias_of(self.module(layer - 1, plan.post_norm))
        return bias_of(submodule(self._base, plan.embed_norm)) if layer == 0 and plan.embed_norm is not None else None

    def rotation(self, layer: int, notes: Notes) -> Rotation | None:
        """The rotation of a layer's queries and keys, with the tables in its notes; None if there is none."""
        rotary = self.architecture.rotary
        if rotary is None or layer in self.architecture.unrotated:
            return None
        assert notes.rotary is not None
        cos, sin = (table[:, None] for table in notes.rotary)
        return Rotation(rotary, cos, sin)

    def sizes(self, point: str) -> dict[str, int]:
        """The lengths of those axes of a point that the stack fixes; the point is named without its stack."""
        return {
            "head": self.n_heads,
            "kv_head": self.n_kv_heads,
            "d_head": self.d_value if point in ("v", "gate", "z") else self.d_head,
            "d_latent": self.d_latent,
            "d_model": self.d_in if point == "attn_in" else self.d_model,
        }

    def _read_sizes(self) -> None:
        # The sizes of all layers, so that an error names the layer that does not fit its config.
        by_layer = {layer: self._weights(layer, sized_matrix) for layer in self.layers}
        first = by_layer[self.layers[0]]
        for layer, weights in by_layer.items():
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
        """Puts attnmech's attention into a layer; `whole` is the module of `blocks` that holds the layer's block."""
        plan = self.architecture
        if plan.replacement is not None:
            path = plan.replaced or plan.attention
            replaced = plan.replacement(submodule(self.blocks[layer], path))
            whole.set_submodule(".".join(filter(None, (plan.within, path))), replaced)
            self.blocks[layer] = submodule(whole, plan.within)
        attention = submodule(self.blocks[layer], plan.attention)
        site = Site(self.in_force, layer, self.label, plan.n_kv_heads, plan.gate is not None)
        attention.attnmech_site = site  # type: ignore[assignment]

    def turned(self, value: Tensor) -> Tensor:
        """Swaps the axes of texts and positions if the stack's streams have positions first."""
        return value if self.architecture.batch_first else value.transpose(0, 1)

    def by_token(self, value: Tensor) -> Tensor:
        """A stream as `[batch position d_model]`, even of blocks that merge axes (OPT) or have positions first."""
        if value.ndim == 3:
            return self.turned(value)
        return value.reshape(len(self.in_force.under_way.batch.ids), -1, value.shape[-1])

    def as_given(self, value: Tensor, like: Tensor) -> Tensor:
        """The reverse of `by_token`: a value with the axes of `like`, as the model passes it."""
        return value.reshape(like.shape) if self.architecture.batch_first or like.ndim != 3 else value.transpose(0, 1)


def stack_labelled(stacks: Mapping[str, Stack], label: str | None) -> Stack:
    """The stack with a label; without a label, the only stack. Raises `InputError` for any other label."""
    if (label is None or (isinstance(label, str) and label == "self")) and len(stacks) == 1:
        return next(iter(stacks.values()))
    if not isinstance(label, str) or label not in stacks:
        known = ", ".join(repr(known or "self") for known in stacks)
        raise InputError(f"`stack` must be one of {known} on this model; got {label!r}.")
    return stacks[label]


def other_layers(stack: Stack) -> dict[int, str]:
    """The layers without attention, each with the kind of module that replaces it (GatedDeltaNet, MambaMixer).

    These modules belong to a class that no block with attention contains; the class gives their name.
    """
    known = {type(part) for block in stack.blocks.values() for part in block.children()}
    family = stack.architecture.name
    return {
        place: _kind([part for part in block.children() if type(part) not in known] or [block], family)
        for place, block in enumerate(stack.places)
        if place not in stack.blocks
    }


def about_other_layers(stack: Stack) -> str:
    """A sentence that names the layers without attention; empty if every layer has attention."""
    by_kind: dict[str, list[int]] = {}
    for layer, kind in other_layers(stack).items():
        by_kind.setdefault(kind, []).append(layer)
    if not by_kind:
        return ""
    named = "; ".join(f"{_ranges(layers)} ({kind})" for kind, layers in by_kind.items())
    return f"layers without attention, and so without heads: {named}"


def _kind(parts: list[nn.Module], family: str) -> str:
    """The class of the first module that is neither a norm nor an MLP (an MLP only if there is nothing else)."""
    names = [type(part).__name__ for part in parts]
    first = [name for name in names if not any(word in name.lower() for word in ("norm", "mlp", "moe", "feedforward"))]
    name = next(iter([*first, *(name for name in names if "norm" not in name.lower()), *names]))
    return name.removeprefix(family) or name


def _ranges(layers: list[int]) -> str:
    """Layers in a sentence: "0-2, 4"."""
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
