"""Activation patching: activations from one prompt's run replace those in another prompt's run, one place at a time.

Formulas: docs/formulas.md#patching.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self, Unpack

import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import index_of, option
from ...basics.fields import check_rows
from ...basics.public import public
from ...errors import InputError
from ...interventions import Head, Heads, Intervention, Positions, checked_heads
from ...maths.intervals import TextMeans, difference
from ...maths.statistic import UNBOUNDED, Statistic
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...model.stack.points import require_heads
from ...results.by_layer import subtracted
from ...results.sentences import in_words
from ...runs.ablations import reread
from ...runs.effects import Effects, HeadEffects, effect_fields, head_fields
from ...runs.journal import owning_journal
from ...runs.metrics import SAME_METRIC, MetricLike
from ...runs.options import SweepOptions
from ...runs.prompt_pairs import PromptPairs
from ...runs.sweep import Swept, run_sweep

BY_HEAD: Final = ("z", "q", "k", "v", "pattern")  # can be patched head by head; k and v by kv head
BY_POSITION: Final = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")  # can be patched at one position


@dataclass(frozen=True, repr=False)
class Patched(Effects):
    """How much of the clean run's metric is recovered by patching clean activations into the corrupted run."""

    _SAMPLE = "pair"
    FIGURES = ("effect", "recovered")
    recovered = Statistic(
        meaning="(patched − corrupted) / (clean − corrupted), where each term is a mean over pairs: 1 if patching "
        "restores the clean metric. Where it is NaN, `not_recoverable` gives the reason.",
        unit="of the gap",
        printed=True,
        bounds=UNBOUNDED,
        axes="layer place",
    )

    clean: Float[Tensor, " text"]
    """The metric of each clean prompt; `before` is the metric of each corrupted prompt."""
    clean_tokens: tuple[tuple[str, ...], ...]
    """The tokens of the clean prompts; the field `tokens` has those of the corrupted prompts."""

    def _check(self) -> None:
        super()._check()
        check_rows("clean_tokens", self.clean_tokens, len(self.clean))

    def _by_text(self, name: str) -> TextMeans:
        if name != "recovered":
            return super()._by_text(name)
        if self.parts is None:
            return TextMeans.of_ratio(self.per_text, self._gap)
        one, other = (part._by_text(name).at(rows) for part, rows in self._parts_in_rows())
        return difference(one, other) if self.paired else TextMeans.of_values((one.mean - other.mean)[..., None])

    def _statistic(self, name: str) -> Statistic:
        return self.STATISTICS[name] if name == "recovered" else super()._statistic(name)

    def _label_of(self, name: str) -> str:
        if name != "recovered":
            return super()._label_of(name)
        return f"recovered share<br>of the {in_words(self.metric)}"

    @property
    def not_recoverable(self) -> str | None:
        """Why the recovered share is undefined; None if it is defined."""
        if self.parts is not None:
            return self.parts[0].not_recoverable or self.parts[1].not_recoverable
        if self.metric == "loss":
            kind = "masked" if "masked" in self.provenance.options else "next"
            return f"the two runs' losses are for different {kind} tokens"
        clean, corrupted = self.clean.mean(), self.before.nanmean()
        if torch.isclose(clean, corrupted, rtol=SAME_METRIC, atol=0.0):
            return f"the clean and the corrupted prompts give the same {in_words(self.metric)}, {float(clean):.4g}"
        return None

    @property
    def _gap(self) -> Float[Tensor, " text"]:
        """The clean run's metric minus the corrupted run's; NaN where the difference has no meaning."""
        gap = self.clean - self.before
        return gap if self.not_recoverable is None else torch.full_like(gap, torch.nan)

    @property
    def _further(self) -> Mapping[str, Tensor]:
        return {**super()._further, "clean": self.clean.mean().expand(self.swept.shape)}

    @property
    def _remark(self) -> str:
        reason = self.not_recoverable
        return f"; the recovered share is undefined because {reason}" if reason else ""

    @property
    def _about(self) -> str:
        count = int(self.swept.sum())
        places = f"{count} {self._PLACE}{'' if count == 1 else 's'}"
        return f"{self._opening}{self.method} at {places} on {self._texts}"

    def _minus(self, other: Self, paired: bool) -> Self:
        tokens = self.clean_tokens if paired and self.clean_tokens == other.clean_tokens else ()
        clean = subtracted(self.clean, other.clean, paired)
        return replace(super()._minus(other, paired), clean=clean, clean_tokens=tokens)


