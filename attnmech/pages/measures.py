"""Takes the measurements that need only seconds on one input, and notes what is omitted and why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from ..basics.messages import first_line, noted
from ..basics.nouns import Nouns, counted
from ..batch import Batch
from ..demo.text import documents
from ..draw.chart import at_head
from ..draw.embed import View
from ..draw.section import Section
from ..errors import ExactnessError, InputError, UnsupportedModelError
from ..methods.ablation.heads import ablate_heads
from ..methods.focus.attention_focus import AttentionFocus
from ..methods.head_types.head_types import RESTING, HeadTypes, HeadTypesReducer, head_types
from ..methods.null_attention.result import INTERVENTIONS, NullAttention, null_attention, reading_of
from ..methods.null_attention.sums import SINKS
from ..methods.scores.decompose_by_source import SourceDecomposition, decompose_by_source
from ..methods.updates.result import ResidualUpdates
from ..model.run.hooked import HookedModel
from ..model.run.loss import MaskedCopies
from ..model.stack.stack import Stack
from ..runs.effects import HeadEffects
from ..runs.reducer import Reducer
from ..runs.retrieval import TOKENS
from ..runs.stream import stream
from . import limits
from .tokens import TokenPaths

_CLEAREST: Final = f"[head for head, kind in am.head_types(model).main_types.items() if kind not in {RESTING}]"
"""The heads with a type that does not rest, the highest score first, in Python."""


@dataclass(frozen=True)
class Measured:
    """A result on the page with its own sentence and section."""

    question: str  # the question that it answers, in a few words
    result: HeadEffects | NullAttention
    call: str  # the Python call that reproduces the result
    on: str  # the texts, in words: "this text", or "this text and 40 built-in texts"


def section_of(result: HeadEffects | NullAttention, call: str, layers: Sequence[int], on: str) -> Section:
    """The map of an ablation, for a page on which the reader chooses a head in `layers`; `on` names the texts."""
    if isinstance(result, NullAttention):
        name, contents, heading = "null-attention", "Null attention", f"Effects of attention to {SINKS[result.sink]}"
        reading = reading_of(result)
        caveat = "A verdict needs an interval, and an interval needs at least five texts."
    else:
        name, contents, heading = "ablation", "Without each head", "What the model loses with each head"
        loss = "the loss of masked tokens" if "masked" in result.provenance.options else "the loss"
        reading = (
            f"Each cell is one head. Blue: {loss} rises without it, so it helped; brown: the loss falls; "
            "pale: the change is not clear among all heads."
        )
        caveat = (
            "Other heads may take over for an ablated head, so heads that matter together can each look idle. "
            "Without an ablation, the model may never see zero there."
        )
    return Section(
        name=f"map-{name}",
        contents=contents,
        tab="matter",
        heading=heading,
        finding=result.lead,
        reading=f"{reading} Click a cell to choose its head.",
        caveat=f"On {on}. {caveat}",
        figures={name: at_head(result.plot(), result.layers, tuple(layers))},
        call=f"{call}.plot()",
    )


def streamed(
    model: HookedModel, batch: Batch, shown: Stack, notes: list[str], *, nouns: Nouns, paths: bool
) -> tuple[AttentionFocus, ResidualUpdates | None, TokenPaths]:
    """Takes the measurements of one pass: where heads attend, what they write (if the model has a stream), and, with
    `paths`, how each token changes.
    """
    reducers: dict[str, Reducer] = {"focus": AttentionFocus.reducer()}
    if shown.label == "cross":
        notes.append(
            "Updates by cross-attention heads are omitted: am.residual_updates(model, inputs, "
            'stack="cross") measures them.'
        )
    elif shown.architecture.streams:
        reducers["updates"] = ResidualUpdates.reducer()
    else:
        notes.append(f"What heads write is omitted: {model.points[shown.point('resid_pre')].absent}.")
    by_token = TokenPaths.reducers(model, batch, notes, nouns) if paths else {}
    reducers |= by_token
    results = dict(zip(reducers, stream(model, batch, list(reducers.values()), stack=shown.label or None), strict=True))
    return results["focus"], results.get("updates"), TokenPaths(**{name: results[name] for name in by_token})


def last_pass(
    model: HookedModel, batch: Batch, stack: Stack, layers: list[int], notes: list[str], first: int
) -> tuple[Float[Tensor, "layer head query key"], Float[Tensor, "layer head key"] | None, View | None]:
    """Returns the attention of the real tokens from `first` on, the norms of the text's value vectors after W_O, and
    the model's predictions if it predicts next tokens.
    """
    predicts = model.causal and model.points["logits"].absent is None and len(model.stacks) == 1
    predicts = predicts and model.reads_tokens and batch.ids.shape[1] > 1
    if predicts and (refused := model.refused.get("logits")) is not None:
        notes.append(f"The model's predictions are omitted: {refused}.")
        predicts = False
    point = stack.point("pattern")
    v = stack.point("v")
    with_v = [] if model.points[v].absent is not None or v in model.refused else [v]
    ran = model.run(batch, [point, *with_v, *(["logits"] if predicts else [])], layers=layers)
    real, real_keys = batch.queries(stack.label).mask[0], batch.key_tokens(stack.label).mask[0]
    pattern = torch.stack([ran[point, layer][0][:, real][:, first:, real_keys] for layer in layers])
    norms = None
    if all((point, layer) in ran.value_norms for layer in layers):
        norms = torch.stack([ran.value_norms[point, layer][0][:, real_keys] for layer in layers])
    return pattern, norms, ran.show("logits") if predicts else None


def types_of(model: HookedModel, stack: Stack, notes: list[str]) -> HeadTypes | None:
    """Measures the types of heads, if this takes only seconds."""
    if not model.reads_tokens:
        return None
    if _weights(model) * TOKENS > limits.MAX_WORK:
        notes.append("Head types are omitted because measuring them would take minutes; run attnmech heads.")
        return None
    return noted(notes, "Head types are", lambda: head_types(model, stack=stack.label or None), InputError)


def on_text(model: HookedModel, batch: Batch, stack: Stack) -> str:
    """How heads attend to the text's delimiters."""
    types: HeadTypes
    (types,) = stream(model, batch, [HeadTypesReducer()], stack=stack.label or None)
    return types.on_text()


