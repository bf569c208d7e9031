"""`[layer, head]` of a result is that head of that layer of the model, whichever layers were measured."""

from typing import Any

import maps
import models
import numpy as np
import pytest
import torch
from torch import Tensor

import attnmech as am
from attnmech.methods.focus.attention_focus import focus_numbers
from attnmech.methods.null_attention.formulas import VERDICTS

JUDGED = {"answers": torch.tensor([5, 9, 11, 6, 8]), "against": torch.tensor([7, 4, 30, 3, 10])}


def corrupted(ids: Tensor) -> Tensor:
    return ids.roll(2, dims=1)


def arrays(model: am.HookedModel, ids: Tensor, layers: list[int] | None) -> dict[str, Tensor]:
    """Every field with axes of layers and heads, but without a query, key or position axis."""
    heads: Any = "all" if layers is None else [(layer, head) for layer in layers for head in range(model.n_heads)]
    focus = am.attention_focus(model, ids, layers=layers)
    updates = am.residual_updates(model, ids, layers=layers)
    effects = am.ablate_heads(model, ids, heads, shifts=True)
    patched = am.patch(model, ids, corrupted(ids), heads=heads, **JUDGED)
    null = am.null_attention(model, ids, heads=heads)
    importance = am.head_importance(model, ids, layers=layers, sweep=effects)
    split = am.decompose_scores(model, ids, layers=layers)
    contrast = split.contrast(4, 3, 1)
    verdicts = ["", *VERDICTS]
    collapse = ["not measured", "", "dead", "sink", "low entropy"]
    assert effects.shift is not None and importance.exact is not None
    found = {
        **{f"focus {name}": focus[name].mean for name in focus.quantities},
        **{f"updates {name}": updates[name].mean for name in updates.quantities},
        **{f"blocks {name}": updates.blocks[name].mean for name in updates.blocks.STATISTICS},
        "low": focus["entropy"].interval()[0], "high": updates["magnitude"].interval()[1],  # type: ignore[index]
        "distances": focus.distance_histogram, "types": focus.received_by_type, "expected": focus.expected_by_type,
        "bos_mass": focus.bos_mass,
        "effect": effects.effect, "after": effects.after, "effect low": effects.interval()[0], "shift": effects.shift,
        "recovered": patched.recovered, "recovered high": patched["recovered"].interval()[1],
        "score": importance.score, "normalised": importance.normalised, "exact": importance.exact,
        "importance low": importance.interval()[0],
        "sink_mass": null.sink_mass, "value_ratio": null.value_ratio, "difference": null.update_difference,
        "difference low": null["update_difference"].interval()[0],
        "null_share": null.null_share, "facts": null.facts.movedim(1, 0),
        "zero_value": null.effects["zero_value"].effect,
        "residual": split.residual, "largest": split.largest,
        "contrast": contrast.total.movedim(1, 0), "term": contrast["query_key"].movedim(1, 0),
        "verdict": torch.tensor([[verdicts.index(name) for name in row] for row in null.verdict]).float(),
        "collapse": torch.tensor([[collapse.index(name) for name in row] for row in focus.collapse]).float(),
    }  # fmt: skip
    missing = found["verdict"] == 0, found["collapse"] == 0
    found["verdict"][missing[0]] = found["collapse"][missing[1]] = torch.nan
    return found


@pytest.mark.parametrize("layers", [[2, 0], [1]])
def test_a_row_is_a_layer_of_the_model(layers: list[int]) -> None:
    model, ids = models.hooked("gpt2"), models.token_ids("gpt2", batch=5)
    whole, some = arrays(model, ids, None), arrays(model, ids, layers)
    left_out = [layer for layer in range(3) if layer not in layers]
    for name, found in some.items():
        assert len(found) == 3, name
        torch.testing.assert_close(
            found[layers], whole[name][layers], equal_nan=True, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: name + m
        )
        assert found[left_out].isnan().all(), name


def test_figures_show_the_layers_that_were_measured() -> None:
    model, ids = models.hooked("gpt2"), models.token_ids("gpt2", batch=5)
    effects = am.ablate_heads(model, ids, [(0, 0), (2, 3)])
    trace, cells = effects.plot().data[0], maps.shown(effects.plot())
    assert list(trace.y) == ["0", "2"] and np.shape(cells) == (2, 5)
    assert cells[1][3] == float(effects.effect[2, 3]) and "L2H3" in trace.text[1][3]
    importance = am.head_importance(model, ids, layers=[2, 1])
    assert list(importance.plot().data[0].y) == ["2", "1"]
    np.testing.assert_array_equal(maps.shown(importance.plot()), importance.score[[2, 1]].numpy())
    trace, *_ = am.null_attention(model, ids, heads=[(2, 1)]).plot().data
    assert [label.split(" ")[0] for label in trace.y] == ["2"]
    focus = am.attention_focus(model, ids, layers=[2, 0])
    assert focus_numbers(focus).layers == (2, 0)
    np.testing.assert_array_equal(focus_numbers(focus).first_top, focus.first_top[[2, 0]].float().numpy())
    frame = focus.to_frame()
    assert list(frame["layer"]) == [2] * 5 + [0] * 5
    assert list(frame["entropy"]) == focus.entropy[[2, 0]].flatten().tolist() and not frame["entropy"].isna().any()
    assert "10 heads" in focus.lead and "2 layers" in repr(focus)


def test_a_hybrids_rows_are_its_own_layer_numbers() -> None:
    model = models.hooked("jamba")
    ids = torch.randint(2, 41, (5, 8), generator=torch.Generator().manual_seed(1))
    for name, found in arrays(model, ids, None).items():
        assert len(found) == 4, name
        assert found[[0, 2]].isnan().all(), name
    effects = am.ablate_heads(model, ids, [(3, 1)], shifts=True)
    assert effects.to_frame()[["layer", "head"]].to_numpy().tolist() == [[3, 1]]
    assert effects.shift is not None
    assert effects.shift.shape == (4, model.n_heads, 4, model.n_heads)
    moved = effects.shift[3, 1]
    assert moved[[0, 2]].isnan().all() and not moved[[1, 3]].isnan().any()
    assert am.decompose_by_source(models.hooked("gpt2"), ids, layers=[2]).residual.shape == (3, 5)
    with_sinks, ids = models.hooked("gpt_oss"), models.token_ids("gpt_oss")
    whole, some = (am.decompose_scores(with_sinks, ids, layers=layers).sink for layers in (None, [1]))
    assert whole is not None and some is not None and some.shape == whole.shape
    assert torch.equal(some[1], whole[1]) and some[0].isnan().all()
