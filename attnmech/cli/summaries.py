"""Summarises what a command found, for the terminal or as JSON."""

from typing import TYPE_CHECKING

from .outputs import Outputs
from .terminal import Column, Rows, Summary

if TYPE_CHECKING:
    import pandas as pd

    from ..model.run.hooked import HookedModel
    from ..pages.atlas.result import Atlas
    from ..pages.result import Report
    from ..results.result import PagedResult

LAYER, HEAD = Column("layer"), Column("head")


def summary_of(
    command: str, model: "HookedModel", result: "PagedResult", outputs: Outputs, shown: Rows, *further: str
) -> Summary:
    """A result's finding, its table, what was cut, and the files."""
    cut, texts = getattr(result, "truncated", 0), getattr(result, "documents", 0)  # a sweep cuts no text
    count = texts if isinstance(texts, int) else len(texts)
    notes = [f"{cut} of {count} texts were cut to the model's length."] if cut else []
    intervals = str(shown.frame.attrs.get("intervals", ""))
    return Summary(
        command, repr(model), (repr(result), *further), shown, notes + [intervals] * bool(intervals), outputs.names
    )


def report_summary(model: "HookedModel", result: "Report", outputs: Outputs) -> Summary:
    """The findings of the page, and the terms and residuals of each layer."""
    frame: "pd.DataFrame" = result.to_frame()
    names = map(str, frame.filter(like="_share"))
    shares = [Column(name, name.removesuffix("_share"), "share") for name in names]
    shown = Rows(
        "Mean share of each term in a row's highest score; largest residual",
        frame,
        (*[Column("text")] * bool(result.further), LAYER, *shares, Column("residual", unit="of a score")),
    )
    sizes = [
        f"The page has {path.stat().st_size / 1e6:.1f} MB and opens offline."
        for path in outputs.paths
        if path.suffix.lower() == ".html"
    ]
    findings = [f"{question}. {finding}" for question, finding in result.findings.items()]
    return Summary("report", repr(model), findings, shown, (*result.notes, *sizes), outputs.names)


def atlas_summary(model: "HookedModel", result: "Atlas", outputs: Outputs, shown: Rows) -> Summary:
    """The findings of an atlas, and its heads."""
    findings = [f"{question}. {finding}" for question, finding in result.findings.items()]
    return Summary("atlas", repr(model), findings, shown, result.notes, outputs.names)
