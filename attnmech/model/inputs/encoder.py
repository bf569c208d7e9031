"""Makes one `Batch` from a user's inputs (a text, texts, token ids, model inputs), and refuses anything else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...basics.arguments import dense, shown
from ...basics.messages import first_line, takes
from ...batch import Batch
from ...errors import InputError
from ..attention.local_global import GLOBAL_MASK
from ..parts.pieces import Tokenized, piece_of_text, read_piece, special_ids, texts_of_pieces, unknown_id, unknown_texts
from ..structure.text_part import holds_more
from .merged import Besides, Chat, is_chat, is_list_of, joined, numbers_of, require_text_in
from .processors import Picture, Recording

Ids: TypeAlias = Tensor | np.ndarray  # token ids `[position]`, or `[batch position]`

Senses: TypeAlias = Path | Picture | Recording  # the path of a picture or recording, or one of these

Inputs: TypeAlias = (
    str
    | Sequence[str]
    | Ids
    | Sequence[Ids]
    | Chat
    | Sequence[Chat]
    | Mapping[str, Any]
    | Senses
    | Sequence[Senses | np.ndarray]
    | Batch
)
"""A text, a list of texts, token ids, a list of token ids (of texts of any length), a chat, a list of chats, a mapping
of model inputs, a batch made from any of these; for models of images and sound, pictures (also as arrays), recordings
and `Path`s of either; for models of text and images or sound, also `{"text": ..., "images": [...], "sounds": [...]}`,
chats with images, and lists of these."""

MOST_CHARACTERS: Final = 2**22  # in a text: about a million tokens, which take seconds and hundreds of megabytes


@dataclass(eq=False, repr=False)
class Encoder:
    """Turns inputs into a batch for one model, by its tokenizer, vocabulary and number of positions."""

    tokenizer: Any
    n_vocab: int
    position_limit: int | None
    further: Mapping[str, int | None]
    bos: bool | None
    device: torch.device
    decoder_start: int | None = None  # the token with which the decoder starts, in an encoder-decoder model; else None
    global_tokens: Callable[[Batch], Tensor] | None = None  # those global by default, if the model has any
    target_limit: int | None = None  # the number of positions of the decoder's texts
    first_position: Callable[[], int | None] = lambda: None
    """The number from which the model counts positions by default; None if it does not simply count them."""
    placeholders: Mapping[int, str] = field(default_factory=dict)  # what ids stand for that no text may hold
    ignores_zeros: Callable[[str], bool] = lambda name: False
    """Whether zeros as a further input of the model, by its name, change nothing."""
    besides: Besides | None = None  # what the model takes among its tokens besides text; None for a model of text alone
    placed: Callable[[Batch], Batch] = lambda batch: batch  # names the tokens of pictures and sounds by what they hold

    def __post_init__(self) -> None:
        self.unknown = unknown_id(self.tokenizer)  # the id of characters that the vocabulary lacks
        self.special = special_ids(self.tokenizer) | frozenset(self.placeholders)
        self._known_pieces: dict[int, tuple[str | bytes, str | bytes]] = {}
        # A fast tokenizer raises "Already borrowed" if a second thread sets its padding during a call.
        self._tokenizing = Lock()

    def encode(self, inputs: Inputs, bos: bool | None = None) -> Batch:
        """One batch, padded on the right if texts differ in length.

        `bos` says whether each text begins with the tokenizer's BOS or CLS token: True adds it, False removes
        it, None follows the setting at load or, without one, the tokenizer. A text that begins with the token already,
        such as a rendered chat, gets no second one. Token ids stay unchanged.
        """
        batch = self.read(inputs, bos)
        self.check_length(batch)
        return self.placed(batch) if batch.senses else batch

    def read(self, inputs: Inputs, bos: bool | None = None) -> Batch:
        """`encode` without the check of length, for callers that cut texts."""
        if isinstance(inputs, str):
            return self.padded(self.tokenize([inputs], bos))
        if isinstance(inputs, Mapping):
            return self._merged([inputs]) if self._reads_more([inputs]) else self._mapping(inputs)
        if isinstance(inputs, Ids):
            return self._ids(numbers_of("token ids", inputs), None, {})
        entries: Any = inputs
        if is_list_of(entries, str):
            return self.padded(self.tokenize(list(entries), bos))
        if is_chat(entries) and self._reads_more([entries]):
            return self._merged([entries])
        if is_list_of(entries, Mapping | Sequence) and self._reads_more(entries):
            return self._merged(entries)
        if is_list_of(entries, Ids):
            rows = [row for number, ids in enumerate(entries) for row in _rows(number, ids)]
            return self.padded([Tokenized(row) for row in rows])
        if is_chat(entries) or (isinstance(entries, Sequence) and entries and all(is_chat(chat) for chat in entries)):
            chats = [entries] if is_chat(entries) else list(entries)
            batch = self.padded(self.tokenize(self._rendered(chats), bos, add_special=False))
            require_text_in(chats)
            return batch
        mixed = isinstance(entries, Sequence) and any(isinstance(entry, str | Ids) for entry in entries)
        got = "a list of " + " and ".join(sorted({type(entry).__name__ for entry in entries})) if mixed else None
        raise InputError(
            "inputs must be a text, a list of texts, a tensor of token ids, a list of such tensors, a chat (a list of "
            '{"role": ..., "content": ...}), a list of chats, or a mapping of model inputs; got '
            f"{got or type(inputs).__name__}. For a list of ids: torch.tensor(ids)."
        )

    def with_target(self, batch: Batch, texts: str | Sequence[str]) -> Batch:
        """The batch with the decoder's texts, each preceded by the token with which the decoder starts."""
        assert self.decoder_start is not None
        targets = [texts] if isinstance(texts, str) else list(texts)
        if len(targets) != len(batch.ids):
            raise InputError(f"`target` must have one text for each of the {len(batch.ids)} texts; got {len(targets)}.")
        start = torch.tensor([self.decoder_start])
        # Whisper's tokenizer adds the start token itself.
        rows = [
            row if row.ids[0] == self.decoder_start else replace(row, ids=torch.cat((start, row.ids)))
            for row in self.tokenize(targets, as_target=True)
        ]
        target = replace(self.padded(rows), target=None)
        self.check_length(target)
        return replace(batch, target=target)

    def target_of(self, inputs: dict[str, Any], count: int) -> Batch:
        """The decoder's inputs for `count` texts, removed from a mapping; by default, the token that starts it."""
        return self._started(self._given_target(inputs), count)

    def check_length(self, batch: Batch) -> None:
        """Raises `InputError` for texts with more tokens than the model has positions."""
        for part, limit, what in (
            (batch, self.position_limit, "model"),
            (batch.target, self.target_limit, "model's decoder"),
        ):
            length = 0 if part is None else part.ids.shape[1]
            if limit is not None and length > limit:
                raise InputError(
                    f"this {what} has {limit} positions; the text has {length} tokens. Shorten or split it."
                )

    def position_texts(self, ids: Sequence[int], stack: str = "") -> tuple[str, ...]:
        """Each token as text, decoded by itself."""
        return tuple(self.token_texts([token])[0] for token in ids)

    def token_texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The label of each token, with its own spaces; the id's digits if there is no tokenizer.

        A token that holds part of a character is read together with its neighbours (`texts_of_pieces`).
        """
        if self.tokenizer is None:
            return tuple(str(token) for token in ids)
        return texts_of_pieces([self._read(token)[0] for token in ids])

    def _read(self, token: int) -> tuple[str | bytes, str | bytes]:
        """A token's piece for its label, and what it holds of the text."""
        # Cached: decoding a token takes ten times as long as tokenizing it.
        if token not in self._known_pieces:
            piece = read_piece(self.tokenizer, token)
            self._known_pieces[token] = piece, piece_of_text(self.tokenizer, token, piece)
        return self._known_pieces[token]

    def _rendered(self, chats: list[Chat]) -> list[str]:
        """Renders chats as texts by the tokenizer's chat template, which also adds special tokens, BOS included."""
        self._require_tokenizer()
        for message in (message for chat in chats for message in chat):
            if "content" not in message:
                raise InputError(f'a message must have "role" and "content"; got {shown(dict(message))}.')
        processor = None if self.besides is None else self.besides.processor
        renders: Any = processor if getattr(processor, "chat_template", None) else self.tokenizer
        if not getattr(renders, "chat_template", None):
            raise InputError(
                "this model's tokenizer has no chat template, so it takes texts. Give it its template (Jinja): "
                "model.tokenizer.chat_template = ..., or write the chat as one text."
            )
        try:
            texts = renders.apply_chat_template(chats, tokenize=False, add_generation_prompt=False)
        except Exception as error:  # a template is a program, and may raise anything
            require_text_in(chats)
            raise InputError(
                f"the tokenizer's chat template does not take these messages: {first_line(error)}."
            ) from error
        return list(texts)

    def _require_tokenizer(self) -> None:
        if self.tokenizer is None:
            raise InputError(
                "this model was loaded without a tokenizer, so it takes token ids: model.run(torch.tensor([[5, 7]])), "
                "or load it with one: am.load(model, tokenizer=...), or a folder that holds it."
            )

    def tokenize(
        self, texts: list[str], bos: bool | None = None, *, as_target: bool = False, add_special: bool = True
    ) -> list[Tokenized]:
        """The tokens of each text, with `bos` as in `encode`. `as_target`: some tokenizers split a decoder's texts
        differently.

        `add_special` says whether the tokenizer adds special tokens; a rendered chat already has them.
        """
        if not texts:
            raise InputError("the list of texts is empty; give at least one text.")
        self._require_tokenizer()
        for number, text in enumerate(texts):
            which = "the text" if len(texts) == 1 else f"text {number}"
            if not text.strip():
                raise InputError(f"{which} is empty; give at least one word.")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InputError(
                    f"{which} has a lone surrogate (U+D800 to U+DFFF), which is not a character; replace it: "
                    "text.encode('utf-8', 'replace').decode()."
                ) from None
            if len(text) > MOST_CHARACTERS:
                cut = "; in a corpus, truncate=True cuts it" if takes("truncate") else ""
                raise InputError(
                    f"{which} has {len(text):,} characters; at most {MOST_CHARACTERS:,} are tokenized. Split it{cut}."
                )
        wanted, name = self.bos if bos is None else bos, "text_target" if as_target else "text"
        rows = [self._with_bos(row, wanted) for row in self._ids_of(texts, name, add_special)]
        if any(not row for row in rows):
            raise InputError("the tokenizer made no tokens from this text; give at least one word that it knows.")
        made = [Tokenized(torch.tensor(row)) for row in rows]
        for number, row in enumerate(rows):
            if self.unknown in row:
                with self._tokenizing:
                    unknown = unknown_texts(self.tokenizer, self.unknown, texts[number], name)
                made[number] = replace(made[number], unknown=unknown)
        return made

    def _ids_of(self, texts: list[str], name: str, add_special: bool) -> list[list[int]]:
        """The tokenizer's ids; special tokens with which a text begins or ends already are not added again."""

        def ids(texts: list[str], add_special: bool) -> list[list[int]]:
            with self._tokenizing:
                encoded = self.tokenizer(
                    **{name: texts}, add_special_tokens=add_special, padding=False, truncation=False
                )["input_ids"]
            return [[int(token) for token in row] for row in encoded]

        rows = ids(texts, add_special)
        for number, row in enumerate(rows if add_special else ()):
            if any(end in self.special and row.count(end) > 1 for end in {*row[:1], *row[-1:]}):
                rows[number] = _added_once(row, *ids([texts[number]], False))
        return rows

    def padded(self, rows: Sequence[Tokenized]) -> Batch:
        """One batch from the tokens of texts, padded on the right."""
        ids = pad_sequence([row.ids for row in rows], batch_first=True, padding_value=self._pad)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(row.ids) for row in rows])[:, None]
        return self._ids(ids, mask, {}, unknown=[row.unknown for row in rows])

    def _reads_more(self, entries: Sequence[Any]) -> bool:
        """Whether texts hold pictures or sounds, and the model takes them among its tokens."""
        return self.besides is not None and any(map(self.besides.reads, entries))

    def _merged(self, entries: Sequence[Any]) -> Batch:
        assert self.besides is not None
        texts = [self.besides.read(entry, lambda chat: self._rendered([chat])[0]) for entry in entries]
        for text in texts:
            if not text.senses:
                self._require_text(text.ids)
        ids, mask, extra = joined(texts, self._pad)
        return replace(
            self._tokens(ids, mask),
            extra={name: value.to(self.device) for name, value in extra.items()},
            senses=tuple({name: value.to(self.device) for name, value in text.senses.items()} for text in texts),
            kind_of=self.besides.kinds,
            pictures=tuple(text.pictures for text in texts),
        )

    @property
    def _pad(self) -> int:
        of_tokenizer = () if self.tokenizer is None else (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((int(token) for token in of_tokenizer if token is not None), 0)

    @property
    def _bos_ids(self) -> list[int]:
        """The tokenizer's BOS and CLS tokens; empty if it has neither."""
        ids = (getattr(self.tokenizer, name, None) for name in ("bos_token_id", "cls_token_id"))
        return [int(token) for token in ids if token is not None]

    def _with_bos(self, row: list[int], wanted: bool | None) -> list[int]:
        if wanted is None:
            return row
        bos = self._bos_ids
        if not wanted:
            return list(dropwhile(lambda token: token in bos, row))
        if not bos:
            raise InputError("bos=True needs a tokenizer with a BOS or CLS token; this one has neither.")
        return row if row[:1] and row[0] in bos else [bos[0], *row]

    def _mapping(self, inputs: Mapping[str, Any]) -> Batch:
        rest = {name: value for name, value in inputs.items() if value is not None}
        ids = rest.pop("input_ids", None)
        if ids is None:
            raise InputError(_without_ids(inputs))
        mask = rest.pop("attention_mask", None)
        target = self._given_target(rest)
        ids = numbers_of("input_ids", ids)
        further = {name: value for name, value in rest.items() if name in self.further}
        unknown = sorted(
            str(name) for name in rest.keys() - further.keys() if not self._is_unused(name, rest[name], ids)
        )
        if holds_more(rest):
            other = [name for name in unknown if holds_more({name: rest[name]})]
            raise InputError(
                f"attnmech reads only the text of this model; got {', '.join(other)} as well. Leave out what is not "
                "text, and its placeholders among the tokens."
            )
        if unknown:
            decoder = () if self.decoder_start is None else ("decoder_input_ids", "decoder_attention_mask")
            accepted = ("input_ids", "attention_mask", *decoder, *self.further)
            raise InputError(f"this model accepts the inputs {', '.join(accepted)}; got {', '.join(unknown)} as well.")
        batch = self._ids(ids, mask, {name: self._checked(name, x, ids) for name, x in further.items()}, target)
        # Inputs equal to the model's defaults are left out, so that they do not change a text's digest.
        return replace(
            batch, extra={name: x for name, x in batch.extra.items() if not self._is_default(name, x, batch)}
        )

    def _is_unused(self, name: str, value: Any, ids: Tensor) -> bool:
        """Whether a further input is a zero for each token that changes nothing, as tokenizers return them."""
        try:
            numbers = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            return False
        return numbers.shape == ids.shape and not bool(numbers.any()) and self.ignores_zeros(name)

    def _is_default(self, name: str, value: Tensor, batch: Batch) -> bool:
        """Whether leaving this input out gives the same results at real tokens."""
        if name == "token_type_ids":
            return not bool((value * batch.mask).any())
        if name != "position_ids":
            return False
        first = self.first_position()
        padded_before = bool((~batch.mask[:, :-1] & batch.mask[:, 1:]).any())
        if first is None or padded_before or (first and bool(((batch.ids == first - 1) & batch.mask).any())):
            return False
        counted = first + torch.arange(batch.ids.shape[1], device=value.device)
        return bool(((value == counted) | ~batch.mask).all())

    def _given_target(self, inputs: dict[str, Any]) -> Batch | None:
        """The decoder's inputs, removed from a mapping; None if it has none."""
        if self.decoder_start is None or "decoder_input_ids" not in inputs:
            return None
        ids = numbers_of("decoder_input_ids", inputs.pop("decoder_input_ids"))
        return self._tokens(ids, inputs.pop("decoder_attention_mask", None))

    def _started(self, target: Batch | None, count: int) -> Batch:
        """The decoder's inputs for `count` texts; by default, the token with which it starts."""
        assert self.decoder_start is not None
        if target is None:
            return self._tokens(torch.full((count, 1), self.decoder_start), None)
        if len(target.ids) != count:
            raise InputError(
                f"decoder_input_ids must have one row per text; got {len(target.ids)} rows for {count} texts."
            )
        return target

    def _checked(self, name: str, value: Any, ids: Tensor) -> Tensor:
        """Checks positions or token types: whole numbers of the shape of the ids, within the range of their table."""
        numbers, limit = numbers_of(name, value), self.further[name]
        if numbers.is_floating_point() or numbers.dtype == torch.bool or numbers.shape[-1:] != ids.shape[-1:]:
            raise InputError(
                f"{name} must be whole numbers of the shape of the token ids, {tuple(ids.shape)}; got {numbers.dtype} "
                f"{tuple(numbers.shape)}."
            )
        low, high = int(numbers.min()), int(numbers.max())
        # Models without a table of token types also accept zeros (DeBERTa).
        if low < 0 or (limit is not None and high >= max(limit, 1)):
            bound = "0 or more" if limit is None else f"from 0 to {limit - 1}"
            raise InputError(f"{name} must be {bound}; got {low if low < 0 else high}.")
        return numbers[None] if numbers.ndim == 1 else numbers

    def _ids(
        self,
        ids: Tensor,
        mask: Any,
        extra: Mapping[str, Tensor],
        target: Batch | None = None,
        unknown: Sequence[Sequence[str]] | None = None,
    ) -> Batch:
        batch = self._tokens(ids, mask, unknown)
        if self.placeholders:
            self._require_text(batch.ids[batch.mask].cpu())
        if self.decoder_start is not None:
            target = self._started(target, len(batch.ids))
        if self.global_tokens is not None and GLOBAL_MASK not in extra:
            extra = {**extra, GLOBAL_MASK: self.global_tokens(batch).long()}
        return replace(batch, target=target, extra={name: x.to(self.device) for name, x in extra.items()})

    def _tokens(self, ids: Tensor, mask: Any, unknown: Sequence[Sequence[str]] | None = None) -> Batch:
        dense("token ids", ids)
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise InputError(f"token ids must be whole numbers; got a tensor of {ids.dtype}.")
        if ids.ndim == 1:
            ids = ids[None]
        if ids.ndim != 2 or ids.numel() == 0:
            raise InputError(
                f"token ids must have the shape [batch position] with at least one token; got {tuple(ids.shape)}."
            )
        ids = ids.cpu().long()
        if mask is None:
            mask = torch.ones_like(ids, dtype=torch.bool)
        else:
            mask = numbers_of("attention_mask", mask).cpu()
            mask = mask[None] if mask.ndim == 1 else mask
            if mask.shape != ids.shape:
                raise InputError(
                    f"attention_mask must have the shape of the token ids, {tuple(ids.shape)}, with 1 at real tokens; "
                    f"got {tuple(mask.shape)}."
                )
            if not ((mask == 0) | (mask == 1)).all():
                raise InputError("attention_mask must be 1 at real tokens and 0 at padding; it holds other numbers.")
            mask = mask.to(torch.bool)
            if not mask.any(dim=1).all():
                raise InputError("every sequence must have a real token; attention_mask hides a whole sequence.")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.n_vocab:
            bad = low if low < 0 else high
            raise InputError(f"token ids must be from 0 to {self.n_vocab - 1} (the model's vocabulary); got {bad}.")
        first = ids.gather(1, mask.int().argmax(dim=1, keepdim=True))
        bos = bool(torch.isin(first, torch.tensor(self._bos_ids)).all()) if self._bos_ids else None
        tokens = tuple(self.token_texts(row) for row in ids.tolist())
        pieces = tuple(map(self._pieces, ids.tolist(), unknown or [()] * len(ids)))
        ids, mask = ids.to(self.device), mask.to(self.device)
        return Batch(ids, mask, tokens, bos, special=self.special, texts_of=self.token_texts, pieces=pieces)

    def _pieces(self, ids: Sequence[int], unknown: Sequence[str]) -> tuple[str | bytes, ...]:
        if self.tokenizer is None:
            return ("",) * len(ids)
        texts = iter(unknown)
        return tuple(
            next(texts, self._read(token)[1]) if token == self.unknown else self._read(token)[1] for token in ids
        )

    def _require_text(self, ids: Int[Tensor, " token"]) -> None:
        held = ids[torch.isin(ids, torch.tensor(list(self.placeholders)))].tolist()
        if held:
            text = "" if self.tokenizer is None else f"{self.token_texts(held[:1])[0]!r}, "
            alone = "attnmech reads only the text of this model. Leave it out."
            advice = 'give that with it, {"text": ..., "images": [...], "sounds": [...]}, or leave the token out.'
            raise InputError(
                f"the text holds {text}token {held[0]}, which stands for {self.placeholders[held[0]]}; "
                f"{alone if self.besides is None or self.besides.refused else advice}"
            )


def _added_once(row: list[int], bare: list[int]) -> list[int]:
    """The ids of a text with special tokens, without those that the text (`bare`) begins or ends with itself.

    >>> _added_once([1, 1, 7, 8, 2], [1, 7, 8])
    [1, 7, 8, 2]
    """
    fitting = [row]
    for start in range(len(row) - len(bare) + 1):
        before, after = row[:start], row[start + len(bare) :]
        if bare and row[start : start + len(bare)] == bare:
            kept = [] if before[:1] == bare[:1] else before, [] if after[-1:] == bare[-1:] else after
            fitting.append([*kept[0], *bare, *kept[1]])
    return min(fitting, key=len)


def _without_ids(inputs: Mapping[str, Any]) -> str:
    """The message for a mapping without token ids; the splits and the records of a dataset are mappings too."""
    names = list(inputs)
    if names and all(hasattr(value, "column_names") for value in inputs.values()):
        splits = ", ".join(map(repr, names))
        return f"inputs are the splits of a dataset ({splits}); choose one, such as dataset[{names[0]!r}]."
    message = f'a mapping of model inputs must hold "input_ids"; got {sorted(map(str, inputs))}.'
    if "text" in inputs:
        return f'{message} To pass texts: inputs["text"].'
    of_text = next((name for name, value in inputs.items() if isinstance(value, str)), None)
    if of_text is None:
        return message
    return f'{message} A record of a corpus must hold a string "text": dataset.rename_column({of_text!r}, "text").'


def _rows(number: int, ids: Ids) -> list[Tensor]:
    tensor = numbers_of(f"entry {number} of the list", ids)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(f"token ids must be whole numbers; entry {number} of the list is a tensor of {tensor.dtype}.")
    if tensor.ndim not in (1, 2) or tensor.numel() == 0:
        raise InputError(
            "each entry of a list of token ids must have the shape [position] with at least one token; entry "
            f"{number} has {tuple(tensor.shape)}."
        )
    return list(tensor.long().cpu().reshape(-1, tensor.shape[-1]))
