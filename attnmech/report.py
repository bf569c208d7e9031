"""Several results of one text on one page: what `attnmech report` shows."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pandas as pd

from .axes import spread
from .demo.about import notes as notes_on_demo
from .draw.page import render_page
from .draw.view import Fact, ScoreView
from .errors import InputError
from .methods.decomposition import ScoreDecomposition, decompose_scores
from .methods.focus import AttentionFocus
from .methods.updates import ResidualUpdates
from .model.certificate import Certificate
from .model.certify import certify
from .model.hooked import HookedModel
from .model.inputs import Inputs
from .results import check_writable, writing
from .runs.stream import stream

MAX_TOKENS: Final = 192
"""A page shows at most this many tokens of a text."""

MAX_CELLS: Final = 2_250_000
"""A page holds at most this many scores, about 12 MB; of larger models it shows some layers."""


_STATUS: Final[dict[str, Literal["ok", "warn", "fail"] | None]] = {
    "holds": "ok",
    "differs": "warn",
    "FAILS": "fail",
    "not checked": None,
}
"""How the page marks a check."""


@dataclass(frozen=True)
class Report:
    """One text on one model: why, where and what its heads write, the model's certificate, and the page of it all."""

    scores: ScoreDecomposition
    focus: AttentionFocus
    updates: ResidualUpdates
    certificate: Certificate
    notes: tuple[str, ...]
    """What the page leaves out, and why."""
    calls: Mapping[str, str]
    """The Python that makes the page's numbers again, by the method."""

    def to_frame(self) -> pd.DataFrame:
        """A row a layer: the largest residual and score of its heads, and the heads' mean share of each term."""
        frame = self.scores.to_frame()
        how = {name: "mean" if name.endswith("_share") else "max" for name in map(str, frame.columns)}
        return (
            frame.drop(columns="head")
            .groupby("layer", as_index=False)
            .agg({name: way for name, way in how.items() if name not in ("layer", "head")})
        )

    def to_html(self) -> str:
        """The page: one file that opens without a network."""
        view = self.scores.view()
        view = ScoreView(**{**vars(view), "notes": (*self.notes, *view.notes)})
        provenance = self.scores.provenance
        return render_page(
            title=f"Where the attention of “{provenance.model}” looks, and why",
            lead=self.lead,
            view=view,
            facts=self._facts(view),
            checks=[
                Fact(
                    check.name,
                    check.statement,
                    _STATUS[check.status],
                    check.evidence,
                )
                for check in self.certificate.checks
            ],
            provenance={
                "model": provenance.model,
                "config and weights (SHA-256)": provenance.weights,
                "inputs (SHA-256)": provenance.inputs,
                "hooks in force": ", ".join(provenance.edits) or "none",
                **{name: str(value) for name, value in provenance.options.items()},
                **provenance.versions,
            },
            call=self.calls["scores"],
            focus=self.focus.view(),
            focus_call=self.calls["focus"],
            updates=self.updates.view(layers=self.scores.layers),
            updates_call=self.calls["updates"],
        )

    def save(self, path: str | Path) -> Path:
        """Writes the page, whole or not at all."""
        target = Path(path)
        check_writable(target)
        with writing(target) as draft:
            draft.write_text(self.to_html(), encoding="utf-8")
        return target

    @property
    def lead(self) -> str:
        """One sentence that the numbers support."""
        frame = self.scores.to_frame()
        shares = frame.filter(like="_share").mean().dropna()
        exact = f"every score is the sum of its terms to within {float(frame.residual.max()):.0e}"
        if len(shares) < 2:
            return f"{exact[0].upper()}{exact[1:]}."
        first = str(shares.idxmax()).removesuffix("_share")
        return (
            f"Averaged over {len(frame)} heads and all rows, {first} makes up {shares.max():.0%} of a row's highest "
            f"score; {exact}."
        )

    def _repr_html_(self) -> str:
        return self.to_frame().to_html(index=False, escape=True, float_format=lambda x: f"{x:.3g}")

    def _facts(self, view: ScoreView) -> list[Fact]:
        largest = float(self.scores.largest.max())
        residual = float(self.scores.residual.max())
        terms = ", ".join(name for name in self.scores.terms if name != "mask")
        return [
            Fact("tokens", str(len(view.tokens))),
            Fact("layers shown", ", ".join(map(str, view.layers))),
            Fact("heads in each", str(view.scores.shape[1])),
            Fact("terms of a score", terms),
            Fact(
                "largest residual",
                f"{residual:.1e}",
                "ok",
                f"max |Σ terms − score|, where the largest score is {largest:.3g}",
            ),
            Fact(
                "certificate",
                self.certificate.verdict,
                "ok" if self.certificate.ok else "fail",
                "see the checks below",
            ),
        ]


def report(model: HookedModel, inputs: Inputs, *, bos: bool | None = None) -> Report:
    """Decomposes the scores of one text and gathers what a page about it shows.

    >>> am.report(am.load(), "The keys to the cabinet are here.").save("report.html")    # doctest: +SKIP

    Of a text longer than 192 tokens (it must fit the model's positions) the beginning is run and shown; of a model
    with very many heads, some layers. The page says so.
    """
    batch = model.encode(inputs, bos=bos)
    if len(batch.ids) > 1:
        raise InputError(f"a report shows one text; got {len(batch.ids)}. Make one for each.")
    notes: list[str] = []
    length = batch.ids.shape[1]
    if length > MAX_TOKENS and model.grid is None:
        notes.append(f"The text has {length} tokens; the first {MAX_TOKENS} were run and are shown.")
        length = MAX_TOKENS
        batch = batch.beginning(length)
    shown = next(iter(model.stacks.values()))
    if len(model.stacks) > 1:
        others = ", ".join(label for label in model.stacks if label != shown.label)
        notes.append(f"The {shown.label} is shown; {others} by am.decompose_scores(..., stack=...).")
    fits = max(1, MAX_CELLS // (shown.n_heads * length**2))
    layers = [shown.layers[place] for place in spread(shown.n_layers, fits)]
    if len(layers) < shown.n_layers:
        notes.append(f"The model has {shown.n_layers} layers; {len(layers)} of them are shown.")
    if model.source == "am.load()":
        notes = notes_on_demo(batch.ids[0].tolist()) + notes
    stack = shown.label or None
    scores = decompose_scores(model, batch, layers=layers, stack=stack)
    focus, updates = stream(model, batch, [AttentionFocus.reducer(), ResidualUpdates.reducer()], stack=stack)
    if model.edited:
        notes.append(f"Hooks were in force at {', '.join(model.edited)}: these numbers are not the model's own.")
    proven = not model.edited and model.certificate.weights == model.weights_hash
    certificate = model.certificate if proven else certify(model)
    return Report(scores, focus, updates, certificate, tuple(notes), _calls(model, shown.label, bos))


def _calls(model: HookedModel, stack: str, bos: bool | None) -> dict[str, str]:
    options = f", stack={stack!r}" if stack else ""
    options += "" if bos is None else f", bos={bos}"
    given = f"({model.source}, text{options})"
    return {
        "scores": f'am.decompose_scores{given}.plot("{{figure}}", layer={{layer}}, head={{head}}, rank={{rank}})',
        "focus": f'am.attention_focus{given}.plot("{{figure}}")',
        "updates": f'am.residual_updates{given}.plot("{{figure}}", layer={{layer}}, side="{{side}}")',
    }
