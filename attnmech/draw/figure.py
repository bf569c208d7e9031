"""The plotly figure that every plot returns, which displays itself in a notebook without a network."""

from html import unescape
from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]

from .embed import in_notebook, plotly_view

_AXES: Final = ("x", "y", "z")


class Figure(go.Figure):  # type: ignore[misc]
    """A plotly figure that is displayed like the other views, so that an exported notebook also shows it.

    plotly itself stores only the numbers in a notebook; a front-end extension draws them.
    """

    _ipython_display_ = None  # so that IPython calls `_repr_mimebundle_`

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **options: Any) -> dict[str, str]:
        return {"text/html": in_notebook([plotly_view(self)]), "text/plain": repr(self)}

    def _repr_html_(self) -> str:
        return in_notebook([plotly_view(self)])

    def to_frame(self) -> pd.DataFrame:
        """The numbers that the figure draws: one row per mark, with trace, x, y, z (as far as it has them) and text.

        >>> effects.plot().to_frame().to_csv("figure.csv")      # doctest: +SKIP
        """
        frames = [_marks(trace, trace.name or str(number)) for number, trace in enumerate(self.data)]
        return pd.concat(frames, ignore_index=True).map(_read) if frames else pd.DataFrame(columns=["trace"])

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(trace.type for trace in self.data))
        return f"Figure({kinds}; shows itself in a notebook, or .show())"


def _read(value: Any) -> Any:
    """A label as a reader sees it; plotly's labels are HTML."""
    return unescape(value.replace("<br>", "\n")) if isinstance(value, str) else value


def _marks(trace: Any, name: str) -> pd.DataFrame:
    """The marks of one trace; a matrix of values becomes a row per cell."""
    z = getattr(trace, "z", None)
    if z is not None and np.ndim(z) == 2:
        rows, columns = np.shape(z)
        x, y = (
            list(range(length)) if values is None else list(values)
            for values, length in ((trace.x, columns), (trace.y, rows))
        )
        cells = {"x": x * rows, "y": [value for value in y for _ in x], "z": np.ravel(z)}
        return pd.DataFrame({"trace": name, **cells})
    held = {axis: getattr(trace, axis, None) for axis in (*_AXES, "text")}
    marks = {axis: list(values) for axis, values in held.items() if values is not None and np.ndim(values) == 1}
    length = max(map(len, marks.values()), default=0)
    return pd.DataFrame({"trace": name, **{axis: values for axis, values in marks.items() if len(values) == length}})
