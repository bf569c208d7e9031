"""The running certificate: faults that appear after loading, or on some text, stop the pass in which they occur.

tests/families/test_as_transformers.py compares which layers it reaches, in every family.
"""

from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from comparing import refuses
from models import FAMILIES, fresh, hooked, token_ids
from torch import nn

import attnmech as am
from attnmech.errors import ExactnessError

IDS = torch.randint(0, 40, (2, 17), generator=torch.Generator().manual_seed(3))


def out_of(model: am.HookedModel, layer: int) -> nn.Module:
    stack = model.stack()
    return stack.module(layer, stack.architecture.out)


def block_of(model: am.HookedModel, layer: int) -> nn.Module:
    return model.stack().blocks[layer]


@pytest.mark.parametrize(("name", "dtype"), [*zip(FAMILIES, cycle((torch.float64, torch.bfloat16, torch.float16)))])
def test_other_precisions_raise_no_false_alarm(name: str, dtype: torch.dtype) -> None:
    model = am.load(fresh(name, dtype))
    for seed in range(4):
        model.run(token_ids(name, length=16, seed=seed))


def test_streams_with_large_outliers_raise_no_false_alarm() -> None:
    module = fresh("llama")
    with torch.no_grad():
        module.model.embed_tokens.weight[:, 3] = 3000.0
        module.model.layers[0].mlp.down_proj.weight[5] *= 4000.0
    model = am.load(module)
    assert model.run(token_ids("llama"), points=["resid_post"])["resid_post", 0].abs().max() > 3000
    half_of_attention_again(model, 1)
    refuses("layer 1", model.run, token_ids("llama"), error=ExactnessError)


def half_of_attention_again(model: am.HookedModel, layer: int) -> None:
    """A block that adds half of its attn_out a second time."""
    added: list[torch.Tensor] = []
    out_of(model, layer).register_forward_hook(lambda module, args, output: added.append(output))

    def more(module: nn.Module, args: object, output: object) -> object:
        tensor = output if isinstance(output, torch.Tensor) else output[0]  # type: ignore[index]
        changed = tensor + 0.5 * added[-1].reshape(tensor.shape)
        return changed if isinstance(output, torch.Tensor) else (changed, *output[1:])  # type: ignore[index]

    submodule = model.stack().architecture.mlp_out
    assert submodule is not None
    model.stack().module(layer, submodule).register_forward_hook(more)


