"""Makes the atlas of a trained model over Python's own documentation, and prints what docs/atlas.md says about it.

python examples/atlas/describe.py MODEL atlas
"""

import argparse
import time
from itertools import islice
from pathlib import Path

import corpus
import pandas as pd

import attnmech as am
from attnmech.methods.examples.sums import SAMPLE
from attnmech.methods.head_types.head_types import RESTING


def facts(atlas: am.results.Atlas) -> list[str]:
    """The facts, as lines of Markdown."""
    frame, heads = atlas.to_frame(), atlas.heads
    assert atlas.types is not None
    lines = [f"{len(frame)} heads, {atlas.examples.documents:,} paragraphs. {atlas.types.lead}", ""]
    lines += ["| type | clearest head | its strongest row |", "|---|---|---|"]
    claims = atlas.types.to_frame()
    for kind in dict.fromkeys(claims.type):
        first = claims[claims.type == kind].iloc[0]
        row = atlas.examples.examples_of(int(first.layer), int(first["head"]))[0]
        key = row.key_tokens[0].strip() or row.key_tokens[0]
        lines.append(
            f"| {kind} | L{first.layer}H{first['head']}, {first.score:.2f} ({first.score_low:.2f} to "
            f"{first.score_high:.2f}) | {_code(row.window)} attends to {_code(key)}, {row.key_weights[0]:.2f} |"
        )
    halves = atlas.examples.halves()
    same = (halves.even_relation == halves.odd_relation).mean()
    differ = int((halves.p * len(halves) < 0.05).sum())
    lines += [
        "",
        f"- Each head has up to {int(atlas.examples.rows.max()):,} rows; of a random sample of {SAMPLE:,} of them, at "
        f"most {round(frame.rows_like.max() * SAMPLE)} ({frame.rows_like.max():.2%}) are as strong as the weakest of "
        "its ten examples.",
        f"- In {same:.0%} of the heads, the strongest rows of even- and odd-numbered paragraphs attend most often to "
        f"the same kind of key; in {differ} heads the halves differ (5 %, corrected for all heads).",
    ]
    if atlas.ov is not None:
        lines.append(f"- {atlas.ov.lead}")
    if atlas.effects is not None:
        lines.append(f"- {atlas.effects.lead}")
    lines += [
        "",
        "| head | types | rows that attend most to | copies | variance from position |",
        "|---|---|---|---|---|",
    ]
    for layer, head in _shown(frame):
        of_head = frame[(frame.layer == layer) & (frame["head"] == head)].iloc[0]
        relations = halves[(halves.layer == layer) & (halves["head"] == head)].iloc[0]
        words = ", ".join(list(heads.attended[heads.layers.index(layer)][head])[:3])
        lines.append(
            f"| L{layer}H{head} | {of_head.types or 'none'} | {relations.even_relation}; {words and _code(words)} | "
            f"{of_head.get('copied', float('nan')):.0%} | {of_head.variance_position:.0%} |"
        )
    return lines


def _shown(frame: pd.DataFrame) -> list[tuple[int, int]]:
    """Eight heads: those that copy most and least, then those whose type does not rest, by layer."""
    moving = frame[~frame.types.isin(["", *RESTING])]
    order = pd.concat([frame.nlargest(2, "copied"), frame.nlargest(2, "suppressed"), moving]).drop_duplicates()
    return [(int(row.layer), int(row["head"])) for _, row in order.head(8).iterrows()]


def _code(text: str) -> str:
    return f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', '¦')}`"


def main() -> None:
    """Reads the arguments, writes the folder, and prints the facts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, a GGUF file or a hub name")
    parser.add_argument("folder", help="the folder to write")
    parser.add_argument("--texts", type=int, default=corpus.MOST, help="the number of paragraphs (default %(default)s)")
    parser.add_argument("--ablate", type=int, default=0, help="the number of texts for ablations (default %(default)s)")
    parser.add_argument("--by", default="attention", help="what orders a head's rows (default %(default)s)")
    chosen = parser.parse_args()
    model = am.load(chosen.model)
    began = time.process_time()
    texts = list(islice(corpus.paragraphs(), chosen.texts))
    journal = f"{chosen.folder}.journal"
    options = {"ablate": chosen.ablate, "truncate": True, "journal": journal, "progress": True}
    atlas = am.atlas(model, texts, by=chosen.by, **options)
    index = atlas.write(chosen.folder)
    size = sum(path.stat().st_size for path in Path(chosen.folder).rglob("*") if path.is_file())
    print(
        f"{index}: {size / 1e6:.1f} MB, {(time.process_time() - began) / 60:.0f} minutes of one core",
        *facts(atlas),
        sep="\n",
    )


if __name__ == "__main__":
    main()
