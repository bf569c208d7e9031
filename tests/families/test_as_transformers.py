"""Each family against plain transformers: output, patterns, the ledger, and every stack without one head."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import count, cycle
from typing import Any, Final

import models
import pytest
import senses
import tiny
import torch
from by_hand import until_the_end
from comparing import close
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import attnmech as am
from attnmech.model.attention import running
from attnmech.model.attention.postponed import through_attend

F32, F64 = torch.float32, torch.float64
READ: Final = (
    "gemma", "gemma3", "gemma3_text", "llama4_text", "phi", "phi3", "phimoe", "mixtral", "ministral", "qwen2_moe",
    "qwen3_moe", "qwen3_next", "olmo", "olmo2", "olmo3", "olmoe", "granite", "granitemoe", "smollm3", "cohere",
    "cohere2", "glm4", "helium", "stablelm", "starcoder2", "gpt_bigcode", "nemotron", "exaone4",
    "seed_oss", "ernie4_5", "arcee", "apertus", "biogpt", "falcon_h1", "granitemoehybrid", "granitemoeshared",
    "nemotron_h", "bitnet", "minimax", "gemma4_text", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3",
    "gemma3n_text",
)  # fmt: skip
"""Decoders whose attention goes through transformers' interface, which hands over q, k and v."""
UNNUMBERED: Final = ("zamba", "zamba2")
"""Their attention, which several layers share, does not know its layer."""
WRITTEN: Final = (
    "codegen", "gpt_neo", "albert", "mpnet", "rembert", "roformer", "luke", "tapas", "megatron-bert", "git", "xglm",
    "trocr", "openai-gpt", "gpt_neox_japanese", "bailing_hybrid",
)  # fmt: skip
"""Types that multiply queries, keys and values themselves."""
ENCODERS: Final = ("distilbert", "electra", "camembert", "modernbert", "esmc")
CROSSED: Final = (
    "blenderbot", "blenderbot-small", "m2m_100", "pegasus", "plbart", "seamless_m4t", "switch_transformers", "umt5",
)  # fmt: skip
OF_TESTS: Final = (
    *models.FAMILIES, *models.NEW, *models.CROSSED, "t5", "mvp", "jamba", "bamba", "lfm2", "longformer", "led",
)  # fmt: skip
BANDED: Final = (("longformer", ""), ("led", "encoder"))
"""Stacks whose patterns are bands in transformers: tests/model/attention."""
TWICE: Final = tuple(name for name in models.NEW if name.startswith("falcon_alibi"))
"""Eager attention counts Falcon's ALiBi twice."""
EXACT: Final = ("rembert",)
"""Rounding of scores of several thousand, as in the first layer of this RemBERT, exceeds the bounds in float32."""


BACKWARDS: Final = ("llama, both ways", "mistral, both ways", "lfm2, both ways", "bloom, both ways")


def both_ways(kind: str) -> Any:
    """A decoder with a mask that hides padding alone."""
    raw = tiny.model_of(kind)
    raw.config.is_causal = False
    return raw


MAKERS: Final[dict[str, Callable[[], Any]]] = {
    **{name: lambda name=name: models.fresh(name) for name in OF_TESTS},
    **{
        kind: lambda kind=kind: tiny.model_of(kind, dtype=F64 if kind in EXACT else F32)
        for kind in (*READ, *UNNUMBERED, *WRITTEN, *ENCODERS, *CROSSED)
    },
    **{name: lambda name=name: both_ways(name.partition(",")[0]) for name in BACKWARDS},
    "CLIP, texts": lambda: models.randomised(senses.two_towers("CLIP")).text_model,
    "Siglip, texts": lambda: models.randomised(senses.two_towers("Siglip")).text_model,
    "albert_groups": tiny.albert_groups,
    "big_bird": lambda: models.randomised(models.big_bird()),
    "big_bird, decoder": lambda: models.randomised(models.big_bird("ForCausalLM", is_decoder=True)),
    "whisper": lambda: models.randomised(
        senses.made("WhisperForConditionalGeneration", "Whisper", senses.TRANSCRIBING)
    ),
}
NAMES: Final = (*MAKERS, *senses.SENSES)
SIDES: Final = dict(zip(NAMES, cycle(("right", "left", ""))))
"""The side of the padding of texts; a third of the models has none."""


