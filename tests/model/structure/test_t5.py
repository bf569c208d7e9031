"""T5: three stacks of attention, each against plain transformers and a computation from the raw weights."""

import math
from functools import cache
from typing import Any

import models
import pytest
import torch
from caching import cached
from torch import Tensor

import attnmech as am
from attnmech.errors import CertificateError, InputError, MissingPointError

F32, F64 = torch.float32, torch.float64
STACKS = ("encoder", "decoder", "cross")


@cached
def t5(dtype: torch.dtype, name: str = "t5") -> Any:
    return models.fresh(name, dtype)


@cache
def hooked(dtype: torch.dtype) -> am.HookedModel:
    return am.load(t5(dtype))


def inputs(padded: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(3, 9, dtype=torch.long)
    if padded:
        mask[1, 6:] = 0
    ids = torch.randint(2, 43, (3, 9), generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(2, 43, (3, 7), generator=generator),
    }


def bucket(offset: int, both_ways: bool, buckets: int, farthest: int) -> int:
    """T5's bucket of key position − query position (Raffel et al. 2020), in plain Python."""
    first = 0
    if both_ways:
        buckets //= 2
        first = buckets if offset > 0 else 0
        distance = abs(offset)
    else:
        distance = max(0, -offset)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    far = exact + int(math.log(distance / exact) / math.log(farthest / exact) * (buckets - exact))
    return first + min(far, buckets - 1)


def by_hand(stack: str, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """query_key and position of one layer, from the raw weights and the hidden states of plain transformers."""
    model, given = t5(dtype), inputs()
    with torch.no_grad():
        out = model(**given, output_hidden_states=True, use_cache=False)
    side = model.encoder if stack == "encoder" else model.decoder
    block = side.block[layer]
    stream = (out.encoder_hidden_states if stack == "encoder" else out.decoder_hidden_states)[layer]
    if stack == "cross":
        with torch.no_grad():
            allowed = torch.zeros(7, 7, dtype=dtype).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
            bias = model.decoder.block[0].layer[0].SelfAttention.compute_bias(7, 7)
            stream = block.layer[0](stream, attention_mask=allowed[None, None], position_bias=bias)[0]
    part = block.layer[1] if stack == "cross" else block.layer[0]
    attention = part.EncDecAttention if stack == "cross" else part.SelfAttention
    x = stream / (stream.float().pow(2).mean(-1, keepdim=True).to(dtype) + 1e-6).sqrt() * part.layer_norm.weight
    y = out.encoder_last_hidden_state if stack == "cross" else x
    q, k = (
        (source @ weight.T).unflatten(-1, (4, 5)).transpose(1, 2)
        for source, weight in ((x, attention.q.weight), (y, attention.k.weight))
    )
    terms = {"query_key": (q @ k.transpose(-1, -2)).detach()}
    if stack != "cross":
        table = side.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        length = x.shape[1]
        places = [[bucket(j - i, stack == "encoder", 8, 6) for j in range(length)] for i in range(length)]
        terms["position"] = table[torch.tensor(places)].permute(2, 0, 1)[None].detach()
    return terms


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("stack", STACKS)
def test_terms_against_the_raw_weights(stack: str, dtype: torch.dtype) -> None:
    split = am.decompose_scores(hooked(dtype), inputs(), stack=stack)
    assert set(split.terms) == {"query_key", "mask"} | ({"position"} if stack != "cross" else set())
    relative = split.residual / split.largest.amax(dim=1, keepdim=True)
    assert float(relative.max()) <= (1e-5 if dtype == F32 else 1e-12)
    for layer in range(len(split.layers)):
        for name, expected in by_hand(stack, layer, dtype).items():
            # transformers computes the norm's variance in float32, whatever the model's precision.
            torch.testing.assert_close(
                split.terms[name][:, layer].expand_as(expected),
                expected,
                rtol=1e-4,
                atol=2e-5 if dtype == F32 else 1e-5,
            )


def test_contrast_and_shares_of_cross_attention() -> None:
    split = am.decompose_scores(hooked(F64), inputs(), stack="cross")
    scores = hooked(F64).run(inputs(), points=["cross.scores"])
    contrast = split.contrast(query=6, key_a=8, key_b=2)
    for layer in range(3):
        expected = scores["cross.scores", layer][:, :, 6, 8] - scores["cross.scores", layer][:, :, 6, 2]
        expected[1] = torch.nan  # key 8 of the second text is padding
        torch.testing.assert_close(contrast.total[:, layer], expected, equal_nan=True)
    assert split.shares_at(3)["query_key"].shape == (3, 3, 4, 7)
    assert len(split.key_tokens[0]) == 9
    assert len(split.tokens[0]) == 7


def test_a_stack_must_be_named() -> None:
    model = hooked(F32)
    with pytest.raises(InputError, match=r"choose one for 'pattern': 'encoder\.pattern', 'decoder\.pattern'"):
        model.run(inputs(), points=["pattern"])
    with pytest.raises(InputError, match="`stack` must be one of 'encoder', 'decoder', 'cross'"):
        am.decompose_scores(model, inputs())
    with pytest.raises(InputError, match=r"from 0 to 1 \(its encoder stack has 2 layers\); got 2"):
        model.run(inputs(), points=[("encoder.pattern", 2)])
    with pytest.raises(MissingPointError, match="the cross stack has no MLP"):
        model.run(inputs(), points=["cross.mlp_out"])
    with pytest.raises(InputError, match="must have one row per text; got 2 rows for 3 texts"):
        model.run(inputs() | {"decoder_input_ids": torch.ones(2, 4, dtype=torch.long)})


def test_an_encoder_alone_has_one_stack() -> None:
    model = am.load(t5(F32, "t5_encoder_alone"))
    assert model.certificate.ok, repr(model.certificate)
    given = inputs()
    given.pop("decoder_input_ids")
    acts = model.run(given, points=["pattern", "embed"])
    assert acts["pattern", 1].shape == (3, 4, 9, 9)
    torch.testing.assert_close(acts["embed"], t5(F32, "t5_encoder_alone").shared.weight[given["input_ids"]])


def test_a_fault_of_the_whole_model_refuses_the_points_of_every_stack() -> None:
    source = models.fresh("t5")
    model = am.load(source)
    with torch.no_grad():
        source.decoder.block[2].layer[1].layer_norm.weight[3] = torch.nan
    assert not am.certify(model).ok
    for stack in STACKS:
        with pytest.raises(CertificateError, match="holds NaN or infinity"):
            model.run(inputs(), points=[f"{stack}.pattern"])
        with pytest.raises(CertificateError):
            am.decompose_scores(model, inputs(), stack=stack)
    with pytest.raises(CertificateError):
        model.run(inputs(), points=["logits"])
