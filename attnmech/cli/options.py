"""The options that several commands share, in the order in which every command lists them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import typer

from .outputs import FILES, RESULT, listed

DeviceOption = Annotated[
    str | None, typer.Option("--device", help="Where the model runs: cuda, cuda:1, mps, …; the CPU if left out.")
]
DtypeOption = Annotated[
    Literal["float64", "float32", "bfloat16", "float16"] | None,
    typer.Option("--dtype", help="The precision of the weights; by default, that in which they were saved."),
]
MetricOption = Annotated[
    Literal["loss", "kl"], typer.Option("--metric", help="The loss, or the KL divergence from the unchanged model.")
]


@dataclass(frozen=True)
class Options:
    """The shared options of a command; those that it does not have are as here."""

    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Hub name, folder or GGUF file; the demo model if left out.")
    ] = None
    device: DeviceOption = None
    dtype: DtypeOption = None
    text: Annotated[str | None, typer.Option("--text", "-t", help="The text to read.")] = None
    image: Annotated[
        list[Path],
        typer.Option("--image", help="A picture that the text is about, for a model that reads both; may be repeated."),
    ] = ()  # type: ignore[assignment]
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help="A corpus: .txt with one document per line, .jsonl, .json, .csv, .tsv or .parquet."
        ),
    ] = None
    column: Annotated[
        str | None,
        typer.Option(
            "--column",
            help="The column of a table, or the key of JSON objects, that holds the texts; if left out, text or the "
            "only one of strings.",
        ),
    ] = None
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut documents that are longer than the model allows or was trained on.")
    ] = False
    out: list[Path] = ()  # type: ignore[assignment]
    """The files to write; `shares` adds their suffixes and those that are written by default."""
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False
    rows: Annotated[
        int,
        typer.Option("--rows", min=0, help="The number of table rows to print; 0 for none. JSON contains all rows."),
    ] = 10
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; attnmech --help lists its keys.")] = (
        False
    )
    memory: Annotated[float, typer.Option("--memory", help="Extra memory that the sweep may use, in GB.")] = 1.0
    engine: Annotated[
        Literal["local", "ray"], typer.Option("--engine", help="Run in this process or in Ray's workers.")
    ] = "local"
    address: Annotated[
        str | None,
        typer.Option("--address", help="A Ray cluster: auto, host:port or ray://host:port; this machine if left out."),
    ] = None
    workers: Annotated[
        int | None, typer.Option("--workers", help="The number of Ray workers to start; by default, all that fit.")
    ] = None


_ALL_HAVE: Final = ("model", "device", "dtype", "out", "overwrite", "as_json")
CORPUS: Final = ("file", "column")
ENGINE: Final = ("engine", "address", "workers")


def shares(
    *names: str, suffixes: tuple[str, ...] = RESULT, rows: int | None = 10
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function of `Options` and of a command's own options a command with the shared options of these names.

    Its own options are listed before `--out`. Without `rows`, it prints no rows.
    """

    def shared(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command).parameters.values()
        help_of_out = f"What to write: {listed(suffixes)}; may be repeated."
        out = {"annotation": Annotated[list[Path], typer.Option("--out", "-o", help=help_of_out)]}
        changed: dict[str, Any] = {"out": {"default": FILES[command.__name__], **out}, "rows": {"default": rows}}
        wanted = {*_ALL_HAVE, *names, *(() if rows is None else ("rows",))}
        options = [
            option.replace(**changed.get(option.name, {}))
            for option in inspect.signature(Options).parameters.values()
            if option.name in wanted
        ]
        place = next(place for place, option in enumerate(options) if option.name == "out")
        options[place:place] = own

        def called(**arguments: Any) -> None:
            its_own = {option.name: arguments.pop(option.name) for option in own}
            command(Options(**arguments), **its_own)

        called.__name__, called.__doc__ = command.__name__, command.__doc__
        called.__annotations__ = {option.name: option.annotation for option in options}
        cast(Any, called).__signature__ = inspect.Signature(options)
        return called

    return shared
