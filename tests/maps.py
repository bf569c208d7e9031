"""Reads the numbers that a map of layers × heads shows."""

from typing import Any

import numpy as np


def shown(figure: Any) -> np.ndarray:
    """The number of each cell, pale or not; NaN for an empty cell."""
    traces = [np.asarray(trace.z, dtype=float) for trace in figure.data if trace.type == "heatmap"]
    assert all((np.isnan(traces[0]) | np.isnan(other)).all() for other in traces[1:])
    return np.nansum(traces, axis=0) + np.where(np.isnan(traces).all(axis=0), np.nan, 0.0)
