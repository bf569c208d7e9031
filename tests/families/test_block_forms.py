"""Unusual blocks: a mixer beside attention, two MLPs, no MLP, a norm before W_O or of values, no plain stream."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from comparing import close, require_gradient
from torch import Tensor, nn

import attnmech as am
from attnmech.errors import UnsupportedModelError

IDS = torch.tensor([[11, 40, 23, 77, 40, 30, 65, 12, 50], [61, 13, 70, 22, 45, 33, 18, 27, 80]])
LAYER = 2


@cache
def raw(kind: str) -> Any:
    return tiny.model_of(kind)


@cache
def hooked(kind: str) -> am.HookedModel:
    return am.load(raw(kind))


@cache
def acts_of(kind: str) -> am.results.Activations:
    there = [name for name, point in hooked(kind).points.items() if point.absent is None]
    return hooked(kind).run(IDS, points=there)


def without(kind: str, *paths: str, layer: int = LAYER) -> Tensor:
    """The logits of transformers' model with the outputs of some modules of one block set to 0."""
    model = copy.deepcopy(raw(kind))

    def nothing(module: nn.Module, args: Any, output: Any) -> Any:
        return torch.zeros_like(output) if isinstance(output, Tensor) else (torch.zeros_like(output[0]), *output[1:])

    for path in paths:
        model.model.layers[layer].get_submodule(path).register_forward_hook(nothing)
    with torch.no_grad():
        logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits


# -- what is added to the stream -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "point", "paths"),
    [
        ("falcon_h1", "mixer_out", ("mamba",)),
        ("falcon_h1", "mlp_out", ("feed_forward",)),
        ("granitemoeshared", "mlp_out", ("block_sparse_moe", "shared_mlp")),
    ],
)
def test_an_edit_of_what_is_added_is_one_of_the_modules(kind: str, point: str, paths: tuple[str, ...]) -> None:
    with hooked(kind).hooks({(point, LAYER): torch.zeros_like}):
        ours = hooked(kind).run(IDS)
    assert ours.logits is not None
    close(ours.logits, without(kind, *paths), 2e-5)
    assert float((ours.logits - acts_of(kind)["logits"]).abs().max()) > 1e-2
    with hooked(kind).hooks({(point, LAYER): lambda value: 1.0 * value}):
        same = hooked(kind).run(IDS).logits
    assert same is not None
    close(same, acts_of(kind)["logits"], 1e-6)


def test_falcons_mixer_is_mamba_times_its_factor() -> None:
    block, kept = raw("falcon_h1").model.layers[LAYER], dict[str, Tensor]()
    hook = block.mamba.register_forward_hook(lambda module, args, output: kept.update(made=output))
    with hook, torch.no_grad():
        raw("falcon_h1")(input_ids=IDS, use_cache=False)
    close(acts_of("falcon_h1")["mixer_out", LAYER], block.ssm_out_multiplier * kept["made"], 1e-6)
    assert block.ssm_out_multiplier != 1


@pytest.mark.parametrize(("kind", "point"), [("granitemoeshared", "mlp_out"), ("bitnet", "pattern")])
def test_gradients_go_through_two_mlps_and_through_the_norm_before_w_o(kind: str, point: str) -> None:
    def loss(logits: Tensor) -> Tensor:
        return logits[:, -1, 7].sum()

    require_gradient(hooked(kind), IDS, (point, LAYER), loss, step=1e-2, relative=2e-2)


def test_a_mixer_is_a_writer_of_its_own() -> None:
    split = am.decompose_by_source(hooked("falcon_h1"), IDS[:1], cells=[(6, 2)], layers=[LAYER])
    assert {"L0 mixer", "L1 mixer", "L0 MLP"} <= set(split.to_frame().source_k)


# -- norms ---------------------------------------------------------------------------------------------------


def test_bitnets_gate_is_its_norm_s_factor() -> None:
    """z follows from pattern, v and the norm's weight; each head's result is its part of what transformers writes."""
    acts, attention = acts_of("bitnet"), raw("bitnet").model.layers[LAYER].self_attn
    values = acts["v", LAYER].repeat_interleave(3, dim=2)
    summed = torch.einsum("bhqk,bkhd->bqhd", acts["pattern", LAYER], values).flatten(2)
    norm = attention.attn_sub_norm
    factor = norm.weight / (summed.pow(2).mean(dim=-1, keepdim=True) + norm.variance_epsilon).sqrt()
    close(acts["gate", LAYER].flatten(2), factor.detach(), 2e-5)
    close(acts["z", LAYER].flatten(2), norm(summed).detach(), 2e-5)
    close(acts["result", LAYER].sum(dim=2), attention.o_proj(norm(summed)).detach(), 2e-5)


def test_bitnets_value_ratio_counts_the_norm_s_weight() -> None:
    """‖(γ ⊙ v_0) W_O‖ divided by the median over the other keys, computed by hand for one head."""
    found = hooked("bitnet").stacks[""].gamma_of_z(LAYER)
    assert found is not None
    assert torch.equal(found.flatten(), raw("bitnet").model.layers[LAYER].self_attn.attn_sub_norm.weight)
    assert hooked("falcon_h1").stacks[""].gamma_of_z(LAYER) is None


def test_gemmas_values_are_normalised_by_head() -> None:
    acts, attention = acts_of("gemma4_text"), raw("gemma4_text").model.layers[LAYER].self_attn
    value = attention.v_proj(acts["attn_in", LAYER]).unflatten(-1, (2, -1)).detach()
    rms = (value.pow(2).mean(dim=-1, keepdim=True) + attention.v_norm.eps).sqrt()
    close(acts["v", LAYER], value / rms, 2e-5)
    with hooked("gemma4_text").hooks({("v", LAYER): torch.zeros_like}):
        ours = hooked("gemma4_text").run(IDS).logits
    assert ours is not None
    close(ours, without("gemma4_text", "self_attn.o_proj"), 2e-5)


# -- no plain stream -----------------------------------------------------------------------------------------


def test_a_report_of_a_family_without_a_plain_stream(tmp_path: Path) -> None:
    report = am.report(hooked("minimax"), IDS[:1])
    assert any("What heads write is omitted: its blocks" in note for note in report.notes)
    assert any("without heads: 1, 3 (LightningAttention)" in note for note in report.notes)
    report.write_html(tmp_path / "report.html")


def test_heads_of_different_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's layers with full attention have larger heads, unless the recipe makes all heads equal."""
    monkeypatch.setattr(tiny, "_own", lambda kind, size: {"global_head_dim": 24})
    with pytest.raises(UnsupportedModelError, match="d_head is 16 in layer 0, 24 in layer 3"):
        am.load(tiny.model_of("gemma4_text"))


# -- layers without attention --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("qwen3_next", "0-2 (GatedDeltaNet)"),
        ("nemotron_h", "0 (Mamba2Mixer); 1 (MoE); 3 (MLP)"),
        ("minimax", "1, 3 (LightningAttention)"),
        ("zamba2", "0, 2 (MambaMixer)"),
        ("falcon_h1", ""),
    ],
)
def test_layers_without_attention_are_named(kind: str, named: str) -> None:
    certificate = hooked(kind).certificate
    said = f"layers without attention, and so without heads: {named}" if named else ""
    assert certificate.left_out == said and said in repr(certificate)
