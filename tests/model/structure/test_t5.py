"""T5: three stacks of attention, each against plain transformers and a computation from the raw weights."""

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
