"""Path patching: the effect of one path from a head to other heads, or to the logits.

Formulas: docs/formulas.md#patching.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Unpack

from ...basics.arguments import listed, option, shown
from ...basics.public import public
from ...draw.section import Section
from ...errors import InputError
from ...interventions import Head, Heads, Intervention, Values
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.sentences import PALE
from ...runs.ablations import reread
from ...runs.effects import HeadEffects, head_fields
from ...runs.engine import Receivers
from ...runs.journal import owning_journal
from ...runs.metrics import MetricLike
from ...runs.options import SweepOptions
from ...runs.prompt_pairs import PromptPairs
from ...runs.sweep import LATER, run_sweep

THROUGH: Final = ("q", "k", "v")  # the inputs of a receiving head at which a path may end


@dataclass(frozen=True, repr=False)
class PathEffects(HeadEffects):
    """The effects on a metric of corrupting one path, by the head that sends: `.effect [layer head]`.

    The effect is the metric with the path patched minus the clean metric, in the metric's unit; intervals are over
    pairs of prompts. NaN where a sender has no path to a receiver.
    """

    _TITLE = "Effect of paths to {result._where} on {metric}, sender by sender"
    _SAMPLE = "pair"

    receivers: tuple[Head, ...]
    """The heads at which paths end; empty for the logits."""
    through: tuple[str, ...]
    """The inputs through which paths enter the receivers: q, k or v."""

    @property
    def _where(self) -> str:
        if not self.receivers:
            return "the logits"
        return f"{' and '.join(self.through)} of {', '.join(self._named(*head) for head in self.receivers)}"

    @property
    def _about(self) -> str:
        count = int(self.swept.sum())
        senders = "1 head" if count == 1 else f"each of {count} heads in turn"
        return f"{self._opening}the path from {senders} to {self._where}, on {self._texts}"

    def _sections(self) -> "Sequence[Section]":
        reading = (
            f"Each cell is one sender. Along the path to {self._where}, the sender's output is that of the corrupted "
            f"prompt; all other heads on the path have their outputs from the clean prompt{PALE}."
        )
        return [Section("Effects", reading, {"effects": self.plot()}, "effects.plot()")]

    def _comparable(self) -> dict[str, Any]:
        options = {"mlps": self.provenance.options.get("mlps")}
        return super()._comparable() | {"receivers": self.receivers, "through": self.through, **options}


@public
@owning_journal
def path_patch(
    model: HookedModel,
    clean: Inputs | Iterable[Inputs],
    corrupted: Inputs | Iterable[Inputs],
    receivers: str | Sequence[Head] = "logits",
    through: str | Sequence[str] = THROUGH,
    *,
    metric: MetricLike = "logit_difference",
    senders: Heads = "all",
    mlps: str = "recompute",
    later: str = "recompute",
    **options: Unpack[SweepOptions],
) -> PathEffects:
    """Measures how a metric changes when one path, from a head to other heads or to the logits, is corrupted.

    For each sender, a first pass over the clean prompts gives the sender its z from the corrupted prompt, holds z of
    all heads in later layers at its clean value, and computes the receivers' q, k or v from the resulting stream. A
    second pass, otherwise clean, uses these q, k or v and yields the metric. A path to the logits needs only the first
    pass: its effect is the sender's direct effect, through the final norm.

    >>> import attnmech as am
    >>> clean, corrupted = ["The keys to the chest"], ["The key to the chest"]
    >>> answers = {"answers": " are", "against": " is"}
    >>> model = am.load()
    >>> am.path_patch(model, clean, corrupted, **answers).effect.shape
    torch.Size([4, 8])
    >>> effects = am.path_patch(model, clean, corrupted, [(3, 1), (3, 2)], "v", **answers)
    >>> bool(effects.effect[3].isnan().all()), bool(effects.effect[:3].isnan().any())
    (True, False)

    Args:
        model: a model with one stack.
        clean: prompts.
        corrupted: the same number of prompts, each with the same number of tokens as its clean partner.
        receivers: "logits", or a list of (layer, head) that receive together.
        through: "q", "k" or "v", or a list of several. If heads share keys and values, the k or v of a receiver belongs
            to its kv head, so the heads that share it receive as well.
        metric: as in `am.ablate_heads`, measured on the clean prompts' tokens.
        senders: the sending heads, in layers below a receiver's layer; "all" takes every such head.
        mlps: "recompute", as in the paper: MLPs between sender and receiver see the changed stream, so paths may pass
            through them; or "frozen" at their clean outputs, which excludes these paths.
        later: for receiving heads, "recompute": everything after them sees the change; or "frozen": all other heads and
            MLPs are held at their clean outputs, so that the receivers act on the logits directly.
        options: answers, against (one token per pair), bos, memory, journal, engine, partial and progress.

    Returns:
        Effects by sender (the metric with the path patched minus the clean metric), with intervals over pairs.

    Raises:
        InputError: for prompts that do not pair up or do not differ, senders without a path, heads that the model does
            not have, and models with an encoder and a decoder; and in the cases of `am.ablate_heads`.

    Source: Wang et al. 2022, "Interpretability in the Wild", §3.1 and appendix B (h → R, with x_orig the clean prompt).

    """
    require_model(model)
    option("mlps", mlps, LATER)
    if len(model.stacks) > 1:
        raise InputError("path patching needs a model with one stack; this model has an encoder and a decoder.")
    if isinstance(receivers, str) and receivers != "logits":
        raise InputError(f'`receivers` must be "logits" or a list of (layer, head); got {shown(receivers)}.')
    received = () if isinstance(receivers, str) else tuple(model.check_heads(receivers))
    entered = _through(through) if received else ()
    if not received and option("later", later, LATER) == "frozen":
        raise InputError(
            '`later` concerns the layers after the receiving heads; with receivers="logits", use mlps="frozen".'
        )
    chosen = _senders(model, senders, received)
    pairs = PromptPairs.of(model, reread(clean), reread(corrupted), options.get("bos"))
    changes = _Paths.of(model, pairs, sorted({layer for layer, _ in chosen}), mlps)
    noted: dict[str, Any] = {
        "corrupted inputs": pairs.corrupted[-1].digest, "mlps": mlps, "through": list(entered),
        "receivers": [list(head) for head in received] or "logits",
        "senders": "all" if isinstance(senders, str) else [list(head) for head in chosen],
    }  # fmt: skip
    swept = run_sweep(
        model, pairs.prompts[0], [changes.of_sender(head) for head in chosen], metric, later=later,
        through=_points(model, received, entered) if received else None, noted=noted, **options,
    )  # fmt: skip
    fields = head_fields(model, chosen, swept, "path patching")
    return PathEffects(**fields, receivers=received, through=entered)


@dataclass(frozen=True)
class _Paths:
    """The interventions along the paths from senders."""

    sent: Mapping[int, Values]  # z in the corrupted run, by layer
    held: Mapping[int, tuple[Intervention, ...]]  # hold z of all heads at clean values, after the first sender's layer
    mlps: Mapping[int, Intervention]  # hold MLPs at their clean outputs, by layer; empty if MLPs are recomputed
    stack: str

    @classmethod
    def of(cls, model: HookedModel, pairs: PromptPairs, layers: Sequence[int], mlps: str) -> "_Paths":
        """Builds the interventions for senders in the given layers."""
        stack = model.output_stack
        later = [layer for layer in stack.layers if layer > layers[0]]
        clean = pairs.values(model, "z", later) if later else {}
        held = {
            layer: (Intervention.replace([(layer, head) for head in range(stack.n_heads)], values, stack=stack.label),)
            for layer, values in clean.items()
        }
        frozen: dict[int, Intervention] = {}
        if mlps == "frozen" and model.points[stack.point("mlp_out")].absent is None:
            outputs = pairs.values(model, "mlp_out", [layers[0], *later])
            frozen = {
                layer: Intervention.stream("mlp_out", [layer], values_of_layer, stack=stack.label)
                for layer, values_of_layer in outputs.items()
            }
        return cls(pairs.values(model, "z", layers, corrupted=True), held, frozen, stack.label)

    def of_sender(self, head: Head) -> tuple[Intervention, ...]:
        """Returns the interventions of the pass in which a sender writes what it writes in the corrupted run."""
        first = head[0]
        sent = Intervention.replace([head], self.sent[first], stack=self.stack)
        between = [hold for layer, some in self.held.items() if layer > first for hold in some]
        return (sent, *between, *(frozen_mlp for layer, frozen_mlp in self.mlps.items() if layer >= first))


def _through(through: Any) -> tuple[str, ...]:
    names = [through] if isinstance(through, str) else listed("through", through, "a list of q, k and v")
    for name in names:
        option("through", name, THROUGH)
    if not names:
        raise InputError("`through` must name q, k or v; got an empty list.")
    return tuple(name for name in THROUGH if name in names)


def _senders(model: HookedModel, senders: Heads, receivers: Sequence[Head]) -> list[Head]:
    """Returns the senders that have a path; raises `InputError` for a requested head without a path."""
    chosen = model.check_heads(senders)
    if not receivers:
        return chosen
    last = max(layer for layer, _ in receivers)
    with_path = [head for head in chosen if head[0] < last]
    if not isinstance(senders, str) and len(with_path) < len(chosen):
        layer, head = next(sender for sender in chosen if sender not in with_path)
        raise InputError(
            f"a sender must be in a layer below that of the last receiver (layer {last}); got L{layer}H{head}."
        )
    if not with_path:
        raise InputError(f"no head is below the receivers, which are in layer {last}.")
    return with_path


def _points(model: HookedModel, receivers: Sequence[Head], through: Sequence[str]) -> Receivers:
    """The receivers' q, k and v, by point and layer; for k and v, the kv heads that they read."""
    stack = model.output_stack
    shared = stack.n_heads // stack.n_kv_heads
    heads_by_point: dict[tuple[str, int], dict[int, None]] = {}
    for name in through:
        for layer, head in receivers:
            heads_by_point.setdefault((name, layer), {})[head if name == "q" else head // shared] = None
    return {key: tuple(heads) for key, heads in heads_by_point.items()}
