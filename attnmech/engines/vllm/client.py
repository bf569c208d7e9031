"""What a user of vLLM's offline `LLM` calls: `watching` and `scaling`."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ..file import joined_ranks, write


@dataclass
class Seen:
    """What was taken while an engine was watched; empty until then."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> Path:
        """Writes a file for `am.engine_statistics`."""
        if not self.header:
            raise InputError("the sums are taken when the `with` block ends; save after it.")
        return write(path, self.tensors, self.header)


@contextmanager
def watching(llm: Any, *, last: int = 8) -> Iterator[Seen]:
    """Watches the heads of an offline engine while requests run.

    >>> llm = LLM(model, worker_extension_cls="attnmech.engines.vllm.Heads")     # doctest: +SKIP
    >>> with watching(llm) as seen:                                              # doctest: +SKIP
    ...     outputs = llm.generate(prompts)
    >>> seen.save("seen.safetensors")                                            # doctest: +SKIP

    Args:
        llm: vLLM's `LLM`, with `worker_extension_cls="attnmech.engines.vllm.Heads"`.
        last: as in `am.attention_focus`.

    Raises:
        InputError: if the engine's attention cannot be read exactly, or a proof fails at the end.
    """
    tokenizer = llm.get_tokenizer() if not llm.llm_engine.model_config.skip_tokenizer_init else None
    special = [] if tokenizer is None else tokenizer.all_special_ids
    seen = Seen()
    llm.collective_rpc("attnmech_start", args=(json.dumps({"last": last, "special": special}),))
    try:
        yield seen
        idle = not llm.llm_engine.has_unfinished_requests()
        seen.tensors, seen.header = joined_ranks(llm.collective_rpc("attnmech_take", args=(idle,)))
    finally:
        llm.collective_rpc("attnmech_stop")


def repeated_sequences(llm: Any, count: int = 24, *, seed: int = 0) -> tuple[list[Any], list[Any]]:
    """Prompts that show the types of heads independently of any text: random tokens, and the same tokens again.

    >>> with watching(llm) as seen:                                              # doctest: +SKIP
    ...     llm.generate(*repeated_sequences(llm))
    >>> am.engine_statistics(seen.save("types.safetensors"), "head_types")       # doctest: +SKIP

    Args:
        llm: vLLM's `LLM`.
        count: the number of sequences; their parts have 14 to 60 tokens.
        seed: seed of the random tokens.

    Returns:
        Prompts and their `SamplingParams`, for `llm.generate`. Each begins with the tokenizer's BOS token, or with one
        more random token.
    """
    from vllm import SamplingParams

    config = llm.llm_engine.model_config
    tokenizer = None if config.skip_tokenizer_init else llm.get_tokenizer()
    special = set() if tokenizer is None else set(tokenizer.all_special_ids)
    ordinary = torch.tensor([token for token in range(config.get_vocab_size()) if token not in special])
    begin = None if tokenizer is None else tokenizer.bos_token_id
    generator, prompts, params = torch.Generator().manual_seed(seed), [], []
    for number in range(count):
        length = 14 + 46 * number // max(1, count - 1)
        first, *chosen = ordinary[torch.randperm(len(ordinary), generator=generator)[: length + 1]].tolist()
        prompts.append({"prompt_token_ids": [first if begin is None else begin, *chosen, *chosen]})
        spans = {"attnmech_spans": [0, 1, 1 + length]}
        params.append(SamplingParams(max_tokens=1, detokenize=False, skip_reading_prefix_cache=True, extra_args=spans))
    return prompts, params


@contextmanager
def scaling(llm: Any, factors: Mapping[tuple[int, int], float]) -> Iterator[None]:
    """Multiplies what heads give to W_O, in all requests of an offline engine: 0 ablates a head.

    >>> with scaling(llm, {(5, 1): 0.0}):                                        # doctest: +SKIP
    ...     outputs = llm.generate(prompts)

    The prefix cache is emptied before and after, since cached keys belong to the model without the change.

    Args:
        llm: vLLM's `LLM`, with `worker_extension_cls="attnmech.engines.vllm.Heads"`.
        factors: by (layer, head), numbered as in the model, also in a tensor parallel engine.

    Raises:
        InputError: for layers and heads that the model does not have.
    """

    def set_to(values: list[tuple[int, int, float]]) -> None:
        llm.collective_rpc("attnmech_scale", args=(json.dumps(values),))
        llm.reset_prefix_cache()

    set_to([(layer, head, float(factor)) for (layer, head), factor in factors.items()])
    try:
        yield
    finally:
        set_to([])
