"""Results as xarray Datasets: the same numbers, under the names of their axes, also after NetCDF."""

import sys
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
import xarray as xr

import attnmech as am
from attnmech.demo.text import documents

TEXTS = documents(6)


def dataset(result: Any) -> xr.Dataset:
    made = result.to_xarray()
    assert made.attrs["kind"] == type(result).__name__
    assert models.demo().weights_hash in made.attrs["provenance"]
    return made


def test_effects_have_layers_heads_and_texts() -> None:
    effects = am.ablate_heads(models.demo(), TEXTS, heads=[(0, 1), (2, 3)])
    made = dataset(effects)
    assert dict(made.sizes) == {"layer": 4, "head": 8, "text": 6}
    np.testing.assert_array_equal(made["after"].transpose("layer", "head", "text"), effects.after)
    for layer, head in ((0, 1), (2, 3)):
        cell = made.sel(layer=layer, head=head)
        assert float(cell["effect"]) == float(effects.effect[layer, head])
        low, high = effects.interval()
        assert float(cell["effect_low"]) == float(low[layer, head])
        assert float(cell["effect_high"]) == float(high[layer, head])
        assert float(cell["per_text"].mean()) == pytest.approx(float(cell["effect"]))
    assert np.isnan(made["effect"].sel(layer=3, head=3))
    assert made.attrs["metric"] == "loss"


def test_measured_layers_keep_their_numbers() -> None:
    found = am.qk_directions(models.demo(), TEXTS, layers=[0, 2], k=2)
    made = dataset(found)
    assert made["measured"].values.tolist() == [0, 2]
    expected = found.share[found.layers.index(2), 5]
    np.testing.assert_array_equal(made["share"].sel(measured=2, head=5).sortby("direction"), expected)
    assert float(made["query_key"].sel(layer=2, head=5)) == pytest.approx(float(expected.sum()))


def test_words_are_words_and_layers_may_have_no_heads() -> None:
    null = am.null_attention(models.demo(), TEXTS, heads=[(1, 0), (2, 6)])
    made, table = dataset(null), null.to_frame().set_index(["layer", "head"])
    for place, verdict in table.verdict.items():
        assert made["verdict"].sel(layer=place[0], head=place[1]).item() == verdict
    drift = am.residual_drift(models.demo(), TEXTS)
    np.testing.assert_array_equal(dataset(drift)["cosine"].sel(layer=[0, 1, 2, 3]), drift.to_frame().cosine)


def test_a_claim_about_one_set_has_scalars() -> None:
    claim = am.confirm_heads(models.demo(), [(1, 0)], am.Task.of_demo("copying", templates=10, per_template=1))
    assert float(dataset(claim)["adds"].sel(layer=1, head=0)) == pytest.approx(claim.by_head().adds.item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_netcdf_gives_the_numbers_back(tmp_path: Path, dtype: torch.dtype) -> None:
    model = am.load(dtype=dtype)
    for result in (
        am.attention_focus(model, iter(TEXTS)),
        am.ablate_heads(model, TEXTS),
        am.decompose_scores(model, "a b"),
    ):
        made, path = result.to_xarray(), tmp_path / "result.nc"
        made.to_netcdf(path)
        again = xr.load_dataset(path)
        assert set(again.data_vars) == set(made.data_vars) and len(made.data_vars) > 3
        for name, values in made.data_vars.items():
            assert again[name].dims == values.dims
            np.testing.assert_array_equal(again[name].values.astype(values.dtype), values.values)
        assert again.attrs["kind"] == type(result).__name__


def test_without_xarray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(am.errors.InputError, match=r'pip install "attnmech\[xarray\]"'):
        am.attention_focus(models.demo(), TEXTS[0]).to_xarray()
