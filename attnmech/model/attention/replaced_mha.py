"""Replaces every `nn.MultiheadAttention` in the private copy of a user's own module by one that uses `attend`.

The signature, the masks and the returned weights are torch's (`torch.nn.functional.multi_head_attention_forward`);
scores, softmax and weighted sum are left to `attend`. The parameters are those of the replaced module.
"""

from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, reduce, wraps
from typing import Any, Final

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ...errors import InputError, UnsupportedModelError
from ..parts.mask import HIDDEN, MaskRule, everything
from .attend import Site, attend

BIAS_KV: Final = "bias_kv"
ZERO: Final = "zero"  # labels of keys that are not tokens: the learned one of `add_bias_kv`, zeros of `add_zero_attn`

_HOOKS: Final = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip

WIDTH: ContextVar[int | None] = ContextVar("width", default=None)
"""The length to which the current pass pads nested tensors; None for the length of the longest text."""

_BY_HEAD: Final = "batch position (head d_head) -> batch head position d_head"


def further_keys(module: nn.MultiheadAttention) -> tuple[str, ...]:
    """The labels of the keys that follow the tokens."""
    labels = (BIAS_KV,) if module.bias_k is not None else ()
    return (*labels, ZERO) if module.add_zero_attn else labels


class PackedProjection(nn.Module):
    """W_Q, W_K or W_V: some rows of the packed weight, or a separate weight."""

    def __init__(self, of: nn.MultiheadAttention, number: int) -> None:
        super().__init__()
        # In a tuple, so that torch does not register the module as a part of this one.
        self._of, self._number = (of,), number

    @property
    def weight(self) -> Float[Tensor, "d_out d_in"]:
        """As torch will use it in the next pass."""
        of, number = self._of[0], self._number
        if of._qkv_same_embed_dim:
            rows: Tensor = of.in_proj_weight[number * of.embed_dim : (number + 1) * of.embed_dim]
            return rows
        separate: Tensor = (of.q_proj_weight, of.k_proj_weight, of.v_proj_weight)[number]
        return separate

    @property
    def bias(self) -> Float[Tensor, " d_out"] | None:
        of, number = self._of[0], self._number
        return None if of.in_proj_bias is None else of.in_proj_bias[number * of.embed_dim : (number + 1) * of.embed_dim]

    def forward(self, x: Float[Tensor, "*places d_in"]) -> Float[Tensor, "*places d_out"]:
        """x W + b."""
        return nn.functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Masked:
    """The masks of one call: which keys each query sees, and the position term added to the scores of these keys."""

    rule: MaskRule
    position: Float[Tensor, "#batch #head #query key"] | None


class Core(nn.Module):
    """Computes z from `attn_in`: projections, the keys that are not tokens, and `attend`."""

    attnmech_site: Site

    def __init__(self, of: nn.MultiheadAttention) -> None:
        super().__init__()
        self._of = (of,)
        self.heads, self.d_head = of.num_heads, of.head_dim
        self.q_proj, self.k_proj, self.v_proj = (PackedProjection(of, number) for number in range(3))

    def forward(
        self,
        hidden_states: Float[Tensor, "batch query d_query"],
        *,
        key_value_states: Float[Tensor, "batch key d_key"] | None,
        value_states: Float[Tensor, "batch key d_value"] | None,
        masked: Masked,
        weights: "Returned | None",
    ) -> Float[Tensor, "batch query d_model"]:
        """z of all heads. By default, keys are made from `hidden_states`, and values from the input of the keys."""
        keys = hidden_states if key_value_states is None else key_value_states
        values = keys if value_states is None else value_states
        q, k, v = (
            rearrange(projection(x), _BY_HEAD, head=self.heads)
            for projection, x in ((self.q_proj, hidden_states), (self.k_proj, keys), (self.v_proj, values))
        )
        if (more := self.further(k)) is not None:
            more_k, more_v = more
            self.attnmech_site.in_force.note(further_keys=more_k, further_values=more_v)
            k, v = torch.cat((k, more_k), dim=2), torch.cat((v, more_v), dim=2)
        z = attend(
            q, k, v, scale=self.d_head**-0.5, position=masked.position, mask=masked.rule, site=self.attnmech_site,
            weights=None if weights is None else weights.add,
        )  # fmt: skip
        return rearrange(z, "batch query head d_head -> batch query (head d_head)")

    def further(
        self, like: Float[Tensor, "batch head key d_head"]
    ) -> tuple[Float[Tensor, "batch head more d_head"], Float[Tensor, "batch head more d_head"]] | None:
        """The keys and values that are not tokens, in torch's order; None if there are none."""
        of = self._of[0]
        if not further_keys(of):
            return None
        nothing = [like.new_zeros(1, self.heads, 1, self.d_head)] if of.add_zero_attn else []
        biases = ([] if b is None else [rearrange(b, _BY_HEAD, head=self.heads)] for b in (of.bias_k, of.bias_v))
        keys, values = (torch.cat([*bias, *nothing], dim=2).expand(len(like), -1, -1, -1) for bias in biases)
        return keys, values


