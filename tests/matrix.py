"""Makes every public call on a small random model of every family, and records which work and why others are refused.

All axes of a model have different lengths; biases and norms are random. A cell that raises anything but an
`AttnmechError` is a bug.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import Parameter, isfunction, signature
from itertools import chain
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import docstring_examples
import models
import senses
import tiny
import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

import attnmech as am
from attnmech.demo import text
from attnmech.results.result import Result

# -- families --------------------------------------------------------------------------------------------------

WORDS: Final = (*models.WORDS, "Anna", "Tom", "gave", "shell", "old", "sang", "key", "is", "of", "chest", "[MASK]")
TEXT: Final = "Anna gave the old keys to Tom. the dog sang of a shell."
TARGET: Final = "a key is here. there are keys."
CLEAN: Final = "the old keys to the cabinet are here. the keys to the chest are"
CORRUPTED: Final = "the old key to the cabinet is here. the key to the chest is"
TEXTS: Final = (
    TEXT,
    CLEAN,
    CORRUPTED,
    "Tom gave a shell to the dog. Anna is there and sang.",
    "the dog is here. a key.",
)


def masked(kind: str) -> Any:
    made = getattr(transformers, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES[kind])
    return models.randomised(made._from_config(tiny.config_of(kind), dtype=torch.float32))


def unispeech() -> Any:
    return models.randomised(senses.made("UniSpeechForCTC", "UniSpeech", senses.WAVES))


def whisper() -> Any:
    return models.randomised(senses.made("WhisperForConditionalGeneration", "Whisper", senses.TRANSCRIBING))


def named(members: str, build: Callable[[str], Any] = tiny.model_of) -> dict[str, dict[str, Callable[[], Any]]]:
    """Members as "name: model types; ...", by the name in the table."""
    pairs = (member.strip().split(": ") for member in members.split(";"))
    return {name: {kind: partial(build, kind) for kind in kinds.split()} for name, kinds in pairs}


FAMILIES: Final[dict[str, dict[str, dict[str, Callable[[], Any]]]]] = {
    "decoders": named(
        "GPT-2: gpt2; OPT: opt; Llama 1 to 4: llama llama4_text; Mistral: mistral; Gemma 1 to 3: gemma gemma2 "
        "gemma3_text; Qwen 2 and 3: qwen2 qwen3; OLMo: olmo olmo2 olmo3; Phi: phi phi3; Cohere: cohere cohere2; "
        "GLM-4: glm4; Granite: granite; gpt-oss: gpt_oss; GPT-NeoX: gpt_neox; GPT-J: gptj"
    ),
    "… with a position term": named("BLOOM: bloom; MPT: mpt")
    | {"Falcon with ALiBi": {"falcon": lambda: models.fresh("falcon_alibi_serial")}},
    "… with latents or gates": named(
        "DeepSeek-V2 and V3: deepseek_v2 deepseek_v3; MiniCPM3: minicpm3; Qwen3-Next: qwen3_next; "
        "OLMo-hybrid: olmo_hybrid"
    ),
    "mixtures of experts": named(
        "Mixtral: mixtral; Qwen-MoE: qwen2_moe qwen3_moe; OLMoE: olmoe; Granite-MoE: granitemoe; "
        "Switch: switch_transformers"
    ),
    "hybrids": named(
        "Jamba: jamba; Bamba: bamba; LFM2: lfm2; Falcon-H1: falcon_h1; Nemotron-H: nemotron_h; "
        "Granite-hybrid: granitemoehybrid; Kimi Linear: kimi_linear"
    ),
    "attention alone": named(
        "Gemma 3n and 4: gemma3n_text gemma4_text; MiniMax: minimax; X-MOD: xmod; Zamba: zamba zamba2"
    ),
    "encoders": named(
        "BERT: bert; RoBERTa: roberta; DistilBERT: distilbert; ELECTRA: electra; ALBERT: albert; MPNet: mpnet; "
        "RemBERT: rembert; RoFormer: roformer; ModernBERT: modernbert; ESM: esm",
        masked,
    ),
    "disentangled attention": named("DeBERTa to v3: deberta deberta-v2; XLNet: xlnet"),
    "encoder-decoders": named(
        "T5: t5; umT5: umt5; BART: bart; mBART: mbart; Marian: marian; Pegasus: pegasus; M2M100: m2m_100; "
        "Blenderbot: blenderbot"
    )
    | {"Whisper": {"whisper": whisper}},
    "long texts": {
        "Longformer": {"longformer": lambda: models.fresh("longformer")}, "LED": {"led": lambda: models.fresh("led")},
    },
    "images": named(
        "ViT: vit; DeiT: deit; DINOv2 and v3: dinov2 dinov3; CLIP: clip_vision; SigLIP: siglip_vision; BEiT: beit; "
        "YOLOS: yolos",
        senses.raw,
    ),
    "sound": named("wav2vec 2.0: wav2vec2; HuBERT: hubert", senses.raw) | {"UniSpeech": {"unispeech": unispeech}}
    | named("SEW: sew; AST: ast; Whisper: whisper_encoder", senses.raw),
}  # fmt: skip
"""A small model of each family that the table in the docs names: by its row, its name there, and its model type."""


# -- what calls are made on ------------------------------------------------------------------------------------


class Subject:
    """A loaded model with every kind of input that calls take."""

    def __init__(self, raw: Any, folder: Path, device: str | None = None) -> None:
        self.raw, self.folder = raw, folder
        self.tokenizer = None if raw.main_input_name != "input_ids" else models.tokenizer(words=WORDS)
        if self.tokenizer is not None:
            self.tokenizer.add_special_tokens({"mask_token": "[MASK]"})
        self.model = am.load(raw, tokenizer=self.tokenizer, device=device)
        self.stack: str | None = None
        """The stack that a call concerns, in a model with several."""

    @property
    def crossed(self) -> bool:
        return len(self.model.stacks) > 1

    @cached_property
    def inputs(self) -> list[Any]:
        """Five inputs, of different lengths if the model takes any length."""
        if self.tokenizer is None:
            return [self._signal(seed) for seed in range(5)]
        if self.crossed:
            return [self.model.encode(text, target=TARGET) for text in TEXTS]
        return list(TEXTS)

    @property
    def texts(self) -> Any:
        """All inputs in the form for calls on several: texts as a list, others as an iterator."""
        return self.inputs if self.reads_text else iter(self.inputs)

    @property
    def few(self) -> Any:
        return self.inputs[:2] if self.reads_text else iter(self.inputs[:2])

    @property
    def reads_text(self) -> bool:
        return self.tokenizer is not None and not self.crossed

    def _signal(self, seed: int) -> dict[str, Tensor]:
        signal = self.model.encoder.signal  # type: ignore[union-attr]
        given = dict(signal.noise(1, seed, next(self.raw.parameters())))
        if self.crossed:
            given["decoder_input_ids"] = torch.tensor([[3, 7, 9, 11, 5, 20]]) + seed
        return given

    @property
    def text(self) -> Any:
        return self.inputs[0]

    @property
    def with_global_token(self) -> Any:
        """For a model with windows, one input whose first token is global; for any other, its inputs."""
        if not any(stack.architecture.windows for stack in self.model.stacks.values()):
            return self.texts
        ids = torch.arange(3, 16)[None]
        given = {"input_ids": ids, "global_attention_mask": (ids == 3).long()}
        return given | ({"decoder_input_ids": ids[:, :6]} if self.crossed else {})

    @property
    def pair(self) -> tuple[Any, Any]:
        """A clean and a corrupted input of equal lengths."""
        return self.inputs[1], self.inputs[2]

    @property
    def segments(self) -> Any:
        """Sentences, or two halves of an input without sentences."""
        if self.tokenizer is not None:
            return "sentence"
        return [(0, 3), (3, self.model.encode(self.text).queries(self.stack or "").ids.shape[1])]

    @property
    def metric(self) -> Any:
        """The loss, or a function of the logits of a model that predicts no next token."""
        return "loss" if self.model.causal and self.model.writes_tokens else first_logits

    @property
    def scored(self) -> dict[str, Any]:
        """The metric, with its direction."""
        return {"metric": self.metric} | ({} if self.metric == "loss" else {"higher_is_better": False})

    @property
    def judged(self) -> dict[str, Any]:
        if not self.model.writes_tokens:
            return {"metric": first_logits}
        return {"answers": torch.tensor([5]), "against": torch.tensor([9])}

    @property
    def zero(self) -> am.Intervention:
        """The heads of this stack, set to zero."""
        return am.Intervention.zero("all", **({"stack": self.stack} if self.stack else {}))

    @property
    def of_stack(self) -> dict[str, str]:
        return {"stack": self.stack} if self.stack else {}

    @property
    def heads(self) -> list[tuple[int, int]]:
        """Two heads of the first layer with attention and two of the last."""
        layers = (self.model.stack(self.stack) if self.stack else self.model.output_stack).layers
        return [(layers[0], 0), (layers[0], 1), (layers[-1], 0), (layers[-1], 1)]


def first_logits(logits: Tensor, batch: Any) -> Tensor:
    """A metric of any model with logits."""
    return logits.flatten(1)[:, :5].sum(dim=1)


# -- calls -----------------------------------------------------------------------------------------------------

Call = Callable[[Subject], Any]


def look(result: Any, folder: Path) -> None:
    """Does with a result what a user does: prints it, shows it in a notebook, makes its table and figure, saves it.

    A loaded result has the same sentence and table.
    """
    printed = repr(result)
    assert isinstance(result, Tensor) or not re.search(r"\bnan\b|\binf\b|\{\w+\}", printed), printed
    if hasattr(result, "_repr_html_"):
        result._repr_html_()
    table = result.to_frame() if hasattr(result, "to_frame") else None
    plot = getattr(result, "plot", None)
    if plot and all(argument.default is not Parameter.empty for argument in signature(plot).parameters.values()):
        plot()
    if isinstance(result, Result):
        again = am.load_result(result.save(folder / "result.safetensors"))
        assert repr(again) == printed and (table is None or again.to_frame().equals(table))


def _written(result: Any, of: Subject) -> Any:
    result.write_html(of.folder / "page.html")
    return result


def _plotted(result: Any, *chosen: Any) -> Any:
    result.plot(*chosen)
    return result


def _certify(of: Subject) -> Any:
    certificate = am.certify(of.model)
    assert certificate.ok, certificate.verdict
    return certificate


def _run(of: Subject) -> Any:
    stack = of.model.stack(of.stack)
    acts = of.model.run(of.text, points=[stack.point("pattern"), stack.point("v"), stack.point("q")])
    acts.show(stack.point("pattern"), layer=stack.layers[-1])
    return acts[stack.point("pattern"), stack.layers[-1]]


def _hooks(of: Subject) -> Any:
    stack = of.model.stack(of.stack)
    with of.model.hooks({(stack.point("pattern"), stack.layers[0]): lambda pattern: pattern / 2}):
        return of.model.run(of.text, points=[stack.point("z")])[stack.point("z"), stack.layers[-1]]


def _intervene(of: Subject) -> Any:
    stack = of.model.stack(of.stack)
    changes = [
        am.Intervention.zero(of.heads[:1], **of.of_stack),
        am.Intervention.attend(of.heads[1:2], "uniform", **of.of_stack),
        am.Intervention.remove_keys(of.heads[2:3], "first", **of.of_stack),
        am.Intervention.scale("query_key", 0.5, of.heads[3:], **of.of_stack),
    ]
    with of.model.intervene(*changes):
        return of.model.run(of.text, points=[stack.point("z")])[stack.point("z"), stack.layers[-1]]


def _gradients(of: Subject) -> Any:
    stack = of.model.stack(of.stack)
    acts = of.model.run(of.text, points=[stack.point("z")], gradients_of=lambda logits: logits.sum())
    gradient = acts.gradients[stack.point("z"), stack.layers[0]]
    assert gradient.shape[2] == stack.n_heads
    return gradient


def _generate(of: Subject) -> Any:
    stack = of.model.output_stack
    generated = of.model.generate(of.text, 2, points=[stack.point("pattern")])
    return generated.steps[-1][stack.point("pattern"), stack.layers[-1]]


def _decompose_scores(of: Subject) -> Any:
    split = am.decompose_scores(of.model, of.text, **of.of_stack)
    layer = split.layers[-1]
    split.explain(layer, 1, 2)
    split.plot("attention_map", layer=layer, head=1)
    split.write_html(of.folder / "scores.html")
    return split


def _centred(of: Subject) -> Any:
    split = am.decompose_scores(of.model, of.text, centre="mean", **of.of_stack)
    split.position_kernel().plot(layer=split.layers[-1], head=1)
    return split


def _decompose_by_source(of: Subject) -> Any:
    found = am.decompose_by_source(of.model, of.text, cells=[(5, 4)])
    found.explain(*of.heads[-1], 5, 4)
    return found


def _logits(of: Subject) -> Any:
    stack = {"stack": of.model.output_stack.label} if of.crossed else {}
    answers, against = torch.tensor([5]), torch.tensor([9])
    return am.residual_updates(of.model, of.text, answers=answers, against=against, **stack).logits


def _sweep(of: Subject) -> Any:
    changes = {"uniform": am.Intervention.attend(of.heads, "uniform", **of.of_stack), "zero": of.zero}
    return am.sweep(of.model, of.few, changes, of.metric)


def _faithfulness(of: Subject) -> Any:
    circuit = am.Circuit(nodes=tuple(f"L{layer}H{head}" for layer, head in of.heads))
    return am.faithfulness(of.model, circuit, *of.pair, **of.judged)


def _steer(of: Subject) -> Any:
    stack = of.model.output_stack
    layer = stack.layers[0]
    values = {layer: torch.ones(1, 1, stack.n_heads, stack.d_value)}
    return am.steer(of.model, values, of.texts, at="z", heads=[(layer, 0)], factors=[0.5], metric=of.metric)


def _function_heads(of: Subject) -> Any:
    words = ("keys", "dog", "the", "a", "to", "are")
    examples = [(word, other) for word, other in zip(words, reversed(words), strict=True)]
    return am.function_heads(of.model, examples, shots=2, prompts=2, heads=of.heads[:1])


def _path_patch(of: Subject) -> Any:
    # A small hybrid has a single layer with attention, whose heads can only send to the logits.
    receivers = of.heads[-1:] if len(of.model.output_stack.layers) > 1 else "logits"
    return am.path_patch(of.model, *of.pair, receivers, senders=of.heads[:1], **of.judged)


def _confirm_heads(of: Subject) -> Any:
    prompts = ["the key is", "the dog is", "a shell is", "Anna is", "Tom is", "the chest is"]
    prompts += ["old keys are", "the keys are", "a dog and a key are", "Tom and Anna are", "keys are", "the shell is"]
    cases = [am.Case(prompt, " here", " there", group=prompt) for prompt in prompts]
    return am.confirm_heads(of.model, of.heads[:1], am.Task("place", cases), sets=20)


def _trajectory(of: Subject) -> Any:
    run = am.trajectory([of.model, of.model], lambda model: am.attention_focus(model, of.texts, **of.of_stack))
    run.plot(run.columns[0])
    return run


def _example(function: Callable[..., Any]) -> Call:
    """The example in the docstring of a public function, with the subject's model and inputs."""

    def call(of: Subject) -> Any:
        with patch.object(am, "load", lambda: of.model), patch.object(text, "documents", lambda count: of.texts):
            made = next(docstring_examples.run(function), None)
        assert made is not None, f"no line of the docstring's example makes a result: {function.__name__}"
        return made.result

    return call


