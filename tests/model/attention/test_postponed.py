"""Postponed products of queries and keys: the values read from them equal the computed products."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import attnmech as am
from attnmech.errors import UnsupportedModelError
from attnmech.model.attention.postponed import Postponed, through, watching_for_products
from attnmech.model.parts.mask import MaskRule

BATCH, HEADS, QUERIES, WIDTH, VALUES = 2, 3, 5, 4, 7
Way = Callable[[Tensor, Tensor, Tensor], Tensor]

GENERATOR = torch.Generator().manual_seed(3)
BIAS = torch.randn(1, HEADS, QUERIES, QUERIES, generator=GENERATOR)
SHOWN = torch.ones(QUERIES, QUERIES).tril()[None, None]
HIDDEN = SHOWN == 0
LOWEST = torch.finfo(torch.float32).min


def flat(x: Tensor) -> Tensor:
    return x.reshape(BATCH * HEADS, *x.shape[2:])


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores /= 2.0
    scores += BIAS
    scores.masked_fill_(HIDDEN, LOWEST)
    return torch.matmul(nn.functional.dropout(scores.softmax(-1), 0.5, training=False), v)


def by_openai(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(WIDTH)
    scores = scores * SHOWN + -1e4 * (1 - SHOWN)
    return torch.matmul(nn.functional.softmax(scores, dim=-1), v)


def in_one_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.bmm(flat(q), flat(k).transpose(1, 2))
    scores = scores.view(BATCH, HEADS, QUERIES, QUERIES) + BIAS
    scores = torch.max(scores, torch.tensor(LOWEST)).view(BATCH * HEADS, QUERIES, QUERIES)
    pattern = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(pattern, flat(v)).view(BATCH, HEADS, QUERIES, VALUES)


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.baddbmm(flat(BIAS.expand(BATCH, -1, -1, -1)), flat(q), flat(k).mT, beta=0.5, alpha=0.25)
    return torch.bmm(nn.Softmax(dim=-1)(scores.float()).type_as(q), flat(v)).unflatten(0, (BATCH, HEADS))


def by_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 0.5 * (q @ k.mT)
    scores = torch.where(~HIDDEN, scores - BIAS, LOWEST)
    return torch.masked_fill(scores.softmax(dim=-1), HIDDEN, 0.0).contiguous() @ v


class Attention(nn.Module):
    """Attention on q, k and v, written in one of the ways above."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way, self.weight = way, nn.Parameter(torch.zeros(1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.way(q, k, v)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = (WIDTH, WIDTH, VALUES)
    q, k, v = (torch.randn(BATCH, HEADS, QUERIES, size, generator=generator) for size in sizes)
    return q, k, v


def taken(way: Way) -> tuple[Tensor, dict[str, Any]]:
    """The output of a module with written-out attention, and the arguments of that attention."""
    given: dict[str, Any] = {}

    def attention(
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskRule,
        *,
        scaling: float,
        position_bias: Tensor | None,
    ) -> tuple[Tensor, None]:
        given.update(scale=scaling, mask=mask, position=position_bias)
        scores = scaling * (q @ k.mT)
        scores = scores if position_bias is None else scores + position_bias
        seen = mask.visible(range(QUERIES))
        return (scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ v).transpose(1, 2), None

    return through(attention, Attention(way))(*qkv()), given


@pytest.mark.parametrize("way", [in_place, by_openai, in_one_axis, by_baddbmm, by_where])
def test_every_way_of_writing_attention_is_read(way: Way) -> None:
    found, given = taken(way)
    assert type(found) is Tensor
    torch.testing.assert_close(found, way(*qkv()), rtol=1e-5, atol=1e-6)
    hides = way in (in_place, by_openai, by_where)
    seen = given["mask"].visible(range(QUERIES))[0, 0]
    assert torch.equal(seen, SHOWN[0, 0].bool() if hides else torch.ones(QUERIES, QUERIES, dtype=torch.bool))
    assert given["scale"] == {in_place: 0.5, by_openai: 0.5, in_one_axis: 1.0, by_baddbmm: 0.25, by_where: 0.5}[way]
    times = {in_place: 1.0, by_openai: None, in_one_axis: 1.0, by_baddbmm: 0.5, by_where: -1.0}[way]
    if times is None:
        assert given["position"] is None
    else:
        torch.testing.assert_close(
            given["position"].expand(BATCH, -1, -1, -1), (times * BIAS).expand(BATCH, -1, -1, -1)
        )


def squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).pow(2).softmax(-1) @ v


def without_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT) @ v


def normalised_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(dim=-2) @ v


def gated_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(dim=-1) * torch.tensor([0.5, 1.0, 2.0])[:, None, None]) @ v


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return in_place(q, k, v) - in_place(k, q, v)


def cut(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores.clamp_(max=0.3)
    return scores.softmax(-1) @ v


def silenced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).masked_fill(HIDDEN, 0.0) @ v


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (squared, "does 'pow' with the product"),
        (without_softmax, "does 'matmul' with the product"),
        (normalised_over_queries, "does 'softmax' with the product"),
        (gated_by_head, "does 'mul' with the product"),
        (twice, "attends 2 times"),
        (lambda q, k, v: nn.functional.dropout((q @ k.mT).softmax(-1), 0.5) @ v, "applies attention dropout"),
        (cut, "in place by 'clamp_'"),
        (silenced, "of visible keys by 0"),
    ],
)
def test_anything_else_is_refused_by_the_name_of_the_step(way: Way, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        taken(way)


@pytest.mark.parametrize("way", [squared, without_softmax, normalised_over_queries, gated_by_head, silenced])
def test_what_is_not_attention_is_computed_as_written(way: Way) -> None:
    module = Attention(way)
    with watching_for_products(module) as seen:
        found = module(*qkv())
    torch.testing.assert_close(found, way(*qkv()), rtol=1e-5, atol=1e-6)
    assert (module in seen.modules) == (way is silenced)


def test_a_postponed_product_has_a_shape_and_no_memory() -> None:
    seen: list[Tensor] = []

    def noted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        seen.append(scores)
        assert scores.shape == scores.size() == (BATCH, HEADS, QUERIES, QUERIES) and scores.dtype == q.dtype
        assert len(scores) == BATCH and scores.ndim == scores.dim() == 4 and scores.device == q.device
        return scores.softmax(-1) @ v

    taken(noted)
    assert isinstance(seen[0], Postponed)
    with torch._C.DisableTorchFunctionSubclass():
        assert seen[0].stride() == (0, 0, 0, 0) and seen[0].untyped_storage().nbytes() == 4


class _Largest(TorchDispatchMode):
    """Measures the number of entries of the largest tensor that is made."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor) and 0 not in each.stride():
                self.found = max(self.found, each.numel())
        return made


@pytest.mark.parametrize("kind", ["megatron-bert", "xglm", "roformer", "albert", "openai-gpt"])
def test_no_scores_of_all_heads_exist(kind: str) -> None:
    length = 2048
    model = am.load(tiny.model_of(kind, {**tiny.ONE, "positions": length + 8}))
    ids = torch.randint(10, 80, (1, length), generator=torch.Generator().manual_seed(1))
    with _Largest() as largest:
        model.run(ids, points=[("attn_raw", 1)])
    assert largest.found <= (length + 8) ** 2, "more than one mask [query key]"
