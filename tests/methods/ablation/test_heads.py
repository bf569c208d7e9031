"""Effects of ablations equal those of ablations by hand on the raw transformers model."""

import itertools
from functools import partial
from typing import Any

import models
import pytest
import torch
from by_hand import divergences, losses, plan_of, seen, until_the_end, z_changed, zeroed
from comparing import refuses
from torch import Tensor, nn

import attnmech as am
from attnmech.errors import InputError
from attnmech.methods.joint_embedding.result import choose_texts
from attnmech.model.parts.modules import submodule

LIKELY: dict[str, Any] = {"metric": "log_probability"}


@pytest.mark.core
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "bloom", "gemma2", "gpt_neox", "opt", "qwen3"])
def test_zeroing_each_head_equals_the_raw_model(family: str) -> None:
    hooked, plain, ids = models.hooked(family), models.plain(family), models.token_ids(family)
    metric = "loss" if hooked.causal else "kl"
    lengths = [ids.shape[1]] * len(ids)
    effects = am.ablate_heads(hooked, ids, metric=metric)
    with torch.no_grad():
        clean = plain(ids).logits
        for layer in range(hooked.n_layers):
            for head in range(hooked.n_heads):
                with z_changed(plain, layer, zeroed(head)):
                    now = plain(ids).logits
                expected = losses(now, ids, lengths) if metric == "loss" else divergences(now, clean, lengths)
                torch.testing.assert_close(effects.after[layer, head], expected, rtol=1e-4, atol=1e-5)
    assert effects.complete
    if metric == "loss":
        torch.testing.assert_close(effects.before, losses(clean, ids, lengths), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma2", "gpt_neox"])
def test_frozen_keeps_all_that_comes_later(name: str) -> None:
    """Direct effect: every module after the ablated attention is made to return its clean output."""
    hooked, plain, ids = models.hooked(name), models.plain(name), models.token_ids(name)
    effects = am.ablate_heads(hooked, ids, metric="kl", later="frozen")
    plan = plan_of(plain)
    blocks = submodule(plain.base_model, plan.blocks)
    written = [(layer, path) for layer in range(hooked.n_layers) for path in (plan.attn_out or plan.out, plan.mlp_out)]

    def module(layer: int, path: str) -> nn.Module:
        return submodule(blocks[layer], path)  # type: ignore[index]

    with torch.no_grad():
        kept: dict[tuple[int, str], Any] = {}
        handles = [
            module(*place).register_forward_hook(lambda _, __, out, place=place: kept.__setitem__(place, out))
            for place in written
        ]
        with until_the_end(handles):
            clean = plain(ids).logits
        for layer in range(hooked.n_layers):
            later = [place for place in written if place[0] > layer or place == (layer, plan.mlp_out)]
            for head in range(hooked.n_heads):
                handles = [module(*place).register_forward_hook(lambda *_, place=place: kept[place]) for place in later]
                with until_the_end(handles), z_changed(plain, layer, zeroed(head)):
                    now = plain(ids).logits
                expected = divergences(now, clean, [ids.shape[1]] * len(ids))
                torch.testing.assert_close(effects.after[layer, head], expected, rtol=2e-4, atol=1e-5)


def test_mean_over_a_reference_and_per_position() -> None:
    hooked, plain, ids = models.hooked("gpt2"), models.plain("gpt2"), models.token_ids("gpt2")
    reference = ids.flip(0).roll(1, dims=1)
    for per_position in (False, True):
        means = am.mean_z(hooked, reference, per_position=per_position)
        effects = am.ablate_heads(hooked, ids, [(1, 2)], "mean", reference=means, layers=[1])
        with torch.no_grad():
            mean = seen(plain, reference, "z", 1).mean(dim=0 if per_position else (0, 1))[..., 2, :]

            def replaced(z: Tensor, mean: Tensor = mean) -> Tensor:
                z[..., 2, :] = mean
                return z

            with z_changed(plain, 1, replaced):
                expected = losses(plain(ids).logits, ids, [ids.shape[1]] * len(ids))
        torch.testing.assert_close(effects.after[1, 2], expected, rtol=1e-4, atol=1e-5)
        assert effects.layers == (1,)
        assert effects.swept.sum() == 1
        assert effects.effect.isnan().sum() == 14


def test_donors_come_from_the_reference() -> None:
    """Each text gets z of one reference text, longer or shorter than itself; several draws use each donor once."""
    hooked, plain, ids = models.hooked("bloom"), models.plain("bloom"), models.token_ids("bloom")
    reference = [models.token_ids("bloom", batch=1, length=length, seed=length)[0] for length in (9, 7)]
    candidates = []
    for donor in reference:
        z_of_donor = seen(plain, donor[None], "z", 1)

        def replaced(z: Tensor, z_of_donor: Tensor = z_of_donor) -> Tensor:
            z[..., 2, :] = z_of_donor[:, :7, 2]
            return z

        with torch.no_grad(), z_changed(plain, 1, replaced):
            candidates.append(losses(plain(ids).logits, ids, [ids.shape[1]] * len(ids)))
    one = am.ablate_heads(hooked, ids, [(1, 2)], "resample", reference=reference, seed=1).after[1, 2]
    for row, value in enumerate(one):
        assert min(abs(float(value - each[row])) for each in candidates) < 1e-5
    both = am.ablate_heads(hooked, ids, [(1, 2)], "resample", reference=reference, draws=2)
    torch.testing.assert_close(both.after[1, 2], (candidates[0] + candidates[1]) / 2, rtol=1e-4, atol=1e-5)
    assert both.provenance.options["values"] == "that of one of 2 reference texts (seed 0)"
    alone = am.ablate_heads(hooked, ids[:1], [(1, 2)], "resample", reference=reference[:1])
    torch.testing.assert_close(alone.after[1, 2, 0], candidates[0][0], rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"`draws` must be .* 1 to 2 \(the 2 texts of `reference`\); got 3"):
        am.ablate_heads(hooked, ids, [(1, 2)], "resample", reference=reference, draws=3)
    with pytest.raises(InputError, match="`reference` must be texts, from which z is taken; got values of"):
        am.ablate_heads(hooked, ids, [(1, 2)], "resample", reference=am.mean_z(hooked, ids))


def test_an_answer_of_several_tokens_is_scored_as_a_sum() -> None:
    hooked, plain = models.hooked("llama"), models.plain("llama")
    given, counts = models.padded("llama"), (3, 1, 2)
    texts = [given["input_ids"][row, :length] for row, length in enumerate((7, 5, 3))]
    answers = [text[-count:].tolist() for text, count in zip(texts, counts, strict=True)]
    found = am.ablate_heads(hooked, iter(texts), [(1, 2)], metric="log_probability", answers=answers)

    def scored() -> list[float]:
        sums = []
        for text, count in zip(texts, counts, strict=True):
            chances = torch.log_softmax(plain(text[None]).logits[0].double(), dim=-1)
            sums.append(sum(float(chances[place - 1, text[place]]) for place in range(len(text) - count, len(text))))
        return sums

    with torch.no_grad():
        assert found.before.tolist() == pytest.approx(scored(), rel=1e-4)
        with z_changed(plain, 1, zeroed(2)):
            assert found.after[1, 2].tolist() == pytest.approx(scored(), rel=1e-4)
    assert "nats of log-probability" in repr(found)


def test_an_answer_in_words_of_several_tokens() -> None:
    hooked = am.load(models.fresh("gpt2"), tokenizer=models.tokenizer())
    texts = ["the keys to the cabinet are here", "a dog to the cabinet are here"]
    words = am.ablate_heads(hooked, texts, [(0, 1)], metric="log_probability", answers=" are here")
    ids = hooked.tokenizer(" are here", add_special_tokens=False)["input_ids"]
    assert len(ids) == 2
    same = am.ablate_heads(hooked, texts, [(0, 1)], metric="log_probability", answers=[ids, ids])
    assert torch.equal(words.after[0, 1], same.after[0, 1])
    with pytest.raises(InputError, match=r'becomes 2: .*score the whole answer: metric="log_probability"'):
        am.ablate_heads(hooked, texts, metric="logit_difference", answers=" are here", against=" dog")


def test_answers_and_a_function_of_ones_own() -> None:
    hooked, plain, ids = models.hooked("llama"), models.plain("llama"), models.token_ids("llama")
    answers, against = torch.tensor([5, 9, 11][: len(ids)]), torch.tensor([7, 4, 30][: len(ids)])

    with torch.no_grad(), z_changed(plain, 1, zeroed(3)):
        last = plain(ids).logits[:, -1]
    difference = last.gather(1, answers[:, None])[:, 0] - last.gather(1, against[:, None])[:, 0]
    options: dict[str, Any] = {"answers": answers, "against": against}
    found = am.ablate_heads(hooked, ids, [(1, 3)], metric="logit_difference", **options)
    torch.testing.assert_close(found.after[1, 3], difference.double(), rtol=1e-4, atol=1e-5)
    right = am.ablate_heads(hooked, ids, [(1, 3)], metric="accuracy", **options)
    assert right.after[1, 3].tolist() == (difference > 0).double().tolist()
    best = am.ablate_heads(hooked, ids, [(1, 3)], metric="accuracy", answers=last.argmax(dim=-1))
    assert best.after[1, 3].tolist() == [1.0] * len(ids)

    def own(logits: Tensor, batch: am.reducers.Batch) -> Tensor:
        assert batch.answers is not None and torch.equal(batch.answers, answers[: len(batch.ids)])
        return logits[:, -1].gather(1, batch.answers[:, None])[:, 0]

    mine = am.ablate_heads(hooked, ids, [(1, 3)], metric=own, answers=answers)
    torch.testing.assert_close(mine.after[1, 3], last.gather(1, answers[:, None])[:, 0].double(), rtol=1e-4, atol=1e-5)
    assert mine.metric == "own"


def test_how_patterns_move() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    effects = am.ablate_heads(hooked, ids, [(0, 1), (1, 4)], shifts=True)
    assert effects.shift is not None
    clean = hooked.run(ids, points=["pattern"])
    for index, (layer, head) in enumerate([(0, 1), (1, 4)]):
        with hooked.intervene(am.Intervention.zero([(layer, head)])):
            now = hooked.run(ids, points=["pattern"])
        for later in range(hooked.n_layers):
            p, q = clean["pattern", later].double(), now["pattern", later].double()
            m = (p + q) / 2
            js = (torch.xlogy(p, p) + torch.xlogy(q, q) - 2 * torch.xlogy(m, m)).sum(-1).mean(dim=(0, 2)) / 2
            found = effects.shift[index, head, later]
            torch.testing.assert_close(found, js, rtol=1e-4, atol=1e-6)
            assert bool((found > 1e-7).any()) is (later > layer)


def test_what_it_says() -> None:
    hooked = models.hooked("gpt2")
    ids = torch.randint(3, 50, (30, 9), generator=torch.Generator().manual_seed(0))
    effects, one = am.ablate_heads(hooked, ids), am.ablate_heads(hooked, ids[:1])
    top = effects.strongest(1).iloc[0]
    assert bool(top["clear"]) and f"the largest is that of L{int(top['layer'])}H{int(top['head'])}" in repr(effects)
    assert f"{int(effects.clear.sum())} of 15 heads have a clear effect" in repr(effects)
    assert repr(one).endswith("; 1 text is too few for an interval, which needs 5 or more.)")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heads": [(0, 5)]}, r"`head` must be from 0 to 4"),
        ({"heads": []}, "at least one head"),
        ({"heads": [(2, 0), (1, 3)], "layers": [1]}, "names layer 2, which is not in `layers`"),
        ({"method": "mean"}, "needs `reference`"),
        ({"reference": torch.arange(5, 9)[None]}, '`reference` needs method="mean"'),
        ({"metric": "perplexity"}, "`metric` must be one of 'loss'"),
        ({"metric": "accuracy"}, "needs `answers`"),
        ({"metric": "logit_difference", "answers": [3, 4, 5]}, "needs `against`"),
        ({"against": [3, 4, 5]}, "`against` needs `answers`"),
        ({"metric": "accuracy", "answers": [3]}, "one token per text, .*; got 1 for 3 texts"),
        ({"metric": lambda logits: logits}, "must take"),
        ({"metric": lambda logits, batch: logits}, r"one number for each of the 3 texts"),
        ({"metric": lambda logits, batch: logits[:, 0, 0] * torch.nan}, "is NaN for text 0"),
        ({"metric": lambda logits, batch: logits[:, 0, 0].abs() / 0}, "is inf for text 0 .with nothing changed"),
        (
            {"metric": lambda logits, batch: (batch.ids != models.token_ids("gpt2")[1]).any(1).double().log()},
            "is -inf for text 1",
        ),
        ({"memory": 1e-6}, "`memory` is"),
        ({"later": "never"}, '"recompute" or "frozen"'),
        ({"later": "frozen", "shifts": True}, "which holds the patterns fixed"),
        (LIKELY | {"answers": [[9, 9], [9], [9]]}, "must end with its answer, .*; the answer's ids are .9, 9., and a"),
        (LIKELY | {"answers": [[5], [6]]}, "one answer per text, .*; got 2 for 3 texts"),
        (LIKELY | {"answers": [[5], [], [6]]}, r"at least one token; got \[\]"),
        (LIKELY | {"answers": [[5], [99], [6]]}, "`answers` must be from 0 to 52"),
        (LIKELY | {"answers": " New York"}, "loaded without a tokenizer"),
        (LIKELY, 'metric="log_probability" needs `answers`, with which the texts end'),
        (LIKELY | {"answers": 5, "against": 6}, "takes no `against`"),
    ],
)
def test_bad_input(options: dict[str, Any], said: str) -> None:
    refuses(said, am.ablate_heads, models.hooked("gpt2"), models.token_ids("gpt2")[:3], **options)