def _weights(model: HookedModel) -> int:
    weights = {id(weight): weight.numel() for stack in model.stacks.values() for weight in stack.places.parameters()}
    return sum(weights.values())


def sweeps(
    model: HookedModel, batches: Sequence[Batch], types: HeadTypes | None, notes: list[str], step: Callable[[str], None]
) -> tuple[Measured, ...]:
    """Runs the ablation sweeps that take only seconds: on the page's texts and, with the demo model, on more texts of
    its language; of a large model, in the heads of the clearest types.
    """
    predicts_tokens = model.points["logits"].absent is None and model.predicts in ("next token", "masked token")
    if not predicts_tokens or len(model.stacks) > 1:
        return ()
    tokens = sum(batch.ids.numel() for batch in batches)
    if model.predicts == "masked token":
        try:
            masked = [MaskedCopies.of(batch, model.mask_id) for batch in batches]
            for copies in masked:
                copies.require_all([0])
        except InputError as error:
            notes.append(f"Ablations are omitted: {first_line(error)}")
            return ()
        tokens = sum(copies.batch.ids.numel() for copies in masked)
    texts: list[Any] = list(batches)
    on = "this text" if len(texts) == 1 else f"the {len(texts)} texts of this page"
    if model.is_demo:
        texts += documents(limits.OTHER_TEXTS)
        on += f" and {limits.OTHER_TEXTS} built-in texts"
    heads = model.n_layers * model.n_heads
    work = heads * _weights(model) * tokens * len(texts) / len(batches)
    most = int(limits.MAX_WORK * heads / work)
    typed = [] if types is None else [head for head, kind in types.main_types.items() if kind not in RESTING][:most]
    if any(batch.ids.shape[1] < 2 for batch in batches) or (most < heads and not typed):
        notes.append("Ablations are omitted because they would take minutes; run attnmech ablate and attnmech null.")
        return ()
    step(f"ablating {counted(min(most, heads), noun='head')}")
    which, call = ("all", "") if most >= heads else (typed, f", heads={_CLEAREST}[:{most}]")
    effects = Measured(
        "Which heads matter", ablate_heads(model, iter(texts), which), f"am.ablate_heads(model, texts{call})", on
    )
    if most < heads:
        notes.append(
            f"{len(typed)} of {heads} heads were ablated, those of the clearest types; all heads would take minutes: "
            "run attnmech ablate and attnmech null."
        )
        return (effects,)
    if len(INTERVENTIONS) * work > limits.MAX_WORK:
        notes.append("The test of null attention is omitted because it would take minutes; run attnmech null.")
        return (effects,)
    if not model.output_stack.architecture.streams:
        return (effects,)
    step("testing attention to the first token")
    null = Measured(
        "First token",
        null_attention(model, iter(texts), heads="attending"),
        'am.null_attention(model, texts, heads="attending")',
        on,
    )
    return effects, null


def sources_of(model: HookedModel, batch: Batch, layers: Sequence[int], notes: list[str]) -> SourceDecomposition | None:
    """Finds the writers behind each head's scores, if the page has room for them."""
    if len(layers) * model.n_heads * batch.ids.shape[1] > limits.MAX_REASONS:
        notes.append(
            "The upstream writers behind each head's attention are omitted to save space; see am.decompose_by_source."
        )
        return None
    if model.edited:
        return None
    traced = partial(decompose_by_source, model, batch, layers=layers)
    omitted = "The upstream writers behind each head's attention are"
    return noted(notes, omitted, traced, UnsupportedModelError, ExactnessError)
