"""Small tokenizers of every kind: byte-level, SentencePiece with bytes or without, WordPiece, whole words."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as kinds

from attnmech.batch import Batch
from attnmech.demo import model_folder
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


def with_bytes(*pieces: str, special: bool = False) -> Any:
    """A Unigram tokenizer with bytes for what is not in `pieces`; `special`: as trainers add them."""
    names = ["<unk>", *_BYTES, "▁", *pieces]
    raw = Tokenizer(kinds.Unigram([(name, -float(len(name))) for name in names], unk_id=0, byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    if special:
        raw.add_special_tokens(list(_BYTES))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


def wordlevel(*words: str) -> Any:
    """A tokenizer of words and marks; transformers is not told its unknown token."""
    vocabulary = {word: number for number, word in enumerate(("[UNK]", *words))}
    raw = Tokenizer(kinds.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw)


class Slow(transformers.PreTrainedTokenizer):
    """A tokenizer of words and marks in Python, which knows no offsets."""

    def __init__(self, *words: str) -> None:
        self.words = ("<unk>", *words)
        super().__init__(unk_token="<unk>")

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return re.findall(r"\w+|[^\w\s]", text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return self.words[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return " ".join(tokens)


def wordpiece(*pieces: str) -> Any:
    names = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces)
    return transformers.BertTokenizer(vocab={name: number for number, name in enumerate(names)})


LACKING: Final[dict[str, Callable[..., Any]]] = {
    "wordpiece": wordpiece, "wordlevel": wordlevel, "slow": Slow, "unigram": lambda *words: unigram("▁", *words),
}  # fmt: skip
"""Tokenizers that have one token for all characters that their vocabulary lacks."""

CHATS: Final = {
    "llama 3": "{bos}{% for m in messages %}<|start_header_id|>{{m.role}}<|end_header_id|>\n\n{{m.content}}<|eot_id|>"
    "{% endfor %}",
    "chatml": "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}",
    "gemma": "{bos}{% for m in messages %}<start_of_turn>{{m.role}}\n{{m.content}}<end_of_turn>\n{% endfor %}",
    "phi": "{bos}{% for m in messages %}<|user|>\n{{m.content}}<|end|>\n{% endfor %}",
    "mistral": "{bos}{% for m in messages %}[INST] {{m.content}}[/INST]{% endfor %}",
}


def chatting(name: str, whole: Any) -> tuple[Any, list[str]]:
    """A tokenizer with a chat template, whose tokens only its vocabulary marks as special; and these tokens."""
    marks = re.findall(r"<[^<>]+>|\[/?INST\]", CHATS[name])
    bos = "<begin>" if "{bos}" in CHATS[name] else None
    raw = whole.backend_tokenizer
    raw.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in [bos or marks[0], *marks]])
    if bos:
        added = [(bos, raw.token_to_id(bos))]
        raw.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=added)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=bos)
    tokenizer.chat_template = CHATS[name].replace("{bos}", str(bos))
    return tokenizer, [bos or marks[0], *marks]


WHOLE: Final[dict[str, Callable[[], Any]]] = {
    "bytes": lambda: byte_level(257),
    "few merges": lambda: byte_level(290),
    "many merges": lambda: byte_level(400),
    "byt5": transformers.ByT5Tokenizer,
    "demo": lambda: transformers.AutoTokenizer.from_pretrained(model_folder()),
    "llama": sentencepiece,
    "llama 2": lambda: sentencepiece(prepends=True),
    "unigram with bytes": with_bytes,
    "unigram with special bytes": lambda: with_bytes(special=True),
}
"""Tokenizers that have a token for every byte, and so lose nothing of a text."""


def batch_of(tokenizer: Any, inputs: str | Sequence[str] | torch.Tensor) -> Batch:
    """Texts, or ids, as a model with this tokenizer reads them."""
    size = 50_000 if tokenizer is None else len(tokenizer) + 10
    return Encoder(tokenizer, size, None, {}, None, torch.device("cpu")).encode(inputs)  # type: ignore[arg-type]
