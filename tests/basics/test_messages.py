"""Warnings point at the user's line."""

from typing import Any

import pytest

from attnmech.basics.messages import warn_user


def test_a_warning_points_at_the_line_outside_the_package() -> None:
    within: dict[str, Any] = {"__name__": "attnmech.runs.deep", "warn": warn_user.__wrapped__}  # type: ignore[attr-defined]
    exec("def inner(): warn('Mind the gap.', FutureWarning)\ndef call(): inner()", within)
    with pytest.warns(FutureWarning, match="Mind the gap") as record:
        within["call"]()
    assert record[0].filename == __file__


def test_a_warning_at_top_level_of_the_package_does_not_fail() -> None:
    with pytest.warns(UserWarning, match="Mind"):
        warn_user("Mind the gap.")
