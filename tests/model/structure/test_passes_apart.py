"""Rotary tables that depend on a text's length: each text gets what a fresh model of transformers gives it alone."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny
import torch
import transformers
from caching import cached
from models import randomised
from torch import Tensor

import attnmech as am
from attnmech.model.structure.copies import copy_of
from attnmech.model.structure.passes_apart import _on_a_fresh_copy, follows_length

LIMIT = 16
LENGTHS = (60, 10, 25)
KINDS = ("llama dynamic", "phi3 longrope", "gemma3_text dynamic", "llama4_text longrope", "modernbert dynamic")


@cached
def fresh(kind: str) -> Any:
    """A model whose rotary tables change beyond 16 tokens, which no test may run."""
    family, rotation = kind.split()
    config = tiny.config_of(family)
    half = config.head_dim // 2 if getattr(config, "head_dim", None) else config.hidden_size // 12
    own = {"rope_type": rotation, "factor": 4.0, "original_max_position_embeddings": LIMIT}
    if rotation == "longrope":
        own |= {"short_factor": [1.0] * half, "long_factor": [1.0 + place for place in range(half)]}
    nested = any(isinstance(value, dict) for value in config.rope_parameters.values())
    rope = config.rope_parameters
    config.rope_parameters = {name: value | own for name, value in rope.items()} if nested else rope | own
    config.max_position_embeddings = LIMIT if rotation == "dynamic" else 4 * LIMIT
    config.original_max_position_embeddings = LIMIT
    torch.manual_seed(0)
    return randomised(getattr(transformers, tiny.class_of(family))._from_config(config, dtype=torch.float32))


@cached
def hooked(kind: str) -> am.HookedModel:
    return am.load(copy.deepcopy(fresh(kind)))


def ids_of(length: int) -> Tensor:
    return torch.randint(10, 80, (length,), generator=torch.Generator().manual_seed(length))


def alone(kind: str, ids: Tensor, **inputs: Tensor) -> Tensor:
    """transformers' logits for one text, from a model that has run nothing before."""
    with torch.no_grad():
        return copy.deepcopy(fresh(kind))(input_ids=ids[None], use_cache=False, **inputs).logits[0]


def padded(side: str) -> dict[str, Tensor]:
    ids, mask = torch.full((len(LENGTHS), LENGTHS[0]), 3), torch.zeros(len(LENGTHS), LENGTHS[0], dtype=torch.long)
    for text, length in enumerate(LENGTHS):
        here = slice(length) if side == "right" else slice(-length, None)
        ids[text, here], mask[text, here] = ids_of(length), 1
    return {"input_ids": ids, "attention_mask": mask}


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_of_a_batch_is_read_as_alone(kind: str) -> None:
    model = hooked(kind)
    assert model.certificate.ok, repr(model.certificate)
    places = padded("left")["attention_mask"].cumsum(1).sub(1).clamp_min(0)
    for inputs in (padded("right"), padded("left"), padded("left") | {"position_ids": places}):
        logits = model.run(inputs).logits
        for text, length in enumerate(LENGTHS):
            close(logits[text][inputs["attention_mask"][text] == 1], alone(kind, ids_of(length)))


def test_positions_of_a_batch_without_padding_are_each_text_s_own() -> None:
    kind = "llama dynamic"
    places = torch.stack((torch.arange(10), torch.arange(40, 50)))
    logits = hooked(kind).run({"input_ids": ids_of(10).repeat(2, 1), "position_ids": places}).logits
    for text in range(2):
        close(logits[text], alone(kind, ids_of(10), position_ids=places[text][None]))


@pytest.mark.parametrize(("kind", "dtype"), [*zip(KINDS, (None, None, torch.float64, None, None), strict=True)])
def test_a_used_model_is_loaded_as_a_fresh_one(kind: str, dtype: torch.dtype | None) -> None:
    used = copy.deepcopy(fresh(kind))
    with torch.no_grad():
        used(input_ids=ids_of(60)[None], use_cache=False)
    before = {name: buffer.clone() for name, buffer in used.named_buffers()}
    model = am.load(used, dtype=dtype)
    for length in (25, 10):
        close(model.run(ids_of(length)).logits[0].float(), alone(kind, ids_of(length)))
    assert all(torch.equal(before[name], buffer) for name, buffer in used.named_buffers())


METHODS: dict[str, Callable[[am.HookedModel, list[Tensor]], Tensor]] = {
    "a sweep": lambda model, texts: am.ablate_heads(model, texts, heads=[(1, 2), (3, 4)]).effect[[1, 3], [2, 4]],
    "the loss": lambda model, texts: model.loss(texts).mean(),
}


@pytest.mark.parametrize("method", list(METHODS))
def test_methods_read_a_text_as_alone(method: str) -> None:
    model, texts = hooked("llama dynamic"), [ids_of(length) for length in LENGTHS]
    alone = [METHODS[method](model, [text]) for text in texts]
    torch.testing.assert_close(METHODS[method](model, texts), torch.stack(alone).mean(0), atol=3e-5, rtol=3e-4)


def test_a_corpus_is_read_as_its_texts_alone() -> None:
    model, texts = hooked("llama dynamic"), [ids_of(length) for length in LENGTHS]
    shards = [am.attention_focus(model, iter(texts), shard=(text, len(texts))) for text in range(len(texts))]
    apart = am.results.AttentionFocus.merged(*shards)
    for name in ("entropy", "distance"):
        together = am.attention_focus(model, iter(texts))[name].mean
        torch.testing.assert_close(together, apart[name].mean, atol=1e-5, rtol=1e-5)


def test_every_new_token_comes_from_tables_of_its_length() -> None:
    kind, ids = "llama dynamic", ids_of(14)
    made = hooked(kind).generate(ids, 6, stop_at_eos=False).ids[0]
    for _ in range(6):
        ids = torch.cat((ids, alone(kind, ids)[-1].argmax()[None]))
    assert torch.equal(made, ids)


@pytest.mark.parametrize("kept", ["the batch", "the batch and earlier passes"])
def test_tables_of_other_texts_or_passes_break_the_certificate(kept: str) -> None:
    model = am.load(copy.deepcopy(fresh("llama dynamic")))
    for module in filter(follows_length, model.modules()):
        del module.forward
        if kept == "the batch":
            module.forward = partial(_on_a_fresh_copy, module, type(module).forward)
    (far,) = [check for check in am.certify(model).failed if check.name == "far"]
    assert kept != "the batch" or "of 8 tokens beside one of 40" in far.detail


def test_positions_of_an_earlier_picture_are_forgotten() -> None:
    used = tiny.merging("qwen2_vl")
    used.model.rope_deltas = torch.tensor([[7]])
    assert copy_of(used).model.rope_deltas is None
    assert used.model.rope_deltas is not None
