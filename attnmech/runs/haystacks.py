"""Texts of random tokens that contain a needle, and end with its first tokens and the requested ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from ..model.inputs.encoders import text_encoder
from ..model.reading.unembedding import tokens_with_logits
from ..model.run.hooked import HookedModel
from ..model.structure.text_part import text_setting

COUNT: Final = 24  # the number of texts

NEEDLE: Final = 12  # the number of tokens of a needle

CUE: Final = 4  # the number of these tokens at the end of a text, after which the others are requested

REQUESTED: Final = NEEDLE - CUE


@dataclass(frozen=True)
class Haystacks:
    """Texts of random tokens around a needle. Each ends with the beginning of its needle, and the requested tokens.

    All texts have the same length; the needles lie at different depths.
    """

    begin: Int[Tensor, " first"]
    filler: Int[Tensor, "text filler"]
    needles: Int[Tensor, "text needle"]
    depths: Sequence[int]  # the number of fillers before each needle

    @classmethod
    def of(cls, model: HookedModel, tokens: int, seed: int) -> "Haystacks":
        """Random texts of that many tokens; `InputError` if the model does not read them or the number does not fit."""
        if not model.causal or len(model.stacks) > 1:
            raise InputError(f"`context` needs a decoder alone, which predicts the next token; got {model.name}.")
        model.points.resolve(["logits"], None, model.refused)
        ordinary, begin = ordinary_tokens(model), first_token(model)
        least, limit = len(begin) + 2 * NEEDLE + COUNT, model.architecture.position_limit or tokens
        if not least <= tokens <= limit:
            raise InputError(
                f"`context` must be {least} tokens or more, and no more than the model reads ({limit:,}); got {tokens}."
            )
        if len(ordinary) < 2 * NEEDLE:
            raise InputError(f"`context` needs {2 * NEEDLE} ordinary tokens; this model has {len(ordinary)}.")
        generator = torch.Generator().manual_seed(seed)
        fillers = tokens - len(begin) - 2 * NEEDLE
        shuffled = torch.stack([ordinary[torch.randperm(len(ordinary), generator=generator)] for _ in range(COUNT)])
        others = shuffled[:, NEEDLE:]
        chosen = torch.randint(others.shape[1], (COUNT, fillers), generator=generator)
        depths = [fillers * number // (COUNT - 1) for number in range(COUNT)]
        return cls(begin, others.gather(1, chosen), shuffled[:, :NEEDLE], depths)

    def __iter__(self) -> Iterator[Int[Tensor, "1 position"]]:
        for filler, needle, depth in zip(self.filler, self.needles, self.depths, strict=True):
            yield torch.cat((self.begin, filler[:depth], needle, filler[depth:], needle))[None]

    @property
    def rows(self) -> range:
        """The positions whose next tokens are requested."""
        end = len(self.begin) + self.filler.shape[1] + 2 * NEEDLE - 1
        return range(end - REQUESTED, end)

    @property
    def keys(self) -> Int[Tensor, "text requested"]:
        """The positions of the requested tokens in the needles."""
        return len(self.begin) + torch.tensor(self.depths)[:, None] + torch.arange(CUE, NEEDLE)

    @torch.no_grad()
    def produced(self, model: HookedModel) -> Float[Tensor, "text requested"]:
        """1 where the model's most probable next token is the requested one, else 0."""
        rows = slice(self.rows.start, self.rows.stop)
        highest = [model.run(ids)["logits"][0, rows].argmax(dim=-1).cpu() for ids in self]
        return (torch.stack(highest) == self.needles[:, CUE:]).double()


def ordinary_tokens(model: HookedModel) -> Int[Tensor, " token"]:
    """The tokens with a logit that are not special; raises `InputError` for a model that reads no tokens."""
    if not model.reads_tokens:
        kind = {"tensors": "the arguments of the module", "pixels": "images"}.get(model.architecture.reads, "sound")
        raise InputError(f"repeated tokens are for models of text; give {kind} as `inputs`.")
    # Some models number positions from the padding token's id (RoBERTa).
    text = text_encoder(model.encoder)
    assert text is not None
    left_out = {*text.special, text.unknown, text_setting(model.config, "pad_token_id")}
    return torch.tensor([token for token in range(tokens_with_logits(model)) if token not in left_out])


def first_token(model: HookedModel) -> Int[Tensor, " position"]:
    """The token that the tokenizer puts before a text, if any."""
    if model.tokenizer is None:
        return torch.zeros(0, dtype=torch.long)
    batch = model.encode("a")
    return batch.ids[0, :1].cpu() if batch.bos else torch.zeros(0, dtype=torch.long)
