"""Proves at load that every activation point means what its name says.

A few probe tokens run through three models that share their parameters: attnmech's, transformers' own, and
TransformerLens's bridge. Values that must be equal are compared, and the certificate lists every comparison with its
residual. A point whose check fails is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final

import torch
from torch import Tensor

from ...basics.arguments import flag
from ...basics.messages import first_line
from ...basics.public import public
from ...batch import Batch
from ...errors import UnsupportedModelError, WeightsError
from ...points import POINTS, PointKey, full_name, lens_name
from ..attention.in_force import Part
from ..parts.certificate import Certificate, Check, LensHook
from ..parts.weights import check_finite
from ..reading.partial_pass import MIDDLE, Blocks, can_begin_in_the_middle
from ..reading.unembedding import unembedding_of, why_not_linear
from ..run.hooked import HookedModel, require_model
from ..stack.stack import about_other_layers
from ..structure.copies import cannot_run
from ..structure.passes_apart import reading
from .depth import FULL, SHORT
from .edit_checks import EditChecks
from .far import far_batch, one_of_each_kind, plain_block
from .layer_checks import layer_checks
from .plain_checks import comes_through
from .probe import (
    FROM_STREAM,
    Compared,
    Passes,
    Probe,
    ProbeRun,
    Statement,
    attempt,
    by_row,
    excess_of,
    output_of,
    with_least,
)
from .remembered import remember, remembered
from .texts import beginning_of, each_token_changed, end_changed, padded_batch

EVERY_POINT: Final = tuple(POINTS)
_WHOLE: Final = (
    "weights", "points", "transformers", "implementations", "bridge", "padding", "texts", "causal", "embed", "logits",
    "middle", "far",
)  # fmt: skip
"""The names of the checks of whole passes, which concern every stack."""

_LOOKED_AT: Final = 24  # logits are recomputed at this many tokens of the long probe, since a vocabulary may be large
_AT_A_TIME: Final = 24  # the tokens whose logits are compared at a time


@public
def certify(model: HookedModel, *, full: bool = False) -> Certificate:
    """Proves, on a few probe tokens, that the points of a model mean what their names say.

    >>> import attnmech as am
    >>> am.certify(am.load()).ok
    True

    It runs at load. Call it again after changing weights, which also renews `model.certificate`, or inside
    `model.hooks` to see what an edit breaks. A faulty model raises no error: the certificate lists the faults.

    Args:
        model: the model.
        full: try edits in every layer instead of at most six, compare every layer on two longer texts instead of three
            layers on one, and try causality, padding and edits on 24 tokens instead of 8.

    Returns:
        Every check with its residual, and the points that are refused, each with the reason.
    """
    require_model(model)
    return certify_with(Passes(model, FULL if flag("full", full) else SHORT))


def certify_with(passes: Passes) -> Certificate:
    """The certificate of a model, from passes that may have run in part already."""
    model = passes.model
    with model.in_force.unchecked():
        statements = {label: Statements(passes, stack) for label, stack in model.stacks.items()}
        whole = next(iter(statements.values()))
        checks = list(whole.of_model(lambda run, label, layer: statements[label].read(run, layer)))
        for statement in statements.values():
            checks += statement.of_stack()
    certificate = Certificate(
        model.name,
        model.weights_hash,
        tuple(checks),
        whole.lens_hooks,
        tuple(whole.edited),
        about_other_layers(model.output_stack),
    )
    if not model.edited:
        model.certificate = certificate
    return certificate


def prove(passes: Passes, *, again: bool, kept: bool) -> None:
    """Gives a model its certificate; if it may be `kept`, an earlier load's serves unless it is wanted `again`."""
    known = remembered(passes.model) if kept and not again else None
    if known is not None and still_holds(passes):
        passes.model.certificate, _ = known
        return
    certify_with(passes)
    if kept:
        remember(passes.model, passes.model.certificate)


def still_holds(passes: Passes) -> bool:
    """Whether the output is still that of plain transformers, in a pass that captures nothing else."""
    probe = Statements(passes, passes.model.output_stack)

    def compared() -> Check:
        with passes.model.in_force.unchecked():
            ours = probe.output(passes.batch)
        real = probe.comparable(ProbeRun(passes.batch, {}, frozenset()), "logits", None, ours)
        return probe.compare("transformers", "", (), ours, passes.plain, real=real)

    made = attempt(compared)  # if it fails, the proof, which follows, says what is wrong
    return isinstance(made, Check) and bool(made.passed)