class Returned:
    """The pattern that a call returns, assembled from blocks of rows."""

    def __init__(self, *, average: bool) -> None:
        self._average = average
        self._blocks: list[Tensor] = []

    def add(self, pattern: Float[Tensor, "batch head row seen"], keys: int) -> None:
        """Adds a block of rows, with 0 at the keys after the last one that it sees."""
        block = pattern.mean(dim=1) if self._average else pattern
        self._blocks.append(nn.functional.pad(block, (0, keys - block.shape[-1])))

    def whole(self, dtype: torch.dtype) -> Tensor:
        """All rows, in the form in which torch returns them."""
        return torch.cat(self._blocks, dim=-2).to(dtype)


class OurMultiheadAttention(nn.Module):
    """Replaces an `nn.MultiheadAttention`; everything but `forward` comes from the original module."""

    def __init__(self, original: nn.MultiheadAttention) -> None:
        super().__init__()
        # In a tuple, so that each of its modules has only one path; its parameters are this module's too, under their
        # names.
        self._of = (original,)
        self._parameters.update(original._parameters)
        self.core = Core(original)
        self.out_proj = original.out_proj
        self.training = original.training
        for name in _HOOKS:
            setattr(self, name, getattr(original, name))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_of"][0], name)

    @property
    def original(self) -> nn.MultiheadAttention:
        return self._of[0]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """torch's signature: returns the output, and the weights on request."""
        inputs = [query]
        # One tensor must stay one tensor, so that an edit of `attn_in` reaches everything computed from it.
        inputs += [] if key is query and value is query else [key]
        inputs += [] if value is key else [value]
        batched = query.ndim == 3
        by_text = [self._by_text(x, batched=batched) for x in inputs]
        hidden = by_text[0]
        keys = None if len(by_text) == 1 or key is query else by_text[1]
        values = by_text[-1] if value is not key else None
        lengths = hidden.shape[1], (hidden if keys is None else keys).shape[1]
        masked = masks_of(
            len(hidden), self.heads, *lengths, attn_mask, key_padding_mask,
            hint=is_causal and key_padding_mask is None and not need_weights,
            further=len(further_keys(self.original)), device=hidden.device,
        )  # fmt: skip
        weights = Returned(average=average_attn_weights) if need_weights else None
        merged = self.core(hidden, key_value_states=keys, value_states=values, masked=masked, weights=weights)
        output = self.out_proj(merged)
        returned = None if weights is None else weights.whole(output.dtype)
        if not batched:
            return output[0], None if returned is None else returned[0]
        return output if self.original.batch_first else output.transpose(0, 1), returned

    @property
    def heads(self) -> int:
        return int(self.original.num_heads)

    def _by_text(self, value: Tensor, *, batched: bool) -> Float[Tensor, "batch position features"]:
        if not batched:
            return value[None]
        return value if self.original.batch_first else value.transpose(0, 1)


