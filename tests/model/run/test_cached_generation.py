"""Generation with a cache gives the tokens and logits of full passes, with and without edits, and is refused if not."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import models
import pytest
import tiny
import torch
from caching import cached
from comparing import refuses
from torch import Tensor
from transformers import StoppingCriteria

import attnmech as am
from attnmech.errors import InputError

One = am.Intervention
FAST: Final = ("gpt2", "bloom", "gemma2", "gpt_oss", "t5", "lfm2", "deepseek_v3", "gptj")
"""ALiBi, windows with a soft cap, sinks, cross-attention, convolutions, latents; GPT-J's attention is replaced."""
SLOW: Final = (
    "llama", "mpt3", "falcon_alibi_serial", "falcon_new", "opt_post", "mistral", "qwen3", "codegen", "gpt_neo", "jamba",
    "bart", "led", "llama4_text", "gemma3_text", "falcon_h1", "minicpm3", "glm4_moe_lite", "phi3",
    "cohere2", "olmo3", "biogpt", "bailing_hybrid", "gemma3n_text",
)  # fmt: skip

QWEN3_NEXT: Final = pytest.param(
    "qwen3_next",
    marks=(pytest.mark.slow, pytest.mark.xfail(reason="its chunks differ from its recurrence, in transformers too")),
)


@cached
def loaded(name: str) -> am.HookedModel:
    known = name in models.MAKERS | models.NEW | models.OTHERS | models.CROSSED
    return models.hooked(name) if known else am.load(tiny.model_of(name))


def prompts(model: am.HookedModel) -> Any:
    ids = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :3]}
    return inputs if "decoder" in model.stacks else ids


