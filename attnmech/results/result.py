"""Defines the base classes of results, which become a frame, a file or a page, and name their origin; reads files."""

import dataclasses
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, get_type_hints

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from .. import results
from ..basics.arguments import shown, string
from ..basics.fields import check_fields
from ..basics.files import path_ending, path_of
from ..basics.lens_names import missing_name
from ..basics.messages import first_line
from ..basics.public import check_methods, public
from ..draw.figure_page import in_notebook_output, render_figures, table_html
from ..draw.html_file import WritesHtml, returns_page
from ..draw.section import Section
from ..draw.text import html_text
from ..errors import AttnmechError, InputError
from ..maths.statistic import Statistic, Statistics
from .codec import packed, unpacked
from .figure_file import SavesFigures
from .head_page import head_page, is_about_heads
from .provenance import Provenance
from .sentences import in_words
from .tensor_file import check_whole, read_tensors, write_tensors

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
    main = statistics[result._MAIN].axes if hasattr(result, "_MAIN") else "*place"
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


FILE_VERSION: Final = 1  # of result files (docs/schema/result.json); it increases when older files become unreadable


class Result(SavesFigures, ABC):
    """Base of all results, which are dataclasses: `save` writes their fields, and each class defines `to_frame`."""

    provenance: Provenance

    _SUBTRACT: ClassVar[str]  # advice on what to subtract instead, in a class whose differences would be meaningless
    _AXES: ClassVar[Mapping[str, str | Collection[Any]]] = {}
    """The labels of axes, by the axis: the name of the field or property that holds them, or the labels themselves."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_methods(cls)

    if not TYPE_CHECKING:  # type checkers report missing attributes by themselves

        def __getattr__(self, name: str) -> Any:
            one = ' result["NAME"] is a statistic with its mean and intervals, and' * hasattr(type(self), "_MAIN")
            message = missing_name(type(self).__name__, name, {})
            if ";" not in message:
                message += f";{one} `to_frame()` gives its numbers as a table"
            raise AttributeError(message, name=name, obj=self)

    def __sub__(self, other: Any) -> Self:
        raise InputError(f"two {type(self).__name__} results cannot be subtracted; {self._SUBTRACT}.")

    @abstractmethod
    def to_frame(self) -> pd.DataFrame:
        """The numbers as a tidy table, one row per head."""

    def by_head(self) -> pd.DataFrame:
        """The numbers as a table with one row per head; the same as `to_frame`, unless that has other rows."""
        return self.to_frame()

    def to_xarray(self) -> "xr.Dataset":
        """The numbers as an xarray Dataset with named axes (`pip install 'attnmech[xarray]'`), also for NetCDF.

        >>> effects.to_xarray()["effect"].sel(layer=2)                  # doctest: +SKIP
        >>> effects.to_xarray().to_netcdf("effects.nc")                 # doctest: +SKIP

        The tensors of the result have the axes of their annotations. The columns of `by_head` are there by layer and
        head, NaN (or "") for heads without a row. The attributes hold the kind of the result, its options, and its
        provenance as JSON.
        """
        return dataset_of(self)

    def save(self, path: str | Path) -> Path:
        """Writes the result to one .safetensors file (tensors, and JSON in its header), for `am.load_result`."""
        tables = " For other files: result.to_frame().to_csv(path), result.to_xarray().to_netcdf(path)."
        target = path_ending(path, ".safetensors", instead=tables)
        everything, facts = self._written()
        tensors, same_as = _without_repeats(everything)
        header = {"version": FILE_VERSION, "kind": type(self).__name__, **facts, "same_as": same_as}
        return write_tensors(target, tensors, header)

    @property
    def _figure_model(self) -> str:
        return self.provenance.short_name

    @property
    def _axis_lengths(self) -> Mapping[str, int]:
        """The lengths of labelled axes; when a file is read, its tensors are checked against them."""
        labels = {axis: getattr(self, of) if isinstance(of, str) else of for axis, of in self._AXES.items()}
        return {axis: len(of_axis) for axis, of_axis in labels.items()}

    def _measured(self) -> "Sequence[Self]":
        """The measured results: this result itself or, for a difference, its two parts."""
        return (self,)

    def _check(self) -> None:
        """Raises an exception of any kind if the values are not those that `save` wrote."""
        check_fields(self, self._axis_lengths)

    def _written(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The contents of the file: the tensors, and everything else as JSON values."""
        tensors, rest = packed(self)
        return tensors, {"facts": rest, "provenance": self.provenance.to_dict()}

    @classmethod
    def _read(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Self:
        """The result from the contents that `_written` returned."""
        result: Self = unpacked(cls, tensors, header["facts"], provenance=Provenance.from_dict(header["provenance"]))
        return result

    def _repr_html_(self) -> str:
        return f"<p>{html_text(repr(self))}</p>{table_html(self.to_frame())}"


class PagedResult(WritesHtml, Result):
    """A result with its own page: figures, a table, and one sentence that the numbers support."""

    STATISTICS: ClassVar[Statistics[Statistic]]
    """The statistics that the class declares, in the order of the axis `statistic`."""

    _TITLE: ClassVar[str]
    """The heading of the page, unless a class defines `_title`: `{model}` and `{metric}` stand for their names, and
    `{result.NAME}` for a field."""

    _is_about_heads: ClassVar[bool] = True  # whether `by_head` has rows of heads, not of pairs or steps

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.STATISTICS = Statistics(cls, Statistic)

    @property
    @abstractmethod
    def lead(self) -> str:
        """The one sentence that the numbers support."""

    @property
    def _title(self) -> str:
        metric = in_words(getattr(self, "metric", ""))
        return self._TITLE.format(model=self.provenance.short_name, metric=metric, result=self)

    @abstractmethod
    def _sections(self) -> "Sequence[Section]":
        """The figures of the page."""

    @property
    def _heading(self) -> str:
        return self._title

    @property
    def _origin(self) -> dict[str, str]:
        """The origin of the numbers, as shown on the page."""
        return self.provenance.entries

    def _page_sections(self) -> "Sequence[Section]":
        """The figures of a page whose reader chooses a head."""
        return self._sections()

    @property
    def _table(self) -> pd.DataFrame:
        """The table of the page: all numbers, unless they are too many to show."""
        return self.to_frame()

    @property
    def _labels(self) -> Mapping[str, str]:
        """The labels of numbers, with their units, by the columns of `by_head`."""
        return {name: statistic.axis for name, statistic in self.STATISTICS.items()}

    @property
    def _letters(self) -> Mapping[str, tuple[str, str]]:
        """The letter and the colour of each type of head in the column `types` of `by_head`."""
        return {}

    @returns_page
    def to_html(self) -> str:
        """The figures and the table as one offline page; `write_html(path)` writes it.

        On a page about heads, the reader chooses a head in a map of all heads.
        """
        heads = self.by_head()
        parts: dict[str, Any] = {
            "title": self._heading,
            "lead": self.lead,
            "frame": self._table,
            "provenance": self._origin,
        }
        if not self._is_about_heads or not is_about_heads(heads):
            return render_figures(sections=self._sections(), **parts)
        return head_page(
            sections=self._page_sections(), heads=heads, labels=self._labels, letters=self._letters, **parts
        )

    def _repr_html_(self) -> str:
        return in_notebook_output(title=self._heading, lead=self.lead, sections=self._sections(), frame=self._table)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.lead})"