def masks_of(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    *,
    hint: bool,
    further: int,
    device: torch.device,
) -> Masked:
    """The masks of one call as a rule and, where a float mask adds numbers different from −∞, a position term.

    With `hint` (`is_causal`, if torch relies on it), the causal mask replaces `attn_mask`. Where a mask hides a key
    from some heads only, the position term holds −10⁴ for these heads.
    """
    masks: list[Tensor] = []
    if attn_mask is not None:
        shape = tuple(attn_mask.shape)
        if shape not in ((queries, keys), (batch * heads, queries, keys)):
            raise InputError(
                f"attn_mask must be [{queries}, {keys}] (queries, keys) or [{batch * heads}, {queries}, {keys}] (texts "
                f"· heads, queries, keys); got {list(shape)}."
            )
        by_head = attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.view(batch, heads, queries, keys)
        masks += [] if hint else [by_head]
    # Here torch counts the further keys, which follow all tokens.
    seen = [torch.ones(queries, keys + further, dtype=torch.bool, device=device).tril()[None, None]] if hint else []
    if key_padding_mask is not None:
        padding = key_padding_mask[None] if key_padding_mask.ndim == 1 else key_padding_mask
        if tuple(padding.shape) != (batch, keys):
            raise InputError(f"key_padding_mask must be [{batch}, {keys}] (texts, keys); got {list(padding.shape)}.")
        masks.append(padding[:, None, None])
    return joined_masks(batch, queries, keys + further, device, masks, seen, further)


def joined_masks(
    batch: int,
    queries: int,
    keys: int,
    device: torch.device,
    masks: Sequence[Tensor],
    seen: Sequence[Bool[Tensor, "#batch #head #query key"]] = (),
    further: int = 0,
) -> Masked:
    """Joins masks into one rule and one position term, with tensors that are True where a key is `seen`.

    True or −∞ in a mask hides a key; other numbers are added to scores. The last `further` keys are in no mask.
    """
    shown, added = list(seen), list[Tensor]()
    for mask in masks:
        hidden = hides(mask)
        if bool(hidden.any()):
            shown.append(nn.functional.pad(~hidden, (0, further), value=True))
        if mask.dtype != torch.bool and bool((rest := mask.masked_fill(hidden, 0.0)).any()):
            added.append(nn.functional.pad(rest, (0, further)))
    visible = reduce(torch.logical_and, shown) if shown else None
    if visible is not None and visible.shape[1] > 1:
        shared = visible.any(dim=1, keepdim=True)
        if not torch.equal(shared.expand_as(visible), visible):
            added.append(torch.where(shared & ~visible, HIDDEN, 0.0))
        visible = shared
    allows = everything if visible is None else partial(_looked_up, visible)
    rule = MaskRule(batch, queries, keys, 0, 0, allows, None, device)
    return Masked(rule, reduce(torch.add, added) if added else None)


def hides(mask: Tensor) -> Bool[Tensor, "..."]:
    """True where a mask hides a key: at True, at −∞, and at numbers low enough to have the same effect."""
    return mask if mask.dtype == torch.bool else mask <= HIDDEN


def _looked_up(
    seen: Bool[Tensor, "#batch 1 #query key"], text: Tensor, head: Tensor, query: Tensor, key: Tensor
) -> Tensor:
    text = text if seen.shape[0] > 1 else torch.zeros_like(text)
    query = query if seen.shape[2] > 1 else torch.zeros_like(query)
    return seen[text, head, query, key]


def use_our_mha(root: nn.Module, besides: Collection[str] = ()) -> None:
    """Replaces every `nn.MultiheadAttention` of a private copy, except those at the paths `besides`.

    A module that appears in two places gets one replacement.
    """
    ours: dict[int, OurMultiheadAttention] = {}
    by_path: dict[str, OurMultiheadAttention] = {}
    for path, module in list(root.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.MultiheadAttention) and path not in besides:
            if id(module) not in ours:
                require_readable(path.removeprefix("module.").removeprefix("module"), module)
                ours[id(module)] = OurMultiheadAttention(module)
            by_path[path] = ours[id(module)]
    for path, module in by_path.items():
        root.set_submodule(path, module)