@dataclass(frozen=True, repr=False)
class PatchEffects(Patched, HeadEffects):
    """The effects on a metric of giving one head of the corrupted run its clean activations.

    `effect [layer head]` is the patched minus the corrupted metric, in the metric's unit; `recovered [layer head]` is
    its share of clean minus corrupted. Intervals are over pairs.
    """


@dataclass(frozen=True, repr=False)
class KVPatchEffects(PatchEffects):
    """The effects on a metric of giving k or v of one kv head in the corrupted run its clean value.

    `effect [layer kv_head]` and `recovered [layer kv_head]`; all query heads that share a kv head read the change.
    """

    _PLACE: ClassVar[str] = "kv head"

    def _named(self, layer: int, place: int) -> str:
        return f"kv head {place} of layer {layer}"


@dataclass(frozen=True, repr=False)
class PositionEffects(Patched):
    """The effects on a metric of giving one position of a layer in the corrupted run its clean value.

    `effect [layer position]` is the patched minus the corrupted metric, in the metric's unit; `recovered
    [layer position]` is its share of clean minus corrupted. Intervals are over pairs.
    """

    _PLACE: ClassVar[str] = "position"

    def _check(self) -> None:
        super()._check()
        for name, rows in (("tokens", self.tokens), ("clean_tokens", self.clean_tokens)):
            check_rows(name, rows, len(self.clean), self.after.shape[1])

    def _map(self, name: str, layer: int | None = None, head: int | None = None, **look: Any) -> "go.Figure":
        # The first pair's tokens; a difference between results on different pairs has none.
        pairs = zip(self.clean_tokens[0], self.tokens[0], strict=True) if self.tokens and self.clean_tokens else ()
        tokens = tuple(now if clean == now else f"{clean}→{now}" for clean, now in pairs)
        return super()._map(name, layer, head, tokens=tokens, **look)


