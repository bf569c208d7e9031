"""Converts a result into an xarray Dataset, whose axes have names."""

import dataclasses
import inspect
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..errors import AttnmechError, InputError
from ..maths.statistic import Statistic

if TYPE_CHECKING:
    import xarray as xr


def dataset_of(result: Any) -> "xr.Dataset":
    """The tensors of a result with the axes of their annotations, and the columns of `by_head` by layer and head."""
    try:
        import xarray as xr
    except ImportError as error:
        raise InputError('for xarray: pip install "attnmech[xarray]".') from error
    frame = result.by_head()
    lengths: dict[str, int] = {}
    variables: dict[str, Any] = {}
    unnamed = set()
    statistics = getattr(result, "STATISTICS", {})
    main = statistics[result.MAIN].axes if hasattr(result, "MAIN") else "*place"
    for name, tensor, annotated in _tensors(result):
        written = annotated.replace("*place", main)
        axes = _axes(written.replace("place", "head") if "head" in frame else written, tensor)
        if axes is None:
            unnamed.add(name)
            axes = [f"{name}_{number}" for number in range(tensor.ndim)]
        axes = [
            axis if lengths.setdefault(axis, length) == length else f"{name}_{axis}"
            for axis, length in zip(axes, tensor.shape, strict=True)
        ]
        variables[name] = (axes, _array(tensor))
    coordinates = {axis: list(range(length)) for axis, length in lengths.items() if axis in ("layer", "head")}
    layers: Sequence[int] = getattr(result, "layers", ())
    for axis in ("layer", "measured"):
        if lengths.get(axis) == len(layers):
            coordinates[axis] = list(layers)
    for name, column in _columns(frame, coordinates).items():
        if name not in variables or name in unnamed:
            variables[name] = column
    facts = {
        field.name: value
        for field in dataclasses.fields(result)
        if isinstance(value := getattr(result, field.name), int | float | str)
    }
    attributes = {name: int(value) if isinstance(value, bool) else value for name, value in facts.items()}
    attributes |= {"kind": type(result).__name__, "provenance": json.dumps(result.provenance.to_dict())}
    return xr.Dataset(variables, coordinates, attributes)


def _tensors(result: Any) -> Iterator[tuple[str, Tensor, str]]:
    """The public fields and properties that are tensors, with the axes of their annotations."""
    kind = type(result)
    hints = get_type_hints(kind)
    for name in sorted({*hints, *(name for base in kind.__mro__ for name in vars(base))}):
        member = inspect.getattr_static(kind, name, None)
        hint = get_type_hints(member.fget).get("return") if isinstance(member, property) else hints.get(name)
        axes = member.axes or None if isinstance(member, Statistic) else getattr(hint, "dim_str", None)
        if name.startswith("_") or axes is None:
            continue
        try:
            value = getattr(result, name)
        except AttnmechError:  # a property that this result does not have, such as the rows of a corpus
            continue
        if isinstance(value, Tensor):
            yield name, value, axes


def _axes(written: str, tensor: Tensor) -> list[str] | None:
    """The names of the axes of a tensor, or None if they are not all written, as in "*place text"."""
    named = [axis.lstrip("#") for axis in written.split()]
    known = len(named) == tensor.ndim and len(set(named)) == len(named) and all(map(str.isidentifier, named))
    return named if known else None


def _array(tensor: Tensor) -> np.ndarray:
    known = tensor.detach().cpu()
    return (known.float() if known.dtype in (torch.bfloat16, torch.float16) else known).numpy()


def _columns(frame: pd.DataFrame, coordinates: dict[str, list[int]]) -> dict[str, tuple[list[str], np.ndarray]]:
    """The columns of a table by head or by layer, with their axes; adds coordinates that are missing."""
    axes = [axis for axis in ("layer", "head") if axis in frame]
    if not axes or frame.duplicated(axes).any():
        return {}
    places = [coordinates.setdefault(axis, sorted(set(frame[axis].astype(int).tolist()))) for axis in axes]
    rows = frame.set_index(axes).reindex(pd.MultiIndex.from_product(places) if len(axes) > 1 else places[0])
    columns = {}
    for name in rows:
        column = rows[name].dropna()
        if pd.api.types.is_numeric_dtype(rows[name]) or column.map(lambda value: isinstance(value, bool)).all():
            values = rows[name].astype(float).to_numpy()
        elif column.map(lambda value: isinstance(value, str)).all():
            values = rows[name].fillna("").astype(str).to_numpy(dtype=str)
        else:
            continue
        columns[str(name)] = (axes, values.reshape([len(place) for place in places]))
    return columns
