"""Wraps a user's own module in the interface of a transformers model, so that `HookedModel` can run and copy it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig, PreTrainedModel

from ...basics.messages import first_line
from ...errors import InputError, UnsupportedModelError, WeightsError
from ..attention.attend import IMPLEMENTATION
from ..attention.replaced_mha import WIDTH, further_keys, pad_nested, use_our_mha
from ..structure.architecture import Architecture
from .attention import Described, DescribedAttention, keep_weights_of_product, use_our_product
from .call import CallForm

_NAMES: Final = (
    "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal",
)  # fmt: skip

NO_TOKENS: Final = "it is a module of your own, which reads tensors instead of tokens"


@dataclass
class OwnOutput:
    """The output of a pass, under transformers' names."""

    logits: Tensor  # the first floating-point tensor that the module returns, with one row per text first
    whole: Any  # everything that the module returns
    attentions: tuple[Tensor | None, ...] | None = None
    encoder_attentions: tuple[Tensor | None, ...] | None = None
    decoder_attentions: tuple[Tensor | None, ...] | None = None
    cross_attentions: tuple[Tensor | None, ...] | None = None


@dataclass(frozen=True)
class Layer:
    """The place of one layer of a stack in the module."""

    stack: str
    block: str  # the path of its block, below the adapter
    attention: str  # the path of its `nn.MultiheadAttention`, or of the module that replaces it


class OwnModule(PreTrainedModel):  # type: ignore[no-untyped-call]
    """A private copy of a user's module, called with one row per text (`CallForm.rows`)."""

    config_class = PreTrainedConfig
    base_model_prefix = ""

    def __init__(self, module: nn.Module, form: CallForm) -> None:
        super().__init__(PreTrainedConfig(name_or_path=type(module).__name__))  # type: ignore[call-arg]
        self.module = module
        self.form = form
        self.output_axis: int | None = 0  # the batch axis of the output; None if it has none
        self.layers: tuple[Layer, ...] = ()  # in the order of the traced call
        self.products: tuple[str, ...] = ()  # paths of modules that call `scaled_dot_product_attention` once
        self.described: dict[str, tuple[Architecture, Described, int]] = {}
        """The attention modules that a user's `Architecture` names, by path, each with its description."""
        self.named: tuple[str, ...] = ()  # the paths of the attention modules that a user's `Architecture` names
        self._weights: list[Tensor | None] = []

    def build(self, layers: Sequence[Layer]) -> None:
        """Gathers the blocks of each stack in a list."""
        self.layers = tuple(layers)
        for stack in dict.fromkeys(layer.stack for layer in layers):
            blocks = [self.get_submodule(layer.block) for layer in layers if layer.stack == stack]
            self.add_module(blocks_of(stack), nn.ModuleList(blocks))

    def forward(self, rows: Mapping[str, Tensor], **options: Any) -> OwnOutput:
        """Calls the module; `output_attentions` also returns torch's weights, after `own_attention("eager")`."""
        args, kwargs = self.form.arguments(rows)
        self._weights = []
        width = WIDTH.set(self.form.width(rows))
        try:
            with counting(self):
                whole = self.module(*args, **kwargs)
        finally:
            WIDTH.reset(width)
        output = OwnOutput(self._by_text(whole), whole)
        if options.get("output_attentions"):
            for stack in dict.fromkeys(layer.stack for layer in self.layers):
                own = zip(self.layers, self._weights, strict=True)
                attentions = tuple(weights for layer, weights in own if layer.stack == stack)
                setattr(output, f"{stack}_attentions" if stack else "attentions", attentions)
        return output

    def _by_text(self, whole: Any) -> Tensor:
        output = first_output(whole)
        if self.output_axis in (0, None) or output.ndim <= (self.output_axis or 0):
            return output
        return output.movedim(self.output_axis or 0, 0)

    def cannot_run(self, error: Exception) -> WeightsError:
        """The error for a module that cannot run in its precision on its device."""
        return WeightsError(f"{self.name_or_path} does not run on its example with noise: {first_line(error)}.")

    def own_attention(self, implementation: str) -> None:
        """Sets how this copy attends: by `attend`, by torch with its weights returned ("eager"), or as the user's."""
        if implementation == IMPLEMENTATION:
            use_our_mha(self, self.named)
            pad_nested(self)
            for path in self.products:
                use_our_product(self.get_submodule(path))
            for path, (plan, how, returns) in self.described.items():
                original = self.get_submodule(path)
                ours = DescribedAttention(original, plan, how)
                ours.returns = returns
                for other, part in list(self.named_modules(remove_duplicate=False)):
                    if part is original:
                        self.set_submodule(other, ours)
        elif implementation == "eager":
            pad_nested(self)
            for module in self.modules():
                if isinstance(module, nn.MultiheadAttention):
                    module.register_forward_hook(self._keep_weights, with_kwargs=True)
            for path in self.products:
                keep_weights_of_product(self.get_submodule(path), self._weights.append)
            for path in self.described:
                self.get_submodule(path).register_forward_hook(lambda *_: self._weights.append(None))

    def _keep_weights(self, module: nn.MultiheadAttention, args: Any, kwargs: Any, output: Any) -> None:
        arguments = dict(zip(_NAMES, args, strict=False)) | kwargs
        query, key = arguments["query"], arguments["key"]
        if (
            arguments.get("is_causal")
            and arguments.get("key_padding_mask") is None
            and not arguments.get("need_weights", True)
        ):
            if further_keys(module):
                # When torch returns weights, it computes something else: it shows these keys to all queries.
                self._weights.append(None)
                return
            axis = 0 if query.ndim == 2 or not module.batch_first else 1
            shown = torch.ones(query.shape[axis], key.shape[axis], dtype=torch.bool, device=query.device).tril()
            arguments["attn_mask"] = ~shown
        weights = module.forward(**{**arguments, "need_weights": True, "average_attn_weights": False})[1]
        assert weights is not None
        self._weights.append(weights if weights.ndim == 4 else weights[None])

    @property
    def base_model(self) -> nn.Module:
        """This module itself: a user's module has no known head."""
        return self

    def get_input_embeddings(self) -> nn.Module:
        """Raises `InputError`: there is no token embedding."""
        raise InputError(f"this needs the tokens of a language model, and this model has none: {NO_TOKENS}.")

    def get_output_embeddings(self) -> None:
        """None: there is no known unembedding."""
        return None


