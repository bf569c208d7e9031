"""Measures drift, inflows and segments for each token of a report's text, in the report's own pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ..basics.messages import noted
from ..basics.nouns import TEXT, Nouns
from ..batch import Batch
from ..draw.section import Section
from ..errors import InputError
from ..methods.drift.result import ResidualDrift, drift_numbers
from ..methods.drift.section import drift_section
from ..methods.flow.result import AttentionFlow, FlowReducer
from ..methods.flow.section import flow_section
from ..methods.segments.section import segment_section
from ..methods.segments.segment_attention import SegmentAttention, SegmentReducer
from ..methods.segments.segmentation import Segmented
from ..model.run.hooked import HookedModel
from ..runs.reducer import Reducer

MAX_SCAN: Final = 30_000_000_000  # scans of the vocabulary take at most this many multiplications, 2 to 3 s on one core

NEAREST: Final = 100  # the number of nearest rows that churn compares, if the vocabulary has that many


@dataclass(frozen=True)
class TokenPaths:
    """How the tokens of one text change; fields are None if they could not be measured."""

    drift: ResidualDrift | None = None
    flow: AttentionFlow | None = None
    segments: SegmentAttention | None = None

    @classmethod
    def reducers(cls, model: HookedModel, batch: Batch, notes: list[str], nouns: Nouns = TEXT) -> dict[str, Reducer]:
        """The reducers that measure the fields in one pass, by field; `notes` receives what is omitted and why."""
        if len(model.stacks) > 1:
            notes.append(
                f"The path of each {nouns.token} through the layers is omitted: it is shown only for models "
                "with one stack."
            )
            return {}
        measures: dict[str, Reducer] = {}
        if (drift := _drift(model, batch, notes)) is not None:
            measures["drift"] = drift
        architecture = model.stack().architecture
        if architecture.streams and architecture.gate is None:
            measures["flow"] = FlowReducer("norm_residual")
        elif architecture.streams:
            notes.append(
                f"The sources of each {nouns.token}'s content are omitted: with a gate or a norm between attention "
                "and W_O, what a key writes depends on the query."
            )
        if model.reads_tokens and Segmented.of(batch, "sentence").most > 1:
            measures["segments"] = SegmentReducer("sentence")
        return measures

    def sections(
        self, arguments: str, tokens: Sequence[str], layers: Sequence[int], nouns: Nouns = TEXT
    ) -> list[Section]:
        """The page's sections, which follow the query that the reader chooses; `arguments` are those of the calls."""
        sections, flow, segments = [], self.flow, self.segments
        if self.drift is not None:
            sections.append(drift_section(drift_numbers(self.drift), f"am.residual_drift{arguments}", layers))
        if flow is not None:
            call = f'am.attention_flow{arguments[:-1]}, method="norm_residual")'
            shares = flow.shares[:, 0].float().numpy()
            sections.append(
                flow_section(shares, flow.tokens, layers_of_flow=flow.layers, layers=layers, call=call, nouns=nouns)
            )
        if segments is not None:
            rows = [segments.layers.index(layer) for layer in layers]
            mass, expected = (values[rows].float().numpy() for values in (segments.mass(), segments.expected()))
            texts, starts, call = segments.segments_of(), segments.starts[0], f"am.segment_attention{arguments}"
            sections.append(segment_section(mass, expected, texts, starts, tokens=tokens, layers=layers, call=call))
        return sections


def _drift(model: HookedModel, batch: Batch, notes: list[str]) -> Reducer | None:
    if not model.reads_tokens:
        return None
    stack = model.stack()
    work = stack.n_layers * batch.ids.numel() * model.n_vocab * stack.d_model
    if work > MAX_SCAN:
        notes.append(
            "Drift from the embeddings is omitted because scanning this large vocabulary would take too long; run "
            "attnmech drift."
        )
        return None
    reducer = partial(ResidualDrift.reducer, model, k=min(NEAREST, model.n_vocab))
    return noted(notes, "Drift from the embeddings is", reducer, InputError)
