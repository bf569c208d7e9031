"""Small tokenizers of every kind: byte-level, SentencePiece with bytes or without, WordPiece."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import transformers
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as kinds

from attnmech.batch import Batch
from attnmech.demo.tokenizer import build_tokenizer
from attnmech.model.inputs.encoder import Encoder

LINES: Final = [
    "hello world, the keys of 你好 are 你们",
    "été à Noël مرحبا שלום",
    "नमस्ते 👩‍👧 e\u0301",
    "the keys 世界 hello",
]

_BYTES: Final = tuple(f"<0x{byte:02X}>" for byte in range(256))


def byte_level(size: int) -> Any:
    """A tokenizer like GPT-2's: a token for each byte, and `size` − 257 merges."""
    raw = Tokenizer(kinds.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"initial_alphabet": alphabet, "special_tokens": ["<|end|>"], "show_progress": False}
    raw.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=size, **options))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")


def sentencepiece(*words: str, prepends: bool = False) -> Any:
    """A tokenizer like Llama's, with bytes for what is not in `words`; `prepends`, like Llama 2's, a ▁ before any text.

    A word begins with ▁ and is a single token.
    """
    letters = dict.fromkeys("▁" + "".join(words).replace("▁", ""))
    merges, made = [], dict[str, None]()
    for word in words:
        for end in range(1, len(word)):
            if word[: end + 1] not in made:
                made[word[: end + 1]] = None
                merges.append((word[:end], word[end]))
    names = ["<unk>", "<s>", "</s>", *_BYTES, *letters, *made]
    vocabulary = {name: number for number, name in enumerate(names)}
    if not prepends:
        return transformers.LlamaTokenizer(vocab=vocabulary, merges=merges)
    raw = Tokenizer(kinds.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = decoders.Replace("▁", " ")
    raw.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **special)


def unigram(*pieces: str) -> Any:
    """A tokenizer like T5's; a piece that is not listed is `<unk>`."""
    raw = Tokenizer(kinds.Unigram([("<unk>", 0.0), *((piece, -float(len(pieces))) for piece in pieces)], unk_id=0))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", pad_token="<unk>")


def wordpiece(*pieces: str) -> Any:
    """A tokenizer like BERT's."""
    names = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces)
    return transformers.BertTokenizer(vocab={name: number for number, name in enumerate(names)})


WHOLE: Final[dict[str, Callable[[], Any]]] = {
    "bytes": lambda: byte_level(257),
    "few merges": lambda: byte_level(290),
    "many merges": lambda: byte_level(400),
    "byt5": transformers.ByT5Tokenizer,
    "demo": build_tokenizer,
    "llama": sentencepiece,
    "llama 2": lambda: sentencepiece(prepends=True),
}
"""Tokenizers that have a token for every byte, and so lose nothing of a text."""


def batch_of(tokenizer: Any, inputs: str | Sequence[str] | torch.Tensor) -> Batch:
    """Texts, or ids, as a model with this tokenizer reads them."""
    size = 50_000 if tokenizer is None else len(tokenizer) + 10
    return Encoder(tokenizer, size, None, {}, None, torch.device("cpu")).encode(inputs)  # type: ignore[arg-type]
