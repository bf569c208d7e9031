"""Interventions and metrics by hand, on transformers' own models with plain torch hooks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import models
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attnmech.model.parts.modules import submodule
from attnmech.model.structure.architecture import Architecture
from attnmech.model.structure.plan import architectures_of

LLAMA_LIKE: Final = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
FUSED: Final = {
    "gpt2": "attn.c_attn",
    "bloom": "self_attention.query_key_value",
    "gpt_neox": "attention.query_key_value",
}
ANSWERS, AGAINST = torch.tensor([5, 9, 11]), torch.tensor([7, 4, 30])
JUDGED: Final[dict[str, Any]] = {"answers": ANSWERS, "against": AGAINST}
"""The metric of three prompts: the logit differences of these tokens."""
_PLANS: WeakKeyDictionary[nn.Module, Architecture] = WeakKeyDictionary()


def pair(name: str, pairs: int = 3) -> tuple[Tensor, Tensor]:
    """Clean and corrupted prompts that differ at tokens 2 and 5."""
    clean = models.token_ids(name, pairs)
    corrupted = clean.clone()
    corrupted[:, [2, 5]] = models.token_ids(name, pairs, seed=8)[:, [2, 5]]
    return clean, corrupted


def plan_of(plain: Any) -> Architecture:
    """The places of the parts of a raw model with one stack, read once."""
    if plain not in _PLANS:
        (_PLANS[plain],) = architectures_of(plain)
    return _PLANS[plain]


def block_of(plain: Any, layer: int) -> nn.Module:
    found: nn.Module = submodule(plain.base_model, plan_of(plain).blocks)[layer]  # type: ignore[index]
    return found


@contextmanager
def until_the_end(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """The block with these hooks, which are then removed."""
    with ExitStack() as until:
        for handle in handles:
            until.enter_context(handle)
        yield


@contextmanager
def watched(modules: dict[str, nn.Module]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """The inputs and outputs of a plain model's modules during the block, by name, in float64."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    given: dict[str, Tensor] = {}

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            given[name] = (args[0] if args else kwargs["hidden_states"]).detach().clone().double()

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # A copy, because Falcon adds to it in place.
            first = output if isinstance(output, Tensor) else output[0]
            found[name] = given[name], first.detach().clone().double()

        return hook

    handles = [module.register_forward_pre_hook(before(name), with_kwargs=True) for name, module in modules.items()]
    with until_the_end(handles + [module.register_forward_hook(after(name)) for name, module in modules.items()]):
        yield found


