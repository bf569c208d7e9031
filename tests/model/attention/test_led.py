"""LED: its encoder with a window and global tokens, by hand; test_longformer.py plants faults in both."""

from itertools import product
from typing import Any

import models
import pytest
import torch
from caching import cached
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError

F64 = torch.float64
STACKS = ("encoder", "decoder", "cross")
WINDOWS = (4, 8)
SOURCE, TARGET = 21, 7
"""Neither length is a multiple of a window."""


def inputs() -> dict[str, Tensor]:
    """Three texts, the second padded on the right and the third on the left, with two, three and no global tokens."""
    generator = torch.Generator().manual_seed(3)
    real = torch.ones(3, SOURCE, dtype=torch.long)
    real[1, 15:] = 0
    real[2, :4] = 0
    is_global = torch.zeros_like(real)
    is_global[0, [0, 13]] = 1
    is_global[1, [5, 6, 18]] = 1  # the last is padding
    return {
        "input_ids": torch.randint(3, 43, (3, SOURCE), generator=generator),
        "attention_mask": real,
        "global_attention_mask": is_global,
        "decoder_input_ids": torch.randint(3, 43, (3, TARGET), generator=generator),
    }


def real() -> Tensor:
    return inputs()["attention_mask"].bool()


def is_global() -> Tensor:
    return inputs()["global_attention_mask"].bool() & real()


@cached
def theirs() -> Any:
    with torch.no_grad():
        return models.plain("led", F64)(**inputs(), output_attentions=True, use_cache=False)


@cached
def acts() -> am.results.Activations:
    points = ["encoder.resid_pre", "encoder.pattern", "encoder.z", "logits"]
    return models.hooked("led", F64).run(inputs(), points)


def test_logits_beside_global_tokens_are_transformers() -> None:
    torch.testing.assert_close(acts().logits, theirs().logits, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("layer", [0, 1])
def test_terms_pattern_and_z_of_the_encoder_by_hand(layer: int) -> None:
    """Pattern and z row by row, from the stream and the raw weights of the two sets of projections."""
    module = models.plain("led", F64).led.encoder.layers[layer].self_attn.longformer_self_attn
    x, scale = acts()["encoder.resid_pre", layer], 8**-0.5
    split = am.decompose_scores(models.hooked("led", F64), inputs(), stack="encoder", layers=[layer])
    terms = {name: split.terms[name].expand(3, 1, 3, SOURCE, SOURCE)[:, 0] for name in split.terms}
    pattern, z = acts()["encoder.pattern", layer], acts()["encoder.z", layer]
    for text, i in product(range(3), range(SOURCE)):
        if not real()[text, i]:
            continue
        suffix = "_global" if is_global()[text, i] else ""
        query, key, value = (getattr(module, name + suffix) for name in ("query", "key", "value"))
        near = (torch.arange(SOURCE) - i).abs() <= WINDOWS[layer] // 2
        seen = (near | is_global()[text] | is_global()[text, i]) & real()[text]
        for head in range(3):
            own = slice(8 * head, 8 * head + 8)
            q, k = x[text, i] @ query.weight[own].T, x[text] @ key.weight[own].T
            expected = {
                "query_key": k @ q,
                "key_bias": k @ query.bias[own],
                "query_bias": (q @ key.bias[own]).expand(SOURCE),
                "constant": (query.bias[own] @ key.bias[own]).expand(SOURCE),
            }
            for name, term in expected.items():
                found = terms[name][text, head, i].double()
                torch.testing.assert_close(found, (scale * term).detach(), atol=1e-10, rtol=1e-8)
            row = (scale * sum(expected.values())).masked_fill(~seen, -torch.inf).softmax(dim=0)
            torch.testing.assert_close(pattern[text, head, i], row.detach(), atol=1e-12, rtol=1e-10)
            read = row @ (x[text] @ value.weight[own].T + value.bias[own])
            half = slice(8, 16) if suffix else slice(0, 8)
            torch.testing.assert_close(z[text, i, head, half], read.detach(), atol=1e-12, rtol=1e-10)
            assert float(z[text, i, head].norm()) == pytest.approx(float(read.detach().norm()))


def test_generation_is_that_of_transformers() -> None:
    raw = models.fresh("led")
    given = {name: value[:1] for name, value in inputs().items() if name != "decoder_input_ids"}
    said = models.hooked("led").generate(given, 6, points=["cross.pattern"], stop_at_eos=False)
    raw.generation_config.eos_token_id = None
    expected = raw.generate(**given, max_new_tokens=6, do_sample=False, num_beams=1, use_cache=False)
    assert said.target is not None and said.target.ids.tolist() == expected.tolist()
    del given["global_attention_mask"]
    without = models.hooked("led").generate(given, 6, points=["cross.pattern"], stop_at_eos=False)
    other = raw.generate(**given, max_new_tokens=6, do_sample=False, num_beams=1, use_cache=False)
    assert without.target is not None and without.target.ids.tolist() == other.tolist()
    torch.testing.assert_close(said.extra["global_attention_mask"], inputs()["global_attention_mask"][:1])


def test_limits_of_encoder_and_decoder() -> None:
    model, ids = models.hooked("led"), torch.full((1, 141), 5)
    assert model.run({"input_ids": ids[:, :140], "decoder_input_ids": ids[:, :33]}).logits.shape == (1, 33, 43)
    with pytest.raises(InputError, match="this model has 140 positions; the text has 141 tokens"):
        model.run(ids)
    with pytest.raises(InputError, match="this model's decoder has 33 positions; the text has 34 tokens"):
        model.run({"input_ids": ids[:, :40], "decoder_input_ids": ids[:, :34]})


@pytest.mark.parametrize("windows", [(4, 16), (32, 4, 16)])
def test_other_sizes(windows: tuple[int, ...]) -> None:
    """A model without its head, and windows longer or shorter than the texts."""
    model = am.load(models.randomised(models.led(windows)).led)
    assert model.certificate.ok and list(model.stacks) == list(STACKS)
    assert model.stacks["encoder"].architecture.windows == windows
