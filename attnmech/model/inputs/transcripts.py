"""Makes one `Batch` from recordings and their transcripts: frames for the encoder, tokens for the decoder."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from ...batch import Batch
from ...errors import InputError
from ..structure.signals import FrontEnd, Signal
from .encoder import Encoder
from .sounds import SoundEncoder

_OF_DECODER: Final = ("decoder_input_ids", "decoder_attention_mask")


class TranscriptEncoder(SoundEncoder):
    """Turns recordings, with or without texts for the decoder, into a batch for one model.

    `text` makes the decoder's tokens. Without a text, the decoder receives only the token with which it starts.
    """

    def __init__(
        self, signal: Signal, front: FrontEnd, config: Any, text: Encoder, *, like: Tensor, processor: Any
    ) -> None:
        super().__init__(signal, front, config, like=like, processor=processor)
        self.text = text
        self._further = (*self._further, "decoder_input_ids")

    def encode(self, inputs: Any, bos: bool | None = None) -> Batch:
        """One batch from recordings, as in `SoundEncoder`, or from a mapping that also holds the decoder's inputs."""
        of_decoder: dict[str, Any] = {}
        if isinstance(inputs, Mapping):
            of_decoder = {name: inputs[name] for name in _OF_DECODER if name in inputs}
            inputs = {name: value for name, value in inputs.items() if name not in of_decoder}
        heard = super().encode(inputs, bos)
        target = self.text.target_of(of_decoder, len(heard.ids))
        if of_decoder:
            raise InputError("decoder_attention_mask needs decoder_input_ids, which are missing.")
        self.text.check_length(target)
        return replace(heard, target=target)

    def position_texts(self, ids: Sequence[int], stack: str = "") -> tuple[str, ...]:
        """The labels of the positions with these ids: tokens in the decoder, elsewhere the times of frames."""
        if stack != "decoder":
            return super().position_texts(ids, stack)
        return tuple(self.text.token_texts([token])[0] for token in ids)
