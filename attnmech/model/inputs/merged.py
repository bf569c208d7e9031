"""Reads texts with pictures or sounds among their tokens, as users have them or as processors return them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...basics.arguments import dense, shown
from ...errors import InputError
from ..structure.text_part import holds_more, sense_of
from .processors import Pictures, both_processed

Chat: TypeAlias = Sequence[Mapping[str, Any]]  # messages as chat templates take them, with "role" and "content"


@dataclass(frozen=True)
class Besides:
    """What a model takes among its tokens besides text."""

    taken: frozenset[str]  # names of the inputs that hold it, or that say which tokens it belongs to
    dtype: torch.dtype
    kinds: Mapping[int, str]  # the ids of the tokens that stand for it, each with its kind: "image", "video" or "sound"
    processor: Any = None
    refused: str = ""  # why none of it is read; empty if it is

    def reads(self, entry: Any) -> bool:
        """Whether an entry of a list of inputs holds pictures or sounds."""
        if is_chat(entry):
            return next(_senses_in([entry]), None) is not None
        return isinstance(entry, Mapping) and holds_more(entry)

    def read(self, entry: Any, rendered: Callable[[Chat], str]) -> "Merged":
        """One text of a list: a mapping of model inputs, a text with its images and sounds, or a chat."""
        if isinstance(entry, str):
            entry = {"text": entry}
        if self.refused:
            raise InputError(f"attnmech reads only the text of this model: {self.refused}.")
        if is_chat(entry):
            signals = [(sense, part) for _, sense, part in _senses_in([entry])]
            images = [_signal_of(part, "image") for sense, part in signals if sense == "an image"]
            sounds = [_signal_of(part, "audio") for sense, part in signals if sense == "a sound"]
            if len(images) + len(sounds) < len(signals):
                raise InputError("films are not read; give their frames as images.")
            made, pictures = both_processed(self.processor, rendered(entry), images, sounds, add_special_tokens=False)
        elif "text" in entry:
            if unknown := sorted(map(str, entry.keys() - {"text", "images", "sounds"})):
                raise InputError(f'a text with pictures is {{"text": ..., "images": [...]}}; got {unknown[0]} as well.')
            images, sounds = (_listed(entry.get(name)) for name in ("images", "sounds"))
            made, pictures = both_processed(self.processor, entry["text"], images, sounds)
        else:
            return Merged.of(entry, self.taken, self.dtype)
        known = {"input_ids", "attention_mask", *self.taken}
        text = Merged.of({name: made[name] for name in made if name in known}, self.taken, self.dtype)
        return replace(text, pictures=pictures)


def _listed(signals: Any) -> list[Any]:
    return [] if signals is None else list(signals) if isinstance(signals, list) else [signals]


def _signal_of(part: Mapping[str, Any], kind: str) -> Any:
    signal = part.get(kind, part.get("path"))
    if signal is None:
        raise InputError(f'a chat holds {{"type": "{kind}", "{kind}": ...}}; got {shown(dict(part))}.')
    return signal


@dataclass(frozen=True)
class Merged:
    """One text: its tokens, the further inputs with a number for each token, and its pictures and sounds."""

    ids: Int[Tensor, " position"]
    by_token: Mapping[str, Int[Tensor, " position"]]
    senses: Mapping[str, Tensor]
    pictures: Pictures | None = None  # the user's, if a processor made inputs of them

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
        by_token = {
            name: value[real]
            for name, value in values.items()
            if value.shape == ids.shape and not value.is_floating_point()
        }
        senses = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in values.items()
            if name not in by_token
        }
        return cls(ids[real].long(), by_token, senses)


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


def is_list_of(inputs: Any, kind: Any) -> bool:
    """Whether inputs are a list of entries of one kind (texts, or token ids); an empty list counts as both."""
    return isinstance(inputs, Sequence) and all(isinstance(entry, kind) for entry in inputs)


def is_chat(inputs: Any) -> bool:
    """Whether inputs are the messages of one chat: a list of mappings that name roles."""
    return is_list_of(inputs, Mapping) and len(inputs) > 0 and all("role" in message for message in inputs)


def require_text_in(chats: Sequence[Chat]) -> None:
    """Raises `InputError` for a message that holds a picture, a film or a sound."""
    for number, sense, part in _senses_in(chats):
        raise InputError(
            f"message {number} of the chat holds {sense} (a part of the type {_type_of(part)!r}); attnmech reads only "
            "text. Leave it out."
        )


def _senses_in(chats: Sequence[Chat]) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """The parts of messages that are not text, each with the message's number and what it is."""
    for number, message in ((number, message) for chat in chats for number, message in enumerate(chat)):
        content = message.get("content")
        for part in content if isinstance(content, Sequence) and not isinstance(content, str) else ():
            if isinstance(part, Mapping) and (sense := sense_of(_type_of(part))) is not None:
                yield number, sense, part


def _type_of(part: Mapping[str, Any]) -> str:
    return str(part.get("type", next(iter(part), "")))


def numbers_of(name: str, value: Any) -> Tensor:
    """An input as a tensor; raises `InputError` for anything but numbers."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} must be a tensor of numbers, one row of equal length per text; got {shown(value)}."
        ) from error
    return dense(name, tensor)