CALLS: dict[str, Call] = {
    "certify": _certify,
    "run": _run,
    "hooks": _hooks,
    "intervene": _intervene,
    "gradients": _gradients,
    "generate": _generate,
    "loss": lambda of: of.model.loss(of.text),
    "decompose_scores": _decompose_scores,
    'decompose_scores(centre="mean")': _centred,
    "by_wavelength": lambda of: am.decompose_scores(of.model, of.text, centre="mean", **of.of_stack).by_wavelength([8]),
    "decompose_by_source": _decompose_by_source,
    "variance_shares": lambda of: am.variance_shares(of.model, of.texts, **of.of_stack),
    "mean_qk": lambda of: am.mean_qk(of.model, of.texts, **of.of_stack),
    "mean_z": lambda of: am.mean_z(of.model, of.texts, **of.of_stack),
    "attention_focus": lambda of: am.attention_focus(of.model, of.with_global_token, **of.of_stack),
    "residual_updates": lambda of: am.residual_updates(of.model, of.text, **of.of_stack),
    "residual_updates(answers)": _logits,
    "residual_drift": lambda of: am.residual_drift(of.model, of.text, k=5, **of.of_stack),
    "attention_flow": lambda of: am.attention_flow(of.model, of.text),
    'attention_flow("norm_residual")': lambda of: am.attention_flow(of.model, of.text, "norm_residual"),
    'attention_flow("gradient")': lambda of: am.attention_flow(of.model, of.text, "gradient", metric=of.metric),
    "stream": lambda of: am.stream(of.model, iter(of.inputs), [am.results.AttentionFocus.reducer()], **of.of_stack)[0],
    "head_types": lambda of: am.head_types(of.model, None if of.reads_text else of.texts, **of.of_stack),
    "relations": lambda of: _plotted(am.relations(of.model, [(text, 5, 2, "five") for text in of.inputs]), "five"),
    "group_attention": lambda of: _plotted(
        am.group_attention(of.model, of.texts, {"nouns": ["keys", "dog", "shell"], "articles": ["the", "a"]}),
        "nouns → articles",
    ),
    "segment_attention": lambda of: am.segment_attention(of.model, of.text, of.segments, **of.of_stack),
    "segment_effects": lambda of: am.segment_effects(of.model, of.text, of.segments),
    "redundancy": lambda of: am.redundancy(of.model, of.texts, **of.of_stack),
    "odd_heads": lambda of: am.odd_heads(of.model, of.texts, **of.of_stack),
    "composition": lambda of: am.composition(of.model),
    "joint_embedding": lambda of: _written(
        am.joint_embedding(of.model, of.text, sample=30, heads=of.heads[:2], **of.of_stack), of
    ),
    "ablate_heads": lambda of: am.ablate_heads(of.model, of.few, of.heads, of.zero, of.metric),
    'ablate_heads(later="frozen")': lambda of: am.ablate_heads(
        of.model, of.few, of.heads[:1], of.zero, of.metric, later="frozen"
    ),
    'ablate_heads("mean")': lambda of: am.ablate_heads(
        of.model, of.few, of.heads, "mean", of.metric, reference=of.texts
    ),
    "ablate_set": lambda of: am.ablate_set(of.model, of.few, of.heads[:2], of.zero, of.metric),
    "ablate_pairs": lambda of: am.ablate_pairs(of.model, of.few, [(of.heads[0], of.heads[-1])], metric=of.metric),
    "sweep": _sweep,
    "head_importance": lambda of: am.head_importance(of.model, of.few, metric=of.metric),
    "null_attention": lambda of: am.null_attention(of.model, of.few, heads=of.heads[:1], metric=of.metric),
    "patch": lambda of: am.patch(of.model, *of.pair, heads=of.heads[:2], **of.judged),
    'patch(at="resid_pre")': lambda of: am.patch(of.model, *of.pair, at="resid_pre", positions=[2, 3], **of.judged),
    "attribute": lambda of: am.attribute(of.model, *of.pair, confirm=1, controls=1, **of.judged),
    "attribute(edges=True)": lambda of: am.attribute(
        of.model, *of.pair, edges=True, nodes="heads+mlps", confirm=1, controls=1, **of.judged
    ),
    "faithfulness": _faithfulness,
    "mean_difference": lambda of: am.mean_difference(of.model, iter(of.inputs[:4]), iter(of.inputs[1:]), at="z"),
    "steer": _steer,
    "function_heads": _function_heads,
    "path_patch": _path_patch,
    "prune_heads": lambda of: am.prune_heads(of.model, of.few, heads=of.heads, steps=2, random=1, **of.scored),
    "confirm_heads": _confirm_heads,
    "contrast_answers": lambda of: am.contrast_answers(
        of.model, of.text, am.Intervention.zero("all", stack=of.model.output_stack.label), 3
    ),
    "kv_scores": lambda of: am.kv_scores(of.model, of.texts, first=1, last=3, steps=1, random=1),
    "compare": lambda of: am.compare(of.model, of.model, of.texts, am.head_importance, metric=of.metric),
    "untrained": lambda of: am.untrained(of.model).certificate,
    "trajectory": _trajectory,
    "report": lambda of: _written(am.report(of.model, of.text), of),
    "atlas": lambda of: _written(am.atlas(of.model, of.texts, k=2), of),
    "examples": lambda of: am.examples(of.model, of.texts, k=3, **of.of_stack),
    'examples(by="value_weighted")': lambda of: am.examples(
        of.model, of.texts, by="value_weighted", k=3, **of.of_stack
    ),
    'examples(by="update")': lambda of: am.examples(of.model, of.texts, by="update", k=3, **of.of_stack).by_head(),
    'examples(by="next_token")': lambda of: am.examples(
        of.model, of.texts, by="next_token", k=3, **of.of_stack
    ).by_head(),
    "qk_directions": lambda of: am.qk_directions(of.model, of.texts, k=2, distance=1),
    "ov_tokens": lambda of: am.ov_tokens(of.model, of.texts, k=3, **of.of_stack),
}
CALLS |= {
    name: _example(getattr(am, name))
    for name in am.__all__
    if isfunction(getattr(am, name))
    and name not in {"load", "load_result", "engine_statistics", "explore", *(call.partition("(")[0] for call in CALLS)}
}
"""The calls, by the names in the table; of a function that is not listed, the example in its docstring."""

