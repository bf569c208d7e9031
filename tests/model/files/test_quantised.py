"""Quantised models are read as they compute, for a projection written here and for each installed package."""

import copy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import models
import pytest
import tiny
import torch
import transformers
from comparing import refuses
from matrix import CALLS, Subject, first_logits
from torch import Tensor, nn

import attnmech as am
from attnmech.errors import UnsupportedModelError, WeightsError
from attnmech.maths.precision import pass_tolerance
from attnmech.model.files.load import UnprovenWarning
from attnmech.model.files.travelling import Blueprint

IDS = torch.arange(3, 19)[None]


class Codes(nn.Module):
    """x (scale · codes)ᵀ + b, with codes of 8 bits and one scale per output."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = of.in_features, of.out_features
        weight = of.weight.detach()
        self.register_buffer("scale", weight.abs().amax(dim=1, keepdim=True) / 127)
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = of.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.scale * self.weight.to(x.dtype), self.bias)


class RoundedInputs(Codes):
    """The same, with inputs rounded to 8 bits."""

    def forward(self, x: Tensor) -> Tensor:
        unit = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-9) / 127
        return super().forward((x / unit).round() * unit)


class Hidden(Codes):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def quantised(raw: Any, kind: Callable[[nn.Linear], nn.Module] = Codes) -> Any:
    """The model with its blocks' projections replaced."""
    for path, part in list(raw.base_model.named_modules()):
        if type(part) is nn.Linear:
            raw.base_model.set_submodule(path, kind(part))
    return raw


def dequantised(raw: Any) -> Any:
    for path, part in list(raw.named_modules()):
        if isinstance(part, Codes):
            plain = nn.Linear(part.in_features, part.out_features, bias=part.bias is not None)
            plain.weight.data, plain.bias = part.scale * part.weight, part.bias
            raw.set_submodule(path, plain)
    return raw


@pytest.mark.parametrize("family", ["llama", "bert", "gpt_neox"])
def test_codes_are_read_as_the_numbers_that_they_stand_for(family: str) -> None:
    raw = quantised(models.fresh(family))
    packed, plain = am.load(raw), am.load(dequantised(copy.deepcopy(raw)))
    assert packed.certificate.ok and packed.name == f"{plain.name} (quantised)"
    for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_V", "b_O"):
        ours, theirs = (getattr(model.weights(1), name) for model in (packed, plain))
        assert (ours is None and theirs is None) or torch.allclose(ours, theirs, atol=1e-6), name
    for call in (am.attention_focus, am.residual_updates, am.decompose_scores):
        ours, theirs = (call(model, IDS).to_frame().select_dtypes("number") for model in (packed, plain))
        assert torch.allclose(*(torch.tensor(frame.values) for frame in (ours, theirs)), atol=1e-4, equal_nan=True)
    effects = [am.ablate_heads(model, [IDS, IDS + 1], metric=first_logits).effect for model in (packed, plain)]
    assert torch.allclose(*effects, atol=1e-5)
    assert packed.weights_hash == am.load(raw).weights_hash != plain.weights_hash


def test_scales_are_part_of_the_hash() -> None:
    raw = quantised(models.fresh("llama"))
    before = am.load(raw).weights_hash
    raw.model.layers[0].self_attn.q_proj.scale.mul_(2)
    assert am.load(raw).weights_hash != before


@pytest.mark.parametrize(
    "call", ["decompose_by_source", "composition", "path_patch", "gradients", "generate", "report"]
)
def test_other_calls_take_a_quantised_model(call: str, tmp_path: Path) -> None:
    CALLS[call](Subject(quantised(tiny.model_of("llama")), tmp_path))


def test_rounded_inputs_are_refused_by_the_certificate() -> None:
    with pytest.warns(UnprovenWarning, match="projections"):
        model = am.load(quantised(models.fresh("llama"), RoundedInputs))
    assert {"q", "k", "v", "z"} <= model.refused.keys()


def test_what_cannot_be_read_or_done_says_so() -> None:
    with pytest.raises(
        UnsupportedModelError, match="the packed weights of a Hidden cannot be read from its outputs, which are not 48"
    ):
        am.load(quantised(models.fresh("llama"), Hidden))
    raw = quantised(models.fresh("llama"))
    refuses(r"LlamaForCausalLM \(quantised\) keeps its precision and its device; leave", am.load, raw, dtype="bfloat16")
    refuses(r'is quantised, and .* engine="local"', Blueprint.of, am.load(raw), error=UnsupportedModelError)
    raw.model.layers[0].self_attn.q_proj = plain = nn.Linear(36, 48, bias=False)
    plain.weight = nn.Parameter(torch.ones(48, 36, dtype=torch.int8), requires_grad=False)
    with pytest.raises(
        WeightsError, match=r"floating-point numbers; model\.layers\.0\.self_attn\.q_proj\.weight is int8"
    ):
        am.load(raw)


def torchao() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


def bitsandbytes_4bit(kind: str) -> Any:
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=torch.bfloat16
    )


PACKAGES: dict[str, tuple[str, Callable[[], Any], tuple[torch.dtype, ...], str]] = {
    "torchao int8": ("torchao", torchao, (torch.float32, torch.bfloat16), "torchao"),
    "quanto int8": (
        "optimum.quanto", lambda: transformers.QuantoConfig(weights="int8"), (torch.float32, torch.bfloat16),
        "quanto to 8 bits",
    ),
    "quanto int4": (
        "optimum.quanto", lambda: transformers.QuantoConfig(weights="int4"), (torch.float32, torch.bfloat16),
        "quanto to 4 bits",
    ),
    "bitsandbytes int8": (
        "bitsandbytes", lambda: transformers.BitsAndBytesConfig(load_in_8bit=True), (torch.bfloat16,),
        "bitsandbytes to 8 bits",
    ),
    "bitsandbytes nf4": (
        "bitsandbytes", lambda: bitsandbytes_4bit("nf4"), (torch.bfloat16,), "bitsandbytes to 4 bits",
    ),
    "bitsandbytes fp4": (
        "bitsandbytes", lambda: bitsandbytes_4bit("fp4"), (torch.bfloat16,), "bitsandbytes to 4 bits",
    ),
}  # fmt: skip


def _there(package: str) -> bool:
    return find_spec(package.partition(".")[0]) is not None and find_spec(package) is not None


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", PACKAGES)
def test_what_packages_quantise_is_certified(name: str, tmp_path: Path) -> None:
    package, config, precisions, method = PACKAGES[name]
    if not _there(package):
        pytest.skip(f"{package} is not installed")
    settings = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=256, max_position_embeddings=128,
    )  # fmt: skip
    models.randomised(transformers.LlamaForCausalLM(settings)).save_pretrained(tmp_path)
    for dtype in precisions:
        raw = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=config(), dtype=dtype, device_map="cpu"
        )
        with torch.no_grad():
            expected = raw(IDS).logits
        model = am.load(raw)
        assert model.certificate.ok, model.certificate.verdict
        assert model.name.endswith(f"(quantised by {method})") and model.dtype == dtype
        allowed = pass_tolerance(dtype) * expected.abs().max()
        assert (model.run(IDS).logits - expected).abs().max() <= allowed
        am.decompose_scores(model, IDS)
        am.ablate_heads(model, [IDS], [(0, 1)], metric=first_logits)
        assert model.weights_hash == am.load(raw).weights_hash
