"""The command `attnmech atlas`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .inputs import engine_of, streamed
from .options import (
    AddressOption,
    ColumnOption,
    DeviceOption,
    DtypeOption,
    EngineOption,
    JsonOption,
    ModelOption,
    OverwriteOption,
    RowsOption,
    TruncateOption,
    WorkersOption,
)
from .outputs import ATLAS, FILES, listed, outputs_of
from .stages import stages
from .summaries import HEAD, LAYER, atlas_summary
from .terminal import Column, Rows, columns_of, print_summary


def atlas(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="A corpus: .txt with one document per line, .jsonl, .json, .csv, .tsv or .parquet. Without it, 300 "
            "documents in the demo model's language are used.",
        ),
    ] = None,
    column: ColumnOption = None,
    truncate: TruncateOption = False,
    by: Annotated[
        Literal["type", "attention", "value_weighted", "update", "next_token"],
        typer.Option("--by", help="The statistic that orders a head's rows."),
    ] = "type",
    k: Annotated[int, typer.Option("-k", min=1, help="The number of example rows of each kind.")] = 10,
    ablate: Annotated[
        int, typer.Option("--ablate", min=0, help="The number of texts on which each head is ablated; 0 for none.")
    ] = 0,
    out: Annotated[
        list[Path], typer.Option("--out", "-o", help=f"What to write: {listed(ATLAS)}; may be repeated.")
    ] = FILES["atlas"],
    overwrite: OverwriteOption = False,
    rows: RowsOption = 15,
    as_json: JsonOption = False,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Writes what every head of a model does over a corpus: examples, statistics, types, and likeness, as a page.

    A folder holds an index and a file for each layer, and opens from disk; a .html file holds everything. A journal is
    kept beside the output: if interrupted, run the same command again to resume.
    """
    with (
        outputs_of(out, ATLAS, overwrite=overwrite, source=file, resumable=True) as outputs,
        engine_of(engine, address, workers) as run_on,
    ):
        hooked, inputs, run = streamed(model, device, dtype, None, file, column, outputs, truncate, run_on)
        from ..demo.text import documents
        from ..pages.atlas.atlas import atlas as make_atlas

        texts = documents(300) if file is None else inputs
        run |= {"journal": outputs.journal, "progress": True, **run_on}
        result = make_atlas(hooked, texts, by=by, k=k, ablate=ablate, **run)
        with stages("writing", total=1):
            outputs.write(result.to_frame(), {".html": result.write_html, "": result.write})
    shown = Rows(
        "Types of heads, and where they attend",
        result.to_frame(),
        (LAYER, HEAD, Column("types"), *columns_of(result.focus.STATISTICS.printed)),
    )
    print_summary(atlas_summary(hooked, result, outputs, shown), rows=rows, as_json=as_json)