def blocks_of(stack: str) -> str:
    return f"attnmech_{stack or 'self'}_blocks"


def first_output(whole: Any) -> Tensor:
    """The first floating-point tensor that a module returns; raises `InputError` if there is none."""
    leaves = pytree.tree_leaves(vars(whole) if hasattr(whole, "__dataclass_fields__") else whole)
    output = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()), None)
    if output is None:
        raise InputError(
            f"the module must return a floating-point tensor, alone or among others; it returned a "
            f"{type(whole).__name__} without one."
        )
    return output.to_padded_tensor(0.0) if output.is_nested else output


_CALLS: ContextVar[dict[int, int]] = ContextVar("calls of shared modules")


class EachUse(nn.Module):
    """Replaces a module that a pass calls several times by one copy for each call; all copies share its parameters."""

    def __init__(self, module: nn.Module, count: int, path: str) -> None:
        super().__init__()
        self.path, self.count = path, count
        shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self.uses = nn.ModuleList([module, *(deepcopy(module, dict(shared)) for _ in range(count - 1))])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(next(iter(self._modules["uses"].children())), name)  # type: ignore[union-attr]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        calls = _CALLS.get()
        number = calls.get(id(self), 0)
        calls[id(self)] = number + 1
        if number >= self.count:
            raise UnsupportedModelError(_called(self, number + 1, "or more"))
        return self.uses[number](*args, **kwargs)


@contextmanager
def counting(root: nn.Module) -> Iterator[None]:
    """Counts the calls of shared modules in a pass; raises `UnsupportedModelError` if they differ from `example`'s."""
    token = _CALLS.set({})
    try:
        yield
        for module in root.modules():
            if isinstance(module, EachUse) and (calls := _CALLS.get().get(id(module), 0)) != module.count:
                raise UnsupportedModelError(_called(module, calls, ""))
    finally:
        _CALLS.reset(token)


def _called(module: EachUse, calls: int, more: str) -> str:
    times = f"{calls} times {more}".strip()
    return (
        f"{module.path!r} was called {module.count} times in `example`, each a layer, and now {times}: load the module "
        "with an example of this kind."
    )