def test_several_donors_for_each_text() -> None:
    """Each draw is a separate sweep; a text's donors differ, and the result gives their mean and their spread."""
    hooked, heads = models.hooked("gpt2"), [(0, 1), (2, 4)]
    ids = models.token_ids("gpt2", batch=6)
    found = am.ablate_heads(hooked, ids, heads, "resample", draws=5, seed=3)
    z = hooked.run(ids, points=["z"])
    effects = torch.zeros(2, 6, 6)
    for place, (layer, head) in enumerate(heads):
        for text, donor in itertools.permutations(range(6), 2):
            values = z["z", layer][donor : donor + 1]
            with hooked.intervene(am.Intervention.replace([(layer, head)], {layer: values})):
                effects[place, text, donor] = loss_of(hooked, ids[text : text + 1])
        effects[place] -= torch.tensor([loss_of(hooked, ids[text : text + 1]) for text in range(6)])[:, None]
        # With six texts, five draws use all donors.
        wanted = (effects[place].sum(dim=-1) - effects[place].diagonal()) / 5
        torch.testing.assert_close(found.per_text[layer, head].float(), wanted, rtol=1e-4, atol=1e-5)
    assert found.by_draw is not None and found.draw_spread is not None
    torch.testing.assert_close(found.by_draw.mean(dim=-1), found.effect, equal_nan=True)
    assert float(found.draw_spread[2, 4]) == pytest.approx(float(found.by_draw[2, 4].std()))
    assert found.to_frame()["draw_spread"].tolist() == [float(found.draw_spread[head]) for head in heads]
    one = am.ablate_heads(hooked, ids, heads, "resample", seed=3)
    torch.testing.assert_close(one.effect[2, 4], found.by_draw[2, 4, 0])
    assert one.draw_spread is None and "draw_spread" not in one.to_frame()
    with pytest.raises(InputError, match=r"`draws` must be a whole number, 1 to 5 \(the other texts, of 6\); got 6"):
        am.ablate_heads(hooked, ids, heads, "resample", draws=6)
    refuses('`draws` needs method="resample"; got 2 with', am.ablate_heads, hooked, ids, heads, draws=2)