def edits(model: am.HookedModel) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Edits in the first layer, and in the last, by name."""
    stack = model.output_stack
    first, last, label = stack.layers[0], stack.layers[-1], stack.label
    heads, generator = [(first, stack.n_heads - 1), (last, 0)], torch.Generator().manual_seed(0)
    means = torch.randn(1, 40, stack.n_heads, stack.d_value, generator=generator)
    key, prefix = torch.randn(stack.d_head, generator=generator), f"{label}." if label else ""
    square: Callable[[Tensor], Tensor] = lambda p: p.square() / p.square().sum(dim=-1, keepdim=True)  # noqa: E731
    interventions = {
        "nothing": [],
        "zero": [One.zero(heads, positions=[2] if label else [2, 5], stack=label)],
        "mean": [One.replace(heads, dict.fromkeys((first, last), means), stack=label)],
        "add": [One.add("k", key, heads=[(first, 0)], stack=label)],
        "terms": [One.scale("query_key", 0.5, heads, stack=label)],
        "weights and keys": [One.reweight(heads, "first", 5.0, stack=label), One.remove_keys(heads, [1], stack=label)],
        "the last row of the last block": [One.zero([(last, 0)], positions="last", stack=label)],
    }
    if not stack.architecture.streams or last != stack.running[-1]:
        del interventions["the last row of the last block"]
    hooks = {
        "hook of a row": {(f"{prefix}z", first): lambda z: z * 1.5 + 0.1, "logits": lambda x: x * 1.2},
        "hook of the pattern": {(f"{prefix}pattern", first): square, (f"{prefix}scores", first): lambda s: s * 0.8},
        "hook of keys": {(f"{prefix}k", first): lambda k: k * 1.3, (f"{prefix}v", first): lambda v: v - 0.2},
    }
    chosen = {name: lambda several=several: model.intervene(*several) for name, several in interventions.items()}
    return chosen | {name: lambda points=points: model.hooks(points) for name, points in hooks.items()}


def steps(model: am.HookedModel, inputs: Any, *, cache: bool) -> tuple[Tensor, Tensor]:
    made = model.generate(inputs, 5, points=["logits"], stop_at_eos=False, cache=cache)
    written = made if made.target is None else made.target
    assert made.steps[-1].logits.shape[1] == (1 if cache else written.ids.shape[1] - 1)
    return written.ids, torch.stack([step.logits[:, -1] for step in made.steps])


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW), QWEN3_NEXT])
def test_a_cache_changes_no_token_and_no_logit(name: str) -> None:
    model = loaded(name)
    inputs, logits = prompts(model), list[Tensor]()
    for what, edit in edits(model).items():
        with edit():
            (ids, full), (mine, cached_logits) = (steps(model, inputs, cache=cache) for cache in (False, True))
        assert torch.equal(ids, mine), what
        torch.testing.assert_close(cached_logits, full, rtol=1e-5, atol=1e-5 * float(full.abs().max()), msg=what)
        assert what == "nothing" or not torch.equal(full, logits[0]), what
        logits.append(full)
    unwatched = model.generate(inputs, 5, stop_at_eos=False)
    assert torch.equal((unwatched.target or unwatched).ids, steps(model, inputs, cache=False)[0])


@pytest.mark.parametrize("name", ["gpt2", "bloom", "gemma2", "gpt_oss", "opt", "mpt3", "lfm2"])
def test_prompts_of_different_lengths_are_continued_as_each_alone(name: str) -> None:
    model, inputs = models.hooked(name), models.padded(name)
    for change in ((), (One.zero([(model.output_stack.layers[0], 0)], positions=[1]),)):
        with model.intervene(*change):
            several = model.generate(inputs, 5, stop_at_eos=False, points=["logits"])
            for row, length in enumerate((7, 5, 3)):
                prompt = inputs["input_ids"][row : row + 1, :length]
                one = model.generate(prompt, 5, stop_at_eos=False, points=["logits"], cache=False)
                assert torch.equal(several.alone(row).ids, one.ids)
                for step, alone in zip(several.steps, one.steps, strict=True):
                    torch.testing.assert_close(step.logits[row, -1], alone.logits[0, -1], rtol=1e-4, atol=2e-5)


def test_edits_that_change_earlier_rows_are_refused() -> None:
    model, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    refused = [
        model.hooks({("z", 0): lambda z: z - z.mean(dim=1, keepdim=True)}),
        model.hooks({("pattern", 1): lambda p: p.roll(1, dims=2)}),
        model.hooks({("resid_pre", 2): lambda x: torch.cat((x[:, :-1], 2 * x[:, -1:]), dim=1)}),
        model.intervene(One.zero([(0, 1)], positions="last")),
        model.intervene(One.reweight([(1, 1)], [-1], 2.0)),
    ]
    for edit in refused:
        with edit, pytest.raises(InputError, match=r"the cache holds keys and values .*cache=False"):
            model.generate(ids, 4, stop_at_eos=False)


def test_a_hook_that_raises_leaves_the_model_as_it_was() -> None:
    model, ids, calls = models.hooked("llama"), models.token_ids("llama"), []
    before = model.generate(ids, 9, points=["z"], stop_at_eos=False)

    def raise_at_seven(z: Tensor) -> None:
        calls.append(z.shape[1])
        if len(calls) == 7:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), model.hooks({("z", 0): raise_at_seven}):
        model.generate(ids, 9, stop_at_eos=False)
    assert calls == list(range(7, 14)) and model.edited == () and not model.in_force.running
    assert torch.equal(model.generate(ids, 9, points=["z"], stop_at_eos=False).ids, before.ids)


@pytest.mark.parametrize("points", [(), ("z",)])
def test_an_interruption_keeps_the_tokens_so_far(points: tuple[str, ...]) -> None:
    class Interrupting(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            if input_ids.shape[1] == 12:
                raise KeyboardInterrupt
            return torch.zeros(len(input_ids), dtype=torch.bool)

    model, ids = models.hooked("llama"), models.token_ids("llama")
    whole = model.generate(ids, 9, stop_at_eos=False)
    with pytest.warns(UserWarning, match="interrupted; the text has the 4 tokens"):
        part = model.generate(ids, 9, points=points, stop_at_eos=False, stopping_criteria=[Interrupting()])
    assert torch.equal(part.ids, whole.ids[:, :11]) and len(part.steps) == (4 if points else 0)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_prompt_and_answer_are_measured_together(name: str) -> None:
    model = models.hooked(name)
    inputs = models.padded(name) if name == "gpt2" else prompts(model) | {"attention_mask": None}
    inputs = {key: value for key, value in inputs.items() if value is not None}
    starts = (7, 5, 3) if name == "gpt2" else (3, 3)
    with model.intervene(One.zero([(1, 1)], stack=model.output_stack.label)):
        text = model.generate(inputs, 4, stop_at_eos=False)
        acts = model.run(text, points=[model.output_stack.point(point) for point in ("pattern", "z")] + ["logits"])
        reducer, stack = am.results.AttentionFocus.reducer(), model.output_stack.label or None
        (focus,) = am.stream(model, inputs, [reducer], stack=stack, generate=4)
        expected = am.attention_focus(model, model.generate(inputs, 4), stack=stack)
        (corpus,) = am.stream(model, iter([inputs]), [reducer], stack=stack, generate=4)
        effects = am.ablate_heads(model, text, metric="log_probability", answers=text.answer_ids)
    assert focus.provenance.options["generate"] == 4
    torch.testing.assert_close(focus.state, expected.state, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(corpus.entropy, expected.entropy, rtol=1e-9, atol=1e-9)
    written = text.target or text
    for row, start in enumerate(starts):
        ids, answer = written.ids[row], slice(start, start + 4)
        assert text.is_answer[row].nonzero()[:, 0].tolist() == [*range(start, start + 4)]
        assert text.answer_ids[row] == ids[answer].tolist()
        pattern, z = (model.output_stack.point(point) for point in ("pattern", "z"))
        assert torch.equal(acts.of_answer(pattern)[row], acts[pattern][:, row, :, answer])
        assert torch.equal(acts.of_answer((z, 1))[row], acts[z, 1][row, answer])
        chances = acts.logits[row].log_softmax(dim=-1)[start - 1 : start + 3].gather(1, ids[answer, None])
        assert float(effects.before[row]) == pytest.approx(float(chances.sum()), rel=1e-5)
    refuses("has no rows of an answer", model.run(inputs, points=[z]).of_answer, (z, 1))


def test_a_report_shows_the_answer_with_its_prompt() -> None:
    model = am.load()
    report = am.report(model, "Anna gave an old anchor", generate=4)
    text = model.generate("Anna gave an old anchor", 4)
    assert report.scores.tokens == text.tokens and report.written == 4
    assert "The model wrote the last 4 tokens of the text, greedily." in report.notes
    assert "text = model.generate('Anna gave an old anchor', 4)\n" in report.calls["setup"]
    refuses("`generate` must be a whole number", am.report, model, "Anna", generate=-1)
    both = am.report(model, ["Anna gave an old anchor", "Tom met"], generate=4)
    assert "    model.generate('Tom met', 4),\n" in both.texts[1].calls["setup"]
    assert both.texts[1].scores.tokens == model.generate("Tom met", 4).tokens
    refuses("`target`, or let the model write it with `generate`", am.report, model, "Anna", target="a", generate=4)
