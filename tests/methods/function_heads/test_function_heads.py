"""Effects of heads on tasks with examples equal those of plain hooks; the planted head is found."""

import itertools
from random import Random
from typing import Any

import models
import pytest
import torch
from by_hand import z_changed
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError
from attnmech.maths.intervals import TextMeans
from attnmech.methods.function_heads.result import foils_of, prompts_of

PAIRS = [("keys", "are"), ("dog", "here"), ("cabinet", "there"), ("to", "and"), ("the", "a"), (".", "dog"), ("a", "to")]
TEMPLATE = "{x} the {y} . "


def model_of(family: str) -> tuple[am.HookedModel, Any]:
    return am.load(models.fresh(family), tokenizer=models.tokenizer()), models.fresh(family)


@pytest.mark.core
@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom"])
def test_effects_equal_those_of_plain_hooks(family: str) -> None:
    hooked, plain = model_of(family)
    found = am.function_heads(hooked, PAIRS, shots=2, prompts=5, template=TEMPLATE, seed=3)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(3)).tolist()
    halves = [[PAIRS[place] for place in order[half::2]] for half in (0, 1)]
    teaching, asking = (
        prompts_of(hooked, half, 2, 5, TEMPLATE, 3 + number, None) for number, half in enumerate(halves)
    )

    def log_probabilities(prompts: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return torch.stack([plain(ids[None]).logits[0, -2].double().log_softmax(-1)[ids[-1]] for ids in prompts])

    torch.testing.assert_close(found.before, log_probabilities(asking.shuffled), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.clean, log_probabilities(asking.right), rtol=1e-4, atol=1e-5)
    for layer, head in ((0, 1), (1, 2)):
        kept: list[Tensor] = []
        with torch.no_grad(), z_changed(plain, layer, lambda z, kept=kept, head=head: kept.append(z[0, -2, head]) or z):  # type: ignore[func-returns-value]
            for ids in teaching.right:
                plain(ids[None])
        mean = torch.stack(kept).mean(dim=0)

        def restored(z: Tensor, head: int = head, mean: Tensor = mean) -> Tensor:
            z[:, -2, head] = mean
            return z

        with z_changed(plain, layer, restored):
            after = log_probabilities(asking.shuffled)
        torch.testing.assert_close(found.after[layer, head], after, rtol=1e-4, atol=1e-5)
        assert found.written is not None
        W_O = hooked.weights(layer).W_O[head].detach()
        torch.testing.assert_close(found.written[layer, head], mean @ W_O, rtol=1e-4, atol=1e-5)


def test_prompts() -> None:
    hooked, _ = model_of("gpt2")
    prompts = prompts_of(hooked, PAIRS[:4], 3, 9, TEMPLATE, 0, None)
    words = hooked.tokenizer.convert_ids_to_tokens
    for number, (right, wrong, answer) in enumerate(zip(prompts.right, prompts.shuffled, prompts.answers, strict=True)):
        tokens, others = words(right.tolist()), words(wrong.tolist())
        question, y = PAIRS[number % 4]
        assert tokens[-3:] == [question, "the", y] and answer == right[-1] == wrong[-1]
        examples = dict(zip(tokens[0:-3:4], tokens[2:-3:4], strict=True))
        assert examples == {x: y for x, y in PAIRS[:4] if x != question}
        assert others[0::4] == tokens[0::4] and sorted(others[2:-3:4]) == sorted(tokens[2:-3:4])
        assert all(now != before for now, before in zip(others[2:-3:4], tokens[2:-3:4], strict=True))
    again = prompts_of(hooked, PAIRS[:4], 3, 9, TEMPLATE, 0, None)
    assert all(torch.equal(one, other) for one, other in zip(prompts.shuffled, again.shuffled, strict=True))


def test_what_a_result_says_and_how_it_steers() -> None:
    hooked, _ = model_of("gpt2")
    found = am.function_heads(hooked, PAIRS, shots=2, prompts=5, template=TEMPLATE)
    assert found.lead.startswith(
        "Giving each of 15 heads its mean output after right examples, on 5 prompts (3 answers) with shuffled ones (ln"
    )
    assert found.lead.endswith("; 3 answers are too few for an interval, which needs 5 or more.")
    assert found.written is not None
    best = found.effect.flatten().topk(4).indices.tolist()
    total = sum(found.written[divmod(place, 5)] for place in best)
    torch.testing.assert_close(found.vector(4).by_layer[2][0, 0], total)
    assert (
        str(found.vector(4)) == "a function vector of 4 heads" and "Blue: ln p of the answer rises" in found.to_html()
    )
    doses = am.steer(hooked, found.vector(4), ["keys the are"], at="resid_post", layers=[1], factors=[1], metric="loss")
    assert doses.what == "a function vector of 4 heads added to resid_post of L1"
    twice = found - found
    assert twice.effect.abs().max() == 0 and twice.written is None
    with pytest.raises(InputError, match="`count` must be a whole number, 1 to 15"):
        found.vector(16)
    gemma, _ = model_of("gemma2")
    with pytest.raises(InputError, match="a norm follows the heads of this model"):
        am.function_heads(gemma, PAIRS, shots=2, prompts=2, template=TEMPLATE).vector()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"examples": PAIRS[:5]}, "2 examples and a question in each half need 6 pairs; got 5"),
        ({"examples": [("a", "")] * 6}, "`examples` must be a list of"),
        ({"examples": [(x, "are") for x, _ in PAIRS]}, "shuffled examples need different answers; all are 'are'"),
        ({"template": "{x} the"}, "`template` must hold {x} once, and {y} once after it"),
        ({"shots": 1}, "`shots` must be a whole number, 2 or more"),
        ({"heads": [(3, 0)]}, "3"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    hooked, _ = model_of("gpt2")
    with pytest.raises(InputError, match=message.replace("{", r"\{")):
        am.function_heads(hooked, **{"examples": PAIRS, "shots": 2, "template": TEMPLATE, **options})


NUMBERED = tuple(f"w{number}" for number in range(50))


def drawn_pairs(seed: int, answers: int) -> list[tuple[str, str]]:
    """22 different questions that share a number of answers."""
    words = Random(seed).sample(NUMBERED[3:], 22 + answers)
    return [(words[number], words[22 + number % answers]) for number in range(22)]


def test_random_models_have_no_function_heads() -> None:
    """In a random model no head carries a task, with few answers or many, though its changes favour some answers."""
    alone = clear = 0
    weights = models.fresh("gpt2")
    model = am.load(weights, tokenizer=models.tokenizer(words=NUMBERED))
    for seed, answers in itertools.product(range(10), (4, 22)):
        models.randomised(weights, seed=500 + seed)
        found = am.function_heads(model, drawn_pairs(seed, answers), shots=3, template="{x} {y} ", seed=seed)
        sizes = TextMeans.of_values(found.per_text)
        alone += bool(sizes.clear.any()) or bool(sizes.clear_size.any())
        clear += bool(found.clear.any()) or bool(found.clear_size.any())
    assert clear <= 3 and alone >= 5, (clear, alone)  # P(more than 3 of 20 at 5 %) < 0.02


def test_effects_are_compared_with_foils_by_hand() -> None:
    """Of weights with a head whose change exceeds that of others on the same questions."""
    raw, pairs = models.fresh("gpt2", seed=552), drawn_pairs(3, 22)
    model = am.load(models.fresh("gpt2", seed=552), tokenizer=models.tokenizer(words=NUMBERED))
    found = am.function_heads(model, pairs, shots=3, template="{x} {y} ", seed=3)
    order = torch.randperm(22, generator=torch.Generator().manual_seed(3)).tolist()
    teaching, asking = (
        prompts_of(model, [pairs[place] for place in order[half::2]], 3, 24, "{x} {y} ", 3 + half, None)
        for half in (0, 1)
    )
    foils = foils_of([prompt.tolist() for prompt in asking.shuffled], asking.answers)
    for prompt, answer, foil in zip(asking.shuffled, asking.answers, foils, strict=True):
        assert foil != answer and foil in asking.answers and foil not in prompt[:-1] and answer not in prompt[:-1]
    assert found.against_foils is not None
    (layer, head), *_ = (found.against_foils != 0).any(dim=-1).nonzero().tolist()
    mean = torch.stack([model.run(ids[None], ["z"])["z", layer][0, -2, head] for ids in teaching.right]).mean(dim=0)

    def restored(z: Tensor) -> Tensor:
        z[:, -1, head] = mean
        return z

    def margins() -> Tensor:
        logits = [raw(prompt[None, :-1]).logits[0, -1].double() for prompt in asking.shuffled]
        return torch.stack([row[a] - row[b] for row, a, b in zip(logits, asking.answers, foils, strict=True)])

    with torch.no_grad():
        before = margins()
        with z_changed(raw, layer, restored):
            after = margins()
    torch.testing.assert_close(found.against_foils[layer, head], after - before, rtol=1e-3, atol=1e-5)