NO_STREAM: Final = ("minimax", "gemma4_text", "gemma3n_text", *UNNUMBERED)
"""Their blocks combine attention and stream differently, so that the stream's points are absent."""
THROUGH: Final = (
    *WRITTEN[3:-1], "big_bird", "big_bird, decoder", "bloom", "bloom, both ways", "mvp", "led",
    *(name for name in models.NEW if name.startswith(("bloom", "falcon", "mpt"))),
)  # fmt: skip
"""Types whose products are postponed; CodeGen and GPT-Neo are in the table, ALBERT and Bailing call the interface."""
IN_THREE: Final = (*CROSSED, *models.CROSSED, "t5", "mvp", "led", "whisper")
BOTH_WAYS: Final = (
    *(name for name in models.NEW if "berta" in name), "bert", *ENCODERS, *WRITTEN[2:9], *BACKWARDS,
    "Siglip, texts", "albert_groups", "big_bird", "longformer",
)  # fmt: skip
LATENT: Final = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "bailing_hybrid")
UNROTATED: Final = ("gpt_bigcode", "biogpt", "granitemoehybrid", "nemotron_h")
ROTARY: Final = {*READ} - {*UNROTATED} | {
    name for name in OF_TESTS
    if name.startswith(("llama", "falcon_multi", "falcon_rot", "falcon_new", "gpt_", "gptj", "mistral", "qwen", "gem"))
} | {
    *BACKWARDS[:3], "bamba", "lfm2", "codegen", "roformer", "gpt_neox_japanese", "bailing_hybrid", "modernbert",
    "esmc", "dinov3",
}  # fmt: skip
CHECKED: Final[dict[str, Collection[str]]] = {
    "transformers": NAMES,
    "padding": MAKERS,
    "causal": {*MAKERS} - {*BOTH_WAYS},
    "alibi": {"bloom", "bloom, both ways", "bloom6", "mpt3", "mpt4", "mpt6", *TWICE},
    "rotary": ROTARY,
    "rotary tables": ROTARY - {
        "gpt_oss_yarn", "gemma3", "gemma3_text", "olmo3", "apertus", "gemma4_text", "gemma3n_text", "modernbert",
        "dinov3",
    },
    "latent": LATENT,
    "relative positions": [name for name in NAMES if name.startswith("deberta")],
    "cross queries": IN_THREE,
    "cross states": IN_THREE,
    # OLMo's norm has no ε as an attribute; Nemotron-H ends in a block without attention; the others have no norm
    # before their head, or a layer of their own within it.
    "logits": {
        *READ, *models.FAMILIES, *models.NEW, *IN_THREE, "jamba", "bamba", "lfm2", "codegen", "gpt_neo", "xglm",
        "gpt_neox_japanese", "bailing_hybrid",
    } - {
        "olmo", "nemotron_h", *NO_STREAM, "minicpm3", "opt_post", *BOTH_WAYS, "bart", "marian", "t5", "mvp", "led",
        "blenderbot-small", "plbart",
    } | {*BACKWARDS},
}  # fmt: skip
"""The models for which a check compares something."""


@dataclass(frozen=True)
class Pair:
    """A model of transformers and attnmech's, with what both make of the same inputs."""

    name: str
    raw: Any
    model: am.HookedModel
    inputs: dict[str, Tensor]
    acts: am.results.Activations
    output: Any

    @property
    def points(self) -> list[str]:
        patterns = [stack.point("pattern") for stack in self.model.stacks.values()]
        return patterns + (["logits"] if self.model.points["logits"].absent is None else [])

    @property
    def squares(self) -> dict[str, Any]:
        """The stacks whose patterns transformers returns as `[batch head query key]`."""
        stacks = {} if self.name in TWICE else self.model.stacks
        return {label: stack for label, stack in stacks.items() if (self.name, label) not in BANDED}

    def rows(self, stack: str) -> Tensor:
        """The real tokens among the queries of a stack: `[batch position]`."""
        return self.acts.batch.queries(stack).mask

    def patterns(self, stack: str, output: Any) -> list[Tensor]:
        """transformers' patterns of the layers of a stack; MiniMax also returns those of layers without heads."""
        patterns = getattr(output, f"{stack}_attentions" if stack else "attentions")
        patterns = [pattern for pattern in patterns if pattern is not None]
        layers = self.model.stacks[stack].layers
        return patterns if len(patterns) == len(layers) else [patterns[layer] for layer in layers]


