"""Threads, tasks and generators: each call gets the results that it would get alone, and leaves no edits active."""

import asyncio
import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Barrier, Event
from time import sleep
from typing import Any

import pytest
import torch
from models import hooked, token_ids
from transformers import BloomForCausalLM, PreTrainedModel

import attnmech as am

TEXTS = ("Anna sang of shells.", "Tom lost his old anchor.", "The keys to the old chest are here.")
ROUNDS = 6


def work_on(model: am.HookedModel, number: int) -> list[Callable[[], list[torch.Tensor]]]:
    """The work of one thread, each piece under different edits."""
    text = TEXTS[number % len(TEXTS)]
    other = f"{text} {text}"

    def under(context: Callable[[], AbstractContextManager[Any]], points: list[str]) -> list[torch.Tensor]:
        with context():
            acts = model.run(text, points=points)
        return [acts.values[key] for key in sorted(acts.values, key=str)]

    return [
        lambda: under(nullcontext, ["logits"]),
        lambda: under(
            lambda: model.intervene(am.Intervention.zero([(number % 4, number % 8)])), ["z", "pattern", "logits"]
        ),
        lambda: under(lambda: model.hooks({("pattern", number % 4): lambda p: p.tril(-1)}), ["pattern", "attn_raw"]),
        lambda: [am.attention_focus(model, text)["first_top"].mean.nan_to_num()],
        lambda: [am.attention_focus(model, iter([text, other]))["entropy"].mean.nan_to_num()],
        lambda: [am.residual_updates(model, text).magnitude.nan_to_num()],
        lambda: [am.decompose_scores(model, text).terms["query_key"]],
        lambda: [am.ablate_heads(model, [text, other], heads=[(1, number), (3, 2)]).effect.nan_to_num()],
        lambda: [am.decompose_by_source(model, text, layers=[2]).residual.nan_to_num()],
        lambda: [model.generate(text.split()[0], 4).ids],
    ]


def test_threads_that_load_do_not_read_weights_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While transformers reads weights, no model ties its weights; overlapping readings would make this permanent."""
    reading, most = [], []
    real, tie = BloomForCausalLM.from_pretrained.__func__, PreTrainedModel.tie_weights
    start = Barrier(2)

    def slow(kind: type[BloomForCausalLM], *arguments: Any, **options: Any) -> Any:
        reading.append(1)
        most.append(len(reading))
        sleep(0.2)
        try:
            return real(kind, *arguments, **options)
        finally:
            reading.pop()

    monkeypatch.setattr(BloomForCausalLM, "from_pretrained", classmethod(slow))

    def load(_: int) -> torch.Tensor:
        start.wait()
        return am.load().run(TEXTS[0], points=["logits"]).logits

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(load, range(2))
    assert torch.equal(one, other)
    assert most == [1, 1]
    assert PreTrainedModel.tie_weights is tie


def test_threads_get_what_they_get_alone() -> None:
    model = am.load()
    works = [work_on(model, number) for number in range(3)]
    alone = [[piece() for piece in work] for work in works]
    start = Barrier(3)

    def run(number: int) -> list[str]:
        start.wait()
        wrong = []
        for turn in range(ROUNDS):
            # Each thread has a different order, so that different kinds of work overlap.
            order = list(range(len(works[number])))
            for place in order[turn + number :] + order[: turn + number]:
                found = works[number][place]()
                if not all(torch.equal(one, other) for one, other in zip(found, alone[number][place], strict=True)):
                    wrong.append(f"thread {number}, piece {place}, turn {turn}")
        return wrong

    with ThreadPoolExecutor(3) as pool:
        assert [wrong for found in pool.map(run, range(3)) for wrong in found] == []
    assert model.edited == () and not model.in_force.running


def test_two_passes_are_in_the_middle_at_once() -> None:
    model = hooked("gpt2")
    first, second = Event(), Event()
    ids = token_ids("gpt2")

    def wait_for(mine: Event, other: Event) -> Callable[[torch.Tensor], None]:
        def hook(value: torch.Tensor) -> None:
            mine.set()
            assert other.wait(timeout=60)

        return hook

    def run(mine: Event, other: Event) -> torch.Tensor:
        with model.hooks({("z", 1): wait_for(mine, other)}):
            return model.run(ids).logits

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(run, first, second), pool.submit(run, second, first)]
        assert torch.equal(both[0].result(), both[1].result())


def test_a_thread_begins_with_nothing_in_force_unless_it_is_given_the_context() -> None:
    model = hooked("gpt2")
    ids = token_ids("gpt2")
    clean = model.run(ids).logits
    with model.intervene(am.Intervention.zero([(0, 1)])), ThreadPoolExecutor(1) as pool:
        changed = model.run(ids).logits
        context = contextvars.copy_context()
        assert torch.equal(pool.submit(lambda: model.run(ids).logits).result(), clean)
        assert torch.equal(pool.submit(context.run, lambda: model.run(ids).logits).result(), changed)
    # The block has ended, in every context.
    assert torch.equal(context.run(lambda: model.run(ids).logits), clean)


def test_tasks_that_take_turns_keep_their_own_edits() -> None:
    model = hooked("gpt2")
    ids = token_ids("gpt2")

    def alone(head: int) -> torch.Tensor:
        with model.intervene(am.Intervention.zero([(1, head)])):
            return model.run(ids).logits

    async def task(head: int) -> list[bool]:
        found = []
        with model.intervene(am.Intervention.zero([(1, head)])):
            for _ in range(4):
                await asyncio.sleep(0)
                found.append(torch.equal(model.run(ids).logits, expected[head]))
        return found

    async def both() -> list[list[bool]]:
        return await asyncio.gather(*(task(head) for head in range(3)))

    expected = [alone(head) for head in range(3)]
    with ThreadPoolExecutor(1) as apart:  # the browser of other tests leaves an event loop in this thread
        assert apart.submit(lambda: asyncio.run(both())).result() == [[True] * 4] * 3


def test_our_generators_hold_nothing_in_force_between_yields() -> None:
    from attnmech.runs.corpus import batches

    model = hooked("gpt2")
    ids = token_ids("gpt2")
    clean = model.run(ids).logits
    for _ in batches(iter([ids[:1], ids[1:], ids]), model, tokens_per_batch=8, window=1):
        assert not model.in_force.running and model.edited == ()
        assert torch.equal(model.run(ids).logits, clean)


def test_a_corpus_may_run_the_model_itself() -> None:
    model = hooked("gpt2")
    ids = token_ids("gpt2")

    def texts() -> Iterator[torch.Tensor]:
        for row in ids:
            with model.intervene(am.Intervention.zero([(0, 0)])):
                model.run(row[None])
            yield row[None]

    ours = am.attention_focus(model, texts())["entropy"].mean
    torch.testing.assert_close(ours, am.attention_focus(model, iter(ids.split(1)))["entropy"].mean, equal_nan=True)
