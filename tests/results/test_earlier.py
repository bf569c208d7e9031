"""Files that attnmech 0.1.0 wrote still load, with the numbers that they were written with."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors import safe_open

import attnmech as am
from attnmech.methods.patching.patch import PositionEffects
from attnmech.methods.updates.result import BlockUpdates

FILES = sorted((Path(__file__).parent / "saved_by_0.1.0").glob("*.safetensors"))
KINDS = {kind.__name__: kind for kind in (BlockUpdates, PositionEffects)}


@pytest.mark.parametrize("path", [path for path in FILES if path.stem != "intervention"], ids=lambda path: path.stem)
def test_a_result_is_read_with_its_numbers(path: Path, tmp_path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        kind = json.loads(file.metadata()["attnmech"])["kind"]
    found = (KINDS.get(kind) or getattr(am, kind)).load(path)
    frame = found.to_frame()
    wanted = pd.read_csv(path.with_suffix(".csv.gz"), keep_default_na=False, na_values=[""])
    for name in wanted.columns:
        if name.endswith(("_low", "_high")):  # three texts have no interval any more
            assert name not in frame or frame[name].isna().all()
        elif pd.api.types.is_numeric_dtype(wanted[name]):
            mine = pd.to_numeric(frame[name], errors="coerce").astype(float)
            np.testing.assert_allclose(mine, wanted[name].astype(float), rtol=1e-6, err_msg=name)
        elif name != "verdict":
            assert frame[name].fillna("").tolist() == wanted[name].fillna("").tolist(), name
    again = type(found).load(found.save(tmp_path / "again"))
    assert again.to_frame().equals(frame) and repr(again) == repr(found)


def test_an_intervention_is_read() -> None:
    found = am.Intervention.load(FILES[0].parent / "intervention.safetensors")
    assert str(found) == "z of L0H1 becomes mean over 3 texts, pooled"