def require_readable(path: str, module: nn.MultiheadAttention) -> None:
    """Raises `UnsupportedModelError` for a changed `forward`, or an input projection computed anew in every pass."""
    kind = type(module)
    if kind.forward is not nn.MultiheadAttention.forward or "forward" in vars(module):
        raise UnsupportedModelError(
            f"{path or 'the module'} is a {kind.__name__} with its own forward, which may not compute what "
            "nn.MultiheadAttention computes; describe it: "
            "am.load(module, example=..., architecture=am.Architecture(...))."
        )
    weights = (module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if not all(isinstance(weight, nn.Parameter) for weight in weights if weight is not None):
        raise UnsupportedModelError(
            f"the input projection of {path or 'the module'} is computed anew in every pass (pruned, or parametrised); "
            f"make it permanent first: torch.nn.utils.prune.remove(module, 'in_proj_weight')."
        )


def pad_nested(root: nn.Module) -> None:
    """Makes the encoders of a private copy work on padded tensors, and return what torch's fast path returns.

    There, torch turns padded texts into a nested tensor, and the output is 0 at padding, before the last norm.
    """
    for module in root.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.forward = _of_encoder(module)  # type: ignore[method-assign]
            module.use_nested_tensor, module.attnmech_nests = False, getattr(module, "use_nested_tensor", False)  # type: ignore[assignment]
        elif isinstance(module, nn.TransformerEncoderLayer):
            module.forward = _of_layer(module)  # type: ignore[method-assign]


def _of_layer(layer: nn.TransformerEncoderLayer) -> Callable[..., Tensor]:
    forward = layer.forward

    @wraps(forward)
    def padded(src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not src.is_nested:
            return forward(src, *args, **kwargs)
        whole, hidden = padded_of(src)
        output = forward(whole, *args, **{**kwargs, "src_key_padding_mask": hidden})
        return torch._nested_tensor_from_mask(output, ~hidden, mask_check=False)

    return padded


def _of_encoder(encoder: nn.TransformerEncoder) -> Callable[..., Tensor]:
    forward = encoder.forward

    @wraps(forward)
    def padded(
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        nested, hidden = src.is_nested, src_key_padding_mask
        if nested:
            src, hidden = padded_of(src)
        output = forward(src, mask, hidden, is_causal)
        if nested:
            assert hidden is not None
            return torch._nested_tensor_from_mask(output, ~hidden, mask_check=False)
        if hidden is None or not _would_nest(encoder, src, mask, hidden):
            return output
        nothing = output.new_zeros(output.shape[-1])
        nothing = nothing if encoder.norm is None else encoder.norm(nothing)
        return torch.where(hidden[..., None] != 0, nothing, output)

    return padded


def padded_of(nested: Tensor) -> tuple[Tensor, Bool[Tensor, "batch position"]]:
    """A nested tensor, padded on the right with zeros, and True at its padding."""
    lengths = torch.tensor([len(text) for text in nested.unbind()], device=nested.device)
    padded = nested.to_padded_tensor(0.0)
    if (width := WIDTH.get()) is not None:
        padded = nn.functional.pad(padded, (0, 0, 0, width - padded.shape[1]))
    return padded, torch.arange(padded.shape[1], device=nested.device) >= lengths[:, None]


def _would_nest(encoder: nn.TransformerEncoder, src: Tensor, mask: Tensor | None, hidden: Tensor) -> bool:
    """Whether torch would make a nested tensor (`nn.TransformerEncoder.forward`), with 0 at padding."""
    if not torch.backends.mha.get_fastpath_enabled() or not encoder.attnmech_nests or src.ndim != 3:
        return False
    if mask is not None or torch.is_autocast_enabled():
        return False
    if torch.is_grad_enabled() and any(value.requires_grad for value in (src, *encoder.layers[0].parameters())):
        return False
    seen = ~(hidden if hidden.dtype == torch.bool else hidden < 0)
    return not getattr(encoder, "mask_check", True) or torch._nested_tensor_from_mask_left_aligned(src, seen)