@contextmanager
def z_changed(plain: Any, layer: int, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The raw model with z of a layer, the input of its output projection, changed: `[batch position head d_head]`."""
    heads = plan_of(plain).n_heads
    projection = submodule(block_of(plain, layer), plan_of(plain).out)

    def at_input(module: nn.Module, args: Any) -> Any:
        z = rearrange(args[0], "... (head d_head) -> ... head d_head", head=heads)
        return (rearrange(change(z.clone()), "... head d_head -> ... (head d_head)"),)

    with projection.register_forward_pre_hook(at_input):
        yield


def losses(logits: Tensor, ids: Tensor, lengths: list[int]) -> Tensor:
    """Mean cross-entropy of the next token, text by text."""
    found = []
    for row, tokens, length in zip(logits.double(), ids, lengths, strict=True):
        chances = torch.log_softmax(row, dim=-1)
        found.append(-sum(chances[i, tokens[i + 1]] for i in range(length - 1)) / (length - 1))
    return torch.stack(found)  # type: ignore[arg-type]


def divergences(logits: Tensor, clean: Tensor, lengths: list[int]) -> Tensor:
    """Mean KL(clean ‖ now), text by text."""
    p, q = clean.double().softmax(-1), logits.double().softmax(-1)
    whole = (p * (p / q).log()).sum(-1)
    return torch.stack([row[:length].mean() for row, length in zip(whole, lengths, strict=True)])


def zeroed(head: int) -> Callable[[Tensor], Tensor]:
    def change(z: Tensor) -> Tensor:
        z[..., head, :] = 0
        return z

    return change


def swapped(x: Tensor, axis: int = 1) -> Tensor:
    """Exchanges the first two entries of an axis."""
    order = torch.arange(x.shape[axis])
    order[:2] = order[:2].flip(0)
    return x.index_select(axis, order)


@contextmanager
def point_changed(plain: Any, point: str, layer: int, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The raw model with a point of a layer's stream, attn_out or mlp_out changed: `[batch position d_model]`."""
    plan, block = plan_of(plain), block_of(plain, layer)

    def at_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (change(args[0].clone()), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"].clone())}

    def at_norm(module: nn.Module, args: Any) -> None:
        args[0].copy_(change(args[0].clone()))  # the tensor with which the block continues

    def at_end(module: nn.Module, args: Any, output: Any) -> Any:
        return change(output.clone()) if isinstance(output, Tensor) else (change(output[0].clone()), *output[1:])

    if point == "resid_mid":
        assert plan.mid_norm is not None
        handle = submodule(block, plan.mid_norm).register_forward_pre_hook(at_norm)
    elif point == "resid_post":
        handle = block.register_forward_hook(at_end)
    elif point == "resid_pre":
        handle = block.register_forward_pre_hook(at_input, with_kwargs=True)
    else:
        path = plan.mlp_out if point == "mlp_out" else plan.attn_out or plan.out
        assert path is not None
        handle = submodule(block, path).register_forward_hook(at_end)
    with handle:
        yield


def values_and_gradients(plain: Any, ids: Tensor, judged: Callable[[Tensor], Tensor]) -> dict[str, list[Any]]:
    """z and the MLPs' outputs of each layer, and the gradients of each text's metric at them, by torch's autograd."""
    kept: dict[str, list[Tensor]] = {"z": [], "mlp": []}
    handles = []

    def keep(name: str, value: Tensor) -> None:
        value.retain_grad()
        kept[name].append(value)

    for layer in range(len(models.blocks_of(plain))):
        block, plan = block_of(plain, layer), plan_of(plain)
        assert plan.mlp_out is not None
        handles += [
            submodule(block, plan.out).register_forward_pre_hook(lambda module, args: keep("z", args[0])),
            submodule(block, plan.mlp_out).register_forward_hook(lambda module, args, output: keep("mlp", output)),
        ]
    with until_the_end(handles):
        judged(plain(ids).logits).sum().backward()
    plain.zero_grad()
    values = {name: [value.detach() for value in kept[name]] for name in kept}
    return values | {f"{name} gradient": [value.grad for value in kept[name]] for name in kept}


def seen(plain: Any, ids: Tensor, at: str, layer: int) -> Tensor:
    kept: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value.clone())
        return value

    with torch.no_grad(), z_changed(plain, layer, keep) if at == "z" else point_changed(plain, at, layer, keep):
        plain(ids)
    return kept[0]


def logit_differences(logits: Tensor, answers: Tensor, against: Tensor) -> Tensor:
    """Logit of the answer minus that of the other token, at the last token, text by text."""
    last = logits[:, -1].double()
    return torch.stack([row[a] - row[b] for row, a, b in zip(last, answers, against, strict=True)])


def columns(family: str, point: str, head: int, plain: Any) -> tuple[str, slice]:
    """The projection of a block, and the columns of a head's q, k or v in its output."""
    config, place = plain.config, "qkv".index(point)
    heads = config.num_attention_heads
    d = getattr(config, "head_dim", None) or config.hidden_size // heads
    if family == "gpt2":
        return FUSED[family], slice((place * heads + head) * d, (place * heads + head + 1) * d)
    if family in FUSED:  # q, k and v of a head lie side by side
        return FUSED[family], slice((3 * head + place) * d, (3 * head + place + 1) * d)
    return LLAMA_LIKE[point], slice(head * d, (head + 1) * d)


@contextmanager
def output_changed(plain: Any, layer: int, path: str, change: Callable[[Tensor], Any]) -> Iterator[None]:
    """Replaces a module's output by what `change` returns, unless that is None."""

    def at_output(module: Any, args: Any, output: Any) -> Any:
        whole = not isinstance(output, Tensor)
        new = change((output[0] if whole else output).clone())
        return None if new is None else ((new, *output[1:]) if whole else new)

    with submodule(block_of(plain, layer), path).register_forward_hook(at_output):
        yield
