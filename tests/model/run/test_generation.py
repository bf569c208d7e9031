"""Generation with and without a cache, in whose passes hooks, interventions and captures apply."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import models
import pytest
import torch
from by_hand import z_changed, zeroed
from torch import Tensor
from torch.nn import functional as F

import attnmech as am
from attnmech.errors import InputError


@pytest.fixture(scope="module")
def demo() -> am.HookedModel:
    return am.load()


def test_what_cannot_be_continued_is_refused(demo: am.HookedModel) -> None:
    with pytest.raises(InputError, match="the same length"):
        demo.generate(["Anna sang.", "Anna lost her book."], cache=False)
    with pytest.raises(InputError, match="no head that continues"):
        models.hooked("bert").generate(torch.tensor([[5, 7]]))


def test_without_an_end_token_every_asked_token_is_made() -> None:
    plain = models.randomised(models.gpt2())
    plain.config.eos_token_id = plain.generation_config.eos_token_id = None
    hooked, ids = am.load(plain), torch.tensor([[5, 7], [8, 3]])
    longer = hooked.generate(ids, 6)
    assert longer.ids.shape == (2, 8)
    assert torch.equal(longer.ids, hooked.generate(ids, 6, generator=torch.Generator()).ids)
    assert torch.equal(longer.ids, hooked.generate(ids, 6, stop_at_eos=True).ids)


FAMILIES = ["gpt2", "llama", "bloom", "gemma2"]


def by_hand(
    plain: Any,
    ids: Tensor,
    count: int,
    choose: Callable[[Tensor], Tensor] = lambda logits: logits.argmax(dim=-1),
    changed: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tensor:
    """Generation token by token on the raw model."""
    for _ in range(count):
        with torch.no_grad(), changed():
            ids = torch.cat((ids, choose(plain(ids).logits[:, -1])[:, None]), dim=1)
    return ids


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_sees_hooks_and_interventions(family: str) -> None:
    hooked, plain, ids = models.hooked(family), models.plain(family), models.token_ids(family)
    options: dict[str, Any] = {"stop_at_eos": False}

    def last_doubled(z: Tensor) -> Tensor:
        z[:, -1] *= -2
        return z

    free = hooked.generate(ids, 5, points=["z"], **options)
    assert torch.equal(free.ids, by_hand(plain, ids, 5)) and len(free.steps) == 5
    with hooked.intervene(am.Intervention.zero([(1, 2), (1, 0)])):
        found = hooked.generate(ids, 5, **options)
    two = by_hand(plain, ids, 5, changed=lambda: z_changed(plain, 1, lambda z: zeroed(0)(zeroed(2)(z))))
    assert torch.equal(found.ids, two)
    with hooked.hooks({("z", 0): last_doubled}):
        last = hooked.generate(ids, 5, cache=False, **options)
    assert torch.equal(last.ids, by_hand(plain, ids, 5, changed=lambda: z_changed(plain, 0, last_doubled)))
    with hooked.intervene(am.Intervention.zero([(0, head) for head in range(hooked.n_heads)], positions="last")):
        stepwise = hooked.generate(ids, 5, points=[("z", 0)], cache=False, **options)
    without = by_hand(
        plain, ids, 5, changed=lambda: z_changed(plain, 0, lambda z: F.pad(z[:, :-1], (0, 0, 0, 0, 0, 1)))
    )
    assert torch.equal(stepwise.ids, without)
    assert [int((step["z", 0] == 0).all(dim=-1).all(dim=-1).sum()) for step in stepwise.steps] == [3] * 5
    assert len({tuple(each.ids.flatten().tolist()) for each in (free, found, last, stepwise)}) > 2


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.3}, {"top_k": 4}, {"top_p": 0.5}, {"top_k": 9, "top_p": 0.8, "temperature": 2.0}]
)
def test_draws_are_those_of_the_generator(options: dict[str, Any]) -> None:
    hooked, plain, ids = models.hooked("llama"), models.plain("llama"), models.token_ids("llama")
    generator = torch.Generator().manual_seed(5)

    def draw(logits: Tensor) -> Tensor:
        chances = (logits / options.get("temperature", 1.0)).softmax(dim=-1)
        for row in chances:
            ranked = sorted(range(len(row)), key=lambda token: -float(row[token]))
            allowed = ranked[: options.get("top_k", len(row))]
            row[[token for token in ranked if token not in allowed]] = 0
            row.div_(row.sum())
            mass, kept = 0.0, []
            for token in allowed:
                if mass >= options.get("top_p", 2.0):
                    break
                mass += float(row[token])
                kept.append(token)
            row[[token for token in ranked if token not in kept]] = 0
        return torch.multinomial(chances, 1, generator=generator)[:, 0]

    expected = by_hand(plain, ids, 6, draw)
    given = {"do_sample": True, "stop_at_eos": False, **options}
    found = hooked.generate(ids, 6, generator=torch.Generator().manual_seed(5), **given)
    assert torch.equal(found.ids, expected)
    assert torch.equal(found.ids, hooked.generate(ids, 6, generator=torch.Generator().manual_seed(5), **given).ids)


def test_an_encoder_decoder_and_its_cross_attention_step_by_step() -> None:
    hooked, plain = models.hooked("t5"), models.plain("t5")
    given = models.padded("t5")
    said = hooked.generate(given, 4, points=["cross.pattern"], stop_at_eos=False)
    assert said.target is not None and said.target.ids.shape == (3, 5) and len(said.steps) == 4
    target = torch.zeros(3, 1, dtype=torch.long)
    for step in said.steps:
        with torch.no_grad():
            ran = plain(**given, decoder_input_ids=target, output_attentions=True)
        for layer, theirs in enumerate(ran.cross_attentions):
            torch.testing.assert_close(step["cross.pattern", layer], theirs, rtol=1e-4, atol=1e-5)
        assert "logits" not in step
        target = torch.cat((target, ran.logits[:, -1].argmax(dim=-1, keepdim=True)), dim=1)
    assert torch.equal(said.target.ids, target)
    whole = hooked.run({**given, "decoder_input_ids": target[:, :-1]}, points=["cross.pattern"])
    for layer in range(3):
        rows = torch.cat([step["cross.pattern", layer][:, :, -1:] for step in said.steps], dim=2)
        torch.testing.assert_close(rows, whole["cross.pattern", layer])
    with hooked.intervene(am.Intervention.zero("all", stack="cross")):
        without = hooked.generate(given, 4, stop_at_eos=False)
    assert without.target is not None and not torch.equal(without.target.ids, target)


def test_the_steps_of_a_decoder_are_one_pass() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2", length=3)
    said = hooked.generate(ids, 4, points=["pattern", "scores"], stop_at_eos=False)
    for name in ("pattern", "scores"):
        whole = hooked.run(said.ids[:, :-1], points=[name])[name]
        for length, step in enumerate(said.steps, start=3):
            row = whole[..., length - 1, :length]
            torch.testing.assert_close(step[name][..., -1, :], row, rtol=1e-4, atol=1e-5)


def test_a_text_ends_at_its_end_token() -> None:
    """Row 0 is made to produce the end token (2) at once, row 1 in the third step, row 2 never."""
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2", length=4)

    def say(logits: Tensor) -> None:
        logits[:, :, 2] = -99
        logits[0, -1, 2] = 99
        if logits.shape[1] == 6 and len(logits) > 1:
            logits[1, -1, 2] = 99

    with hooked.hooks({"logits": say}):
        found = hooked.generate(ids, 5, points=["logits"])
        both = hooked.generate(ids[:2], 9)
        on = hooked.generate(ids[:1], 3, stop_at_eos=False)
    assert found.ids[0, 4:].tolist() == [2] * 5 and found.mask.sum(dim=1).tolist() == [5, 7, 9]
    assert found.steps[0].logits.shape == (3, 4, 53)
    assert both.ids.shape == (2, 7) and both.mask.sum(dim=1).tolist() == [5, 7]
    assert on.ids[0, 4:].tolist() == [2, 2, 2] and not on.padded


def test_passes_of_our_own_say_what_the_bridge_says(demo: am.HookedModel) -> None:
    prompt = "When Anna and Tom came to the harbour, Tom gave an old anchor"
    fast, own = demo.generate(prompt, 8), demo.generate(prompt, 8, points=["pattern"])
    assert torch.equal(fast.ids, own.ids) and fast.steps == () and len(own.steps) == 8
    again = demo.run(own, points=["pattern"])["pattern", 1]
    row = own.ids.shape[1] - 2
    torch.testing.assert_close(own.steps[-1]["pattern", 1][0, :, -1], again[0, :, row, : row + 1], atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topk": 2}, r"`generate` has no option `topk`; try `top_k`\. It takes stop_at_eos, do_sample, "),
        ({"num_beams": 2}, "`generate` has no option `num_beams`"),
        ({"repetition_penalty": -1.0}, "transformers .*penalty"),
        ({"generator": 5}, "`generator` must be a torch.Generator; got 5"),
        ({"do_sample": "no"}, "`do_sample` must be True or False"),
        ({"temperature": 0}, "`temperature` must be a finite number above 0"),
        ({"top_k": 0}, "`top_k` must be a whole number, 1 or more"),
        ({"top_p": 1.5}, "`top_p` must be a finite number above 0 and below 1"),
        ({"points": ["zz"]}, "there is no point 'zz'"),
        ({"points": 3}, "`points` must be a list of names"),
        ({"max_new_tokens": 13}, "this model has 19 positions; a prompt of 7 tokens and 13 new ones do not fit"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        models.hooked("gpt2").generate(models.token_ids("gpt2"), **{"max_new_tokens": 3, "points": ["z"], **options})
