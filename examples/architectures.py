"""Makes `architectures.md`: points, terms and residuals of each family, measured on the tests' small random models.

`python examples/architectures.py` from a checkout; needs the packages of the tests. With `--census` it makes
`census.md` instead: every model type of transformers' auto classes, built small and loaded (some minutes). With
`--calls` it makes `calls.md`, every public call on each family of docs/how/models.md, and the table there.
"""

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import attnmech as am
from attnmech.points import POINTS, split_stack

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import models

TERMS = (
    "query_key", "key_bias", "query_bias", "constant", "content_to_position", "position_to_content", "position",
    "softcap", "mask",
)  # fmt: skip
HEADER = ("model_type", "variant", "stack", *TERMS, "missing points", "certificate", "float32", "float64")
ABOUT = """# Architectures

Every model here is small, with random weights, biases and norms; its makers stand in `tests/models.py`. Made by
`python examples/architectures.py`.

- **Terms** of the score ledger that the variant has (✓): together they are the attention score.
- **Missing points**: every other point is there: {points}. `gate` and `latent` are points of some models that are
  read and not in this table (Qwen3-Next, DeepSeek): see [census.md](census.md).
- **Certificate**: "holds" if no check fails at load; a note says where another implementation computes something else.
- **float32, float64**: the ledger's residual, max |Σ terms − score| over visible cells of a batch padded on the right,
  relative to the largest visible score of the layer; the worst layer and head. 0 is to the last bit.
"""


class Notes:
    """The numbered notes below the table, without duplicates."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def mark(self, text: str) -> str:
        """The number of a note, as written in a cell."""
        if text not in self._texts:
            self._texts.append(text)
        return f"[{self._texts.index(text) + 1}]"

    def __str__(self) -> str:
        return "\n".join(f"{number}. {text}" for number, text in enumerate(self._texts, 1))


def residual(name: str, stack: str, dtype: torch.dtype, notes: Notes) -> str:
    """The relative residual of the ledger; a note if transformers cannot run the model in this precision."""
    try:
        split = am.decompose_scores(models.hooked(name, dtype), models.inputs_of(name), stack=stack or None)
    except am.errors.WeightsError as error:
        return f"– {notes.mark(str(error).partition(' Try ')[0])}"
    # Layers without attention are NaN.
    residual = float((split.residual / split.largest.amax(dim=1, keepdim=True)).nan_to_num(0.0).max())
    return "0" if residual == 0 else f"{residual:.0e}"


def missing(model: am.HookedModel, stack: str, notes: Notes) -> str:
    """The points that a stack of a model lacks, grouped by reason; each reason becomes a note."""
    by_reason: dict[str, list[str]] = {}
    for full, point in model.points.items():
        label, name = split_stack(full)
        if point.absent is not None and label in ("", stack) and name not in ("gate", "latent", "mixer_out"):
            # One note for each reason, independent of the family that it names.
            reason = point.absent.replace(model.architecture.name, "the family", 1)
            by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)} {notes.mark(reason)}" for reason, names in by_reason.items()) or "–"


def verdict(certificate: am.results.Certificate, notes: Notes) -> str:
    """holds or FAILS, with a note for each check that fails or that another implementation fails."""
    marks = [
        notes.mark("; ".join(filter(None, (f"does not hold: {check.statement}", check.detail.partition("; ")[2]))))
        for check in certificate.remarks
    ]
    if not certificate.ok:
        return " ".join(["FAILS", notes.mark(certificate.verdict)])
    return " ".join(["holds", *dict.fromkeys(marks)])


def rows(names: Sequence[str], notes: Notes) -> Iterator[tuple[str, ...]]:
    """One row per variant or, if it has several stacks, per stack."""
    for name, stack in [(family, stack) for family in names for stack in models.hooked(family).stacks]:
        model = models.hooked(name)
        present = am.decompose_scores(model, models.inputs_of(name), stack=stack or None).terms
        unknown = set(present) - set(TERMS)
        if unknown:
            raise SystemExit(f"terms without a column: {', '.join(sorted(unknown))}")
        yield (
            model.config.model_type,
            name.replace("_", " "),
            stack or "self",
            *("✓" if term in present else "" for term in TERMS),
            missing(model, stack, notes),
            verdict(model.certificate, notes),
            residual(name, stack, torch.float32, notes),
            residual(name, stack, torch.float64, notes),
        )


def table(names: Sequence[str]) -> str:
    """The whole page."""
    notes = Notes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        body = sorted(rows(names, notes), key=lambda row: row[0])
    lines = [HEADER, tuple(":-:" if title in TERMS else "---" for title in HEADER), *body]
    points = ", ".join(f"`{point}`" for point in POINTS if point not in ("gate", "latent", "mixer_out"))
    drawn = "\n".join("| " + " | ".join(cell for cell in line) + " |" for line in lines)
    return f"{ABOUT.format(points=points)}\n{drawn}\n\n{notes}\n"


def census(kinds: Sequence[str], sizes: str, seed: int) -> bool:
    """Takes the census and writes its page, or prints it if only some types or other models are requested.

    Returns False if a certified model is wrong.
    """
    import census as every
    import tiny

    chosen = {"one": tiny.ONE, "other": tiny.OTHER}[sizes]
    outcomes = every.taken(kinds or [*tiny.kinds(), *tiny.senses()], chosen, seed)
    if (list(kinds), sizes, seed) == ([], "one", 0):
        Path(__file__).with_name("census.md").write_text(every.page(outcomes), encoding="utf-8")
    else:
        print(*sorted(map(str, outcomes)), sep="\n")
    print(every.summaries(outcomes))
    return not any(row.result == "WRONG" for row in outcomes)


def main() -> None:
    """Makes the requested page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="TYPE", help="with --census: only these model types")
    parser.add_argument("--census", action="store_true", help="try every model type of transformers")
    parser.add_argument(
        "--calls", action="store_true", help="make every public call on every family of docs/how/models.md"
    )
    parser.add_argument("--sizes", choices=("one", "other"), default="one", help="sizes of the census's models")
    parser.add_argument("--seed", type=int, default=0, help="seed of their weights (default %(default)s)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.census:
        sys.exit(0 if census(chosen.kinds, chosen.sizes, chosen.seed) else 1)
    if chosen.calls:
        import calls

        calls.write()
        return
    Path(__file__).with_suffix(".md").write_text(table([*models.MAKERS, *models.NEW, *models.OTHERS]), encoding="utf-8")


if __name__ == "__main__":
    main()
