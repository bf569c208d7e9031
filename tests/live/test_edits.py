"""What the live page says of an edit equals plain transformers with a hook on what heads write."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from comparing import refuses
from torch import Tensor

import attnmech as am
from attnmech.live.edits import NEW_TOKENS, Edits, compared
from attnmech.live.session import Session

TEXT = "Anna gave an old anchor to Tom, and Tom gave the"
OTHER = "Anna gave an old anchor to Anna, and Tom gave the"


@contextmanager
def writing(model: am.HookedModel, layer: int, head: int, new_z: Any) -> Iterator[None]:
    """Plain transformers, whose head writes `new_z` of its z and of the rows' numbers."""
    dense: Any = model.original.transformer.h[layer].self_attention.dense
    size = model.config.hidden_size // model.config.n_head

    def changed(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        z, *others = inputs
        z = z.clone()
        part = slice(head * size, (head + 1) * size)
        z[..., part] = new_z(z[..., part])
        return z, *others

    handle = dense.register_forward_pre_hook(changed)
    try:
        yield
    finally:
        handle.remove()


def z_of(model: am.HookedModel, ids: Tensor, layer: int, head: int) -> Tensor:
    seen: list[Tensor] = []
    with writing(model, layer, head, lambda z: seen.append(z) or z), torch.no_grad():
        model.original(ids)
    return seen[0]


def grown(model: am.HookedModel, ids: Tensor) -> tuple[Tensor, list[int]]:
    """ln p after every token of the text, and the greedy answer by full passes."""
    rows, new = [], list[int]()
    while len(new) < NEW_TOKENS:
        with torch.no_grad():
            rows.append(model.original(torch.cat((ids, torch.tensor([new], dtype=torch.long)), dim=1)).logits[0])
        new.append(int(rows[-1][-1].argmax()))
        if new[-1] == model.config.eos_token_id:
            break
    return rows[0].double().log_softmax(dim=-1), new


@pytest.mark.core
@pytest.mark.parametrize("way", ["zero", "mean", "first", "patch", "patch at one token"])
def test_what_the_model_writes_is_that_of_plain_transformers(demo: am.HookedModel, way: str) -> None:
    layer, head, place = 2, 6, 7
    ids, others = (demo.encode(text).ids for text in (TEXT, OTHER))
    own, other = z_of(demo, ids, layer, head), z_of(demo, others, layer, head)
    value = demo.run(TEXT, points=["v"])["v", layer][:, :1, head]

    def patched(z: Tensor) -> Tensor:
        rows = torch.tensor([place]) if "one" in way else torch.arange(other.shape[1])
        return z.index_copy(1, rows, other[:, rows])

    changes = {
        "zero": torch.zeros_like, "mean": lambda z: own.mean(dim=1, keepdim=True).expand_as(z),
        "first": lambda z: value.expand_as(z),
    }  # fmt: skip
    position = place if "one" in way else None
    asked = {"heads": [[layer, head, way.split(maxsplit=1)[0]]], "prompt": OTHER, "position": position}
    edits = Edits.of(asked)
    block = compared(demo, TEXT, edits)
    plain, answer = grown(demo, ids)
    with writing(demo, layer, head, changes.get(way, patched)):
        edited, other_answer = grown(demo, ids)
    assert block["answers"] == [list(demo.position_texts(new)) for new in (answer, other_answer)]
    for losses, log_probs in zip(block["losses"], (plain, edited), strict=True):
        expected = -log_probs[:-1].gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(losses[1:], dtype=torch.float64), expected, rtol=0, atol=1e-4)
    chances = torch.stack((plain[-1], edited[-1])).exp()
    best = chances.amax(dim=0).topk(len(block["next"]))
    assert [token for token, *_ in block["next"]] == list(demo.position_texts(best.indices.tolist()))
    found = torch.tensor([shares for _, *shares in block["next"]], dtype=torch.float64)
    torch.testing.assert_close(found.T, chances[:, best.indices], rtol=0, atol=1e-5)
    before, after = (sum(values[1:]) / len(values[1:]) for values in block["losses"])
    assert block["sentences"][1] == (
        f"The mean loss of the text's tokens is {before:.3f} nats without the edit, {after:.3f} with it."
    )
    names: dict[str, Any] = {"am": am, "model": demo, "text": TEXT}
    lines = block["python"].splitlines()
    exec("\n".join([*lines[:-1], f"answers = {lines[-1]}"]), names)
    row = names["answers"].iloc[0]
    assert [row["plain"], row["edited"]] == ["".join(tokens) for tokens in block["answers"]]


def test_an_edit_that_means_nothing_is_refused(demo: am.HookedModel) -> None:
    head = [0, 0, "zero"]
    nothing: list[Any] = [{}, [], {"heads": []}, {"heads": [[1]]}, {"heads": [["a", 0, "zero"]]}]
    for asked in [*nothing, {"heads": [head, head]}, {"heads": [[0, 0, "drop"]]}, {"heads": [head], "prompt": 3}]:
        refuses("", Edits.of, asked)
    edits = Edits.of({"heads": [[0, 0, "patch"]], "prompt": "Anna gave"})
    refuses("as many tokens as the text", compared, demo, TEXT, edits)
    refuses("from 0 to 3", compared, demo, TEXT, Edits.of({"heads": [[9, 0, "zero"]]}))
    refuses(
        "from 0 to 12", compared, demo, TEXT, Edits.of({"heads": [[0, 0, "patch"]], "prompt": OTHER, "position": 13})
    )
    assert demo.interventions == ()


def test_a_text_that_nobody_awaits_ends_between_its_tokens(demo: am.HookedModel) -> None:
    steps = list[str]()

    def step(stage: str) -> None:
        steps.append(stage)
        if f"tokens {NEW_TOKENS + 3} " in stage:
            raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        Session(demo, TEXT).compare(TEXT, Edits.of({"heads": [[2, 6, "zero"]]}), step)
    assert steps[-1] == f"comparing, tokens {NEW_TOKENS + 3} of {2 * NEW_TOKENS}" and demo.interventions == ()
