"""Models with planted circuits: weights are set by hand, so that each head's function is known.

The stream has one dimension per token: a token is written as its own unit vector, and its logit reads that dimension.
By default, heads attend uniformly, read a cue, and write towards an answer; MLPs write nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, Final

import models
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import attnmech as am

BOS, CUES, ANSWERS, ASK, FIRST, LAST = 1, (3, 4), (5, 6), 7, 10, 40
"""Ids: the first token, two cues, their answers, the last token, and fillers from FIRST to LAST − 1."""
RELAY, IDLE = 8, 9
"""Dimensions that no logit of the task reads: one passes a signal from head to head, one is unused."""

MAKERS: Final[dict[str, Callable[[], Any]]] = {
    "gpt2": lambda: models.gpt2(heads=8, d_head=8, layers=3),
    "llama": lambda: models.llama(heads=8, kv_heads=8, d_head=8, hidden=64, layers=3),
    "bloom": lambda: models.bloom(heads=8, d_head=8, layers=3),
    "two layers": lambda: models.gpt2(heads=8, d_head=8, layers=2),
}

Head = tuple[int, int]


def blank(maker: Callable[[], Any]) -> am.HookedModel:
    """A model whose heads and MLPs write nothing, and whose logits read the stream one to one."""
    model = am.load(models.randomised(maker()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name or ".ln_" in name
            parameter.fill_(1.0 if norm and name.endswith("weight") else 0.0)
        for matrix in (model.embedding, model.unembedding):
            assert matrix is not None
            matrix.zero_()
            matrix[: matrix.shape[1]].fill_diagonal_(1.0)
    return model


def write(model: am.HookedModel, head: Head, read: dict[int, float], to: dict[int, float], size: float = 1.0) -> None:
    """Makes a head read a weighted sum of dimensions and add it, times `size`, to others."""
    layer, number = head
    weights = model.weights(layer)
    with torch.no_grad():
        for place, value in read.items():
            weights.W_V[number, place, 0] = value
        for place, value in to.items():
            weights.W_O[number, 0, place] = size * value


def look(model: am.HookedModel, head: Head, pairs: dict[int, int], sharpness: float = 30.0) -> None:
    """Makes a head attend from one dimension to another."""
    layer, number = head
    weights = model.weights(layer)
    with torch.no_grad():
        for channel, (query, key) in enumerate(pairs.items()):
            weights.W_Q[number, query, channel + 1] = sharpness
            weights.W_K[number, key, channel + 1] = sharpness


@contextmanager
def with_tokens(model: am.HookedModel, layer: int, edit: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """The model with a layer's pattern edited by a function of the pattern and of the token ids of its batch."""
    ids: list[Tensor] = []

    def read(module: Any, arguments: tuple[Tensor]) -> None:
        ids[:] = arguments[:1]

    handle = model.base.get_input_embeddings().register_forward_pre_hook(read)
    with handle, model.hooks({("pattern", layer): lambda pattern: edit(pattern.clone(), ids[0])}):
        yield


CUE: Final = {CUES[0]: 1.0, CUES[1]: -1.0}
ANSWER: Final = {ANSWERS[0]: 1.0, ANSWERS[1]: -1.0}


