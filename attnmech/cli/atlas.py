"""The command `attnmech atlas`."""

from typing import Annotated, Literal

import typer

from .inputs import job_of
from .options import CORPUS, ENGINE, Options, shares
from .outputs import ATLAS
from .stages import stages
from .summaries import HEAD, LAYER, atlas_summary
from .terminal import Column, Rows, columns_of


@shares(*CORPUS, "truncate", *ENGINE, suffixes=ATLAS, rows=15)
def atlas(
    options: Options,
    by: Annotated[
        Literal["type", "attention", "value_weighted", "update", "next_token"],
        typer.Option("--by", help="The statistic that orders a head's rows."),
    ] = "type",
    k: Annotated[int, typer.Option("-k", min=1, help="The number of example rows of each kind.")] = 10,
    ablate: Annotated[
        int, typer.Option("--ablate", min=0, help="The number of texts on which each head is ablated; 0 for none.")
    ] = 0,
) -> None:
    """Writes what every head of a model does over a corpus: examples, statistics, types, and likeness, as a page.

    A folder holds an index and a file for each layer, and opens from disk; a .html file holds everything. A journal is
    kept beside the output: if interrupted, run the same command again to resume. Without a file, 300 documents in the
    demo model's language are used.
    """
    with job_of(options, ATLAS, resumable=True) as job:
        hooked, inputs, run = job.streamed()
        from ..demo.text import documents
        from ..pages.atlas.atlas import atlas as make_atlas

        texts = documents(300) if options.file is None else inputs
        result = make_atlas(hooked, texts, by=by, k=k, ablate=ablate, **{**run, **job.run})
        with stages("writing", total=1):
            job.outputs.write(result.to_frame(), {".html": result.write_html, "": result.write})
        shown = Rows(
            "Types of heads, and where they attend",
            result.to_frame(),
            (LAYER, HEAD, Column("types"), *columns_of(result.focus.STATISTICS.printed)),
        )
        job.summary = atlas_summary(hooked, result, job.outputs, shown)
