"""The options that several commands share, in the order in which every command lists them.

A command's own options are listed between `--truncate` and `--out`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .outputs import REPORT, RESULT, TABLE, listed


def _out(kinds: Iterable[str]) -> Any:
    return typer.Option("--out", "-o", help=f"A file to write, ending in {listed(kinds)}; may be repeated.")


ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="Hub name, folder or GGUF file; the demo model if left out.")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="Where the model runs: cuda, cuda:1, mps, …; the CPU if left out.")
]
DtypeOption = Annotated[
    Literal["float64", "float32", "bfloat16", "float16"] | None,
    typer.Option("--dtype", help="The precision of the weights; by default, that in which they were saved."),
]
TextOption = Annotated[str | None, typer.Option("--text", "-t", help="The text to read.")]
CorpusOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        help="A corpus: .txt with one document per line, .jsonl, .json, .csv, .tsv or .parquet.",
    ),
]
ColumnOption = Annotated[
    str | None,
    typer.Option(
        "--column",
        help="The column of a table, or the key of JSON objects, that holds the texts; if left out, text or the only "
        "one of strings.",
    ),
]
TruncateOption = Annotated[
    bool, typer.Option("--truncate", help="Cut documents that are longer than the model allows or was trained on.")
]
MetricOption = Annotated[
    Literal["loss", "kl"], typer.Option("--metric", help="The loss, or the KL divergence from the unchanged model.")
]
ReportOut = Annotated[list[Path], _out(REPORT)]
ResultOut = Annotated[list[Path], _out(RESULT)]
TableOut = Annotated[list[Path], _out(TABLE)]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]
RowsOption = Annotated[
    int, typer.Option("--rows", min=0, help="The number of table rows to print; 0 for none. JSON contains all rows.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object; attnmech --help lists its keys.")]
MemoryOption = Annotated[float, typer.Option("--memory", help="Extra memory that the sweep may use, in GB.")]
EngineOption = Annotated[
    Literal["local", "ray"], typer.Option("--engine", help="Run in this process or in Ray's workers.")
]
AddressOption = Annotated[
    str | None,
    typer.Option("--address", help="A Ray cluster: auto, host:port or ray://host:port; this machine if left out."),
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", help="The number of Ray workers to start; by default, all that fit.")
]