def with_decoys(model: am.HookedModel, besides: Sequence[Head], size: float = 0.02, seed: int = 0) -> am.HookedModel:
    """Gives all other heads small random weights."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(model.n_layers):
        weights = model.weights(layer)
        for head in range(model.n_heads):
            if (layer, head) not in besides:
                with torch.no_grad():
                    for matrix, scale in ((weights.W_V[head], 1.0), (weights.W_O[head], size)):
                        matrix.copy_(scale * torch.randn(matrix.shape, generator=generator))
    return model


def and_pair(name: str, one: Head = (0, 2), other: Head = (2, 5)) -> am.HookedModel:
    """The first head passes the cue on, and the second answers from that; without either there is no answer."""
    model = blank(MAKERS[name])
    write(model, one, CUE, {RELAY: 1.0}, 4.0)
    write(model, other, {RELAY: 1.0}, ANSWER, 4.0)
    return with_decoys(model, [one, other])


def or_pair(name: str, one: Head = (0, 2), other: Head = (2, 5)) -> am.HookedModel:
    """Each of two heads writes the answer; a weaker third head opposes it, so that accuracy needs one of the two."""
    model = blank(MAKERS[name])
    for head in (one, other):
        write(model, head, CUE, ANSWER, 4.0)
    write(model, (1, 6), CUE, ANSWER, -2.0)
    return with_decoys(model, [one, other, (1, 6)])


def lookup(name: str, head: Head = (1, 3)) -> am.HookedModel:
    """One head answers; another, a sink, attends to the first token and writes it to an unused dimension."""
    model = blank(MAKERS[name])
    write(model, head, CUE, ANSWER, 4.0)
    sink = (1, 6)
    look(model, sink, {ASK: BOS})
    write(model, sink, {BOS: 1.0}, {IDLE: 1.0}, 3.0)
    return with_decoys(model, [head, sink])


def cued(groups: int = 12, each: int = 4, seed: int = 0, metric: Any = "") -> am.Task:
    """Texts with one of two cues among fillers, to be followed by the cue's answer; a group shares its fillers."""
    rng = Random(seed)
    cases: dict[Any, Any] = {}
    for group in range(groups):
        fillers = [rng.randrange(FIRST, LAST) for _ in range(rng.randint(4, 9))]
        while len(cases) < each * (group + 1):
            right = len(cases) % 2
            text = list(fillers)
            text.insert(rng.randrange(len(text) + 1), CUES[right])
            prompt = (BOS, *text, ASK)
            cases[prompt] = (prompt, ANSWERS[right], ANSWERS[1 - right], f"fillers {group}")
    return am.Task("cued answers", tuple(cases.values()), metric)


def cued_pairs(count: int = 24) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """Prompts with one of two cues, and the same prompts with the other cue."""
    clean = [list(case.prompt) for case in cued(groups=count, each=1).cases]
    swap = dict(zip(CUES, reversed(CUES), strict=True))
    corrupted = [[swap.get(token, token) for token in prompt] for prompt in clean]
    right = [next(CUES.index(token) for token in prompt if token in CUES) for prompt in clean]
    answers = [ANSWERS[number] for number in right]
    judged = {"answers": answers, "against": [ANSWERS[1 - number] for number in right]}
    return list(map(torch.tensor, clean)), list(map(torch.tensor, corrupted)), judged


def either_suffices(one: tuple[int, int] = (0, 2), other: tuple[int, int] = (0, 5)) -> am.HookedModel:
    """Each of two heads passes the cue on; an MLP answers unless both pass on the wrong one, where it is saturated."""
    model = blank(MAKERS["gpt2"])
    for head in (one, other):
        write(model, head, CUE, {RELAY: 1.0}, 4.0)
    with torch.no_grad():
        block = models.blocks_of(model.base)[2]
        block.mlp.c_fc.weight[RELAY, 0] = 6.0
        block.mlp.c_fc.bias[0] = 5.0
        for answer, sign in ANSWER.items():
            block.mlp.c_proj.weight[0, answer] = sign
    return with_decoys(model, [one, other], 0.001)


TOKENS, POSITIONS, D_HEAD = 12, 16, 24
TOKEN, PREVIOUS, OUT, POSITION = 0, 12, 24, 36
"""The first dimension of each part of the stream: the token, the previous token, the prediction, the position."""