def run_plain(name: str, raw: Any, inputs: dict[str, Tensor], attention: str = "eager") -> Any:
    attention = "sdpa" if name in TWICE else attention
    raw.config._attn_implementation = raw.base_model.config._attn_implementation = attention
    if raw.config.model_type != "falcon":
        raw.set_attn_implementation(attention)
    uncached = {"use_cache": False} if "use_cache" in raw.config.to_dict() else {}
    with torch.no_grad():
        return raw(**inputs, **uncached, output_attentions=attention == "eager")


def inputs_of(name: str, raw: Any) -> dict[str, Tensor]:
    """Texts of 9 and 6 tokens, padded on one side; without a side, both have 9. Seven tokens for a decoder."""
    if name in senses.SENSES:
        return senses.inputs_of(name)
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(10, 40, (2, 9), generator=generator)
    target = {"decoder_input_ids": torch.randint(10, 40, (2, 7), generator=generator)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 7, 18, generator=generator)} | target
    mask = torch.ones_like(ids)
    if SIDES[name]:
        mask[1, slice(None, 3) if SIDES[name] == "left" else slice(-3, None)] = 0
    return {"input_ids": ids, "attention_mask": mask} | (target if raw.config.is_encoder_decoder else {})


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest) -> Pair:
    """One model; pytest runs all its tests before those of the next."""
    name = request.param
    raw = senses.raw(name) if name in senses.SENSES else MAKERS[name]()
    model, inputs = am.load(raw), inputs_of(name, raw)
    assert not any(part._forward_hooks or "forward" in vars(part) for part in raw.modules())
    output = run_plain(name, raw, inputs)
    acts = model.run(inputs, points=Pair(name, raw, model, inputs, None, output).points)  # type: ignore[arg-type]
    return Pair(name, raw, model, inputs, acts, output)


def require_same_logits(pair: Pair, ours: Tensor, theirs: Tensor) -> None:
    """At real tokens, or, for one answer a text, everywhere."""
    real = pair.rows(pair.model.output_stack.label)
    keep = real if theirs.shape[:2] == real.shape else slice(None)
    close(ours[keep], theirs[keep], 2e-5)


def test_the_certificate_holds(pair: Pair) -> None:
    certificate, plan = pair.model.certificate, pair.model.output_stack.architecture
    assert certificate.ok, repr(certificate)
    assert certificate.refused == {}
    assert (plan.replacement is through_attend) == (pair.name in THROUGH)
    held = {check.name for check in certificate.checks if check.passed}
    for label in pair.model.stacks:
        always = {"projections", "ledger", "softmax", "mask", "z", "heads", "pattern edit"}
        always |= {"attentions"} if pair.name not in TWICE else set()
        always |= {"streams", "chain", "attn_in", "mlp"} if label != "cross" and pair.name not in NO_STREAM else set()
        assert {f"{label} {check}".strip() for check in always} <= held
    for check, names in CHECKED.items():
        assert (check in held) == (pair.name in names), check


def test_the_output_is_that_of_transformers(pair: Pair) -> None:
    if "logits" in pair.points:
        require_same_logits(pair, pair.acts.logits, pair.output.logits)
    else:
        assert "logits" not in pair.output


def test_patterns_are_those_of_eager_attention(pair: Pair) -> None:
    for label, stack in pair.squares.items():
        rows = pair.rows(label)[:, None, :, None]
        for layer, theirs in zip(stack.layers, pair.patterns(label, pair.output), strict=True):
            close(pair.acts[stack.point("pattern"), layer] * rows, theirs * rows, 1e-5)


def test_the_terms_of_the_ledger_make_the_pattern(pair: Pair) -> None:
    for label in pair.squares:
        split = am.decompose_scores(pair.model, pair.inputs, **({"stack": label} if label else {}))
        rows = pair.rows(label)[:, None, :, None]
        for place, theirs in enumerate(pair.patterns(label, pair.output)):
            total = torch.stack([term[:, place].expand(theirs.shape) for term in split.terms.values()]).sum(dim=0)
            made = total.softmax(dim=-1) * theirs.sum(dim=-1, keepdim=True)  # less than 1 beside a sink
            close(made * rows, theirs.to(total) * rows, 5e-5)