OF_A_STACK: Final = {
    "run", "hooks", "intervene", "gradients", "decompose_scores", 'decompose_scores(centre="mean")', "by_wavelength",
    "variance_shares", "mean_qk", "mean_z", "attention_focus", "residual_updates", "residual_drift", "stream",
    "head_types", "segment_attention", "redundancy", "odd_heads", "joint_embedding",
    "ablate_heads", 'ablate_heads(later="frozen")', "ablate_set", "sweep", "trajectory", "examples",
    'examples(by="value_weighted")', 'examples(by="update")', 'examples(by="next_token")', "ov_tokens",
}  # fmt: skip
"""The calls that concern one stack of a model with several."""


# -- cells -----------------------------------------------------------------------------------------------------


def models_of_all() -> dict[str, Callable[[], Any]]:
    """Every small model, by its model type."""
    return {kind: make for row in FAMILIES.values() for of_name in row.values() for kind, make in of_name.items()}


_SHARED: Final = 8
"""The number of models of a row that share its calls, if the row has that many."""


def calls_of(kind: str) -> dict[str, Call]:
    """The share of the calls that a model makes in the tests; the models of a row make every call."""
    (row,) = (
        [*chain.from_iterable(row.values())] for row in FAMILIES.values() if any(kind in of for of in row.values())
    )
    turn, turns = row.index(kind), min(len(row), _SHARED)
    return {name: function for number, (name, function) in enumerate(CALLS.items()) if (number + turn) % turns == 0}


