"""The stream split by writer, against the stream that the model uses."""

import models
import pytest
import torch
from torch import Tensor

from attnmech.model.attention.observed import RowBlock
from attnmech.model.reading.writers import Writers, most_writers, points_of_writers, why_no_sum

F64 = torch.float64


def parts_of(name: str) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """`attn_in` of every layer, and its parts."""
    model = models.hooked(name, F64)
    batch, layers = model.encode(models.padded(name)), list(model.stack().layers)
    writers, found = Writers(model, batch), []

    def look(block: RowBlock) -> None:
        parts = dict(writers.parts_of(block.layer, block.values))
        found.append((block["attn_in"].clone(), parts))

    model.forward(batch, captures=points_of_writers(model, layers), rows=[look])
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "roberta", "bloom", "gemma2", "opt", "gptj", "falcon_new"])
def test_the_parts_add_up_to_what_attention_is_given(name: str) -> None:
    stack = models.hooked(name, F64).stack()
    # transformers' RMSNorms compute in float32.
    tolerance = 1e-6 if name in ("llama", "gemma2") else 1e-11
    for layer, (attn_in, parts) in enumerate(parts_of(name)):
        assert parts.keys() >= {"token embedding"} | {f"L{below}H0" for below in range(layer)}
        assert len(parts) <= most_writers(stack, layer)
        total = torch.stack(list(parts.values())).sum(dim=0)
        torch.testing.assert_close(total, attn_in, rtol=tolerance, atol=tolerance)


def test_every_embedding_is_a_writer() -> None:
    first = {name: tuple(parts_of(name)[0][1]) for name in ("llama", "gpt2", "bert")}
    assert first == {
        "llama": ("token embedding",),
        "gpt2": ("token embedding", "position embedding", "norm shift"),
        "bert": ("token embedding", "position embedding", "token-type embedding", "embedding norm shift"),
    }
    positions = models.plain("gpt2", F64).transformer.wpe.weight[:7].detach()
    hooked = models.hooked("gpt2", F64)
    batch = hooked.encode(models.token_ids("gpt2"))
    captured = hooked.forward(batch, captures=[("position embedding", None)])["position embedding", None]
    assert torch.equal(captured.expand(3, -1, -1), positions.expand(3, -1, -1))


def test_models_with_rotary_or_no_positions_of_their_own_name_no_further_embedding() -> None:
    assert models.hooked("llama").further_embeddings == ()
    assert models.hooked("vit").further_embeddings == ()
    assert models.hooked("t5").further_embeddings == ()


def test_the_models_whose_stream_is_no_sum() -> None:
    refused = {name for name in ("t5", "vit", "jamba", "gpt2", "bert", "gemma2") if why_no_sum(models.hooked(name))}
    assert refused == {"t5", "vit", "jamba"}
