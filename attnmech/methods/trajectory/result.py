"""The numbers of a result at every checkpoint of a training run."""

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import option, shown
from ...basics.nouns import counted
from ...basics.public import public
from ...draw.figure import Figure
from ...draw.section import Section
from ...draw.style import FIGURE_STYLE
from ...draw.text import short_name, with_minus_signs
from ...errors import AttnmechError, InputError
from ...model.files.load import load
from ...model.run.hooked import HookedModel
from ...results.provenance import Provenance
from ...results.result import PagedResult, Result
from ...results.table import require_no_head
from ...runs.progress import steps as progress_of


@public
def trajectory(
    checkpoints: Iterable[Any], method: Callable[[HookedModel], Result], *, progress: bool = False
) -> "Trajectory":
    """Measures every checkpoint of a training run with the same method.

    >>> import attnmech as am
    >>> trained = am.load()
    >>> run = am.trajectory([("start", am.untrained(trained)), ("end", trained)], am.head_types)
    >>> run.steps, run["induction"].shape
    (('start', 'end'), torch.Size([2, 32]))
    >>> folders = sorted(Path("run").glob("step-*"))                                     # doctest: +SKIP
    >>> run = am.trajectory(folders, am.head_types)                                      # doctest: +SKIP
    >>> run.plot("induction")                                                            # doctest: +SKIP

    Args:
        checkpoints: folders, hub names or models, or pairs of a name and one of these. Each checkpoint is loaded only
            while it is measured. A checkpoint from a folder is named by the last part of its path, and numbered if
            another checkpoint has the same name. With an iterator, at most one model is in memory at a time.
        method: a function from the model to a result with one row per head, such as `am.head_types` or
            `lambda model: am.attention_focus(model, texts)`.
        progress: shows a bar on stderr.

    Returns:
        Every number of the results' tables, `[step row column]`, and one table of the heads at all steps.

    Raises:
        AttnmechError: for a checkpoint that cannot be loaded or measured: the error of `am.load` or of the method, with
            the checkpoint's name.
        InputError: if a result's heads differ from those of the first result.

    """
    if not callable(method):
        raise InputError(f"`method` must be a function that takes a model and returns a result; got {shown(method)}.")
    if not isinstance(checkpoints, Iterable) or isinstance(checkpoints, str | Path):
        raise InputError(f"`checkpoints` must be a list of folders or models; got {shown(checkpoints)}.")
    names: list[str] = []
    tables: list[pd.DataFrame] = []
    origins: list[Provenance] = []
    total = len(checkpoints) if isinstance(checkpoints, Sized) else None
    with progress_of("checkpoints", total, show=progress) as bar:
        for item in checkpoints:  # `enumerate` would keep the last item alive
            number = len(names)
            name, checkpoint = _named(item, number)
            name = f"{name}, {number}" if name in names else name
            result = _measured(checkpoint, method, f"checkpoint {number}, {name}")
            del item, checkpoint
            names.append(name)
            tables.append(_numbers(result.by_head(), name, tables))
            origins.append(result.provenance)
            bar.advance(1)
    if not names:
        raise InputError("`checkpoints` must be a list of folders or models; got none.")
    first = tables[0]
    # A column may be missing where nothing was measured: a kind without a target, an interval of too few texts.
    columns = list(dict.fromkeys(str(column) for table in tables for column in table.columns))
    tables = [table.reindex(columns=columns) for table in tables]
    return Trajectory(
        steps=tuple(names),
        layers=tuple(first.index.get_level_values("layer")),
        heads=tuple(first.index.get_level_values("head")),
        columns=tuple(columns),
        values=torch.stack([torch.from_numpy(table.to_numpy(dtype="float64", copy=True)) for table in tables]),
        weights=tuple(origin.weights for origin in origins),
        provenance=origins[-1],
    )


