"""Makes the model of the tasks and its corpora. Its heads are known, because this file sets their weights.

A GPT-2 of two layers with twelve heads each. The stream has a dimension for each word, for each position, and for each
word that came before. L0H1 writes the word before; L1H2 attends to the token after the last occurrence of the query's
word, and writes that token: together they continue repeated text. L1H0 attends like L1H2 and writes nothing. L1H3 rests
on the first token and writes to a dimension that nothing reads. L0H3 attends to "kiwi" wherever it stands. The other
heads have small random weights; the MLPs write nothing.
"""

from pathlib import Path
from random import Random
from typing import Final

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

WORDS: Final = str.split(
    "apple pear plum fig lime lemon mango melon peach grape berry cherry olive date guava kiwi papaya quince nut bean "
    "corn rice oat rye wheat barley salt sugar honey milk cream butter bread cake tart soup stew tea juice water"
)
LENGTH: Final = 32
SIZE: Final = 48
"""The dimensions of a head; words and positions have this many each."""
BEFORE, POSITION, UNREAD = SIZE, 2 * SIZE, 3 * SIZE
"""Where the dimensions of the word before, of the positions, and of what nothing reads begin."""
LAYERS, HEADS = 2, 12


def planted() -> GPT2LMHeadModel:
    """The model."""
    config = GPT2Config(
        vocab_size=len(WORDS) + 1, n_positions=LENGTH, n_embd=HEADS * SIZE, n_layer=LAYERS, n_head=HEADS,
        n_inner=SIZE, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "ln_" in name and name.endswith("weight") else 0.0)
        words = torch.eye(len(WORDS) + 1, HEADS * SIZE)
        model.transformer.wte.weight.copy_(words)
        model.transformer.wpe.weight[:, POSITION : POSITION + LENGTH] = torch.eye(LENGTH)
        model.lm_head.weight.copy_(4 * words)
        read, step, sharp = torch.eye(SIZE), torch.eye(SIZE).roll(1, dims=0), 40.0
        _plant(model, (0, 1), q=(POSITION, sharp * step), k=(POSITION, read), v=(0, read), o=(BEFORE, read))
        _plant(model, (1, 2), q=(0, sharp * read), k=(BEFORE, read), v=(0, read), o=(0, read))
        _plant(model, (1, 0), q=(0, sharp * read), k=(BEFORE, read), v=(0, read), o=(0, 0 * read))
        _plant(model, (1, 3), q=None, k=(POSITION, _first(0)), v=(POSITION, 0.1 * read), o=(UNREAD, 0.1 * read))
        kiwi = _first(WORDS.index("kiwi") + 1)
        _plant(model, (0, 3), q=None, k=(0, kiwi), v=(0, read), o=(UNREAD, 0.1 * read))
        known = {(0, 1), (0, 3), (1, 0), (1, 2), (1, 3)}
        for layer, head in sorted({(layer, head) for layer in range(LAYERS) for head in range(HEADS)} - known):
            noise = torch.randn(4, SIZE, SIZE, generator=generator)
            q, k, v, o = noise * torch.tensor([0.3, 0.3, 0.1, 0.1])[:, None, None]
            _plant(model, (layer, head), q=(0, q), k=(0, k), v=(0, v), o=(UNREAD, o))
    return model


def _first(place: int) -> torch.Tensor:
    """Reads one dimension into the first of the head."""
    matrix = torch.zeros(SIZE, SIZE)
    matrix[place, 0] = 1.0
    return matrix


def _plant(
    model: GPT2LMHeadModel,
    head: tuple[int, int],
    *,
    q: tuple[int, torch.Tensor] | None,
    k: tuple[int, torch.Tensor],
    v: tuple[int, torch.Tensor],
    o: tuple[int, torch.Tensor],
) -> None:
    """Sets the weights of a head: where each matrix reads or writes, and its values; without `q`, every query is the
    same and asks for what `k` writes to the first dimension.
    """
    layer, number = head
    attention = model.transformer.h[layer].attn
    at = number * SIZE
    for part, given in enumerate((q, k, v)):
        columns = slice(part * HEADS * SIZE + at, part * HEADS * SIZE + at + SIZE)
        if given is None:
            attention.c_attn.bias[part * HEADS * SIZE + at] = 40.0
        else:
            begin, matrix = given
            attention.c_attn.weight[begin : begin + SIZE, columns] = matrix
    begin, matrix = o
    attention.c_proj.weight[at : at + SIZE, begin : begin + SIZE] = matrix


def tokenizer() -> PreTrainedTokenizerFast:
    """Words are tokens; a text begins with <s>."""
    made = Tokenizer(WordLevel({word: place for place, word in enumerate(["<s>", *WORDS])}, unk_token="<s>"))
    made.pre_tokenizer = WhitespaceSplit()
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<s>")


def repeats(count: int, seed: int = 0) -> list[str]:
    """Texts of ten words in random order, twice."""
    rng = Random(seed)
    texts = []
    for _ in range(count):
        words = rng.sample(WORDS, 10)
        texts.append(" ".join(words + words))
    return texts


def make(folder: Path) -> None:
    """Writes the model, `repeats.txt` (40 texts), and `words.txt` (40 texts of 20 different words)."""
    planted().save_pretrained(folder / "planted")
    tokenizer().save_pretrained(folder / "planted")
    rng = Random(1)
    words = [" ".join(rng.sample(WORDS, 20)) for _ in range(40)]
    for name, texts in (("repeats", repeats(40)), ("words", words)):
        (folder / f"{name}.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
