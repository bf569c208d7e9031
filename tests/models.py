"""Small transformers models with random weights, no two axes of one length, and what tests ask of them.

Every parameter is random: biases and norm weights too, so that nothing that is wrong can hide behind a zero.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn

import attnmech as am


def randomised(model: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """The model in eval mode with every parameter drawn anew; matrices keep the size of what goes through them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim > 1:
                parameter.copy_(noise if "emb" in name or "wte" in name else noise / parameter.shape[-1] ** 0.5)
            else:
                norm = name.endswith("weight")
                parameter.copy_(1 + 0.3 * noise if norm else 0.5 * noise)
    return model.to(dtype).eval()


def bloom(heads: int = 3, d_head: int = 10, layers: int = 2) -> Any:
    config = transformers.BloomConfig(
        vocab_size=61, hidden_size=heads * d_head, n_layer=layers, n_head=heads, hidden_dropout=0, attention_dropout=0
    )
    return transformers.BloomForCausalLM(config)


def gpt2(heads: int = 5, d_head: int = 4, layers: int = 3) -> Any:
    config = transformers.GPT2Config(
        vocab_size=53, n_positions=19, n_embd=heads * d_head, n_layer=layers, n_head=heads, n_inner=28,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(
    heads: int = 6, kv_heads: int = 2, d_head: int = 8, hidden: int = 36, bias: bool = False, layers: int = 2
) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=47, hidden_size=hidden, intermediate_size=34, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=d_head, attention_bias=bias, max_position_embeddings=64,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert(heads: int = 3, d_head: int = 7, layers: int = 2, headless: bool = False) -> Any:
    config = transformers.BertConfig(
        vocab_size=59, hidden_size=heads * d_head, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=26, max_position_embeddings=23,
    )  # fmt: skip
    return (transformers.BertModel if headless else transformers.BertForMaskedLM)(config)


MAKERS: Final[dict[str, Callable[[], Any]]] = {
    "bloom": bloom,
    "bloom5": lambda: bloom(heads=5, d_head=4),
    "bloom12": lambda: bloom(heads=12, d_head=2, layers=1),
    "bloom4": lambda: bloom(heads=4, d_head=6),
    "gpt2": gpt2,
    "llama": llama,
    "llama_bias": lambda: llama(heads=4, kv_heads=2, d_head=6, hidden=20, bias=True, layers=3),
    "bert": bert,
    "bert_headless": lambda: bert(headless=True),
}

FAMILIES: Final = ("bloom", "gpt2", "llama", "llama_bias", "bert")
"""One model of each family, and Llama with and without biases."""


def fresh(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model of its own, for tests that change it."""
    return randomised(MAKERS[name](), dtype=dtype, seed=seed)


@cache
def plain(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model in eager attention, shared by all tests: not to be changed."""
    model = fresh(name, dtype)
    model.set_attn_implementation("eager")
    return model


@cache
def hooked(name: str, dtype: torch.dtype = torch.float32) -> am.HookedModel:
    """attnmech's model of the same weights, shared by all tests."""
    return am.load(fresh(name, dtype))


def token_ids(name: str, batch: int = 3, length: int = 7, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, plain(name).config.vocab_size, (batch, length), generator=generator)


def padded(name: str, side: str = "right", batch: int = 3, length: int = 7) -> dict[str, Tensor]:
    """Sequences of length, length − 2, length − 4, ..., padded on one side."""
    mask = torch.zeros(batch, length, dtype=torch.long)
    for row in range(batch):
        here = length - 2 * row
        if side == "right":
            mask[row, :here] = 1
        else:
            mask[row, length - here :] = 1
    return {"input_ids": token_ids(name, batch, length), "attention_mask": mask}


def blocks_of(model: Any) -> nn.ModuleList:
    """The list of blocks of a transformers model, wherever it stands."""
    base = model.base_model
    for path in ("h", "layers", "encoder.layer"):
        try:
            return base.get_submodule(path)
        except AttributeError:
            continue
    raise AssertionError(f"no blocks in {type(model).__name__}")


WORDS: Final = (
    "[PAD]",
    "[UNK]",
    "[BOS]",
    "the",
    "keys",
    "to",
    "cabinet",
    "are",
    "here",
    "there",
    "and",
    "a",
    "dog",
    ".",
)


def tokenizer(*, has_bos: bool = False, adds_bos: bool = False, words: tuple[str, ...] = WORDS) -> Any:
    """A tokenizer of whole words; with a BOS token, and one that puts it at the front, where asked."""
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 2)])
    special = {"bos_token": "[BOS]"} if has_bos or adds_bos else {}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="[UNK]", pad_token="[PAD]", **special
    )  # fmt: skip