def _checked(probe: Probe, made: Check | Statement | Exception) -> Check:
    if isinstance(made, Exception):
        raise made
    return made.check(probe) if isinstance(made, Statement) else made


def check_runs(passes: Passes) -> None:
    """Raises `WeightsError` if transformers itself cannot run the model in its precision on its device."""
    model = passes.model
    try:
        _ = passes.plain
    except UnsupportedModelError:
        raise
    except Exception as error:  # transformers raises many kinds of errors for sizes and precisions that it cannot run
        raise cannot_run(model.plain, error) from error


class Statements(EditChecks):
    """The statements that must hold for every model."""

    def of_model(self, read: Callable[[ProbeRun, str, int], None]) -> Iterator[Check]:
        """The checks of whole passes; `read` receives each layer of each stack when it has run."""
        yield self._spelled_out(self._finite())
        reached = self._reached(read)
        yield self._spelled_out(reached)
        if reached.passed:
            yield from self._computed(self._whole_passes())

    def of_stack(self) -> Iterator[Check]:
        """The checks of the stack's layers; none if a pass failed."""
        if self.passes.runs:
            edits = {"pattern_edit": self._pattern_edit}
            if self.plan.streams:
                edits["resid_mid_edit"] = self._resid_mid_edit
            yield from self._computed(self._made_of_layers | edits)

    @property
    def _made_of_layers(self) -> dict[str, Callable[[], Check]]:
        return {name: partial(_checked, self, made) for name, made in self._of_layers.items()}

    @cached_property
    def _of_layers(self) -> dict[str, Check | Statement | Exception]:
        """The statements about the stack's layers, which are made before the passes; or what making one raised."""
        made: dict[str, Check | Statement | Exception] = {}
        for entry in layer_checks(self):
            name, check = (entry.name, entry) if isinstance(entry, Statement) else (entry[0], attempt(entry[1]))
            made[name] = check
        return made

    def read(self, run: ProbeRun, layer: int) -> None:
        for statement in self._of_layers.values():
            if isinstance(statement, Statement):
                statement.read(self, run, layer)

    def _computed(self, makers: Mapping[str, Callable[[], Check]]) -> Iterator[Check]:
        """Computes the checks; a check that raises an error on a broken model counts as failed."""
        for name, make in makers.items():
            made = attempt(make)
            if isinstance(made, Exception):
                made = Check(name, f"{name} can be checked", EVERY_POINT, False, detail=first_line(made))
            yield self._spelled_out(made)

    def _spelled_out(self, check: Check) -> Check:
        """The check with the full names of its points: of every stack for a whole pass, of its own for a layer."""
        whole = check.name in _WHOLE
        labels = list(self.model.stacks) if whole else [self.stack.label]
        if check.name == "streams":
            # The encoder's output reaches every stack; the decoder's stream reaches the decoder and cross-attention.
            labels = [label for label in self.model.stacks if self.stack.label == "encoder" or label != "encoder"]
        points = tuple(dict.fromkeys(full_name(label, name) for label in labels for name in check.points))
        name = check.name if whole or not self.stack.label else f"{self.stack.label} {check.name}"
        return replace(check, name=name, points=points)

    def _whole_passes(self) -> dict[str, Callable[[], Check]]:
        return {
            "transformers": self._transformers,
            **({"implementations": self._implementations} if self.plan.trusted == "sdpa" else {}),
            "bridge": self._bridge,
            **({"texts": self._texts} if self.model.is_own else {"padding": self._padding}),
            "causal": self._causal,
            "embed": self._embed,
            "logits": self._logits,
            "middle": self._middle,
            "far": self._far,
        }

    def _reached(self, read: Callable[[ProbeRun, str, int], None]) -> Check:
        failed = attempt(lambda: self.passes.run(self._kept, read))
        detail = self._unreached if failed is None else first_line(failed)
        if detail:
            self.passes.runs = ()
        return Check("points", "every point is reached in a forward pass", EVERY_POINT, not detail, detail=detail)

    @property
    def _unreached(self) -> str:
        """Which layer's attention does not go through attnmech's softmax; empty if that of every layer does."""
        for stack in self.model.stacks.values():
            missing = [layer for layer in stack.layers if (stack.label, layer) not in self.short.masks]
            if missing:
                where = f"layer {missing[0]}" + (f" of the {stack.label} stack" if stack.label else "")
                return f"the attention of {where} does not go through attnmech's softmax"
        return ""

    @property
    def _kept(self) -> set[PointKey]:
        """The points that checks of whole passes read after the pass."""
        encoder = self.model.stacks.get("encoder")
        kept = {self.model.last_stream, *self._of_bridge}
        kept |= set() if encoder is None else {(encoder.point("resid_post"), encoder.layers[-1])}
        return kept | ({(self.stack.point("resid_pre"), self._middle_layer)} if self.plan.streams else set())

    @property
    def _of_bridge(self) -> list[PointKey]:
        """The points at which the bridge's hooks are compared, by their own names: those of the layer in the middle."""
        if len(self.model.stacks) > 1 or self.model.is_own:
            return []
        layer = self._middle_layer
        there = [(name, point) for name, point in POINTS.items() if self.model.points[name].absent is None]
        return [(name, layer if point.per_layer else None) for name, point in there if name != "result"]

    @property
    def _middle_layer(self) -> int:
        return self.layers[len(self.layers) // 2]

    def _finite(self) -> Check:
        statement = "every weight is finite"
        try:
            check_finite(self.model.named_parameters())
        except WeightsError as error:
            return Check("weights", statement, EVERY_POINT, False, detail=str(error))
        return Check("weights", statement, (), True)

    def _transformers(self) -> Check:
        statement = f"output = output of {'the module itself' if self.model.is_own else 'plain transformers'}"
        return self.compare("transformers", statement, EVERY_POINT, self._output, self.passes.plain, again=self._again)

    def _again(self) -> Tensor:
        return self.output(self.batch)

    @cached_property
    def _output(self) -> Tensor:
        logits = self.short.values.get(("logits", None))
        return self.output(self.batch) if logits is None else logits

    def _implementations(self) -> Check:
        """Compares transformers' two implementations of attention; where they disagree, says which one is followed."""
        statement = "eager and sdpa attention of transformers agree"
        eager = self.passes.eager
        if isinstance(eager, Exception):
            return Check.untried("implementations", statement, str(eager))
        check = self.compare("implementations", statement, (), output_of(eager), self.passes.plain)
        if check.passed:
            return check
        followed = f"{check.detail}; attnmech follows {self.plan.trusted}, which computes what was trained"
        return replace(check, detail=followed)

    def _bridge(self) -> Check:
        statement = "output = output of TransformerLens's bridge"
        if self.model.is_own:
            return Check.untried("bridge", statement, "TransformerLens has none for a module of your own")
        if len(self.model.stacks) > 1:
            return Check.untried("bridge", statement, "not compared on models of several stacks")
        ours = {key: self.short.values[key] for key in self._of_bridge}
        ran = attempt(lambda: _bridge_run(self.model, self.batch, [lens_name(key) for key in ours]))
        if isinstance(ran, Exception):  # a bridge that cannot be built or run is TransformerLens's fault
            return Check.untried("bridge", statement, first_line(ran))
        theirs, cache = ran
        self.lens_hooks = tuple(self._lens_hooks(ours, cache))
        if self.model.points["result"].absent is None:
            self.lens_hooks += (LensHook("result", lens_name(("result", self._middle_layer)), "absent", None),)
        check = self.compare("bridge", statement, (), self._output, theirs, again=self._again)
        if not check.passed and self.plan.trusted == "sdpa":
            return replace(check, detail=f"{check.detail}; the bridge runs transformers' eager attention")
        wrong = [hook.point for hook in self.lens_hooks if hook.verdict == "differs"]
        if wrong and check.passed:
            return replace(
                check, detail=f"hooks that mean something else, with the right value here: {', '.join(wrong)}"
            )
        return check

    def _lens_hooks(self, points: Mapping[PointKey, Tensor], cache: Mapping[str, Tensor]) -> Iterator[LensHook]:
        for key, ours in points.items():
            hook = lens_name(key)
            theirs = cache.get(hook)
            if theirs is None or theirs.shape != ours.shape:
                yield LensHook(key[0], hook, "absent" if theirs is None else "differs", None)
                continue
            keep = self.comparable(self.short, key[0], key[1], ours)
            residual = self.whole * excess_of(ours, theirs, self.whole * theirs[keep].abs().amax().to(self.wide), keep)
            yield LensHook(key[0], hook, "agrees" if residual <= self.whole else "differs", residual)

    def _padding(self) -> Check:
        statement = "neither padding nor its tokens change any output"
        batch = padded_batch(self.model, self.passes.depth.beginning)
        if batch is None:
            return Check.untried("padding", statement, "this probe has no padding")
        batch = self.passes.encoded(batch)
        real = self.written(batch).mask[0]
        before, after, keep = [], [], []
        for output in (self.by_token(batch), *self.plain_by_token(batch)):
            before.append(output[[0, 2]])
            after.append(output[[1, 3]])
            keep.append(self.written(batch).mask[[0, 2]] & comes_through(self, output[[0, 2]]))
        text = beginning_of(batch, 2, int(real.sum()))
        alone = self.by_token(text)
        unpadded = self.written(batch).mask[2:3]
        padded = before[0][1:2][unpadded][None]
        check = self.compare(
            "padding", statement, EVERY_POINT, torch.cat(before), torch.cat(after), real=torch.cat(keep)
        )
        if not check.passed:
            return replace(check, detail=f"other tokens in the padding: {check.detail}")
        everywhere = torch.ones_like(alone[..., 0]) > 0
        others = [("a text alone and padded on the right", padded)]
        # Without padding, sdpa attention may be given no mask, and then decides by itself which keys a token sees.
        others += [("transformers with a text alone", theirs) for theirs in self.plain_by_token(text)]
        for what, other in others:
            check = self.compare(
                "padding", statement, EVERY_POINT, alone, other, real=everywhere, again=lambda: self.by_token(text)
            )
            if not check.passed:
                return replace(check, detail=f"{what}: {check.detail}")
        return check

    def _texts(self) -> Check:
        """Compares the longest text of a batch with the same text alone, in a later pass."""
        statement = "neither other texts of a batch nor earlier passes change any output"
        longest = self.batch.lengths.argmax()[None]
        together, alone = self._output, self.output(self.batch.texts(longest))
        if together.shape != (len(self.batch.ids), *alone.shape[1:]):
            return Check.untried("texts", statement, "the output has no row per text")
        real = torch.ones(1, dtype=torch.bool, device=alone.device)
        return self.compare("texts", statement, EVERY_POINT, together[longest.to(together.device)], alone, real=real)

    def _causal(self) -> Check:
        statement = "no token sees a later one"
        if not self.model.causal:
            return Check.untried("causal", statement, "an encoder: every token sees every other")
        if self.model.is_own:
            why = "the mask of the traced call hides later positions; outside attention, the module may mix positions"
            return Check.untried("causal", statement, why)
        if self.written(self.batch).ids.shape[1] < 2:
            return Check.untried("causal", statement, "the probe has one token")
        # Comparing the stream is enough if logits depend only on a token's own stream, which another check proves.
        look = self.last_stream if why_not_linear(self.model) is None else self.by_token
        changed = self.passes.encoded(each_token_changed(self.model, self.beginning))
        copies = len(self.written(changed).ids) - 1
        seen = look(changed)
        before, after = seen[-1:].expand(copies, -1, -1), seen[:-1]
        # Copy n differs from the text at position n + 1, so nothing before that position may change.
        untouched = torch.ones(before.shape[:2], dtype=torch.bool, device=before.device).tril()
        points = ("scores", "pattern", "z")
        check = self.compare("causal", statement, points, before, after, real=untouched)
        if not check.passed or len(self.passes.runs) < 2:
            return check
        long = self.passes.runs[-1].batch
        other, half = end_changed(self.model, long)
        before, after = self.passes.runs[-1].values[self.model.last_stream], self.last_stream(other)
        further = self.compare(
            "causal", statement, points, before[:, :half], after[:, :half], real=self.written(long).mask[:, :half]
        )
        return check if further.passed else replace(further, detail=f"at {half} of a longer text: {further.detail}")

    def _logits(self) -> Check:
        """Compares the logits with norm and head, step by step, at all tokens of the short probe and some others."""
        reason = why_not_linear(self.model)
        if reason is not None:
            return Check.untried("logits", "logits = N(resid_post) W_U", f"{reason}; logit attribution is refused")
        head = unembedding_of(self.model)
        bias = "" if head.bias is None else " + b"
        scale = "" if head.logit_scale == 1 else f"{head.logit_scale:.4g} · "
        statement = f"logits = {scale}N(resid_post) W_U{bias}"
        if head.softcap is not None:
            statement = f"logits = c · tanh(({statement.removeprefix('logits = ')}) / c), c = {head.softcap:.4g}"
        label, last = self.model.output_stack.label, self.model.last_stream

        def comparisons() -> Iterator[Compared]:
            for run in self.passes.runs:
                real = run.real(label).nonzero()
                chosen = real if run is self.short else real[:: max(1, len(real) // _LOOKED_AT)]
                for first in range(0, len(chosen), _AT_A_TIME):
                    texts, places = chosen[first : first + _AT_A_TIME].unbind(dim=1)
                    stream = run.values[last][texts, places]
                    expected, ours = head.logits(stream), run.values["logits", None][texts, places]
                    allowed, everywhere = head.rounding(stream, expected), torch.ones_like(texts, dtype=torch.bool)
                    yield self.compared(run, last[1], ours, expected, allowed, everywhere)

        return self.by_layer("logits", statement, ("logits",), comparisons(), self.product(self.model.d_model))

    def _middle(self) -> Check:
        """Begins a pass at a middle block, as sweeps do; if the result differs, sweeps run every block instead."""
        statement = "a pass that begins in the middle, with a stored stream, ends as the whole pass"
        if not can_begin_in_the_middle(self.model) or self.stack.n_layers < 2:
            return Check.untried(MIDDLE, statement, "sweeps run every block of this model")
        start, last = self._middle_layer, self.model.last_stream
        stream = self.short.values[self.stack.point("resid_pre"), start]
        ran = Blocks(self.model).run(self.batch, start=start, stream=stream, captures=[last])
        return self.compare(MIDDLE, statement, (), ran.values[last], self.short.values[last], self.local)

    def _far(self) -> Check:
        """Compares one block of each kind with its plain copy, on a text longer than windows and branches of code."""
        statement = "past the reach of a window, a single block returns what plain transformers returns"
        batch = far_batch(self.model, self.passes.depth.beginning)
        if batch is None:
            return Check.untried("far", statement, "the other probes reach past every branch of this model's code")
        if not can_begin_in_the_middle(self.model) or not self.plan.batch_first:
            return Check.untried("far", statement, "a single block of this model cannot run by itself")
        texts = [batch.alone(number) for number in range(len(batch.ids))]
        length, *beside = (text.ids.shape[1] for text in texts)
        if beside:
            statement += " for each text of a batch alone"

        def comparisons() -> Iterator[Compared]:
            for layer in one_of_each_kind(self.model.config, self.layers):
                alone = [plain_block(self.model, self.stack, layer, text).to(self.wide) for text in texts]
                together, where = self._block_output(batch, layer), f"layer {layer} in a text of"
                yield self._apart(together[:1], alone[0], f"{where} {length} tokens")
                for short in beside:
                    after = self._block_output(texts[1], layer)
                    yield self._apart(together[1:, :short], alone[1], f"{where} {short} tokens beside one of {length}")
                    yield self._apart(after, alone[1], f"{where} {short} tokens after one of {length}")

        return self.by_layer("far", statement, FROM_STREAM, comparisons(), self.whole)

    def _block_output(self, batch: Batch, layer: int) -> Tensor:
        name = self.stack.point("resid_post"), layer
        return self.model.forward(batch, captures=[name], part=Part(layer, layer + 1))[name].to(self.wide)

    def _apart(self, ours: Tensor, theirs: Tensor, where: str) -> Compared:
        """A comparison of two streams, row by row."""
        return Compared(where, excess_of(ours, theirs, with_least(by_row(theirs, self.whole), self.model.dtype)))

    def _embed(self) -> Check:
        scale = self.plan.embed_scale
        statement = "embed = row of the token embedding" + ("" if scale == 1 else f" · {scale:.4g}")
        if ("embed", None) not in self.short.values:
            return Check.untried("embed", statement, self.model.points["embed"].absent or "")
        expected = self.model.embedding[self.batch.ids] * torch.tensor(scale, dtype=torch.float32).to(self.model.dtype)
        return self.compare("embed", statement, ("embed",), self.short.values["embed", None], expected, self.local)


def _bridge_run(model: HookedModel, batch: Batch, hooks: Sequence[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
    mask = batch.mask.long() if batch.padded else None
    inputs = batch.extra.get("pixel_values", batch.ids)
    options: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
    with torch.no_grad(), reading(batch), model._bridges.passing() as bridge:
        logits, cache = bridge.run_with_cache(
            inputs, names_filter=set(hooks).__contains__, return_cache_object=True, **options
        )
        values = dict(cache.items())  # type: ignore[no-untyped-call]
    assert isinstance(logits, torch.Tensor)
    return logits, values


def certificate_of(model: HookedModel) -> Certificate:
    """The certificate of the model as it is: that of its load or, under hooks or with other weights, a new one."""
    proven = not model.edited and model.certificate.weights == model.weights_hash
    return model.certificate if proven else certify(model)
