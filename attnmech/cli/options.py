"""What do the options that several commands share mean?"""

from pathlib import Path
from typing import Annotated, Literal

import typer

ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="Hub name, folder or GGUF file; the demo model if left out.")
]
TextOption = Annotated[str | None, typer.Option("--text", "-t", help="The text to look at.")]
FileOption = Annotated[Path | None, typer.Option("--file", "-f", help="A UTF-8 file that holds the text.")]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Where the page goes; an existing page is replaced.")]
CorpusOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        help="A corpus: one document per line, .jsonl with one text per line, or .parquet (column text).",
    ),
]
TableOption = Annotated[
    Path, typer.Option("--out", "-o", help="Where the table goes, .csv or .parquet; the page goes beside it.")
]
OverwriteOption = Annotated[bool, typer.Option(help="Replace an existing table and page.")]
RowsOption = Annotated[
    int, typer.Option("--rows", min=0, help="How many rows of the table are printed; 0 for none. JSON has them all.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
EngineOption = Annotated[
    Literal["local", "ray"], typer.Option("--engine", help="Where it runs: in this process, or by Ray's workers.")
]
AddressOption = Annotated[
    str | None,
    typer.Option("--address", help="A Ray cluster: auto, host:port or ray://host:port; this machine if left out."),
]
WorkersOption = Annotated[int | None, typer.Option("--workers", help="How many workers; as many as fit if left out.")]
MemoryOption = Annotated[float, typer.Option(help="Extra memory that the sweep may use, in GB.")]
