"""Layers that do not run on text, or have no attention: the other layers keep their numbers, and every call works."""

from pathlib import Path
from typing import Any

import matrix
import models
import pytest
import tiny
import torch
import transformers
from torch.nn.functional import cross_entropy

import attnmech as am
from attnmech.errors import InputError
from attnmech.runs.haystacks import ordinary_tokens

CALLS = (
    "certify", "decompose_by_source", "residual_updates(answers)", "residual_drift", "head_types", "ablate_heads",
    'ablate_heads(later="frozen")', "ablate_set", "ablate_pairs", "sweep", "head_importance", "patch",
    'patch(at="resid_pre")', "path_patch", "prune_heads", "attribute", "ov_tokens", "report",
)  # fmt: skip
"""The calls that begin or end passes at single blocks, or read the stream at either end."""


def mllama(of_images: tuple[int, ...]) -> Any:
    config = tiny.config_of("mllama")
    config.text_config.num_hidden_layers, config.text_config.cross_attention_layers = 5, list(of_images)
    made = transformers.MllamaForConditionalGeneration._from_config(config, dtype=torch.float32)
    return models.randomised(made, seed=0)


def _loss(plain: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = plain(ids).logits[:, :-1]
    return cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(dim=1).mean()


@pytest.mark.parametrize("of_images", [(4,), (0, 3), (1, 2, 4)])
def test_every_call_works_on_the_layers_that_run(of_images: tuple[int, ...], tmp_path: Path) -> None:
    plain = mllama(of_images)
    subject = matrix.Subject(plain, tmp_path)
    model = subject.model
    assert model.stack().layers == tuple(sorted({*range(5)} - {*of_images})) and not model.architecture.hybrid
    cells = matrix.cells(subject, {name: matrix.CALLS[name] for name in CALLS})
    assert not [(name, why) for name, _, why in cells if why]
    ids = torch.randint(5, 80, (2, 9), generator=torch.Generator().manual_seed(0))
    effect, clean, width = am.ablate_heads(model, ids).effect, _loss(plain, ids), model.d_head
    for layer, head in [(model.stack().layers[0], 1), (model.stack().layers[1], 2), (model.stack().layers[-1], 5)]:

        def without(module: Any, args: Any, head: int = head) -> Any:
            args[0][..., head * width : (head + 1) * width] = 0

        with plain.model.language_model.layers[layer].self_attn.o_proj.register_forward_pre_hook(without):
            torch.testing.assert_close(effect[layer, head], (_loss(plain, ids) - clean).double(), atol=3e-6, rtol=0)
    assert effect[list(of_images)].isnan().all()


def test_tokens_without_a_logit_are_no_answers_and_are_not_drawn() -> None:
    """The embedding has eight rows for images, which the head lacks."""
    model = am.load(mllama((4,)))
    clean, corrupted = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 8, 7]])
    with pytest.raises(InputError, match="`answers` must be from 0 to 96"):
        am.patch(model, clean, corrupted, answers=torch.tensor([100]), against=torch.tensor([9]))
    assert int(ordinary_tokens(model).max()) < 97 < model.n_vocab


# -- hybrids ---------------------------------------------------------------------------------------------------


IDS = torch.tensor([[5, 9, 3, 30, 7, 7, 12, 40]])


def test_lfm2s_scores_from_the_raw_weights() -> None:
    model, layer = models.plain("lfm2"), 3
    with torch.no_grad():
        stream = model(IDS, output_hidden_states=True, use_cache=False).hidden_states[layer]
        block = model.model.layers[layer]
        part, x = block.self_attn, block.operator_norm(stream)
        q = part.q_layernorm(part.q_proj(x).unflatten(-1, (6, 4))).transpose(1, 2)
        k = part.k_layernorm(part.k_proj(x).unflatten(-1, (2, 4))).transpose(1, 2).repeat_interleave(3, dim=1)
        theta = torch.arange(0, 4, 2) / 4
        angle = torch.arange(8)[:, None] * model.config.rope_parameters["rope_theta"] ** -theta
        turn = torch.polar(torch.ones_like(angle), angle)
        q, k = (torch.view_as_real(torch.complex(y[..., :2], y[..., 2:]) * turn).flatten(-2) for y in (q, k))
        expected = q @ k.transpose(-1, -2) / 2
    seen = torch.ones(8, 8).tril().bool().expand_as(expected)
    found = models.hooked("lfm2").run(IDS, points=[("scores", layer)])["scores", layer]
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-4, atol=1e-5)