def loss_of(hooked: am.HookedModel, ids: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(hooked.run(ids).logits[0][:-1], ids[0, 1:]))


def test_resample_with_one_text_and_loss_of_an_encoder_are_refused() -> None:
    refuses("give at least two", am.ablate_heads, models.hooked("gpt2"), torch.arange(4, 9)[None], method="resample")
    refuses('use metric="kl"', am.ablate_heads, models.hooked("bert"), models.token_ids("bert"))
    with pytest.raises(InputError, match="single tokens; ' zzxq' becomes 5"):
        am.ablate_heads(models.demo(), ["Anna sang."], metric="accuracy", answers=[" zzxq"])


def test_a_metric_that_becomes_infinite_under_an_ablation_is_refused() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    clean = hooked.run(ids).logits[:, -1, 0]

    def odds(logits: torch.Tensor, batch: am.reducers.Batch) -> torch.Tensor:
        return torch.where((logits[:, -1, :1] - clean).abs().amin(dim=1) > 1e-3, torch.inf, 1.0)

    refuses(r"the metric odds is inf for text \d \(z of L", am.ablate_heads, hooked, ids, metric=odds)


def test_donors_and_chosen_texts_do_not_depend_on_the_order_of_texts() -> None:
    hooked = models.hooked("llama")
    ids = [models.token_ids("llama", batch=1, length=length, seed=length)[0] for length in range(4, 14)]
    expected = am.ablate_heads(hooked, ids, [(1, 2)], "resample", draws=3)
    reference = [models.token_ids("llama", batch=1, length=length, seed=30 + length)[0] for length in range(5, 12)]
    others = am.ablate_heads(hooked, ids, [(1, 2)], "resample", reference=reference, draws=2)
    choose = partial(choose_texts, hooked, tokens=60, seed=2, bos=None, truncate=False)
    chosen = set(choose(iter(ids))[1])
    for seed in range(3):
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
        shuffled = [ids[place] for place in order]
        found = am.ablate_heads(hooked, shuffled, [(1, 2)], "resample", draws=3)
        assert torch.allclose(found.after[1, 2], expected.after[1, 2][order], rtol=1e-6)
        again = am.ablate_heads(hooked, shuffled, [(1, 2)], "resample", reference=reference[::-1], draws=2)
        assert torch.allclose(again.after[1, 2], others.after[1, 2][order], rtol=1e-6)
        assert {int(order[number]) for number in choose(iter(shuffled))[1]} == chosen
