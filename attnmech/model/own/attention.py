"""Reads attention that a user wrote: from its one call of `scaled_dot_product_attention`, or from the parts named by
the user.

A module that makes exactly one such call keeps its own forward, and the call goes to `attend`. Any other module is
replaced by one that uses the projections, W_O and mask that an `Architecture` names, with the scale and the reading of
the mask that make it return what the user's module returns.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...batch import Batch
from ...errors import UnsupportedModelError
from ..attention.attend import Site, attend, unexpanded
from ..attention.in_force import InForce, Pass
from ..attention.replaced_attention import StandIn
from ..attention.replaced_mha import Masked, joined_masks
from ..structure.architecture import Architecture

_CLOSE: Final = 1e-4  # the replacement's output may differ from the user's by this share of its size


@dataclass(frozen=True, eq=False)
class ProductCall:
    """One call of `scaled_dot_product_attention`."""

    q: Float[Tensor, "batch head query d_head"]
    k: Float[Tensor, "batch kv_head key d_head"]
    v: Float[Tensor, "batch kv_head key d_value"]
    scale: float
    masked: Masked

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> "ProductCall":
        """Reads the arguments of torch's function."""
        if query.ndim != 4:
            raise UnsupportedModelError(
                f"scaled_dot_product_attention must be called with [batch, heads, positions, d_head]; got "
                f"{list(query.shape)}."
            )
        if dropout_p:
            raise UnsupportedModelError("this module applies attention dropout although it is in eval mode.")
        sizes = len(query), query.shape[2], key.shape[2]
        seen = [torch.ones(sizes[1:], dtype=torch.bool, device=query.device).tril()[None, None]] if is_causal else []
        # Here True shows a key.
        masks = [] if attn_mask is None else [~attn_mask if attn_mask.dtype == torch.bool else attn_mask]
        masked = joined_masks(*sizes, query.device, [_for_all(mask, *sizes[1:]) for mask in masks], seen)
        return cls(query, key, value, query.shape[-1] ** -0.5 if scale is None else float(scale), masked)

    def attended(self, site: Site) -> Float[Tensor, "batch head query d_value"]:
        z = attend(
            self.q, unexpanded(self.k, site.kv_heads), unexpanded(self.v, site.kv_heads), scale=self.scale,
            position=self.masked.position, mask=self.masked.rule, site=site,
        )  # fmt: skip
        return z.transpose(1, 2)

    def weights(self) -> Float[Tensor, "batch head query key"]:
        """The attention probabilities, computed directly from q, k and the masks."""
        scores = self.scale * (self.q @ self.k.repeat_interleave(self.q.shape[1] // self.k.shape[1], dim=1).mT)
        scores = scores if self.masked.position is None else scores + self.masked.position
        return scores.masked_fill(~self.masked.rule.visible(range(self.q.shape[2])), -torch.inf).softmax(dim=-1)


class _Product(TorchFunctionMode):
    """Passes calls of `scaled_dot_product_attention` to a function, with one that computes torch's own output."""

    def __init__(self, handle: Callable[[ProductCall, Callable[[], Tensor]], Tensor]) -> None:
        super().__init__()
        self._handle = handle

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            return self._handle(ProductCall.of(*args, **kwargs), lambda: func(*args, **kwargs))
        return func(*args, **kwargs)


def watching_products(observe: Callable[[ProductCall, Tensor], None]) -> AbstractContextManager[Any]:
    """Passes every call of `scaled_dot_product_attention` in the block, with its output, to `observe`."""

    def call(made: ProductCall, compute: Callable[[], Tensor]) -> Tensor:
        output = compute()
        observe(made, output)
        return output

    return _Product(call)


def use_our_product(module: nn.Module) -> None:
    """Makes a module of a private copy use `attend`, at the site `module.attnmech_site`."""
    _within(module, lambda: _Product(lambda made, _: made.attended(module.attnmech_site)))  # type: ignore[arg-type]


def keep_weights_of_product(module: nn.Module, keep: Callable[[Tensor], None]) -> None:
    """Makes a module of a private copy report the attention probabilities of its call to `keep`."""
    _within(module, lambda: watching_products(lambda made, _: keep(made.weights())))


def _within(module: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> None:
    forward = module.forward

    def ours(*args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    module.forward = ours


@dataclass(frozen=True)
class Described:
    """Properties of an attention that a user's `Architecture` does not state, found by comparing outputs."""

    scale: float
    shows: bool | None  # whether True (or 1) in the mask shows a key; None without a mask, or if it is added to scores
    causal: bool = False  # whether no query sees a later key


class DescribedAttention(StandIn):
    """Computes a user's attention from the parts that an `Architecture` names."""

    def __init__(self, original: nn.Module, plan: Architecture, how: Described) -> None:
        super().__init__(original)
        self.heads, self.kv_heads, self.how = plan.n_heads, plan.n_kv_heads, how
        self.layout = plan.qkv  # type: ignore[assignment]
        self.out_name = plan.out.removeprefix(f"{plan.attention}.") if plan.attention else plan.out
        self._mask = plan.mask
        self._signature = inspect.signature(original.forward)
        self.returns = 0  # the length of the tuple that the user's module returns; 0 if it returns a tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's signature: returns attn_raw, or a tuple of the user's length with attn_raw first."""
        x, masked = self.masked(*args, **kwargs)
        q, k, v = self.project(x, self.heads, self.kv_heads)
        z = attend(
            q, k, v, scale=self.how.scale, position=masked.position, mask=masked.rule, site=self.attnmech_site
        )  # fmt: skip
        merged = self.merge(z)
        return (merged, *(None for _ in range(self.returns - 1))) if self.returns else merged

    def masked(self, *args: Any, **kwargs: Any) -> tuple[Float[Tensor, "batch position d_model"], Masked]:
        arguments = self._signature.bind(*args, **kwargs).arguments
        x = next(value for value in arguments.values() if isinstance(value, torch.Tensor))
        mask, length = arguments.get(self._mask) if self._mask else None, x.shape[1]
        masks: list[Tensor] = []
        if mask is not None:
            whole = _for_all(mask[:, None] if mask.ndim == 3 else mask, length, length)
            if self.how.shows is not None:
                whole = whole == 0 if self.how.shows else whole != 0
            masks.append(whole)
        return x, joined_masks(len(x), length, length, x.device, masks)


def _for_all(mask: Tensor, queries: int, keys: int) -> Float[Tensor, "#batch #head query key"]:
    whole = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return whole.expand(*whole.shape[:2], queries, keys)


def described_as(
    module: nn.Module, plan: Architecture, args: Sequence[Any], kwargs: dict[str, Any], made: Any
) -> tuple[Described, int]:
    """The scale and mask with which the named parts return the user's output; raises an error if none do."""
    wanted = made[0] if isinstance(made, tuple) else made
    returns = len(made) if isinstance(made, tuple) else 0
    width = wanted.shape[-1]
    for scale in dict.fromkeys(((width // plan.n_heads) ** -0.5, 1.0, width**-0.5)):
        for shows in (None, True, False):
            how = Described(scale, shows)
            tried = DescribedAttention(module, plan, how)
            in_force = InForce()
            tried.attnmech_site = Site(in_force, 0)
            try:
                with torch.no_grad(), in_force.unchecked(), in_force.recording(Pass(no_tokens())):
                    returned = tried(*args, **kwargs)
            except (RuntimeError, ValueError, TypeError):
                continue
            output = returned[0] if isinstance(returned, tuple) else returned
            apart = (output - wanted).norm() if output.shape == wanted.shape else torch.tensor(torch.inf)
            if float(apart) <= _CLOSE * float(wanted.norm()):
                _, masked = tried.masked(*args, **kwargs)
                return replace(how, causal=masked.rule.causal), returns
    raise UnsupportedModelError(
        f"`architecture` does not describe {type(module).__name__}: with these projections, {plan.n_heads} heads and "
        f"{f'the mask {plan.mask!r}' if plan.mask else 'no mask'}, softmax attention returns something else."
    )


def no_tokens() -> Batch:
    """A batch for passes that do not read their positions."""
    ids = torch.zeros(1, 1, dtype=torch.long)
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), (), None)
