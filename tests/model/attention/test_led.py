"""LED: an encoder with a window and global tokens, a decoder and cross-attention, against transformers."""

from dataclasses import replace
from itertools import product
from typing import Any

import models
import pytest
import torch
from caching import cached
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError
from attnmech.model.attention import led, local_global
from attnmech.model.files.load import UnprovenWarning

F32, F64 = torch.float32, torch.float64
STACKS = ("encoder", "decoder", "cross")
WINDOWS = (4, 8)
SOURCE, TARGET = 21, 7
"""Neither length is a multiple of a window."""


def inputs() -> dict[str, Tensor]:
    """Three texts, the second padded on the right and the third on the left, with two, three and no global tokens."""
    generator = torch.Generator().manual_seed(3)
    real = torch.ones(3, SOURCE, dtype=torch.long)
    real[1, 15:] = 0
    real[2, :4] = 0
    is_global = torch.zeros_like(real)
    is_global[0, [0, 13]] = 1
    is_global[1, [5, 6, 18]] = 1  # the last is padding
    return {
        "input_ids": torch.randint(3, 43, (3, SOURCE), generator=generator),
        "attention_mask": real,
        "global_attention_mask": is_global,
        "decoder_input_ids": torch.randint(3, 43, (3, TARGET), generator=generator),
    }


def real() -> Tensor:
    return inputs()["attention_mask"].bool()


def is_global() -> Tensor:
    return inputs()["global_attention_mask"].bool() & real()


@cached
def theirs(dtype: torch.dtype = F64, chosen: bool = True) -> Any:
    given = inputs()
    if not chosen:
        del given["global_attention_mask"]
    with torch.no_grad():
        return models.plain("led", dtype)(**given, output_attentions=True, output_hidden_states=True, use_cache=False)


@cached
def acts(dtype: torch.dtype = F64) -> am.results.Activations:
    model = models.hooked("led", dtype)
    return model.run(inputs(), [name for name, about in model.points.items() if about.absent is None])


