"""The demo model's tokenizer: a token for each word of the language, bytes for everything else."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from attnmech.demo.text import FIRST_WORD

from . import words

PAD, BOS, EOS = "<pad>", "<s>", "</s>"

CHUNK = r" ?\p{L}+| ?[^\s\p{L}]|\s"
"""A run of letters, or one other character, each with one leading space; or one white-space character."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer that decodes to the text that it encoded, whatever the text.

    >>> tokenizer = build_tokenizer()
    >>> tokenizer.tokenize("The owls (and 2 hens)")
    ['The', ' owls', ' (', 'and', '<0x20>', '<0x32>', ' hens', ')']

    A chunk of text that is a word of the language is one token; any other chunk becomes a token for each of
    its characters that is a word ("a", "A") and for each UTF-8 byte of the rest. Every text begins with `<s>` unless
    `add_special_tokens=False`. A special token that is spelled out in a text is ordinary text, so
    `decode(encode(text), skip_special_tokens=True) == text` always holds.
    """
    tokenizer = Tokenizer(models.BPE(vocab=_ids(), merges=[], byte_fallback=True, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(CHUNK), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, _ids()[BOS])]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def token_ids(tokenizer: PreTrainedTokenizerFast, tokens: Iterable[str]) -> list[int]:
    """Returns the ids of tokens that are spelled with their spaces.

    >>> token_ids(build_tokenizer(), ["<pad>", "<s>"])
    [0, 1]
    """
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    assert isinstance(ids, list)
    return ids


def _ids() -> dict[str, int]:
    tokens = [PAD, BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"<reserved {place}>" for place in range(len(tokens), FIRST_WORD)]
    return {token: number for number, token in enumerate([*tokens, *words.vocabulary()])}