def stacks_of(subject: Subject, name: str) -> tuple[str | None, ...]:
    """The stacks that a call is tried on, one by one; None for the model as a whole."""
    return tuple(subject.model.stacks) if subject.crossed and name in OF_A_STACK else (None,)


def cells(subject: Subject, calls: Mapping[str, Call] = CALLS) -> Iterator[tuple[str, str, str]]:
    """Makes every call on every stack that it may concern; yields name, stack and the reason of a refusal, or "".

    Any error but an `AttnmechError` is raised.
    """
    for name, function in calls.items():
        for stack in stacks_of(subject, name):
            subject.stack = stack
            refused = ""
            try:
                look(function(subject), subject.folder)
            except am.AttnmechError as error:
                refused = _reason(subject.model, str(error))
            except Exception as error:
                raise AssertionError(f"{name} ({stack or 'the model'}) raises {type(error).__name__}") from error
            yield name, stack or "", refused


@dataclass(frozen=True)
class Row:
    cells: int
    """The number of all calls."""
    refused: Mapping[str, str]
    """The reasons, by call, with the stack in brackets for models with several stacks."""


def row_of(
    make: Callable[[], Any], folder: Path, calls: Mapping[str, Call] = CALLS, counted: Collection[str] = CALLS
) -> Row:
    """Makes all or some calls on a small model; `counted` are those of its cells."""
    subject = Subject(make(), folder)
    done = cells(subject, calls)
    refused = {f"{name} ({stack})" if stack else name: why for name, stack, why in done if why}
    return Row(sum(len(stacks_of(subject, name)) for name in counted), refused)


def _reason(model: am.HookedModel, error: str) -> str:
    """The first sentence of an error, without the names of the model."""
    plans = {stack.architecture.name for stack in model.stacks.values()}
    for plan in plans:
        error = error.replace(f" ({plan})", "")
    for name in (model.name, *plans):
        error = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "this model", error)
    return " ".join(error.partition(". ")[0].partition("; got")[0].removesuffix(".").split())
