"""Makes the inputs of the proof: a few random tokens, images or recordings, and their variations."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from ...batch import Batch
from ..attention.local_global import GLOBAL_MASK
from ..inputs.images import ImageEncoder
from ..inputs.own_inputs import OwnEncoder
from ..inputs.sounds import SoundEncoder
from ..inputs.transcripts import TranscriptEncoder
from ..run.hooked import HookedModel
from ..structure.text_part import text_ids, text_setting

_LENGTH: Final = 24
LONG: Final = 104
_PADDING: Final = 4  # the number of padding tokens on either side of the first long text
_FILLED: Final = 3  # the number of padding tokens added to a text, whose copies have different tokens there

SEED: Final = 20


def probe_batch(model: HookedModel) -> Batch:
    """Two sequences of seeded random tokens, the second shorter and padded on the right; or two random images; or, for
    a user's own module, the texts of its example with and without noise.
    """
    if isinstance(model.encoder, OwnEncoder):
        return model.encoder.probe
    generator = torch.Generator().manual_seed(SEED)
    limit = _limit(model)
    length = _LENGTH if limit is None else min(_LENGTH, limit)
    if isinstance(model.encoder, TranscriptEncoder):
        return model.encoder.encode(_heard(model.encoder, *_last_padded(model, length - 2, generator)))
    if isinstance(model.encoder, ImageEncoder | SoundEncoder):
        return model.encoder.encode(model.encoder.signal.noise(2, SEED, next(model.base.parameters())))
    ids, mask = _last_padded(model, length, generator)
    inputs = {"input_ids": ids, "attention_mask": mask, **_global_tokens(model, ids)}
    if "decoder" in model.stacks:
        inputs["decoder_input_ids"] = _random_ids(model, (2, _of_target(model, length)), generator)
    return model.encoder.encode(inputs)


def long_batch(model: HookedModel, texts: int) -> Batch | None:
    """Longer texts, padded on both sides; None for images and short position tables."""
    limit = _limit(model)
    # Longer than a window reaches.
    length = max(LONG, max(model.architecture.windows, default=0) // 2 + _LENGTH)
    length = length if limit is None else min(length, limit)
    if not model.writes_tokens or length <= 2 * _PADDING:
        return None
    generator = torch.Generator().manual_seed(SEED + 1)
    if isinstance(model.encoder, TranscriptEncoder):
        return model.encoder.encode(_heard(model.encoder, *_padded(model, texts, length, generator)))
    inputs = dict(zip(("input_ids", "attention_mask"), _padded(model, texts, length, generator), strict=True))
    inputs |= _global_tokens(model, inputs["input_ids"])
    if "decoder" in model.stacks:
        target = _padded(model, texts, _of_target(model, length), generator)
        inputs |= dict(zip(("decoder_input_ids", "decoder_attention_mask"), target, strict=True))
    return model.encoder.encode(inputs)


def padded_batch(model: HookedModel, length: int) -> Batch | None:
    """Four copies of one text: padded on the left with one token and with another, and likewise on the right.

    The text has `length` tokens, or fewer if the model limits it. None for images, and for models with few positions.
    The padding is never the tokenizer's own, from which some families (RoBERTa) count positions.
    """
    limit = _limit(model)
    length = length if limit is None else min(length, limit - _FILLED)
    if not model.writes_tokens or length < 1:
        return None
    generator = torch.Generator().manual_seed(SEED + 2)
    pad = text_setting(model.config, "pad_token_id")
    fillings = [token for token in _text_ids(model)[:3].tolist() if token != pad][:2]

    def filled() -> tuple[Tensor, Tensor]:
        text = _random_ids(model, (length,), generator)
        rows = [(torch.full((_FILLED,), token), text) for token in (fillings[0], fillings[-1])]
        ids = torch.stack(
            [*(torch.cat((pad, text)) for pad, text in rows), *(torch.cat((text, pad)) for pad, text in rows)]
        )
        real = torch.ones_like(ids)
        real[:2, :_FILLED] = real[2:, length:] = 0
        return ids, real

    if isinstance(model.encoder, TranscriptEncoder):
        heard = _heard(model.encoder, *filled())
        # The same for all copies.
        return model.encoder.encode(
            {name: value[:1].expand_as(value) if value.is_floating_point() else value for name, value in heard.items()}
        )
    inputs = dict(zip(("input_ids", "attention_mask"), filled(), strict=True))
    inputs |= _global_tokens(model, inputs["input_ids"], _FILLED + 1)
    if "decoder" in model.stacks:
        inputs |= dict(zip(("decoder_input_ids", "decoder_attention_mask"), filled(), strict=True))
    return model.encoder.encode(inputs)


def texts_of(model: HookedModel, lengths: Sequence[int]) -> Batch:
    """Texts of random tokens, padded on the right."""
    ids = _random_ids(model, (len(lengths), max(lengths)), torch.Generator().manual_seed(SEED + 3))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return model.encoder.encode({"input_ids": ids, "attention_mask": mask})


def beginning_of(batch: Batch, number: int, length: int) -> Batch:
    """The first tokens of one text of a batch, and of its decoder's text; inputs other than tokens stay whole."""
    text = batch.texts(torch.tensor([number]))
    target = text.target
    if target is not None and target.texts_of is not None:
        target = target.beginning(length)
    whole = text.texts_of is None or bool(text.senses)
    return replace(text if whole else text.beginning(length), target=target)


