"""Finds the part of a model that reads text, and what stands for a picture, a film or a sound in its texts."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

_SENSES: Final[Mapping[str, str]] = {  # what the names of tokens, inputs and parts of a message say that they stand for
    "a video": r"video",
    "an image": r"image|(?<![a-z])img|vision|visual|pixel|picture|(?<![a-z])media(?![a-z])|(?<![a-z])[be]oi(?![a-z])",
    "a sound": r"audio|sound|speech|input_features|input_values|(?<![a-z])[be]oa(?![a-z])",
}

_ID: Final = re.compile(r"token_(id|index)s?$")
_OF_TEXT: Final = frozenset(
    {
        *("self", "args", "kwargs", "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds"),
        *("labels", "use_cache", "cache_position", "logits_to_keep", "output_attentions", "output_hidden_states"),
        *("return_dict", "mm_encoder_outputs", "vision_feature_layer", "vision_feature_select_strategy"),
    }
)
"""The arguments of a model's forward pass that are not what a processor returns besides the text."""
_STANDS: Final = re.compile(r"(image|video|audio)_token_(?:id|index)$")
_KINDS: Final = {"audio": "sound"}


def sense_of(name: str) -> str | None:
    """What a name stands for besides text: "an image", "a video" or "a sound"; None for any other name."""
    return next((sense for sense, words in _SENSES.items() if re.search(words, name.lower())), None)


def taken_besides(arguments: Collection[str]) -> frozenset[str]:
    """The inputs besides text among the arguments of a model's forward pass; empty for a model of text alone."""
    return frozenset(arguments) - _OF_TEXT if any(map(_holds_sense, arguments)) else frozenset()


def holds_more(inputs: Mapping[str, Any]) -> bool:
    """Whether model inputs hold a picture or a sound.

    >>> holds_more({"input_ids": [[5, 7]], "mm_token_type_ids": [[0, 0]]}), holds_more({"pixel_values": [[0.5]]})
    (False, True)
    """
    return any(value is not None and _holds_sense(str(name)) for name, value in inputs.items())


def _holds_sense(name: str) -> bool:
    return sense_of(name) is not None and not name.endswith("token_type_ids") and name not in _OF_TEXT


def placeholders_of(config: PreTrainedConfig, tokenizer: Any, inputs: Sequence[str] = ()) -> dict[int, str]:
    """The ids that stand for pictures, films or sounds in a model's texts, each with what it stands for.

    They are named by the config, by those of its parts, and by the tokenizer (`image_token`). If one of the model's
    `inputs` is not text, special tokens that name a picture or a sound ("<|image|>") are placeholders as well.
    """
    senses: dict[int, str] = {}
    for name, ids in _settings(config):
        sense = sense_of(name) if _ID.search(name) else None
        for token in ids if isinstance(ids, list | tuple) else [ids]:
            if sense is not None and isinstance(token, int):
                senses.setdefault(token, sense)
    if tokenizer is None:
        return senses
    named = {name: str(text) for name, text in getattr(tokenizer, "special_tokens_map", {}).items()}
    if senses or any(map(sense_of, inputs)):
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        named |= {token.content: token.content for token in added if token.special}
    texts = {text: sense for name, text in named.items() if (sense := sense_of(name)) is not None}
    for text, token in zip(texts, tokenizer.convert_tokens_to_ids(list(texts)), strict=True):
        if token is not None and token != tokenizer.unk_token_id:
            senses.setdefault(token, texts[text])
    return senses


def kinds_of(config: PreTrainedConfig) -> dict[int, str]:
    """The ids of tokens in whose places pictures, films or sounds are put, each with "image", "video" or "sound"."""
    named = [(_STANDS.match(name), token) for name, token in _settings(config)]
    return {token: _KINDS.get(match[1], match[1]) for match, token in named if match and isinstance(token, int)}


def text_ids(vocabulary: int, placeholders: Collection[int]) -> Int[Tensor, " token"]:
    """The ids of a vocabulary without its placeholders, in order."""
    ids = torch.arange(vocabulary)
    return ids[~torch.isin(ids, torch.tensor(sorted(placeholders), dtype=torch.long))]


def _settings(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _settings(value)
        else:
            yield name, value


def text_setting(config: PreTrainedConfig, name: str) -> Any:
    """A setting of a model's text (`pad_token_id`), from its config or from that of its text part; None without it."""
    value = getattr(config, name, None)
    return getattr(config.get_text_config(), name, None) if value is None else value


def text_modules(base: Any, blocks: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model's text part, with their paths: those around `blocks`, the lists of its stacks.

    A model inside the model that holds none of these lists reads pictures or sounds. A model that holds a list and the
    token embedding reads the text alone, and what is outside it does not.
    """
    try:
        embedding = getattr(base.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # a decoder of its own (Bart, TrOCR), which has no other part
        embedding = None
    models = [(path, part) for path, part in base.named_modules() if isinstance(part, PreTrainedModel)]
    embedding_too = [path for path, part in models if any(weight is embedding for weight in part.parameters())]
    towers = towers_of(base, blocks)
    whole = [max((path for path in embedding_too if _is_in(block, path)), key=len, default="") for block in blocks]
    for path, part in base.named_modules():
        if any(_is_in(path, model) for model in whole) and not any(_is_in(path, tower) for tower in towers):
            yield path, part


def towers_of(base: nn.Module, blocks: Sequence[str]) -> list[str]:
    """The paths of the models inside a model that hold none of `blocks`: they read pictures or sounds."""
    models = [path for path, part in base.named_modules() if isinstance(part, PreTrainedModel)]
    return [path for path in models if not any(_is_in(block, path) for block in blocks)]


def merged_into(base: nn.Module, blocks: str) -> nn.Module | None:
    """The model inside a model that takes its tokens and what its towers made as one sequence; None without one."""
    models = [path for path, part in base.named_modules() if path and isinstance(part, PreTrainedModel)]
    path = max((path for path in models if _is_in(blocks, path)), key=len, default=None)
    return None if path is None else base.get_submodule(path)


def merged_by(base: nn.Module, blocks: str) -> nn.Module | None:
    """The module beside the blocks that merges what its towers made with the tokens' embeddings (Phi-4), or None."""
    tops = {path.partition(".")[0] for path in towers_of(base, [blocks])}
    part = base.get_submodule(tops.pop()) if len(tops) == 1 and merged_into(base, blocks) is None else None
    return None if isinstance(part, PreTrainedModel) else part


def _is_in(path: str, above: str) -> bool:
    return not above or f"{path}.".startswith(f"{above}.")
