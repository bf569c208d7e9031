"""Finds a model's embeddings of tokens, positions and token types, and makes the encoder that respects their sizes."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import InputError
from ..attention.in_force import InForce
from ..attention.local_global import GLOBAL_MASK, globals_by_default
from ..parts.modules import first_tensor
from ..structure.architecture import Architecture
from ..structure.text_part import (
    kinds_of,
    merged_by,
    merged_into,
    placeholders_of,
    taken_besides,
    text_ids,
    text_modules,
    text_setting,
)
from .encoder import Encoder
from .merged import Besides
from .places import PlaceFinder, placed

_TRIED: Final = 3  # the length of the text on which the numbering of positions is tested


def token_embedding(model: PreTrainedModel) -> Tensor:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


def wire_embeddings(
    model: PreTrainedModel, plans: Sequence[Architecture], in_force: InForce, d_model: int, *, is_point: bool
) -> tuple[str, ...]:
    """Wires the embeddings of tokens (with pictures or sounds, where they have been merged with them), of positions and
    of token types to `in_force`; returns the labels of all except the tokens'.

    Gradients start at the token embedding, which is the point `embed` if `is_point`.
    """
    blocks, batch_first = plans[0].blocks if len(plans) == 1 else None, plans[0].batch_first
    weight = token_embedding(model)

    def entering(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        embedded = kwargs.get("inputs_embeds")
        if embedded is None or not in_force.under_way.batch.senses:
            return None
        return args, {**kwargs, "inputs_embeds": visited_at(embedded)}

    def visiting(merged: bool, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return visited_at(output) if bool(in_force.under_way.batch.senses) == merged else output

    def visited_at(output: Tensor) -> Tensor:
        if in_force.under_way.gradients and not output.requires_grad:
            output = output.detach().requires_grad_()
        if not is_point:
            return output
        by_token = output if batch_first else output.transpose(0, 1)
        visited = in_force.visit("embed", None, by_token)
        return visited if batch_first else visited.transpose(0, 1)

    for part in model.modules():
        if isinstance(part, nn.Embedding) and part.weight is weight:
            part.register_forward_hook(partial(visiting, False))
    if blocks is not None and (merged := merged_into(model.base_model, blocks)) is not None:
        merged.register_forward_pre_hook(entering, with_kwargs=True)
    elif blocks is not None and (merging := merged_by(model.base_model, blocks)) is not None:
        merging.register_forward_hook(partial(visiting, True))
    return _wire_further(model, plans, in_force, d_model)


def _wire_further(
    model: PreTrainedModel, plans: Sequence[Architecture], in_force: InForce, d_model: int
) -> tuple[str, ...]:
    """Wires the embeddings of positions and token types to `in_force`, each under its own label; returns the labels.

    In a model with several stacks, a label begins with the label of the stack. A table is not added to the stream if
    its width is neither the token embedding's nor the stream's: MPNet's holds biases of scores, RoFormer's holds sines
    and cosines.
    """
    weight = token_embedding(model)
    blocks = tuple(f"{plan.blocks}." for plan in plans)
    sides = {f"{plan.blocks.rpartition('.')[0]}.": f"{plan.stack} " for plan in reversed(plans) if plan.stack}
    # Relative positions enter the scores instead of the stream.
    relative = "rel_embeddings" if any(plan.relative for plan in plans) else None

    def visiting(label: str) -> Callable[..., Tensor]:
        return lambda module, args, output: in_force.visit(label, None, output)

    labels: list[str] = []
    for name, module in text_modules(model.base_model, [plan.blocks for plan in plans]):
        if not isinstance(module, nn.Embedding) or module.weight is weight or name.startswith(blocks):
            continue
        if name.split(".")[-1] != relative and module.embedding_dim in (weight.shape[1], d_model):
            side = next((label for start, label in sides.items() if name.startswith(start)), "")
            label = side + ("token-type embedding" if "type" in name else "position embedding")
            number = 1 + sum(earlier.startswith(label) for earlier in labels)
            label = label if number == 1 else f"{label} {number}"
            module.register_forward_hook(visiting(label))
            labels.append(label)
    return tuple(labels)


def token_encoder(
    model: PreTrainedModel,
    plans: Sequence[Architecture],
    tokenizer: Any,
    bos: bool | None,
    device: torch.device,
    *,
    processor: Any,
    plain: Callable[[], PreTrainedModel],
) -> Encoder:
    """The encoder of this model's tokens and of its decoder's targets, with the sizes of its tables.

    `plain` returns the model as transformers runs it, which is asked on demand.

    Raises `InputError` for a tokenizer with more tokens than the model has.
    """
    decoder = next((plan for plan in plans if plan.stack == "decoder"), None)
    plan = plans[0] if decoder is None or plans[0].reads == "tokens" else decoder
    n_vocab = len(token_embedding(model))
    if tokenizer is not None and len(tokenizer) > n_vocab:
        raise InputError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's embedding has {n_vocab} rows: "
            "they do not belong together. Give the tokenizer with which this model was trained."
        )
    further = _further_inputs(model, plan.position_limit)
    starts = [getattr(model.config, name, None) for name in ("decoder_start_token_id", "pad_token_id")]
    start = None if decoder is None else next((token for token in starts if token is not None), 0)
    target = None if decoder is None else decoder.position_limit
    chosen = globals_by_default(model) if GLOBAL_MASK in further else None
    of_text = plans[0].reads == "tokens"
    taken = tuple(inspect.signature(model.forward).parameters)
    besides, finder = None, cache(lambda: PlaceFinder(plain(), plan.blocks))
    if of_text and (more := taken_besides(taken)):
        refused = ""
        if plan.idle:
            refused = f"its blocks {', '.join(map(str, plan.idle))} read pictures by cross-attention"
        elif all(module_of(model.base_model, plan.blocks) is None for module_of in (merged_into, merged_by)):
            refused = "no module takes its tokens and what it reads besides them as one sequence"
        besides = Besides(more, token_embedding(model).dtype, kinds_of(model.config), processor, refused)
    return Encoder(
        tokenizer, n_vocab, plan.position_limit, further, bos, device, start, chosen, target,
        cache(lambda: _first_position_of(plain())), placeholders_of(model.config, tokenizer, taken) if of_text else {},
        cache(lambda name: _ignores_zeros_in(plain(), name)), besides,
        lambda batch: placed(batch, finder(), processor),
    )  # fmt: skip


def _further_inputs(model: PreTrainedModel, position_limit: int | None) -> dict[str, int | None]:
    """The model's inputs besides tokens and mask, each with the size of its table (None: any number works)."""
    tables = {"position_ids": position_limit, GLOBAL_MASK: 2}
    if (types := text_setting(model.config, "type_vocab_size")) is not None:
        tables["token_type_ids"] = types
    taken = inspect.signature(model.forward).parameters
    return {name: size for name, size in tables.items() if name in taken}