def without_head(pair: Pair, label: str, layer: int, head: int) -> Any:
    """transformers' output if W_O of a layer reads zeros for a head; blocks that share W_O differ by their call."""
    stack = pair.model.stacks[label]
    weights = [stack.module(number, stack.architecture.out).weight for number in stack.layers]
    place, calls = list(stack.layers).index(layer), count()
    call = sum(weight is weights[place] for weight in weights[:place])

    def before(module: Any, args: Any) -> Any:
        if next(calls) != call:
            return None
        z = args[0].clone()
        z.unflatten(-1, (stack.n_heads, -1))[..., head, :] = 0
        return (z, *args[1:])

    outs = [module for module in pair.raw.modules() if getattr(module, "weight", None) is weights[place]]
    handles = [out.register_forward_pre_hook(before) for out in outs]
    with until_the_end(handles):
        return run_plain(pair.name, pair.raw, pair.inputs)


def test_a_head_set_to_zero_is_what_w_o_does_not_read(pair: Pair) -> None:
    """In a layer of each stack: the logits, and the patterns of the last layer."""
    output = pair.model.output_stack
    for label, stack in pair.model.stacks.items():
        layer, head = stack.layers[min(len(stack.layers) // 2, len(stack.layers) - 2)], stack.n_heads - 2
        theirs = without_head(pair, label, layer, head)
        with pair.model.intervene(am.Intervention.zero([(layer, head)], **({"stack": label} if label else {}))):
            ours = pair.model.run(pair.inputs, points=pair.points)
        if "logits" in pair.points:
            require_same_logits(pair, ours.logits, theirs.logits)
            assert float((ours.logits - pair.acts.logits).abs().max()) > 1e-3 * float(theirs.logits.abs().max())
        if output.label in pair.squares:
            last, rows = (output.point("pattern"), output.layers[-1]), pair.rows(output.label)[:, None, :, None]
            close(ours[last] * rows, pair.patterns(output.label, theirs)[-1] * rows, 2e-5)
            assert "logits" in pair.points or float((ours[last] - pair.acts[last]).abs().max()) > 1e-4


def test_every_layer_is_compared_while_it_runs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    identities: set[tuple[str, str, int]] = set()
    equations = running.equations

    def spied(*args: Any) -> Any:
        made = equations(*args)
        identities.update(made.identities)
        return made

    monkeypatch.setattr(running, "equations", spied)
    # A pass before has found which tensors the model changes in place.
    assert pair.model.run(pair.inputs).unchecked == ()
    for stack in pair.model.stacks.values():
        for layer in stack.layers:
            assert ("heads", stack.label, layer) in identities
            assert ("block", stack.label, layer) in identities or not stack.architecture.streams
            assert stack.architecture.norm == "pre" or ("mlp", stack.label, layer) in identities


def test_queries_keys_and_values_are_those_that_reach_attention(pair: Pair) -> None:
    if pair.name not in READ:
        return
    handed: dict[int, tuple[Tensor, ...]] = {}
    inner = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def keep(module: Any, *qkv: Any, **options: Any) -> Any:
        handed[module.layer_idx] = tuple(value.transpose(1, 2) for value in qkv[:3])
        return inner(module, *qkv, **options)

    AttentionMaskInterface.register("kept_for_a_test", eager_mask)
    ALL_ATTENTION_FUNCTIONS.register("kept_for_a_test", keep)
    run_plain(pair.name, pair.raw, pair.inputs, "kept_for_a_test")
    rotates = pair.model.points["q_rot"].absent is None
    names = ("q_rot", "k_rot", "v") if rotates else ("q", "k", "v")
    acts, real = pair.model.run(pair.inputs, points=names), pair.rows("")
    assert sorted(handed) == list(pair.model.stacks[""].layers)
    for layer, values in handed.items():
        for name, value in zip(names, values, strict=True):
            close(acts[name, layer][real], value[real], 1e-5)


DOUBLE: Final = ("phi3", "gpt_bigcode", "olmo2", "glm4", "falcon_h1", "albert", "roformer", "openai-gpt", "mpnet")


@pytest.mark.parametrize("kind", DOUBLE)
def test_other_sizes_in_float64(kind: str) -> None:
    raw = tiny.model_of(kind, tiny.OTHER, dtype=F64, seed=1)
    model, inputs = am.load(raw), inputs_of("phi3", raw)
    assert model.certificate.ok, repr(model.certificate)
    close(model.run(inputs).logits[0], run_plain(kind, raw, inputs).logits[0], 1e-6)
    split = am.decompose_scores(model, inputs)
    assert float((split.residual / split.largest).max()) <= 1e-12