def in_gpt2(n_heads: int = 5, layers: int = 2) -> am.HookedModel:
    """A blank model whose stream has separate dimensions for token, previous token, prediction and position."""
    config = GPT2Config(
        vocab_size=TOKENS, n_positions=POSITIONS, n_embd=n_heads * D_HEAD, n_layer=layers, n_head=n_heads, n_inner=28,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = blank(lambda: GPT2LMHeadModel(config))
    unembedding = model.unembedding
    assert unembedding is not None
    with torch.no_grad():
        unembedding.zero_()
        unembedding[:, OUT : OUT + TOKENS].fill_diagonal_(5.0)
        places = model.base.get_submodule("wpe").weight
        places.zero_()
        places[:, POSITION : POSITION + POSITIONS].fill_diagonal_(1.0)
    return model


def induction(previous: Head = (0, 1), induce: Head = (1, 3)) -> am.HookedModel:
    """A previous-token head, and a head that attends to the token after the last token's earlier copy."""
    model = in_gpt2()
    with torch.no_grad():
        one, other = (model.weights(layer) for layer in (previous[0], induce[0]))
        for place in range(1, POSITIONS):
            one.W_Q[previous[1], POSITION + place, place - 1] = 20.0
        for place in range(POSITIONS):
            one.W_K[previous[1], POSITION + place, place] = 20.0
        for token in range(TOKENS):
            one.W_V[previous[1], TOKEN + token, token] = 1.0
            one.W_O[previous[1], token, PREVIOUS + token] = 0.15
            other.W_Q[induce[1], TOKEN + token, token] = 8.0
            other.W_K[induce[1], PREVIOUS + token, token] = 8.0
            other.W_V[induce[1], TOKEN + token, TOKENS + token] = 1.0
            other.W_O[induce[1], TOKENS + token, OUT + token] = 1.0
    return with_decoys(model, [previous, induce], 0.002)


def repeats(groups: int = 12, each: int = 4, seed: int = 0) -> am.Task:
    """Different tokens, then one of them again; the answer is what followed it before. A group has one distance."""
    rng = Random(seed)
    cases = {}
    for group in range(groups):
        length, place = 5 + group % 6, group % 3
        while sum(case[3] == f"{length}, {place}, {group}" for case in cases.values()) < each:
            text = rng.sample(range(1, TOKENS), length)
            wrong = rng.choice([token for token in text if token not in (text[place], text[place + 1])])
            prompt = (0, *text, text[place])
            cases[prompt] = (prompt, text[place + 1], wrong, f"{length}, {place}, {group}")
    return am.Task("repeated text", tuple(cases.values()))


def duplicate(head: Head = (3, 2)) -> am.HookedModel:
    """A head that attends to copies of the last token; if there is no earlier copy, the answer is 10, else 11."""
    model = in_gpt2(layers=5)
    with torch.no_grad():
        weights = model.weights(head[0])
        for token in range(TOKENS):
            weights.W_Q[head[1], TOKEN + token, token] = 1.6
            weights.W_K[head[1], TOKEN + token, token] = 1.6
        weights.W_V[head[1], POSITION + DUPLICATE_LENGTH - 1, TOKENS] = -1.0
        weights.W_O[head[1], TOKENS, OUT + 10], weights.W_O[head[1], TOKENS, OUT + 11] = -1.0, 1.0
        bias = model.base.get_parameter(f"h.{head[0]}.attn.c_proj.bias")
        bias[OUT + 10], bias[OUT + 11] = -5.6, 5.6
    return with_decoys(model, [head], 0.002)


DUPLICATE_LENGTH: Final = 9


def duplicates(groups: int = 12, each: int = 4, seed: int = 0) -> am.Task:
    """Asks whether the last token occurred before; each group has one token."""
    rng = Random(seed)
    cases = {}
    for group in range(groups):
        last = 1 + group % 9
        while sum(case[3] == f"token {group}" for case in cases.values()) < each:
            twice = len(cases) % 2
            text = [rng.choice([token for token in range(1, 10) if token != last]) for _ in range(7)]
            if twice:
                text[rng.randrange(7)] = last
            prompt = (0, *text, last)
            cases[prompt] = (prompt, 10 + twice, 11 - twice, f"token {group}")
    return am.Task("duplicates", tuple(cases.values()))
