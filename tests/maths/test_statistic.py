"""A statistic is declared once; everything else follows."""

import pytest

import attnmech as am
from attnmech.maths import focus, update_statistics
from attnmech.methods.drift import sums as drift_sums
from attnmech.methods.joint_embedding.numbers import NUMBERS
from attnmech.methods.updates.result import BlockUpdates
from attnmech.runs.update_sums import BLOCK_STATISTICS


@pytest.mark.parametrize(
    ("kind", "statistics"),
    [
        (am.results.AttentionFocus, focus.WITH_GLOBAL),
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
