"""Traces one pass of a user's module: records each call of an attention, with its arguments."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..attention.attend import IMPLEMENTATION, Site
from ..attention.in_force import Pass
from ..attention.replaced_mha import Masked, OurMultiheadAttention, further_keys
from ..structure.copies import copy_of
from ..structure.traced import Trace, recording, tensors_of
from .attention import ProductCall, no_tokens, watching_products
from .module import OwnModule


@dataclass(frozen=True, eq=False)
class Use:
    """One call of an attention in the traced pass: an `nn.MultiheadAttention`, or the user's own code."""

    path: str
    batched: bool
    own: bool  # whether queries and keys are made from the same tensor (self-attention)
    z: Float[Tensor, "batch query features"]  # the input of W_O; for an attention that the user only names, its output
    keys: int  # the number of keys that are made from the input
    order: int
    masked: Masked | None = None
    mha: OurMultiheadAttention | None = None
    product: ProductCall | None = None
    observed: tuple[Any, Any, Any] | None = None  # arguments and output of an attention that the user only names

    @property
    def texts(self) -> int:
        return len(self.z)

    @property
    def queries(self) -> int:
        return self.z.shape[1]

    @property
    def sizes(self) -> tuple[int, int, tuple[str, ...]]:
        """The number of heads, their total number of dimensions, and the labels of the keys that are not tokens."""
        if self.mha is not None:
            return self.mha.heads, self.mha.original.embed_dim, further_keys(self.mha.original)
        heads = 0 if self.product is None else self.product.q.shape[1]
        return heads, self.z.shape[-1], ()

    @property
    def batch_first(self) -> bool:
        """Whether texts are the first axis of the input."""
        return not self.batched or self.mha is None or self.mha.original.batch_first


@dataclass(eq=False)
class Traced(Trace):
    """The recorded calls of one pass of a user's module."""

    uses: list[Use] = None  # type: ignore[assignment]


def traced(plain: OwnModule, rows: Mapping[str, Tensor]) -> Traced:
    """Traces one pass of a copy that uses `attend`: every call of a module, and of an attention."""
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
    """Records every call of an attention, of the `named` modules, and of those `attending`, which the user names."""
    active: list[str] = []
    products: dict[str, ProductCall] = {}

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

    def at_named(path: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            x, made = (next(tensors_of(values)) for values in ((*args, *kwargs.values()), output))
            call, observed = products.pop(path, None), (args, kwargs, output)
            masked = None if call is None else call.masked
            trace.uses.append(
                Use(path, True, True, made, x.shape[1], trace.tick(), masked, product=call, observed=observed)
            )

        return keep

    with ExitStack() as hooks, watching_products(product):
        for path, module in named.items():
            hooks.enter_context(module.register_forward_pre_hook(entering(path)))
            hooks.enter_context(module.register_forward_hook(leaving))
            if path in attending:
                hooks.enter_context(module.register_forward_hook(at_named(path), with_kwargs=True))
            if isinstance(module, OurMultiheadAttention):
                module.core.attnmech_site = Site(trace.in_force, 0)
                for hook in _watch(trace, path, module):
                    hooks.enter_context(hook)
        yield


def _watch(trace: Traced, path: str, module: OurMultiheadAttention) -> list[Any]:
    called: list[Mapping[str, Any]] = []
    names = ("query", "key", "value", "key_padding_mask")

    def at_call(_: nn.Module, args: Any, kwargs: Any) -> None:
        called.append(dict(zip(names, args, strict=False)) | kwargs)

    def at_core(core: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        inputs = called.pop()
        keys = args[0] if kwargs["key_value_states"] is None else kwargs["key_value_states"]
        trace.uses.append(
            Use(
                path, inputs["query"].ndim == 3, inputs["query"] is inputs["key"], output.clone(), keys.shape[1],
                trace.tick(), kwargs["masked"], mha=module,
            )
        )  # fmt: skip

    return [
        module.register_forward_pre_hook(at_call, with_kwargs=True),
        module.core.register_forward_hook(at_core, with_kwargs=True),
    ]


def above(path: str) -> list[str]:
    """The paths of the modules that contain a module, the nearest first."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def parent(path: str) -> str:
    return next(iter(above(path)), "")


def named(path: str) -> str:
    """A path in the user's own module, for messages."""
    return re.sub(r"\.uses\.\d+", "", path.removeprefix("module").removeprefix(".")) or "the module itself"
