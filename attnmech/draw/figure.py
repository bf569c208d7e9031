"""The plotly figure that every plot returns, which displays itself in a notebook without a network."""

from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]

from .embed import in_notebook, plotly_view


class Figure(go.Figure):  # type: ignore[misc]
    """A plotly figure that is displayed like the other views, so that an exported notebook also shows it.

    plotly itself stores only the numbers in a notebook; a front-end extension draws them.
    """

    _ipython_display_ = None
    """None, so that IPython calls `_repr_mimebundle_`."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **options: Any) -> dict[str, str]:
        return {"text/html": in_notebook([plotly_view(self)]), "text/plain": repr(self)}

    def _repr_html_(self) -> str:
        return in_notebook([plotly_view(self)])

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(trace.type for trace in self.data))
        return f"Figure({kinds}; shows itself in a notebook, or .show())"
