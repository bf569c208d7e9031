"""Passes that begin or end at a block equal the same part of whole passes, on every family."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import Tensor

from attnmech.batch import Batch
from attnmech.errors import InputError, UnsupportedModelError
from attnmech.interventions import Intervention
from attnmech.model.parts.modules import submodule
from attnmech.model.reading.partial_pass import Blocks

# XLNet's blocks take positions first; its certificate checks passes from the middle.
ELSEWHERE = {"t5", "mt5", "t5_encoder_alone", "mvp", "xlnet", "led"}
ONE_STACK = sorted((models.MAKERS | models.NEW | models.OTHERS).keys() - ELSEWHERE)
HEADED = [name for name in ONE_STACK if "headless" not in name]


def batch_of(name: str, inputs: Any = None) -> Batch:
    return models.hooked(name).encode(models.inputs_of(name) if inputs is None else inputs)


@pytest.mark.parametrize("name", ONE_STACK)
def test_a_pass_from_any_block_is_the_rest_of_the_whole(name: str) -> None:
    hooked, batch = models.hooked(name), batch_of(name)
    blocks = Blocks(hooked)
    depth = len(blocks)
    clean = blocks.run(batch, streams=range(depth + 1)).streams
    assert len(clean) == depth + 1
    last_layer = hooked.output_stack.layers[-1]
    for start in range(depth + 1):
        rest = blocks.run(batch, start=start, stream=clean[start], streams=range(depth + 1))
        assert set(rest.streams) == (set(range(start, depth + 1)) if start < depth else set())
        for place, stream in rest.streams.items():
            assert torch.equal(stream, clean[place]), (start, place)
    for stop in range(1, depth + 1):
        assert torch.equal(blocks.run(batch, stop=stop, streams=[0, depth]).streams[depth], clean[stop])
    if last_layer > 0 and hooked.points["logits"].absent is None:
        ran = blocks.run(
            batch, start=last_layer, stream=clean[last_layer], captures=[("pattern", last_layer), ("logits", None)]
        )
        whole = hooked.run(batch, points=["pattern", "logits"])
        assert torch.equal(ran.values["pattern", last_layer], whole["pattern", last_layer])
        assert torch.equal(ran.values["logits", None], whole.logits)


@pytest.mark.parametrize("name", HEADED)
def test_the_head_alone(name: str) -> None:
    hooked, inputs = models.hooked(name), models.inputs_of(name)
    batch, blocks = batch_of(name), Blocks(hooked)
    real = inputs["attention_mask"].bool() if "attention_mask" in inputs else slice(None)
    end = blocks.run(batch, streams=[len(blocks)]).streams[len(blocks)]
    with torch.no_grad():
        output = models.plain(name)(**inputs)
    expected = output.logits if "logits" in output else output[0]
    torch.testing.assert_close(blocks.logits(batch, end)[real], expected[real], rtol=1e-4, atol=1e-4)
    if name == "vit":
        assert not blocks.by_row
        return
    assert blocks.by_row
    torch.testing.assert_close(blocks.logits_of_rows(end[real]), expected[real], rtol=1e-4, atol=1e-4)
    # More tokens than positions, and no tokens.
    many = end[real].repeat(9, 1)
    torch.testing.assert_close(blocks.logits_of_rows(many), expected[real].repeat(9, 1), rtol=1e-4, atol=1e-4)


def test_a_model_without_a_head_has_no_logits_by_row() -> None:
    assert not Blocks(models.hooked("bert_headless")).by_row


def test_a_hook_at_the_logits_sees_whole_texts() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    blocks = Blocks(hooked)
    with hooked.hooks({"logits": lambda logits: logits - logits.mean(dim=1, keepdim=True)}):
        assert not blocks.by_row
        end = blocks.run(hooked.encode(ids), streams=[3]).streams[3]
        torch.testing.assert_close(blocks.logits(hooked.encode(ids), end), hooked.run(ids).logits)
    assert blocks.by_row


@pytest.mark.parametrize("name", ["gpt2", "bert", "opt_post", "jamba"])
def test_streams_are_those_before_interventions_and_what_stands_later_sees_them(name: str) -> None:
    hooked, batch = models.hooked(name), batch_of(name)
    blocks, layer = Blocks(hooked), hooked.output_stack.layers[-1]
    clean = blocks.run(batch, streams=range(len(blocks) + 1)).streams
    zeros = {layer: torch.zeros(1, 1, hooked.d_model)}
    with hooked.intervene(Intervention.stream("resid_pre", [layer], zeros), Intervention.zero([(layer, 1)])):
        ran = blocks.run(batch, start=layer, stream=clean[layer], streams=[layer, len(blocks)])
        whole = blocks.run(batch, streams=[layer, len(blocks)])
    assert torch.equal(ran.streams[layer], clean[layer])
    assert torch.equal(ran.streams[len(blocks)], whole.streams[len(blocks)])
    assert not torch.equal(ran.streams[len(blocks)], clean[len(blocks)])


def test_observers_see_the_layers_that_run() -> None:
    hooked, batch = models.hooked("gpt2"), batch_of("gpt2")
    blocks, seen = Blocks(hooked), []
    stream = blocks.run(batch, streams=[1]).streams[1]
    blocks.run(batch, start=1, stream=stream, rows=[lambda block: seen.append((block.layer, block.index))])
    assert seen == [(1, 1), (2, 2)]
    seen.clear()
    observers: list[Callable[..., None]] = [lambda block: seen.append((block.layer, block.index))]
    blocks.run(batch, start=1, stream=stream, rows=observers, layers=[("", 2)])
    assert seen == [(2, 0)]
    with pytest.raises(UnsupportedModelError, match="point 'z' of layer 0 was never reached"):
        blocks.run(batch, start=1, stream=stream, captures=[("z", 0)])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["gpt2", "jamba", "opt_post"])
def test_blocks_are_put_back(name: str, error: type[BaseException]) -> None:
    hooked, batch = models.hooked(name), batch_of(name)
    blocks = Blocks(hooked)
    found = submodule(hooked.base, hooked.output_stack.architecture.blocks)
    before = list(found)  # type: ignore[call-overload]
    hooks = [(len(block._forward_hooks), len(block._forward_pre_hooks)) for block in before]
    clean = hooked.run(batch).logits
    layer = hooked.output_stack.layers[-1]
    stream = blocks.run(batch, streams=[layer]).streams[layer]

    def broken(value: Tensor) -> Tensor:
        raise error

    for options in ({"start": layer, "stream": stream}, {"stop": layer + 1}, {}):
        with pytest.raises(error), hooked.hooks({("z", layer): broken}):
            blocks.run(batch, streams=[0, len(blocks)], **options)  # type: ignore[arg-type]
    with pytest.raises(error), hooked.hooks({"logits": broken}):
        blocks.logits(batch, stream)
    assert list(found) == before  # type: ignore[call-overload]
    assert [(len(block._forward_hooks), len(block._forward_pre_hooks)) for block in before] == hooks
    assert torch.equal(hooked.run(batch).logits, clean)


@pytest.mark.parametrize("name", ["t5", "mt5", "t5_encoder_alone", "bart"])
def test_models_whose_blocks_hand_on_more_than_the_stream_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="cannot begin in the middle: its blocks need more than the stream"):
        Blocks(models.hooked(name))
