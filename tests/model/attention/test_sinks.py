"""Sinks (gpt-oss): one more logit in the softmax's denominator, wherever a pattern is shown."""

import models
import torch

import attnmech as am


def test_the_view_shows_the_pattern_that_the_model_has() -> None:
    model, ids = models.hooked("gpt_oss"), models.token_ids("gpt_oss", 1)
    split = am.decompose_scores(model, ids)
    pattern = model.run(ids, points=["pattern"])
    shown = torch.from_numpy(split.numbers().pattern)
    for layer in range(model.n_layers):
        torch.testing.assert_close(shown[layer], pattern["pattern", layer][0], rtol=1e-5, atol=1e-6)
    assert float(shown.sum(dim=-1).min()) < 0.99


def test_rows_of_padding_on_the_left_see_a_sink_alone() -> None:
    """Rows without attention to any key make no statistic NaN: each text gives the same as alone."""
    model, ids = models.hooked("gpt_oss"), models.token_ids("gpt_oss", 1)
    padded = torch.cat([torch.zeros(1, 3, dtype=ids.dtype), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(ids)], dim=1)
    texts = {"input_ids": padded, "attention_mask": mask}
    alone, beside = (am.attention_focus(model, given).entropy for given in (ids, texts))
    torch.testing.assert_close(beside, alone, rtol=1e-5, atol=1e-6)
    assert not am.head_types(model, texts).state["breadth"].isnan().any()
