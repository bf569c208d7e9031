"""Reads texts with pictures or sounds among their tokens, as transformers' processors return them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...basics.arguments import dense, shown
from ...errors import InputError
from ..structure.text_part import sense_of

Chat: TypeAlias = Sequence[Mapping[str, Any]]
"""The messages of a chat, as transformers' chat templates take them, each with a "role" and a "content"."""

_OF_TEXT: Final = frozenset(
    {
        *("self", "args", "kwargs", "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds"),
        *("labels", "use_cache", "cache_position", "logits_to_keep", "output_attentions", "output_hidden_states"),
        *("return_dict", "mm_encoder_outputs", "vision_feature_layer", "vision_feature_select_strategy"),
    }
)
"""The arguments of a model's forward pass that are not what a processor returns besides the text."""


def taken_besides(arguments: Collection[str]) -> frozenset[str]:
    """The inputs besides text among the arguments of a model's forward pass; empty for a model of text alone."""
    return frozenset(arguments) - _OF_TEXT if any(map(_holds_sense, arguments)) else frozenset()


def holds_more(inputs: Mapping[str, Any]) -> bool:
    """Whether model inputs hold a picture or a sound.

    >>> holds_more({"input_ids": [[5, 7]], "mm_token_type_ids": [[0, 0]]}), holds_more({"pixel_values": [[0.5]]})
    (False, True)
    """
    return any(value is not None and _holds_sense(str(name)) for name, value in inputs.items())


def _holds_sense(name: str) -> bool:
    return sense_of(name) is not None and not name.endswith("token_type_ids") and name not in _OF_TEXT


@dataclass(frozen=True)
class Merged:
    """One text: its tokens, the further inputs with a number for each token, and its pictures and sounds."""

    ids: Int[Tensor, " position"]
    by_token: Mapping[str, Int[Tensor, " position"]]
    senses: Mapping[str, Tensor]

    @classmethod
    def of(cls, inputs: Mapping[str, Any], taken: Collection[str], dtype: torch.dtype) -> "Merged":
        """The text of one mapping of model inputs; `taken` names the inputs that the model takes besides text."""
        values = {str(name): numbers_of(str(name), value) for name, value in inputs.items() if value is not None}
        ids, mask = values.pop("input_ids", None), values.pop("attention_mask", None)
        if ids is None or ids.ndim not in (1, 2) or (ids.ndim == 2 and len(ids) != 1) or ids.is_floating_point():
            raise InputError(
                'a mapping with pictures or sounds must hold "input_ids" of one text, [1 position], so that each '
                "picture belongs to a text. For several texts, give a list: [dict(processor(...)) for each text]; got "
                f"{'none' if ids is None else tuple(ids.shape)}."
            )
        if unknown := sorted(values.keys() - set(taken)):
            raise InputError(f"this model accepts {', '.join(sorted(taken))}; got {', '.join(unknown)} as well.")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        if real.shape != ids.shape:
            raise InputError(f"attention_mask must have the shape of the token ids, {tuple(ids.shape)}.")
        by_token = {name: value[real] for name, value in values.items() if _is_by_token(value, ids)}
        senses = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in values.items()
            if name not in by_token
        }
        return cls(ids[real].long(), by_token, senses)


def _is_by_token(value: Tensor, ids: Tensor) -> bool:
    return value.shape == ids.shape and not value.is_floating_point()


def joined(texts: Sequence[Merged], pad: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The ids of texts, padded on the right, their mask, and their further inputs by token, 0 where a text has none."""
    ids = pad_sequence([text.ids for text in texts], batch_first=True, padding_value=pad)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(text.ids) for text in texts])[:, None]
    names = dict.fromkeys(name for text in texts for name in text.by_token)
    for number, text in enumerate(texts):
        if text.senses and (lacking := names.keys() - text.by_token.keys()):
            raise InputError(f"text {number} lacks {sorted(lacking)[0]}, which others of the list have.")
    extra = {
        name: pad_sequence([text.by_token.get(name, torch.zeros_like(text.ids)) for text in texts], batch_first=True)
        for name in names
    }
    return ids, mask, extra


def require_text_in(chats: Sequence[Chat]) -> None:
    """Raises `InputError` for a message that holds a picture, a film or a sound."""
    for number, message in ((number, message) for chat in chats for number, message in enumerate(chat)):
        content = message.get("content")
        for part in content if isinstance(content, Sequence) and not isinstance(content, str) else ():
            kind = str(part.get("type", next(iter(part), ""))) if isinstance(part, Mapping) else "text"
            if (sense := sense_of(kind)) is not None:
                raise InputError(
                    f"message {number} of the chat holds {sense} (a part of the type {kind!r}); attnmech reads only "
                    "text. Leave it out."
                )


def numbers_of(name: str, value: Any) -> Tensor:
    """An input as a tensor; raises `InputError` for anything but numbers."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} must be a tensor of numbers, one row of equal length per text; got {shown(value)}."
        ) from error
    return dense(name, tensor)
