"""`acts.show` shows every point with the right view, axes and tokens, on decoders, encoders and models with two
stacks."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from comparing import refuses
from safetensors import safe_open
from safetensors.torch import load_file
from transformer_lens import ActivationCache
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import attnmech as am
from attnmech.draw.embed import View
from attnmech.draw.text import visible_token
from attnmech.errors import InputError, OutputError

TEXT = "Anna gave an old anchor to Tom."


@pytest.fixture(scope="module")
def acts() -> am.results.Activations:
    return models.demo().run([TEXT, "Anna sang."], points=["pattern", "scores", "z", "resid_post", "embed", "logits"])


def props(view: View) -> Any:
    return json.loads(view.json)["props"]


def plain(texts: list[str]) -> list[str]:
    return [text.replace("\u2060", "") for text in texts]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "model"),
        ({"layer": 2}, "AttentionHeads"),
        ({"layer": 2, "head": 6}, "AttentionPattern"),
        ({"layer": 2, "query": 3}, "ColoredTokensMulti"),
        ({"layer": 2, "head": 6, "query": 3}, "ColoredTokens"),
        ({"layer": 2, "view": "sentence"}, "sentence"),
        ({"view": "token_graph"}, "token_graph"),
        ({"layer": 2, "head": 6, "view": "model"}, "model"),
    ],
)
def test_the_selection_chooses_the_view(acts: am.results.Activations, options: dict[str, Any], kind: str) -> None:
    view = acts.show("pattern", **options)
    assert view.data.get("element", view.kind) == kind
    tokens = [visible_token(token) for token in acts.tokens[0]]
    assert plain(view.data["queries"] if "queries" in view.data else props(view)["tokens"]) == tokens


def test_numbers_are_those_of_the_text_without_its_padding(acts: am.results.Activations) -> None:
    length = len(acts.tokens[1]) - int((~acts.batch.mask[1]).sum())
    assert length < len(acts.tokens[1])
    pattern = acts["pattern", 2][1, :, :length, :length].numpy()
    cells = np.array(props(acts.show("pattern", layer=2, text=1))["attention"], dtype=float)
    np.testing.assert_allclose(np.nan_to_num(cells), pattern, rtol=6e-4)
    assert (np.isnan(cells) == np.triu(np.ones((length, length), dtype=bool), k=1)).all()
    assert len(acts.show("pattern", text=1).data["queries"]) == length
    row = acts.show("pattern", layer=2, head=6, query=3, text=1)
    np.testing.assert_allclose(props(row)["values"], pattern[6, 3], rtol=6e-4)
    rows = acts.show("pattern", layer=2, query=3, text=1)
    np.testing.assert_allclose(props(rows)["values"], pattern[:, 3].T, rtol=6e-4)
    mean = acts.show("pattern", layer=2, query=3, text=1, view="colored_tokens")
    np.testing.assert_allclose(props(mean)["values"], pattern[:, 3].mean(0), rtol=6e-4)


def test_hidden_scores_are_no_numbers_and_the_scale_is_that_of_the_visible(acts: am.results.Activations) -> None:
    found = props(acts.show("scores", layer=1))
    scores = acts["scores", 1][0].numpy()
    shown = np.array(found["attention"], dtype=float)
    above = np.triu(np.ones(scores.shape[1:], dtype=bool), k=1)
    assert np.isnan(shown[:, above]).all()
    np.testing.assert_allclose(shown[:, ~above], scores[:, ~above], rtol=6e-4)
    assert found["maxValue"] == pytest.approx(np.abs(scores[:, ~above]).max())
    assert found["maskUpperTri"] is True


def test_vectors_by_head_and_by_layer(acts: am.results.Activations) -> None:
    length = int(acts.batch.mask[0].sum())
    found = props(acts.show("z", layer=3))
    np.testing.assert_allclose(found["activations"][0], acts["z", 3][0, :length].numpy(), rtol=6e-4)
    assert (found["firstDimensionName"], found["secondDimensionName"]) == ("head", "d_head")
    one = props(acts.show("z", layer=3, head=5))
    np.testing.assert_allclose(one["activations"][0], acts["z", 3][0, :length, 5:6].numpy(), rtol=6e-4)
    assert one["firstDimensionLabels"] == ["5"]
    layers = props(acts.show("resid_post"))
    np.testing.assert_allclose(layers["activations"][0], acts["resid_post"][:, 0].transpose(0, 1).numpy(), rtol=6e-4)
    assert layers["firstDimensionLabels"] == ["0", "1", "2", "3"]
    embed = props(acts.show("embed"))
    np.testing.assert_allclose(embed["activations"][0], acts["embed"][0][:, None].numpy(), rtol=6e-4)


def test_logits_are_the_texts_own_predictions(acts: am.results.Activations) -> None:
    found = props(acts.show("logits"))
    expected = acts.logits[0, :-1].log_softmax(-1).gather(1, acts.batch.ids[0][1:, None])[:, 0]
    assert found["correctTokenLogProb"] == pytest.approx(expected.tolist(), rel=1e-3)
    best = int(acts.logits[0, 3].argmax())
    assert plain(found["topKTokens"][3])[0] == visible_token(models.demo().encoder.token_texts([best])[0])


def test_an_encoder_is_not_masked_and_its_special_tokens_can_be_hidden() -> None:
    model = am.load(models.fresh("bert"), tokenizer=models.tokenizer())
    acts = model.run(torch.tensor([[model.tokenizer.all_special_ids[-1], 5, 6, 7]]), points=["pattern"])
    assert props(acts.show("pattern", layer=1))["maskUpperTri"] is False
    assert acts.show("pattern", layer=1, view="sentence").data["special"] == [True, False, False, False]


def test_cross_attention_has_two_lists_of_tokens_and_no_square_map() -> None:
    acts = models.hooked("t5").run(models.inputs_of("t5"), points=["cross.pattern", "encoder.z"])
    view = acts.show("cross.pattern", view="sentence")
    assert (len(view.data["queries"]), len(view.data["keys"])) == acts["cross.pattern", 0].shape[-2:]
    assert acts.show("cross.pattern").kind == "model"
    assert acts.show("cross.pattern", layer=0, head=1).kind == "model"
    refuses("for cross-attention use", acts.show, "cross.pattern", layer=0, view="attention_heads")
    assert len(props(acts.show("encoder.z", layer=0))["tokens"][0]) == acts["encoder.z", 0].shape[1]


def test_a_chosen_head_keeps_its_number(acts: am.results.Activations) -> None:
    for view in ("sentence", "token_graph", "model"):
        data = acts.show("pattern", layer=2, head=6, view=view).data
        assert data["chosen"] == {"layer": 0, "head": 6}
        assert (data["layers"], data["heads"]) == ([2], 8)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pattern", {"layer": 9}, r"captured 'pattern' in layers: 0, 1, 2, 3; `layer` is 9"),
        ("pattern", {"layer": 1, "head": 8}, "`head` must be from 0 to 7; got 8"),
        ("pattern", {"layer": 1, "query": 99}, "`query` must be from 0 to"),
        ("pattern", {"text": 2}, "`text` must be from 0 to 1; got 2"),
        ("pattern", {"view": "heat"}, "`view` must be one of model, sentence, .* got 'heat'"),
        ("pattern", {"view": "attention_heads"}, "shows one layer: pass `layer`, one of 0, 1, 2, 3"),
        ("pattern", {"layer": 1, "view": "attention_pattern"}, "shows one head: pass `head`, from 0 to 7"),
        ("pattern", {"layer": 1, "view": "colored_tokens"}, "shows one row: pass `query`, from 0 to"),
        ("scores", {"layer": 1, "view": "sentence"}, 'use "pattern"'),
        ("scores", {}, 'use "pattern", or select a layer'),
        ("z", {}, "'z' has one vector per head: give `layer`, one of 0, 1, 2, 3"),
        ("z", {"layer": 1, "query": 2}, "`view` and `query` are for attention"),
        ("resid_post", {"layer": 1, "head": 2}, "`head` is for points with a head axis"),
        ("q", {}, "this run did not capture 'q'"),
        ("pattern", {"query": 2}, "shows one layer: pass `layer`"),
    ],
)
def test_what_there_is_not_is_refused(
    acts: am.results.Activations, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(am.AttnmechError, match=message):
        acts.show(name, **options)


def test_too_long_a_text_for_circuitsvis_names_what_holds_more() -> None:
    acts = models.demo().run(torch.full((1, 400), 400), points=[("pattern", 0)])
    with pytest.raises(InputError, match=r'1,280,000 numbers exceed the 200,000 .* layer=2, view="model"\)'):
        acts.show("pattern", layer=0, view="attention_heads")
    assert acts.show("pattern", layer=0).kind == "model"


def test_a_thousand_tokens_of_every_head_are_shown() -> None:
    acts = models.demo().run(torch.randint(300, 2000, (1, 1005)), points=["pattern"])
    for options in ({}, {"layer": 2}, {"layer": 2, "head": 3}):
        assert acts.show("pattern", **options).kind == "model"
    assert len(acts.show("pattern").json) < 20e6


FAMILIES = ["gpt2", "llama_bias", "gpt_neox", "bert", "gemma2"]
WITHOUT = {
    "gpt2": set(),
    "llama_bias": set(),
    "gpt_neox": {"q_rot", "k_rot"},
    "bert": {"embed", "scores", "attn_out", "resid_mid"},
    "gemma2": {"logits"},
}
"""The points of a family for which TransformerLens has no hook, or a hook with another value."""


def bridge_of(name: str, *, compatibility: bool) -> TransformerBridge:
    model = models.fresh(name)
    model.set_attn_implementation("eager")  # without it, a bridge of BERT has no patterns
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config, tokenizer=None)
    if compatibility:
        bridge.enable_compatibility_mode(disable_warnings=True)
    return bridge


def every_point(model: am.HookedModel) -> list[str]:
    return [name for name, point in model.points.items() if point.absent is None]


@pytest.mark.parametrize("compatibility", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_equals_the_bridge_s_own(name: str, compatibility: bool) -> None:
    bridge, ids = bridge_of(name, compatibility=compatibility), models.token_ids(name)
    model = am.load(bridge)
    cache = model.run(ids, points=every_point(model)).to_cache(bridge)
    assert isinstance(cache, ActivationCache) and cache.model is bridge
    with torch.no_grad():
        _, theirs = bridge.run_with_cache(ids)
        if name != "bert":  # TransformerLens cannot compute them there
            bridge.set_use_attn_result(True)
            theirs.cache_dict |= bridge.run_with_cache(ids, names_filter=lambda hook: hook.endswith("hook_result"))[1]
    results = {f"blocks.{layer}.attn.hook_result" for layer in range(model.n_layers)}
    assert name == "bert" or results <= set(theirs)
    for hook, value in cache.items():
        if name == "bert" and hook in results:
            continue
        assert value.shape == theirs[hook].shape, hook
        visible = value > torch.finfo(value.dtype).min
        torch.testing.assert_close(value[visible], theirs[hook][visible], atol=2e-5, rtol=2e-5, msg=hook)
        assert visible.all() or "scores" in hook
    assert set(every_point(model)) - model.certificate.lens_points == WITHOUT[name]
    assert len(cache) == sum(
        1 if name in ("embed", "logits") else model.n_layers
        for name in every_point(model)
        if name in model.certificate.lens_points
    )


def test_methods_of_the_cache_work() -> None:
    bridge, ids = bridge_of("gpt2", compatibility=False), models.token_ids("gpt2")
    acts = am.load(bridge).run(ids, points=["pattern", "resid_pre", "resid_mid", "resid_post"])
    cache = acts.to_cache(bridge)
    _, theirs = bridge.run_with_cache(ids)
    for mid in (False, True):
        ours, expected = (each.accumulated_resid(incl_mid=mid) for each in (cache, theirs))
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache["pattern", -1], theirs["pattern", -1], atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.stack_activation("pattern"), acts["pattern"])
    alone = am.load(bridge).run(ids[:1], points=["pattern"]).to_cache()
    assert alone.model is None and alone.remove_batch_dim()["pattern", 1].ndim == 3


def test_gradients_are_left_out() -> None:
    acts = models.hooked("gpt2").run(models.token_ids("gpt2"), points=["z"], gradients_of=lambda logits: logits.sum())
    assert set(acts.to_cache()) == {f"blocks.{layer}.attn.hook_z" for layer in range(3)}


def test_what_cannot_be_a_cache_is_refused() -> None:
    model, ids = models.hooked("bert"), models.token_ids("bert")
    acts = model.run(ids, points=["scores", "resid_mid"])
    says = "no hook with the same value for any point of this run, which holds: scores 0-1, resid_mid 0-1"
    refuses(re.escape(says), acts.to_cache, error=am.errors.InputError)
    with pytest.raises(am.errors.InputError, match=r"must be a TransformerBridge, such as model\.bridge, or None"):
        model.run(ids).to_cache(model)
    seq2seq = models.hooked("t5").run(models.inputs_of("t5"), points=["cross.pattern"])
    refuses(re.escape("On this model these points have one: none."), seq2seq.to_cache, error=am.errors.InputError)


def test_a_table_has_every_number_but_padding(tmp_path: Path) -> None:
    model, inputs = models.hooked("llama"), models.padded("llama")
    acts, lengths = model.run(inputs, points=["pattern", "z", "logits"]), inputs["attention_mask"].sum(dim=1).tolist()
    first = [int(row.argmax()) for row in inputs["attention_mask"]]
    table = acts.to_frame()
    frame = table[table.point == "pattern"]
    assert len(frame) == model.n_layers * model.n_heads * sum(length**2 for length in lengths)
    for row in frame.sample(40, random_state=1).itertuples():
        assert row.value == float(acts["pattern", row.layer][row.batch, row.head, row.query, row.key])
        real = range(first[row.batch], first[row.batch] + lengths[row.batch])
        assert row.query in real and row.key in real
    assert table[table.point == "z"]["layer"].unique().tolist() == [*range(model.n_layers)]
    assert (table.point == "logits").sum() == sum(lengths) * acts.logits.shape[2]
    assert model.run(inputs, points=["z"]).to_frame().columns.to_list() == [
        "point", "layer", "batch", "position", "head", "d_head", "value",
    ]  # fmt: skip
    refuses("this run captured no point", replace(acts, values={}).to_frame)


def test_points_are_saved_under_their_names(tmp_path: Path) -> None:
    acts = models.demo().run("Anna sang of shells.", points=["pattern", "logits"])
    path = acts.save(tmp_path / "acts.safetensors")
    saved = load_file(path)
    assert saved.keys() == {"logits", *(f"pattern.{layer}" for layer in range(4))}
    assert torch.equal(saved["pattern.3"], acts["pattern", 3]) and torch.equal(saved["logits"], acts.logits)
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["attnmech"])["tokens"] == [list(acts.tokens[0])]
    refuses(r"holds Activations, not a .* with safetensors\.torch\.load_file", am.load_result, path)
    refuses(r"must end in \.safetensors; got acts\.pt", acts.save, tmp_path / "acts.pt", error=OutputError)