def _first_position_of(model: PreTrainedModel) -> int | None:
    """The number from which a model counts positions by default; None if it does not simply count them."""
    ids, padding = _tried(model), text_setting(model.config, "pad_token_id")
    counted = torch.arange(_TRIED, device=ids.device)[None]

    def stream(**positions: Tensor) -> Tensor:
        with torch.no_grad():
            return first_tensor(model.base_model(input_ids=ids, use_cache=False, return_dict=True, **positions)[0])

    expected = stream()
    # PaliGemma counts from 1, RoBERTa from the position after the padding's.
    for first in (0, 1) if padding is None else (0, 1, int(padding) + 1):
        if torch.equal(stream(position_ids=counted + first), expected):
            return first
    return None


def _ignores_zeros_in(model: PreTrainedModel, name: str) -> bool:
    """Whether zeros as one more input of a model, with a number for each token, change nothing in what it returns."""
    if not (name.endswith("token_type_ids") or name in inspect.signature(model.forward).parameters):
        return False
    ids = _tried(model)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})

    def output(**further: Tensor) -> Tensor:
        with torch.no_grad():
            return first_tensor(model(**inputs, use_cache=False, return_dict=True, **further)[0])

    try:
        return torch.equal(output(**{name: torch.zeros_like(ids)}), output())
    except Exception:  # models raise many kinds of errors for inputs that they do not take
        return False


def _tried(model: PreTrainedModel) -> Int[Tensor, "1 position"]:
    embedding, padding = token_embedding(model), text_setting(model.config, "pad_token_id")
    known = text_ids(len(embedding), placeholders_of(model.config, None))[: _TRIED + 1].tolist()
    return torch.tensor([[token for token in known if token != padding][:_TRIED]], device=embedding.device)
