"""Every point against transformers' own hidden states, forward hooks on a plain model, or the raw weights."""

from typing import Any

import models
import pytest
import reference
import torch
from by_hand import watched
from comparing import refuses
from torch import Tensor, nn

import attnmech as am
from attnmech.errors import InputError, MissingPointError
from attnmech.points import POINTS, lens_name, parse

F32, F64 = torch.float32, torch.float64
CASES = [(name, dtype) for name in models.FAMILIES for dtype in (F32, F64)]
ATTENTION_OUT = {
    "bloom": "self_attention.dense",
    "gpt2": "attn.c_proj",
    "llama": "self_attn.o_proj",
    "bert": "attention.output.dense",
}
MLP_OUT = {"bloom": "mlp.dense_4h_to_h", "gpt2": "mlp", "llama": "mlp", "bert": "output.dense"}


def expected_points(name: str, dtype: torch.dtype, inputs: dict[str, Tensor]) -> dict[Any, Tensor]:
    """Every point, computed from a plain model."""
    model, kind = models.plain(name, dtype), reference.family(models.plain(name, dtype))
    modules: dict[str, nn.Module] = {"embed": model.get_input_embeddings()}
    for layer, block in enumerate(models.blocks_of(model)):
        modules[f"attn{layer}"] = block.get_submodule(ATTENTION_OUT[kind])
        modules[f"mlp{layer}"] = block.get_submodule(MLP_OUT[kind])
        modules[f"block{layer}"] = block
    with torch.no_grad(), watched(modules) as found:
        output = model(**inputs, output_hidden_states=True, output_attentions=True)
    points: dict[Any, Tensor] = {("embed", None): found["embed"][1], ("logits", None): output.logits}
    heads = model.config.num_attention_heads
    for layer in range(model.config.num_hidden_layers):
        w = reference.layer_weights(model, layer)
        stream = output.hidden_states[layer]
        x = reference.attention_input(model, layer, stream)
        q, k, v = (reference.project(x, *wb) for wb in ((w.W_Q, w.b_Q), (w.W_K, w.b_K), (w.W_V, w.b_V)))
        pattern = output.attentions[layer]
        group = len(w.W_Q) // len(w.W_K)
        z = torch.stack([pattern[:, h] @ v[:, :, h // group] for h in range(heads)], dim=2)
        result = torch.stack([z[:, :, h] @ w.W_O[h] for h in range(heads)], dim=2)
        raw = result.sum(2) if w.b_O is None else result.sum(2) + w.b_O
        terms = reference.terms(model, layer, x, inputs["attention_mask"])
        scores = sum(value for term, value in terms.items() if term != "mask")
        hidden = ~reference.visible(model, inputs["attention_mask"]).expand_as(scores)
        points |= {
            ("resid_pre", layer): stream, ("attn_in", layer): x, ("q", layer): q, ("k", layer): k, ("v", layer): v,
            ("scores", layer): scores.masked_fill(hidden, torch.finfo(dtype).min), ("pattern", layer): pattern,
            ("z", layer): z, ("result", layer): result, ("attn_raw", layer): raw,
            ("attn_out", layer): found[f"attn{layer}"][1], ("resid_mid", layer): stream + found[f"attn{layer}"][1],
            ("mlp_out", layer): found[f"mlp{layer}"][1], ("resid_post", layer): found[f"block{layer}"][1],
        }  # fmt: skip
        if kind == "llama":
            turns = [
                reference.rotation(p, w.d_head, model.config.rope_parameters["rope_theta"], dtype)
                for p in range(x.shape[1])
            ]
            for point, value in (("q_rot", q), ("k_rot", k)):
                points[point, layer] = torch.stack([value[:, p] @ turns[p] for p in range(x.shape[1])], dim=1)
    return points


@pytest.mark.core
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_point_means_what_its_name_says(name: str, dtype: torch.dtype) -> None:
    hooked, inputs = models.hooked(name, dtype), models.padded(name, length=6)
    present = [point for point, about in hooked.points.items() if about.absent is None]
    acts = hooked.run(inputs, points=present)
    expected = expected_points(name, dtype, inputs)
    assert set(acts.values) == set(expected)
    mask = inputs["attention_mask"].bool()
    for key, value in expected.items():
        ours = acts.values[key]
        assert ours.shape == value.shape, key
        assert ours.dtype == dtype
        keep = mask[:, None, :, None].expand_as(value) if key[0] in ("scores", "pattern") else mask
        size = float(value[keep][value[keep] > torch.finfo(dtype).min].abs().max())
        hidden = value[keep] == torch.finfo(dtype).min
        assert torch.equal(ours[keep] == torch.finfo(dtype).min, hidden), key
        difference = float((ours[keep] - value[keep]).abs().masked_fill(hidden, 0).max())
        # transformers computes softmaxes and some tables in float32, even in float64.
        assert difference <= (2e-5 if dtype == F32 else 1e-6) * size, (key, difference)


def test_the_list_of_points_shows_itself() -> None:
    points = models.hooked("gpt2").points
    assert len(points) == len(POINTS) == 21
    lines = repr(points).splitlines()
    assert lines[5].split(maxsplit=1) == ["k", "batch position kv_head=5 d_head=4  attn_in W_K + b_K, before rotary"]
    assert "absent: GPT-2 does not rotate" in lines[7]
    frame = points.to_frame()
    assert list(frame.point) == list(POINTS)
    assert set(frame[frame.absent != ""].point) == {"latent", "q_rot", "k_rot", "gate", "mixer_out"}


WITHOUT = {
    "resid_mid": "adds attention and MLP to the stream in one step",
    "logits": "without a head on top", "gate": "has no gate", "latent": "without a latent", "mixer_out": "has no mixer",
    "q_rot": "does not rotate queries and keys", "k_rot": "does not rotate queries and keys",
}  # fmt: skip


@pytest.mark.parametrize("name", ["bloom", "gpt2", "llama", "bert", "bert_headless", "gptj"])
def test_missing_points_say_why(name: str) -> None:
    hooked = models.hooked(name)
    missing = {"latent", "gate", "mixer_out"} | ({"logits"} if name == "bert_headless" else set())
    missing |= {"resid_mid"} if name == "gptj" else {"q_rot", "k_rot"} if name != "llama" else set()
    assert {point for point, about in hooked.points.items() if about.absent} == missing
    for point in missing:
        expected = f"^this model has no point {point!r}: .*{WITHOUT[point]}"
        refuses(expected, hooked.run, torch.tensor([[5]]), points=[point], error=MissingPointError)
        with pytest.raises(MissingPointError, match=expected), hooked.hooks({point: lambda x: None}):
            pass


def test_a_run_without_points_gives_the_logits_or_the_last_stream() -> None:
    assert set(models.hooked("bloom").run(torch.tensor([[5, 7]])).values) == {("logits", None)}
    headless = models.hooked("bert_headless").run(torch.tensor([[5, 7]]))
    assert set(headless.values) == {("resid_post", 1)}
    with torch.no_grad():
        theirs = models.plain("bert_headless")(input_ids=torch.tensor([[5, 7]])).last_hidden_state
    torch.testing.assert_close(headless["resid_post", 1], theirs, rtol=1e-5, atol=1e-5)


def test_a_run_keeps_what_was_asked_and_nothing_else() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    assert set(hooked.run(ids, points=["q", ("z", 1)]).values) == {("q", 0), ("q", 1), ("q", 2), ("z", 1)}
    assert set(hooked.run(ids, points=["q", "embed"], layers=[2]).values) == {("q", 2), ("embed", None)}
    assert set(hooked.run(ids, points=["q", ("q", 0)], layers=[2]).values) == {("q", 2), ("q", 0)}
    assert set(hooked.run(ids, points="pattern", layers=[1]).values) == {("pattern", 1)}
    assert not hooked.run(ids, points=["pattern"])["pattern", 0].requires_grad
    assert hooked.run(ids, points=["q"]).gradients is None


def test_activations_answer_by_name_layer_and_lens_name() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    acts = hooked.run(ids, points=["blocks.2.attn.hook_pattern", "blocks.0.attn.hook_pattern", "hook_embed"])
    assert acts["pattern", 2] is acts["blocks.2.attn.hook_pattern"]
    assert torch.equal(acts["pattern"], torch.stack([acts["pattern", 0], acts["pattern", 2]]))
    assert ("pattern", 1) not in acts
    assert ("pattern", 2) in acts
    assert "pattern" in acts
    assert "nonsense" not in acts
    assert repr(acts) == "Activations(3 × 7 tokens: pattern 2,0; embed)" or "pattern 0,2" in repr(acts)
    with pytest.raises(MissingPointError, match=r"did not capture \('pattern', 1\); it holds: .*pattern 0,2"):
        acts["pattern", 1]
    refuses("did not capture 'logits'", lambda: acts.logits, error=MissingPointError)
    assert len(acts.tokens) == 3


def test_lens_names_go_both_ways_and_agree_with_the_bridge() -> None:
    for name, point in POINTS.items():
        key = (name, 1 if point.per_layer else None)
        assert parse(lens_name(key)) == key
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    with torch.no_grad():
        _, cache = hooked.bridge.run_with_cache(ids)
    for hook in ("hook_embed", "blocks.1.hook_resid_pre", "blocks.2.attn.hook_q", "blocks.0.attn.hook_pattern",
                 "blocks.1.attn.hook_z", "blocks.2.hook_resid_post", "blocks.1.hook_mlp_out"):  # fmt: skip
        torch.testing.assert_close(hooked.run(ids, points=[hook])[hook], cache[hook], rtol=1e-5, atol=1e-5)


def test_names_and_layers_that_cannot_be() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    bad: list[tuple[Any, str]] = [
        (["patern"], "there is no point 'patern'; did you mean 'pattern'? The points are: embed, resid_pre"),
        (["blocks.1.attn.hook_patern"], "did you mean 'pattern'?"),
        (["blocks.1.hook_nonsense_here"], "there is no point 'blocks.1.hook_nonsense_here'"),
        ([("pattern", 3)], "`layer` must be from 0 to 2 (this model has 3 layers); got 3"),
        ([("pattern", -1)], "got -1"),
        (["blocks.7.attn.hook_pattern"], "got 7"),
        ([("logits", 0)], "has no layer"),
        ([("pattern", True)], "a point is a name or a pair"),
        ([""], "there is no point ''"),
    ]
    for points, message in bad:
        with pytest.raises(InputError) as caught:
            hooked.run(ids, points=points)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    refuses(r"from 0 to 2 \(this model has 3 layers\); got 5", hooked.run, ids, points=["q"], layers=[0, 5])


def test_a_name_of_hostile_kind_is_an_input_error() -> None:
    for name in (3, ("pattern",), ("pattern", 1, 2), ("pattern", "1"), (1, 2), None, b"q", ("pattern", None), ()):
        refuses(r"a point is a name or a pair|must be an int", getattr(parse, "__wrapped__", parse), name)


def test_weights_are_views_of_the_callers_parameters() -> None:
    for name in models.FAMILIES:
        model = models.fresh(name)
        hooked = am.load(model)
        for layer in range(hooked.n_layers):
            ours, theirs = hooked.weights(layer), reference.layer_weights(model, layer)
            for field in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V"):
                wanted = getattr(theirs, field)
                if wanted is None:
                    assert getattr(ours, field) is None
                else:
                    assert torch.equal(getattr(ours, field).detach(), torch.stack(list(wanted)))
            assert (ours.b_O is None) == (theirs.b_O is None)
            with torch.no_grad():
                ours.W_K[-1, 2, 1] = 77
            assert float(reference.layer_weights(model, layer).W_K[-1][2, 1]) == 77