def _named(checkpoint: Any, number: int) -> tuple[str, Any]:
    if not isinstance(checkpoint, tuple):
        return _name_of(checkpoint, number), checkpoint
    if len(checkpoint) != 2:
        raise InputError(
            f"checkpoint {number} must be a folder, a model, or a tuple (name, folder or model); "
            f"got {shown(checkpoint)}."
        )
    return str(checkpoint[0]), checkpoint[1]


def _measured(checkpoint: Any, method: Callable[[HookedModel], Result], named: str) -> Result:
    """Measures one checkpoint, without keeping its model; an error names the checkpoint."""
    try:
        result = method(checkpoint if isinstance(checkpoint, HookedModel) else load(checkpoint))
    except AttnmechError as error:
        raise type(error)(f"{named}: {error}") from error
    if not isinstance(result, Result):
        raise InputError(f"`method` must return an attnmech result; got {shown(result)}.")
    return result


def _name_of(checkpoint: Any, number: int) -> str:
    if isinstance(checkpoint, str | Path):
        return Path(checkpoint).name
    return f"{short_name(checkpoint.name)}, {number}" if isinstance(checkpoint, HookedModel) else str(number)


def _numbers(frame: pd.DataFrame, name: str, earlier: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The numeric columns of a result's table, by layer and head; `InputError` if heads differ from the first."""
    by_head = {"layer", "head"} <= set(frame.columns)
    if not by_head or bool(frame.duplicated(["layer", "head"]).any()):
        raise InputError("`method` must return a result with one row per head, such as am.head_types.")
    numbers = frame.set_index(["layer", "head"]).select_dtypes("number")
    if earlier and not numbers.index.equals(earlier[0].index):
        raise InputError(f"checkpoint {name} has different layers or heads from the first.")
    return numbers


@dataclass(frozen=True, repr=False)
class Trajectory(PagedResult):
    """A result's numbers at every checkpoint."""

    _TITLE = "Trajectory over checkpoints: {model}"
    _SUBTRACT = "subtract the results of two checkpoints"

    steps: tuple[str, ...]
    """The names of the checkpoints."""
    layers: tuple[int, ...]
    """The layer of each row."""
    heads: tuple[int, ...]
    """The head of each row."""
    columns: tuple[str, ...]
    """The names of the numbers, in the order of the axis `column`."""
    values: Float[Tensor, "step row column"]
    weights: tuple[str, ...]
    """The SHA-256 of each checkpoint's weights."""
    provenance: Provenance
    """The provenance of the last checkpoint's result."""

    def __getitem__(self, column: str) -> Float[Tensor, "step row"]:
        """One number for every head at every checkpoint."""
        return self.values[:, :, self.columns.index(option("column", column, self.columns))]

    def to_frame(self) -> pd.DataFrame:
        """One row per checkpoint and head: step, layer, head, and every number measured."""
        rows = [
            {"step": step, "layer": layer, "head": head}
            for step in self.steps
            for layer, head in zip(self.layers, self.heads, strict=True)
        ]
        numbers = pd.DataFrame(self.values.flatten(0, 1).numpy(), columns=list(self.columns))
        return pd.concat([pd.DataFrame(rows), numbers], axis=1)

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws a number, by default the first, as a line for each head over the checkpoints, with the heads that
        change most in colour; returned, not shown.
        """
        require_no_head(layer, head)
        column = self.columns[0] if figure is None else option("figure", figure, self.columns)
        names = [f"L{layer}H{head}" for layer, head in zip(self.layers, self.heads, strict=True)]
        return lines_by_step(self[column].T.numpy(), self.steps, names, label=column.replace("_", " "))

    @property
    def lead(self) -> str:
        """The head that changes most in the first measurement that changes."""
        beginning = f"{counted(len(self.columns), noun='measurement')} of {counted(len(self.layers), noun='head')} at"
        if len(self.steps) == 1:
            return f"{beginning} one checkpoint, {self.steps[0]}."
        run = f"{beginning} {counted(len(self.steps), noun='checkpoint')}, {self.steps[0]} to {self.steps[-1]}"
        for name in self._shown:
            values = self[name]
            spread = values.nan_to_num(-torch.inf).amax(dim=0) - values.nan_to_num(torch.inf).amin(dim=0)
            row = int(spread.argmax())
            if float(spread[row]) > 0:
                ends = sorted(
                    (
                        int(values[:, row].nan_to_num(torch.inf).argmin()),
                        int(values[:, row].nan_to_num(-torch.inf).argmax()),
                    )
                )
                one, other = (f"{float(values[step, row]):.3g} ({self.steps[step]})" for step in ends)
                of_head = f"L{self.layers[row]}H{self.heads[row]}"
                change = f"{name.replace('_', ' ')} changes most in {of_head}, from {one} to {other}"
                return with_minus_signs(f"{run}: {change}.")
        return f"{run}: no measurement of any head changes."

    @property
    def _shown(self) -> list[str]:
        """The measurements, without the ends of their intervals and what they are compared with."""
        ends = ("_low", "_high", "_baseline", "_top")
        known = (
            name for name in self.columns if not name.endswith(ends) or name.rpartition("_")[0] not in self.columns
        )
        return list(known)

    def _sections(self) -> "Sequence[Section]":
        return [
            Section(
                name.replace("_", " "),
                "One line per head; the heads that change most are coloured and named.",
                {f"step-{place}": self.plot(name)},
                f'run.plot("{name}")',
            )
            for place, name in enumerate(self._shown)
            if bool(torch.isfinite(self[name]).any())
        ]


_NAMED: Final = (
    ("#d55e00", "solid"), ("#2b8cc4", "dash"), ("#009e73", "dot"), ("#9a5fd6", "dashdot"), ("#b8860b", "longdash"),
    ("#cc79a7", "longdashdot"),
)  # fmt: skip
"""The colour and dash of the heads that change most."""


def lines_by_step(
    values: Float[np.ndarray, "head step"], steps: Sequence[str], names: Sequence[str], *, label: str
) -> go.Figure:
    """Draws a line for each head; the heads that change most are named, the others are grey.

    >>> figure = lines_by_step(np.array([[0.0, 0.9], [0.1, 0.1]]), ["0", "1"], ["L0H0", "L0H1"], label="induction")
    >>> [(trace.name, trace.showlegend) for trace in figure.data]
    [('L0H1', True), ('L0H0', True)]

    Args:
        values: each head's number at each step; NaN where undefined.
        steps: the names of the steps, in order.
        names: the names of the heads.
        label: the title of the vertical axis, which names the number.

    Returns:
        One trace per head; the head that changes most comes last.

    """
    if values.shape != (len(names), len(steps)):
        raise InputError(f"`values` must be [{len(names)} heads, {len(steps)} steps]; got {values.shape}.")
    known = np.isfinite(values)
    spread = np.where(known, values, -np.inf).max(axis=1) - np.where(known, values, np.inf).min(axis=1)
    order = np.argsort(np.where(known.any(axis=1), spread, -1.0), kind="stable")
    figure = Figure()
    for place, head in enumerate(order.tolist()):
        rank = len(order) - 1 - place
        colour, dash = _NAMED[rank] if rank < len(_NAMED) else ("rgba(128,128,128,0.45)", "solid")
        figure.add_scatter(
            x=list(steps),
            y=values[head],
            mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 2 if rank < len(_NAMED) else 1},
            marker={"size": 4},
            name=names[head],
            showlegend=rank < len(_NAMED),
            meta=names[head],
            hovertemplate=f"{names[head]}<br>%{{x}}<br>%{{y:.3g}}<extra></extra>",
        )
    legend = {"traceorder": "reversed", "title": {"text": "the heads that change most"}}
    figure.update_layout(template=FIGURE_STYLE, height=420, margin={"t": 80}, legend=legend)
    figure.update_xaxes(title="checkpoint", type="category")
    figure.update_yaxes(title=label)
    return figure