@public
@owning_journal
def patch(
    model: HookedModel,
    clean: Inputs | Iterable[Inputs],
    corrupted: Inputs | Iterable[Inputs],
    *,
    heads: Heads = "all",
    metric: MetricLike = "logit_difference",
    at: str = "z",
    layers: Iterable[int] | None = None,
    positions: Positions | None = None,
    **options: Unpack[SweepOptions],
) -> PatchEffects | PositionEffects:
    """Measures how a metric changes when activations of the clean run are patched into the corrupted run.

    >>> import attnmech as am
    >>> prompts = am.load(), ["The keys to the chest"], ["The key to the chest"]
    >>> effects = am.patch(*prompts, answers=[" are"], against=[" is"])
    >>> positions = am.patch(*prompts, at="resid_pre", answers=[" are"], against=[" is"])
    >>> effects.effect.shape, positions.recovered.shape
    (torch.Size([4, 8]), torch.Size([4, 11]))

    Prompt n of `clean` is paired with prompt n of `corrupted`, which has the same number of tokens. The corrupted
    prompt is run with one place patched at a time. This is denoising: it shows which places suffice to restore the
    clean answer.

    - at="z", "q" or "pattern": a head's z, queries or attention pattern, at all positions (rows) or at all of
      `positions` together; gives `[layer head]`;
    - at="k" or "v": keys or values by kv head; `heads` are then (layer, kv_head). All query heads that share a kv head
      read the change, and the result is a `KVPatchEffects` `[layer kv_head]`;
    - at="resid_pre", "resid_mid", "resid_post", "attn_out" or "mlp_out": at one position, the stream at the start of a
      layer, between attention and MLP, or at the end, or the output of attention or MLP; gives `[layer position]` for
      `positions`, by default all. All prompts must then have the same length.

    Args:
        model: the model.
        clean: prompts, or token ids.
        corrupted: the same number of prompts, each with the same number of tokens as its clean partner.
        heads: a list of (layer, head), or "all".
        metric: as in `am.ablate_heads`. With "loss", no share is recovered, because the two runs predict different
            tokens; "kl" is not allowed.
        at: the point that is patched, as above.
        layers: all by default.
        positions: all by default; negative positions count from the end of each prompt: -1, or "last", is its last
            token.
        options: answers, against, bos, memory, journal, engine, partial and progress, as in `am.ablate_heads`.
            `answers` and `against` hold one token per pair: usually the answers of the clean and of the corrupted
            prompt.

    Returns:
        `.effect`, the metric after patching minus before, and `.recovered`, that change as a share of the gap between
        the clean and the corrupted run.

    Raises:
        InputError: for prompts that do not pair up or do not differ, and for invalid points, heads, positions and
            metrics.
        JournalError: if the journal belongs to another sweep.

    Source: Meng et al. 2022; Wang et al. 2023.
    """
    require_model(model)
    _check_options(at, heads, metric)
    pairs = PromptPairs.of(model, reread(clean), reread(corrupted), options.get("bos"))
    noted: dict[str, Any] = {"at": at, "clean inputs": pairs.clean[-1].digest}
    clean_prompts, corrupted_prompts = pairs.prompts
    measuring = options | {"journal": None, "partial": False, "progress": False}
    unchanged = run_sweep(model, clean_prompts, [()], metric, **measuring)
    of_clean: dict[str, Any] = {"clean": unchanged.before, "clean_tokens": unchanged.tokens}

    def sweep(changes: Sequence[Intervention], further: dict[str, Any]) -> Swept:
        alone = [(change,) for change in changes]
        return run_sweep(
            model, corrupted_prompts, alone, metric, noted=noted | further, contents=pairs.contents, **options
        )

    stack = model.output_stack
    at_positions = None if positions is None else pairs.check_positions(positions)
    if at in BY_HEAD:
        chosen = _chosen(model, at, heads, layers)
        values = pairs.values(model, at, sorted({layer for layer, _ in chosen}))
        changes = [
            Intervention.replace([head], values[head[0]], point=at, positions=at_positions, stack=stack.label)  # type: ignore[arg-type]
            for head in chosen
        ]
        named = "all" if isinstance(heads, str) else [list(head) for head in chosen]
        swept = sweep(changes, {"heads": named, "positions": at_positions})
        by_kv_head = at in ("k", "v") and stack.n_kv_heads < stack.n_heads
        fields = head_fields(model, chosen, swept, f"patching {at}", by_kv_head=by_kv_head)
        return (KVPatchEffects if by_kv_head else PatchEffects)(**fields, **of_clean)
    length = pairs.one_length(at)
    columns = list(range(length)) if at_positions is None else sorted({place % length for place in at_positions})
    rows = model.points.check_layers(layers, stack.label)
    values = pairs.values(model, at, rows)
    places = [(layer, position) for layer in dict.fromkeys(rows) for position in columns]
    swept = sweep(
        [
            Intervention.stream(at, [layer], values[layer], positions=[position], stack=stack.label)  # type: ignore[arg-type]
            for layer, position in places
        ],
        {"layers": rows, "positions": columns},
    )
    return PositionEffects(**effect_fields(places, length, swept, f"patching {at}"), **of_clean)


def _check_options(at: str, heads: Heads, metric: MetricLike) -> None:
    option("at", at, (*BY_HEAD, *BY_POSITION))
    if at in BY_POSITION and not (isinstance(heads, str) and heads == "all"):
        raise InputError(
            f"`heads` applies only to {', '.join(BY_HEAD)}; {at} has no heads. Use `layers` and `positions`."
        )
    if isinstance(metric, str) and metric == "kl":
        raise InputError(
            'metric="kl" measures the distance from the corrupted run, not the closeness to the clean run. Use '
            '"logit_difference", "accuracy", or a function (logits, batch) -> [batch].'
        )


def _chosen(model: HookedModel, at: str, heads: Heads, layers: Iterable[int] | None) -> list[Head]:
    """The heads to patch; for k and v, the kv heads."""
    stack = model.output_stack
    if at not in ("k", "v"):
        return model.check_heads(heads, layers)
    within = model.points.check_layers(layers, stack.label)
    named = checked_heads(heads)
    if named == "all":
        return [(layer, head) for layer in within for head in range(stack.n_kv_heads)]
    for _, head in named:
        index_of("heads", head, stack.n_kv_heads, f"at={at!r} is indexed by kv head; each layer has {stack.n_kv_heads}")
    require_heads(model.points, stack, named, within, "of each layer of this model")
    return list(named)
