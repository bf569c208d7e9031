"""A statistic is declared once; everything else follows."""

import subprocess
import sys
from pathlib import Path

import pytest

import attnmech as am
from attnmech.maths import focus, update_statistics
from attnmech.methods.drift import sums as drift_sums
from attnmech.methods.joint_embedding.numbers import NUMBERS
from attnmech.methods.updates.result import BlockUpdates
from attnmech.runs.update_sums import BLOCK_STATISTICS

ADDED = """
from attnmech.maths.focus import STATISTICS
from attnmech.maths.statistic import RowStatistic

STATISTICS["second_mass"] = RowStatistic(
    name="second_mass", meaning="Mean of the second highest probability.", label="mean of p(2)", short="second",
    unit="share", bounds=(0.0, 0.5), printed=True,
    defined=lambda seen: seen.choice, value=lambda rows: rows.measures.second,
)

import torch, attnmech as am

model, text = am.load(), "Anna sang of shells."
found = am.attention_focus(model, text)
pattern = torch.stack([model.run(text, points=["pattern"])["pattern", layer][0] for layer in range(4)])
wanted = pattern.topk(2).values[..., 1:, 1].mean(dim=-1)
torch.testing.assert_close(found.second_mass, wanted.double())
assert type(found).second_mass.__doc__ == "Mean of the second highest probability."
assert found.to_frame()["second_mass"].tolist() == found.second_mass.flatten().tolist()
assert "mean of p(2)" in found.plot("second_mass").to_json()
assert found.interval("second_mass") is None and found.by_row("second_mass").shape[:2] == (4, 8)

import contextlib, io, json
from attnmech.cli.main import app

printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    app(["focus", "--text", text, "--out", "focus.csv", "--json"], standalone_mode=False)
table = json.loads(printed.getvalue())["table"]
assert table["units"]["second_mass"] == "share"
wanted = {(row["layer"], row["head"]): row["second_mass"] for row in table["rows"]}
for (layer, head), value in wanted.items():
    assert abs(value - float(found.second_mass[layer, head])) < 1e-6
"""


def test_adding_one_is_one_declaration(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ADDED], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kind", "statistics"),
    [
        (am.results.AttentionFocus, focus.STATISTICS),
        (am.results.ResidualUpdates, update_statistics.STATISTICS),
        (BlockUpdates, BLOCK_STATISTICS),
        (am.results.ResidualDrift, drift_sums.STATISTICS),
        (am.results.JointEmbedding, NUMBERS),
    ],
)
def test_each_has_a_property_that_says_what_it_is(kind: type, statistics: dict) -> None:
    for name, statistic in statistics.items():
        assert statistic.name == name and statistic.meaning.strip().endswith(".")
        assert statistic.bounds[0] < statistic.bounds[1]
        assert getattr(kind, name).__doc__ == statistic.meaning