def doubled_z(model: am.HookedModel, layer: int) -> None:
    """W_O of a layer reads a z that is doubled from position 9 on."""

    def double(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (torch.cat((args[0][:, :9], 2 * args[0][:, 9:]), dim=1),)

    out_of(model, layer).register_forward_pre_hook(double)


VALUES = {
    "gpt2": "attn.c_attn", "bloom": "self_attention.query_key_value", "llama": "self_attn.v_proj",
    "bert": "attention.self.value",
}  # fmt: skip


def changed_values(model: am.HookedModel, layer: int, *, in_place: bool = False) -> None:
    """From position 9 on, a layer no longer attends with the v that its projection returned."""

    def change(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        changed = output if in_place else output.clone()
        changed[:, 9:] *= 1.001
        return changed

    model.stack().module(layer, VALUES[str(model.config.model_type)]).register_forward_hook(change)


TWICE, Z, V = "", r"attn_raw = Σ_h z W_O \+ b_O does not hold", "z = pattern v, with v as the projection returned it"


@pytest.mark.parametrize(
    ("name", "fault", "layer", "token", "equation"),
    [
        *((name, half_of_attention_again, 1, 0, TWICE) for name in ("bloom", "bert", "opt_post", "gpt_neox", "gemma2")),
        *((name, doubled_z, 0, 9, Z) for name in ("gpt2", "bert", "falcon_new")),
        *((name, changed_values, 1, 9, V) for name in ("gpt2", "llama", "bloom", "bert")),
    ],
)
def test_a_fault_is_named_with_the_first_token_that_it_touches(
    name: str, fault: Callable[[am.HookedModel, int], None], layer: int, token: int, equation: str
) -> None:
    model, ids = am.load(fresh(name)), token_ids(name, length=14)
    fault(model, layer)
    if token:
        model.run(ids[:, :token])
    refuses(rf"layer {layer}, token {token} \('.*'\) of text 0: {equation}", model.run, ids, error=ExactnessError)
    with pytest.raises(ExactnessError, match=rf"layer {layer}, token {token} .*the two sides differ by"):
        model.run(ids, points=["v"])


def test_values_that_are_changed_in_place_are_compared_from_the_next_pass_on() -> None:
    model, ids = am.load(fresh("llama")), token_ids("llama", length=14)
    changed_values(model, 1, in_place=True)
    (said,) = model.run(ids).unchecked
    assert said == "z = pattern v, with v as the projection returned it, layer 1: the model changes v in place"
    refuses("layer 1, token 9", model.run, ids, error=ExactnessError)


def test_a_point_v_that_is_edited_is_what_attention_weights() -> None:
    for name in ("gpt2", "llama", "falcon_new", "bert"):
        model = hooked(name)
        with model.hooks({("v", 1): lambda v: 1.5 * v}):
            assert not any("pattern v" in said for said in model.run(token_ids(name)).unchecked)
        with model.intervene(am.Intervention.zero_values([(1, 0)], "first")):
            model.run(token_ids(name))


def test_a_stream_that_changes_between_two_blocks_is_told() -> None:
    model = am.load(fresh("llama"))
    first = block_of(model, 0)
    first.register_forward_hook(lambda module, args, output: output * 1.001)
    refuses(r"layer 1.*resid_pre = resid_post of the layer before", model.run, token_ids("llama"), error=ExactnessError)


def test_what_does_not_sum_to_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnmech.model.attention import attend as attention

    model = am.load(fresh("gpt2"))
    monkeypatch.setattr(attention, "softmax_with_sink", lambda scores, sink: (scores.softmax(dim=-1) * 0.999, None))
    with pytest.raises(ExactnessError, match=r"layer 0, token 0 .*a row of the pattern sums to 1 does not hold"):
        model.run(token_ids("gpt2"))


def test_infinite_numbers_are_called_so() -> None:
    module = fresh("llama", torch.float16)
    model = am.load(module)
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight.mul_(3e4)
    with pytest.raises(ExactnessError, match=r"layer 1.* computes NaN or infinity.* try dtype=torch.float32"):
        am.attention_focus(model, token_ids("llama"))


@pytest.mark.parametrize("name", ["bloom", "gpt2", "llama", "bert", "opt_post", "gemma2", "falcon_new", "gpt_neox"])
def test_edits_are_no_faults(name: str) -> None:
    model = hooked(name)
    ids = token_ids(name)
    model.run(ids)  # the first pass detects which tensors the model changes in place (Falcon's MLP)
    for point, about in model.points.items():
        if about.absent is None and "position" in about.shape and point != "logits":
            with model.hooks({point: lambda value: value * 1.25}):
                assert bool(model.run(ids).unchecked) == (point == "result")
    with model.intervene(am.Intervention.zero([(0, 1)]), am.Intervention.attend([(1, 0)], "uniform")):
        assert model.run(ids).unchecked == ()


def test_a_run_says_what_an_edit_of_results_kept_it_from_comparing() -> None:
    model = hooked("gpt2")
    with model.hooks({("result", 1): lambda value: value * 2}):
        assert model.run(token_ids("gpt2")).unchecked == (
            "attn_raw = Σ_h z W_O + b_O, layer 1: an edit of `result` comes between them",
        )


def test_faults_are_found_in_a_layer_whose_neighbours_are_edited() -> None:
    model = am.load(fresh("gpt2"))
    half_of_attention_again(model, 1)
    edits = {"resid_mid": lambda value: value + 0.3, "attn_out": lambda value: value * 0.5}
    with model.hooks(edits), pytest.raises(ExactnessError, match="layer 1"):
        model.run(token_ids("gpt2"))


@pytest.mark.parametrize("change", ["in place", "data", "fused step"])
def test_weights_that_change_between_passes_are_no_faults(change: str) -> None:
    module = fresh("gpt2")
    model = am.load(module)
    ids = token_ids("gpt2")
    before = model.run(ids).logits
    weights = [block.attn.c_proj.weight for block in module.transformer.h]
    for weight in weights:
        if change == "in place":
            with torch.no_grad():
                weight.mul_(1.5)
        elif change == "data":
            weight.data.mul_(1.5)
        else:
            weight.data = weight.data * 1.5
    after = model.run(ids).logits
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, module(ids).logits, rtol=1e-4, atol=1e-4)
    assert model.run(ids).unchecked == ()


def test_passes_that_are_differentiated_are_compared_too() -> None:
    model = am.load(fresh("bloom"))
    half_of_attention_again(model, 1)
    with pytest.raises(ExactnessError, match="layer 1"):
        model.run(token_ids("bloom"), points=["z"], gradients_of=lambda logits: logits.sum())