# -- against plain transformers ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64])
def test_every_check_holds(dtype: torch.dtype) -> None:
    certificate = models.hooked("led", dtype).certificate
    assert certificate.ok, repr(certificate)
    held = {check.name for check in certificate.checks if check.passed}
    for stack in STACKS:
        always = ("attentions", "projections", "ledger", "softmax", "mask", "z", "heads", "pattern edit")
        assert {f"{stack} {each}" for each in always} <= held
    assert {"transformers", "padding", "causal", "encoder gate", "cross queries", "cross states"} <= held


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_logits_and_streams_are_transformers(dtype: torch.dtype, chosen: bool) -> None:
    expected, model, given = theirs(dtype, chosen), models.hooked("led", dtype), inputs()
    if not chosen:
        del given["global_attention_mask"]
    ours = model.run(given, ["logits", "encoder.resid_pre", "decoder.resid_pre"])
    torch.testing.assert_close(ours.logits, expected.logits, atol=3e-5, rtol=1e-4)
    for stack, states in (("encoder", expected.encoder_hidden_states), ("decoder", expected.decoder_hidden_states)):
        keep = real() if stack == "encoder" else torch.ones(3, TARGET, dtype=torch.bool)
        for layer, state in enumerate(states[:-1]):
            torch.testing.assert_close(ours[f"{stack}.resid_pre", layer][keep], state[keep], atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("layer", [0, 1])
def test_patterns_of_the_encoder_are_transformers_bands_and_rows(layer: int) -> None:
    """transformers' bands, cell by cell: a local row's global columns, then its window; a global token's row."""
    window, ours = WINDOWS[layer], acts()["encoder.pattern", layer]
    band, rows = theirs().encoder_attentions[layer], theirs().encoder_global_attentions[layer]
    for text in range(3):
        places = is_global()[text].nonzero()[:, 0].tolist()
        for i in real()[text].nonzero()[:, 0].tolist():
            expected = torch.zeros(3, SOURCE, dtype=F64)
            if i in places:
                expected = rows[text, :, :SOURCE, places.index(i)]
            else:
                for offset in range(window + 1):
                    j = i + offset - window // 2
                    if 0 <= j < SOURCE:
                        expected[:, j] += band[text, :, i, 2 + offset]
                for column, j in enumerate(places):
                    expected[:, j] += band[text, :, i, column]
            torch.testing.assert_close(ours[text, :, i], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("stack", "name"), [("decoder", "decoder_attentions"), ("cross", "cross_attentions")])
def test_patterns_of_the_decoder_are_transformers(stack: str, name: str) -> None:
    for layer, pattern in enumerate(getattr(theirs(), name)):
        torch.testing.assert_close(acts()[f"{stack}.pattern", layer], pattern, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("stack", STACKS)
def test_zeroing_a_head_is_zeroing_its_columns_of_w_o(stack: str) -> None:
    model, changed = models.hooked("led", F64), models.fresh("led", F64)
    layer, head, d = 1, 1, 8 if stack == "encoder" else 6
    base = changed.led.encoder if stack == "encoder" else changed.led.decoder
    block = base.layers[layer]
    out = {"encoder": "self_attn.output", "decoder": "self_attn.out_proj", "cross": "encoder_attn.out_proj"}[stack]
    with torch.no_grad():
        block.get_submodule(out).weight[:, head * d : head * d + d] = 0
        expected = changed(**inputs(), use_cache=False).logits
    with model.intervene(am.Intervention.zero([(layer, head)], stack=stack)):
        ours = model.run(inputs()).logits
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    assert float((expected - theirs().logits).abs().max()) > 1e-2


def test_a_sweep_over_the_decoder_s_heads() -> None:
    """The loss of the decoder's texts with each head's columns of W_O zeroed, by transformers."""
    found = am.ablate_heads(models.hooked("led", F64), inputs())
    ids = inputs()["decoder_input_ids"]

    def loss(model: Any) -> Tensor:
        with torch.no_grad():
            logits = model(**inputs(), use_cache=False).logits.log_softmax(dim=-1)
        return -logits[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].mean(dim=1)

    torch.testing.assert_close(found.before, loss(models.plain("led", F64)), atol=1e-6, rtol=1e-5)
    for layer, head in product(range(3), range(4)):
        changed = models.fresh("led", F64)
        changed.led.decoder.layers[layer].self_attn.out_proj.weight.data[:, 6 * head : 6 * head + 6] = 0
        torch.testing.assert_close(found.after[layer, head], loss(changed), atol=1e-6, rtol=1e-5)


# -- by hand ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1])
def test_terms_pattern_and_z_of_the_encoder_by_hand(layer: int) -> None:
    """Pattern and z row by row, from the stream and the raw weights of the two sets of projections."""
    module = models.plain("led", F64).led.encoder.layers[layer].self_attn.longformer_self_attn
    x, scale = acts()["encoder.resid_pre", layer], 8**-0.5
    split = am.decompose_scores(models.hooked("led", F64), inputs(), stack="encoder", layers=[layer])
    terms = {name: split.terms[name].expand(3, 1, 3, SOURCE, SOURCE)[:, 0] for name in split.terms}
    pattern, z = acts()["encoder.pattern", layer], acts()["encoder.z", layer]
    for text, i in product(range(3), range(SOURCE)):
        if not real()[text, i]:
            continue
        suffix = "_global" if is_global()[text, i] else ""
        query, key, value = (getattr(module, name + suffix) for name in ("query", "key", "value"))
        near = (torch.arange(SOURCE) - i).abs() <= WINDOWS[layer] // 2
        seen = (near | is_global()[text] | is_global()[text, i]) & real()[text]
        for head in range(3):
            own = slice(8 * head, 8 * head + 8)
            q, k = x[text, i] @ query.weight[own].T, x[text] @ key.weight[own].T
            expected = {
                "query_key": k @ q,
                "key_bias": k @ query.bias[own],
                "query_bias": (q @ key.bias[own]).expand(SOURCE),
                "constant": (query.bias[own] @ key.bias[own]).expand(SOURCE),
            }
            for name, term in expected.items():
                found = terms[name][text, head, i].double()
                torch.testing.assert_close(found, (scale * term).detach(), atol=1e-10, rtol=1e-8)
            row = (scale * sum(expected.values())).masked_fill(~seen, -torch.inf).softmax(dim=0)
            torch.testing.assert_close(pattern[text, head, i], row.detach(), atol=1e-12, rtol=1e-10)
            read = row @ (x[text] @ value.weight[own].T + value.bias[own])
            half = slice(8, 16) if suffix else slice(0, 8)
            torch.testing.assert_close(z[text, i, head, half], read.detach(), atol=1e-12, rtol=1e-10)
            assert float(z[text, i, head].norm()) == pytest.approx(float(read.detach().norm()))


@pytest.mark.parametrize("stack", ["decoder", "cross"])
def test_terms_of_the_decoder_by_hand(stack: str) -> None:
    model = models.hooked("led", F64)
    split = am.decompose_scores(model, inputs(), stack=stack)
    assert set(split.terms) == {"query_key", "key_bias", "query_bias", "constant", "mask"}
    for layer in range(3):
        block = models.plain("led", F64).led.decoder.layers[layer]
        module = block.self_attn if stack == "decoder" else block.encoder_attn
        x = acts()["decoder.resid_pre", layer]
        y = x
        if stack == "cross":
            x = block.self_attn_layer_norm(acts()["decoder.resid_mid", layer])
            y = theirs().encoder_last_hidden_state
        q, k = (part.unflatten(-1, (4, 6)).transpose(1, 2) for part in (module.q_proj(x), module.k_proj(y)))
        expected = (q @ k.mT / 6**0.5).detach()
        content = ("query_key", "key_bias", "query_bias", "constant")
        total = torch.stack([split.terms[term][:, layer].expand(expected.shape) for term in content]).sum(dim=0)
        keep = real()[:, None, None].expand(expected.shape) if stack == "cross" else torch.ones_like(total).bool()
        torch.testing.assert_close(total[keep], expected[keep], rtol=1e-5, atol=1e-6)


def test_local_and_global_mass_of_the_encoder() -> None:
    mass = am.global_attention(models.hooked("led", F64), inputs(), stack="encoder")
    local = real() & ~is_global() & is_global().any(dim=1, keepdim=True)
    for layer, band in enumerate(theirs().encoder_attentions):
        to_global = band[..., :2].sum(dim=-1).transpose(0, 1)[:, local].mean(dim=-1)
        torch.testing.assert_close(mass.global_mass[layer].double(), to_global.double(), atol=1e-6, rtol=1e-5)
    with pytest.raises(InputError, match="has no global tokens"):
        am.global_attention(models.hooked("led"), inputs(), stack="decoder")


# -- what must not pass ------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: Any) -> set[str]:
    monkeypatch.setattr(module, name, value)
    with pytest.warns(UnprovenWarning, match="NOT certified"):
        model = am.load(models.fresh("led"))
    return {check.name for check in model.certificate.failed}


def test_certificate_finds_swapped_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    class Swapped(local_global.Halves):
        def __init__(self, first: Any, second: Any, heads: int) -> None:
            super().__init__(second, first, heads)

    found = failing(monkeypatch, local_global, "Halves", Swapped)
    assert {"transformers", "encoder streams", "encoder attentions"} <= found


def test_certificate_finds_a_wider_window(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wider(local_global.WindowRule):
        def reaching(self, reach: int) -> local_global.WindowRule:
            return super().reaching(reach + 1)

    found = failing(monkeypatch, led, "WindowRule", Wider)
    assert {"transformers", "encoder streams", "encoder attentions"} <= found


def test_certificate_finds_ignored_global_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ignoring(local_global.WindowRule):
        @classmethod
        def of(cls, real: Tensor, is_global: Tensor | None) -> local_global.WindowRule:
            return super().of(real, None)

    found = failing(monkeypatch, led, "WindowRule", Ignoring)
    assert {"transformers", "encoder streams", "encoder attentions", "encoder gate"} <= found


def wrong(stack: str, **changes: Any) -> set[str]:
    """The failed checks of the model if a stack is described incorrectly."""
    raw = models.fresh("led")
    plans = [each.architecture for each in am.load(raw).stacks.values()]
    plans = [replace(plan, **changes) if plan.stack == stack else plan for plan in plans]
    return {check.name for check in am.certify(am.HookedModel(raw, plans, name="led")).failed}


def test_certificate_finds_wrong_norms() -> None:
    assert "decoder mlp" in wrong("decoder", interposed_norm="self_attn_layer_norm")
    assert {"decoder mlp", "cross queries"} <= wrong("decoder", mid_norm="final_layer_norm")
    assert "encoder mlp" in wrong("encoder", post_norm="self_attn_layer_norm")


# -- inputs -----------------------------------------------------------------------------------------------------


def test_generation_is_that_of_transformers() -> None:
    raw = models.fresh("led")
    given = {name: value[:1] for name, value in inputs().items() if name != "decoder_input_ids"}
    said = models.hooked("led").generate(given, 6, points=["cross.pattern"], stop_at_eos=False)
    raw.generation_config.eos_token_id = None
    expected = raw.generate(**given, max_new_tokens=6, do_sample=False, num_beams=1, use_cache=False)
    assert said.target is not None and said.target.ids.tolist() == expected.tolist()
    del given["global_attention_mask"]
    without = models.hooked("led").generate(given, 6, points=["cross.pattern"], stop_at_eos=False)
    other = raw.generate(**given, max_new_tokens=6, do_sample=False, num_beams=1, use_cache=False)
    assert without.target is not None and without.target.ids.tolist() == other.tolist()
    torch.testing.assert_close(said.extra["global_attention_mask"], inputs()["global_attention_mask"][:1])


def test_limits_of_encoder_and_decoder() -> None:
    model, ids = models.hooked("led"), torch.full((1, 141), 5)
    assert model.run({"input_ids": ids[:, :140], "decoder_input_ids": ids[:, :33]}).logits.shape == (1, 33, 43)
    with pytest.raises(InputError, match="this model has 140 positions; the text has 141 tokens"):
        model.run(ids)
    with pytest.raises(InputError, match="this model's decoder has 33 positions; the text has 34 tokens"):
        model.run({"input_ids": ids[:, :40], "decoder_input_ids": ids[:, :34]})


@pytest.mark.parametrize("windows", [(4, 16), (32, 4, 16)])
def test_other_sizes(windows: tuple[int, ...]) -> None:
    """A model without its head, and windows longer or shorter than the texts."""
    model = am.load(models.randomised(models.led(windows)).led)
    assert model.certificate.ok and list(model.stacks) == list(STACKS)
    assert model.stacks["encoder"].architecture.windows == windows
