"""Continuing a text through the bridge, and looking at prompt and continuation."""

import models
import pytest
import torch

import attnmech as am


@pytest.fixture(scope="module")
def demo() -> am.HookedModel:
    return am.load()


def test_each_token_is_the_likeliest_of_a_run_without_a_cache(demo: am.HookedModel) -> None:
    prompt = "When Anna and Tom came to the harbour, Tom gave an old anchor"
    start = demo.encode(prompt).ids.shape[1]
    said = demo.generate(prompt, 8)
    assert said.ids[:, :start].tolist() == demo.encode(prompt).ids.tolist()
    logits = demo.run(said).logits
    assert logits[0, start - 1 : -1].argmax(-1).tolist() == said.ids[0, start:].tolist()


def test_every_point_is_the_same_with_and_without_the_continuation(demo: am.HookedModel) -> None:
    prompt = "Anna painted a small boat near the harbour"
    alone, said = demo.run(prompt, points=["pattern"]), demo.run(demo.generate(prompt, 6), points=["pattern"])
    length = alone.batch.ids.shape[1]
    for layer in range(demo.n_layers):
        torch.testing.assert_close(
            said["pattern", layer][..., :length, :length], alone["pattern", layer], rtol=1e-5, atol=1e-6
        )


def test_what_cannot_be_continued_is_refused(demo: am.HookedModel) -> None:
    with pytest.raises(am.InputError, match="the same length"):
        demo.generate(["Anna sang.", "Anna lost her book."])
    with demo.hooks({"pattern": lambda pattern: pattern}), pytest.raises(am.InputError, match="do not reach"):
        demo.generate("Anna")
    with pytest.raises(am.InputError, match="no head that continues"):
        models.hooked("bert").generate(torch.tensor([[5, 7]]))