def continued(model: HookedModel, text: Batch) -> Batch:
    """A text, and the same text with a few more tokens, beside which the first is padded."""
    more = _random_ids(model, (2, _FILLED), torch.Generator().manual_seed(SEED + 4)).to(text.ids.device)
    made = text.texts(torch.tensor([0, 0]))
    mask = torch.ones_like(more, dtype=torch.bool)
    mask[0] = False
    labels = model.encoder.position_texts(more[1].tolist())
    return replace(
        made,
        ids=torch.cat((made.ids, more), dim=1),
        mask=torch.cat((made.mask, mask), dim=1),
        tokens=tuple((*row, *labels) for row in made.tokens),
        pieces=made.pieces and tuple((*row, *("" for _ in labels)) for row in made.pieces),
        extra={name: torch.cat((value, torch.zeros_like(more)), dim=1) for name, value in made.extra.items()},
    )


def each_token_changed(model: HookedModel, batch: Batch) -> Batch:
    """Copies of one text (of its decoder's): the n-th has another token at place n + 1, the last is unchanged."""
    written = batch if batch.target is None else batch.target
    copies = written.ids.shape[1] - 1
    made = batch.texts(torch.zeros(copies + 1, dtype=torch.long))
    places = torch.arange(copies, device=batch.ids.device)
    ids = written.ids.repeat(copies + 1, 1)
    ids[places, places + 1] = _other_ids(model, ids[places, places + 1])
    return replace(made, ids=ids) if made.target is None else replace(made, target=replace(made.target, ids=ids))


def end_changed(model: HookedModel, batch: Batch) -> tuple[Batch, int]:
    """The batch with other tokens in the second half of its text or its decoder's, and where that half begins."""
    written = batch if batch.target is None else batch.target
    half = written.ids.shape[1] // 2
    ids = written.ids.clone()
    ids[:, half:] = _other_ids(model, ids[:, half:])
    changed = replace(written, ids=ids)
    return (changed if batch.target is None else replace(batch, target=changed)), half


def _text_ids(model: HookedModel) -> Int[Tensor, " token"]:
    """The ids of the model's vocabulary, without those that stand for pictures or sounds."""
    return text_ids(model.n_vocab, getattr(model.encoder, "placeholders", ()))


def _random_ids(model: HookedModel, shape: tuple[int, ...], generator: torch.Generator) -> Int[Tensor, "..."]:
    known = _text_ids(model)
    return known[torch.randint(0, len(known), shape, generator=generator)]


def _other_ids(model: HookedModel, ids: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    known = _text_ids(model).to(ids.device)
    return known[(torch.searchsorted(known, ids.contiguous()) + max(1, len(known) // 2)) % len(known)]


def _last_padded(model: HookedModel, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two texts of random tokens with their mask, the second padded on the right."""
    ids = _random_ids(model, (2, length), generator)
    mask = torch.ones_like(ids)
    # Only one token of padding: in a sliding window, rows of padding that see no key are NaN in transformers'
    # float64.
    mask[1, length - (length > 1) :] = 0
    return ids, mask


def _padded(model: HookedModel, texts: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    ids = _random_ids(model, (texts, length), generator)
    mask = torch.ones_like(ids)
    for text in range(texts):
        mask[text, : _PADDING + text] = mask[text, length - _PADDING + text :] = 0
    return ids, mask


def _heard(encoder: TranscriptEncoder, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    noise = encoder.signal.noise(len(ids), SEED, torch.empty(0, dtype=encoder.dtype, device=encoder.device))
    return {**noise, "decoder_input_ids": ids, "decoder_attention_mask": mask}


def _global_tokens(model: HookedModel, ids: Tensor, *same: int) -> dict[str, Tensor]:
    """If the model has global tokens: two in the first text and one in each other, or the tokens `same` in all."""
    if not model.architecture.windows:
        return {}
    chosen = torch.zeros_like(ids)
    if same:
        chosen[:, list(same)] = 1
    else:
        length = ids.shape[1]
        chosen[0, [length // 3, length // 2]] = 1
        chosen[1:, length // 4] = 1
    return {GLOBAL_MASK: chosen}


def _of_target(model: HookedModel, length: int) -> int:
    """The length of the decoder's text for an encoder's of this length: different, and within the decoder's limit."""
    limit = model.output_stack.architecture.position_limit
    return length - 2 if limit is None else min(length - 2, limit)


def _limit(model: HookedModel) -> int | None:
    """The maximum number of tokens of a text, if the model limits it; for a model of sound, of the decoder's text."""
    return (model.architecture if model.reads_tokens else model.output_stack.architecture).position_limit