def _without_repeats(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors without repeats and, for each further name of the same memory, the name under which it is stored."""
    once: dict[str, Tensor] = {}
    same_as: dict[str, str] = {}
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    for name, value in tensors.items():
        key = (value.data_ptr(), tuple(value.shape), value.stride())
        if value.numel() and key in first:
            same_as[name] = first[key]
            continue
        first[key] = name
        once[name] = value
    return once, same_as


@public
def load_result(path: str | Path) -> Result:
    """Reads a result that its `save` wrote; needs no model.

    >>> effects = am.load_result("effects.safetensors")      # doctest: +SKIP
    >>> effects.to_frame()                                   # doctest: +SKIP

    Args:
        path: the file.

    Returns:
        the result, of the class that was saved (`am.results`).

    Raises:
        InputError: if there is no such file, if it holds no result, if it is damaged, or if its numbers and labels do
            not fit together.
    """
    source = path_of(path)
    if not source.is_file():
        raise InputError(f"there is no file {source}.")
    check_whole(source)
    try:
        tensors, header = read_tensors(source)
        name = string("kind", header["kind"])
    except Exception as error:
        raise InputError(f"{source} is not a result that attnmech saved ({first_line(error)}).") from error
    if name in (
        others := {
            "Intervention": "am.Intervention.load",
            "Activations": "safetensors.torch.load_file",
            "EngineSums": "am.engine_statistics",
        }
    ):
        raise InputError(
            f"{source} holds an {name}, not a result; read it with {others[name]}.".replace("an Act", "Act")
        )
    kind = getattr(results, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Result)):
        raise InputError(
            f"{source} holds {name!r}, which is not in am.results; read it with the version of attnmech that saved it."
        )
    version = header.get("version", FILE_VERSION)
    if version != FILE_VERSION:
        raise InputError(
            f"{source} has the file version {shown(version)}; this attnmech reads version {FILE_VERSION}. Read it with "
            "the version of attnmech that saved it."
        )
    try:
        result = kind._read({**tensors, **{name: tensors[first] for name, first in header["same_as"].items()}}, header)
        for measured in result._measured():
            measured._check()
        return result
    except Exception as error:  # the file may hold anything
        reason = f"no {error}" if isinstance(error, KeyError) else first_line(error)
        raise InputError(f"{source} does not hold a valid {name}: {reason}. Save the result again.") from error
