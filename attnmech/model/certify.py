"""Does every activation point mean what its name says? Proved at load.

A few probe tokens run through three models that share their parameters: ours, transformers' own, and
TransformerLens's bridge. What must be equal is compared, and every comparison is in the certificate with its residual.
A point whose check fails is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from ..errors import UnsupportedModelError, WeightsError, first_line
from ..maths.norms import FrozenNorm
from ..maths.precision import least_rounding, product_rounding, steps_rounding, sum_rounding, table_tolerance
from ..points import POINTS, PointKey, full_name, lens_name
from .block import PostNormEnd
from .certificate import Certificate, Check, LensHook
from .copies import cannot_run
from .hooked import HookedModel, require_model
from .in_force import Edit
from .ledger import ScoreAudit
from .partial_pass import MIDDLE, Blocks, can_begin_in_the_middle
from .position import rotary_tables
from .probe import (
    BEGINNING,
    SEED,
    Compared,
    Passes,
    Probe,
    beginning_of,
    bridge_run,
    by_row,
    each_token_changed,
    end_changed,
    excess_of,
    output_of,
    padded_batch,
)
from .unembedding import unembedding_of, why_not_linear
from .weights import bias_of, check_finite, matrix_of

_EVERY_POINT: Final = tuple(POINTS)
_WHOLE: Final = (
    "weights", "points", "transformers", "implementations", "bridge", "padding", "causal", "embed", "logits", "middle",
)  # fmt: skip
"""The checks of whole passes, which concern every stack."""

_LOOKED_AT: Final = 24
"""At how many tokens of the long probe the logits are recomputed: a vocabulary may be large."""
_ALONE: Final = 4
"""At how many tokens each head is sent through W_O alone."""

_HANDED: Final = {
    "": {"streams": "hidden_states", "attentions": "attentions"},
    "encoder": {"streams": "encoder_hidden_states", "attentions": "encoder_attentions"},
    "decoder": {"streams": "decoder_hidden_states", "attentions": "decoder_attentions"},
    "cross": {"streams": "", "attentions": "cross_attentions"},
}
"""The names under which transformers returns a stack's streams and patterns."""


def certify(model: HookedModel) -> Certificate:
    """Proves, on a few probe tokens, that the points of a model mean what their names say.

    Runs at load; run it again after changing weights, which also renews `model.certificate`, or inside `model.hooks`
    to see what an edit breaks. Never raises for a faulty model: the certificate lists the faults.
    """
    require_model(model)
    return certify_with(Passes(model))


def certify_with(passes: Passes) -> Certificate:
    """The certificate of a model some of whose passes may have been made."""
    model = passes.model
    with model.unchecked():
        statements = [_Statements(passes, stack) for stack in model.stacks.values()]
        checks = list(statements[0].of_model())
        for each in statements:
            checks += each.of_stack()
    certificate = Certificate(
        model.name, model.weights_hash, tuple(checks), statements[0].lens_hooks, tuple(statements[0].edited)
    )
    if not model.edited:
        model.certificate = certificate
    return certificate


def check_runs(passes: Passes) -> None:
    """Raises `WeightsError` if transformers itself cannot run the model in its precision on its device."""
    model = passes.model
    try:
        _ = passes.plain
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever transformers raises over sizes and precisions that it cannot run
        raise cannot_run(model.plain, error) from error


class _Statements(Probe):
    """What must hold for every model, statement by statement."""

    def of_model(self) -> Iterator[Check]:
        """The checks of whole passes."""
        yield self._spelled_out(self._finite())
        reached = self._reached()
        yield self._spelled_out(reached)
        if reached.passed:
            yield from self._computed(self._whole_passes())

    def of_stack(self) -> Iterator[Check]:
        """The checks of the stack's layers; none if a pass failed."""
        if self.passes.runs:
            yield from self._computed([*self._layer_by_layer(), self._pattern_edit, self._resid_mid_edit])

    def _computed(self, makers: list[Callable[[], Check]]) -> Iterator[Check]:
        """Makes the checks; one that cannot even be computed on a broken model counts as failed."""
        for make in makers:
            try:
                check = make()
            except Exception as error:
                name = make.args[0] if isinstance(make, partial) else make.__name__.strip("_")
                check = Check(name, f"{name} can be checked", _EVERY_POINT, False, detail=first_line(error))
            yield self._spelled_out(check)

    def _spelled_out(self, check: Check) -> Check:
        """The check with its points' full names: a whole pass concerns every stack, a layer only its own."""
        whole = check.name in _WHOLE
        labels = list(self.model.stacks) if whole else [self.stack.label]
        points = tuple(dict.fromkeys(full_name(label, name) for label in labels for name in check.points))
        name = check.name if whole or not self.stack.label else f"{self.stack.label} {check.name}"
        return replace(check, name=name, points=points)

    def _whole_passes(self) -> list[Callable[[], Check]]:
        return [
            self._transformers,
            *([self._implementations] if self.plan.trusted == "sdpa" else []),
            self._bridge,
            self._padding,
            self._causal,
            self._embed,
            self._logits,
            self._middle,
        ]

    def _layer_by_layer(self) -> list[Callable[[], Check]]:
        plan, dtype = self.plan, self.model.dtype
        adding = sum_rounding(dtype)

        def checking(
            name: str,
            statement: str,
            points: tuple[str, ...],
            found: Iterator[Compared],
            tolerance: float | None = None,
        ) -> Callable[[], Check]:
            return partial(self.by_layer, name, statement, points, found, tolerance)

        return [
            self._streams,
            self._attentions,
            checking(
                "attn_in",
                "attn_in = the input norm of resid_pre, or resid_pre without one",
                ("resid_pre", "attn_in"),
                self._attn_in(),
            ),
            checking(
                "projections",
                "q, k, v = attn_in W + b",
                ("attn_in", "q", "k", "v"),
                self._projections(),
                self._product(self.model.d_model),
            ),
            *([self._rotation, self._rotary_tables] if plan.rotary is not None else []),
            *([self._alibi] if plan.alibi is not None else []),
            checking(
                "ledger",
                "scores = Σ terms of the score ledger",
                ("q", "k", "scores"),
                self._ledger(),
                self._product(self.model.d_model),
            ),
            checking(
                "softmax",
                "pattern = softmax(scores); rows sum to 1 minus a sink's mass",
                ("scores", "pattern"),
                self._softmax(),
            ),
            checking("mask", "pattern = 0 where a key is hidden", ("scores", "pattern"), self._hidden(), adding),
            *(
                []
                if plan.gate is None
                else [
                    checking(
                        "gate", f"gate = {plan.gate.function}(attn_in W + b)", ("gate", "z"), self._gates(), self.local
                    )
                ]
            ),
            checking(
                "z",
                "z = pattern v" if plan.gate is None else "z = gate ⊙ pattern v",
                ("pattern", "v", "z"),
                self._z(),
                self._product(len(self.short.batch.ids[0])),
            ),
            checking(
                "heads",
                "W_O is given z, and makes z W_O of each head alone; Σ_h z W_O + b_O = attn_raw",
                ("z", "result", "attn_raw"),
                self._heads(),
                self._product(self.stack.n_heads * self.stack.d_head),
            ),
            self._attn_out,
            self._stream,
            checking("mlp", *self._mlp_statement(), self._mlp(), adding if plan.norm == "pre" else None),
            *(
                []
                if plan.within
                else [
                    checking(
                        "chain",
                        "resid_post of a layer = resid_pre of the next",
                        ("resid_pre", "resid_post"),
                        self._chain(),
                        adding,
                    )
                ]
            ),
        ]

    def _product(self, terms: int) -> float:
        """The share of Σ|t| by which a product of `terms` terms may be off, including the rounding of the result."""
        return product_rounding(self.model.dtype, terms) + steps_rounding(self.model.dtype)

    # -- the runs ------------------------------------------------------------------------------------------

    def _reached(self) -> Check:
        """Runs our model, with every point."""
        statement = "every point is reached in a forward pass"
        try:
            self.passes.run()
        except Exception as error:  # whatever a broken model raises is what the certificate has to say
            return Check("points", statement, _EVERY_POINT, False, detail=first_line(error))
        for stack in self.model.stacks.values():
            missing = [layer for layer in stack.layers if (stack.label, layer) not in self.short.blocks]
            if missing:
                where = f"layer {missing[0]}" + (f" of the {stack.label} stack" if stack.label else "")
                detail = f"the attention of {where} does not go through attnmech's softmax"
                self.passes.runs = ()
                return Check("points", statement, _EVERY_POINT, False, detail=detail)
        return Check("points", statement, _EVERY_POINT, True)

    # -- whole passes --------------------------------------------------------------------------------------

    def _finite(self) -> Check:
        statement = "every weight is finite"
        try:
            check_finite(self.model.named_parameters())
        except WeightsError as error:
            return Check("weights", statement, _EVERY_POINT, False, detail=str(error))
        return Check("weights", statement, (), True)

    def _transformers(self) -> Check:
        statement = "output = output of plain transformers"
        return self.compare("transformers", statement, _EVERY_POINT, self._output, self.passes.plain)

    @cached_property
    def _output(self) -> Tensor:
        logits = self.short.values.get(("logits", None))
        return self.output(self.batch) if logits is None else logits

    def _streams(self) -> Check:
        trusted = self.plan.trusted == "sdpa"
        theirs = self.passes.in_attention("sdpa") if trusted else self.passes.eager
        statement = "resid_pre = hidden states of plain transformers"
        handed = self._handed("streams", theirs)
        if isinstance(handed, str):
            return Check("streams", statement, (), None, detail=handed)
        by_run = {self.short: handed}
        if len(self.passes.runs) > 1:
            longer = self._handed("streams", self.passes.longer)
            by_run |= {} if isinstance(longer, str) else {self.passes.runs[-1]: longer}

        def found() -> Iterator[Compared]:
            for run, states in by_run.items():
                for layer in run.layers[self.stack.label]:
                    expected = states[layer].to(self.wide)
                    keep = run.real(self.stack.label) & self._comes_through(expected)
                    yield self.compared(
                        run, layer, self.at(run, "resid_pre", layer), expected, by_row(expected, self.whole), keep
                    )

        return self.by_layer("streams", statement, ("resid_pre", "resid_post"), found(), self.whole)

    def _comes_through(self, theirs: Tensor) -> Tensor:
        """Where transformers gives numbers: in float64, padding that sees no key is NaN, in all layers above too."""
        if self.model.dtype != torch.float64:
            return torch.ones(theirs.shape[:2], dtype=torch.bool, device=theirs.device)
        return theirs.isfinite().all(dim=-1).all(dim=-1, keepdim=True).expand(theirs.shape[:2])

    def _attentions(self) -> Check:
        statement = "pattern = attentions of plain transformers (eager)"
        if self.plan.trusted == "sdpa":
            return Check("attentions", statement, (), None, detail="eager attention computes something else here")
        handed = self._handed("attentions", self.passes.eager)
        if isinstance(handed, str):
            return Check("attentions", statement, (), None, detail=handed)
        # A hybrid returns only the patterns of its layers with attention.
        whole = len(handed) == len(self.layers)
        patterns = dict(zip(self.layers, handed, strict=True)) if whole else handed

        def found() -> Iterator[Compared]:
            for layer in self.layers:
                ours = self.at(self.short, "pattern", layer)
                keep = self.short.real(self.stack.label)[:, None].expand(ours.shape[:3])
                theirs = patterns[layer].to(self.wide)
                if self.block(self.short, layer).sink is not None:
                    # Some families return what the row would be without its sink.
                    ours, theirs = (each / each.sum(dim=-1, keepdim=True) for each in (ours, theirs))
                # Eager attention rounds queries, keys and scores to the model's precision: in the softmax, a factor.
                scores = self.at(self.short, "scores", layer).masked_fill(~self.block(self.short, layer).visible, 0.0)
                largest = scores.abs().amax(dim=-1, keepdim=True)
                factor = torch.expm1(steps_rounding(self.model.dtype) * largest)
                yield self.compared(
                    self.short,
                    layer,
                    ours,
                    theirs,
                    self.whole * theirs.sum(dim=-1, keepdim=True) + factor * torch.maximum(ours, theirs),
                    keep,
                )

        return self.by_layer("attentions", statement, ("pattern",), found(), self.whole)

    def _handed(self, name: str, theirs: Any) -> Any:
        """What transformers returns layer by layer; or why it does not."""
        handed = getattr(theirs, _HANDED[self.stack.label][name], None)
        if handed and len(handed) >= self.stack.n_layers and all(value is not None for value in handed):
            return handed
        return str(theirs) if isinstance(theirs, Exception) else "transformers does not return them"

    def _implementations(self) -> Check:
        """Says where transformers' two implementations of a family disagree, and which one is followed."""
        statement = "eager and sdpa attention of transformers agree"
        eager = self.passes.eager
        if isinstance(eager, Exception):
            return Check("implementations", statement, (), None, detail=str(eager))
        check = self.compare("implementations", statement, (), output_of(eager), self.passes.plain)
        if check.passed:
            return check
        followed = f"{check.detail}; attnmech follows {self.plan.trusted}, which computes what was trained"
        return replace(check, detail=followed)

    def _bridge(self) -> Check:
        statement = "output = output of TransformerLens's bridge"
        if len(self.model.stacks) > 1:
            return Check("bridge", statement, (), None, detail="not compared on models of several stacks")
        layer = self.layers[len(self.layers) // 2]
        keys: list[PointKey] = [(name, layer if point.per_layer else None) for name, point in POINTS.items()]
        ours = {key: self.short.values[key] for key in keys if key in self.short.values}
        try:
            # TransformerLens has `result` off by default, and warns if it is requested.
            hooks = [lens_name(key) for key in ours if key[0] != "result"]
            theirs, cache = bridge_run(self.model, self.batch, hooks)
        except Exception as error:  # a bridge that cannot be built or run is TransformerLens's fault, not this model's
            return Check("bridge", statement, (), None, detail=first_line(error))
        self.lens_hooks = tuple(self._lens_hooks(ours, cache))
        check = self.compare("bridge", statement, (), self._output, theirs)
        if not check.passed and self.plan.trusted == "sdpa":
            return replace(check, detail=f"{check.detail}; the bridge runs transformers' eager attention")
        wrong = [hook.point for hook in self.lens_hooks if hook.verdict == "differs"]
        if wrong and check.passed:
            detail = f"hooks that mean something else, with the right value here: {', '.join(wrong)}"
            return Check(check.name, statement, (), True, check.residual, check.tolerance, detail)
        return check

    def _lens_hooks(self, points: Mapping[PointKey, Tensor], cache: Mapping[str, Tensor]) -> Iterator[LensHook]:
        for key, ours in points.items():
            hook = lens_name(key)
            theirs = cache.get(hook)
            if theirs is None or theirs.shape != ours.shape:
                yield LensHook(key[0], hook, "absent" if theirs is None else "differs", None)
                continue
            keep = self.comparable(self.short, key[0], key[1], ours)
            largest = theirs[keep].abs().amax().to(self.wide)
            residual = self.whole * excess_of(ours[keep], theirs[keep], self.whole * largest)
            yield LensHook(key[0], hook, "agrees" if residual <= self.whole else "differs", residual)

    def _padding(self) -> Check:
        statement = "neither padding nor the tokens in it change any output"
        batch = padded_batch(self.model)
        if batch is None:
            return Check("padding", statement, (), None, detail="this probe has no padding")
        real = self.written(batch).mask[0]
        before, after, keep = [], [], []
        for output in (self.by_token(batch), *self.plain_by_token(batch)):
            before.append(output[[0, 2]])
            after.append(output[[1, 3]])
            keep.append(self.written(batch).mask[[0, 2]] & self._comes_through(output[[0, 2]]))
        alone = self.by_token(beginning_of(batch, 2, int(real.sum())))
        unpadded = self.written(batch).mask[2:3]
        padded = before[0][1:2][unpadded][None]
        check = self.compare(
            "padding", statement, _EVERY_POINT, torch.cat(before), torch.cat(after), real=torch.cat(keep)
        )
        if not check.passed:
            return replace(check, detail=f"other tokens in the padding: {check.detail}")
        check = self.compare("padding", statement, _EVERY_POINT, padded, alone, real=torch.ones_like(alone[..., 0]) > 0)
        return check if check.passed else replace(check, detail=f"a text alone and padded on the right: {check.detail}")

    def _causal(self) -> Check:
        statement = "no token sees a later one"
        if not self.model.causal:
            return Check("causal", statement, (), None, detail="an encoder: every token sees every other")
        if self.written(self.batch).ids.shape[1] < 2:
            return Check("causal", statement, (), None, detail="the probe has one token")
        # If a token's logits depend only on its own stream, as another check proves, the stream is enough.
        look = self.last_stream if why_not_linear(self.model) is None else self.by_token
        text = beginning_of(self.batch, 0, BEGINNING)
        changed = each_token_changed(text, self.model.n_vocab)
        copies = len(self.written(changed).ids) - 1
        seen = look(changed)
        before, after = seen[-1:].expand(copies, -1, -1), seen[:-1]
        # Copy n differs from the text at position n + 1: nothing before that may change.
        untouched = torch.ones(before.shape[:2], dtype=torch.bool, device=before.device).tril()
        points = ("scores", "pattern", "z")
        check = self.compare("causal", statement, points, before, after, real=untouched)
        if not check.passed or len(self.passes.runs) < 2:
            return check
        long = beginning_of(self.passes.runs[-1].batch, 1, self.passes.runs[-1].batch.ids.shape[1])
        other, half = end_changed(long, self.model.n_vocab)
        before, after = self.passes.runs[-1].values[self.model.last_stream][1:2], self.last_stream(other)
        further = self.compare(
            "causal", statement, points, before[:, :half], after[:, :half], real=self.written(long).mask[:, :half]
        )
        return check if further.passed else replace(further, detail=f"at {half} of a longer text: {further.detail}")

    def _logits(self) -> Check:
        """Compares the logits with head and norm written out, at all tokens of the short probe and some of the long."""
        reason = why_not_linear(self.model)
        if reason is not None:
            return Check("logits", "logits = N(resid_post) W_U", (), None, detail=f"{reason}; answers= is refused")
        head = unembedding_of(self.model)
        bias = "" if head.bias is None else " + b"
        scale = "" if head.logit_scale == 1 else f"{head.logit_scale:.4g} · "
        statement = f"logits = {scale}N(resid_post) W_U{bias}"
        if head.softcap is not None:
            statement = f"logits = c · tanh(({statement.removeprefix('logits = ')}) / c), c = {head.softcap:.4g}"
        label, last = self.model.output_stack.label, self.model.last_stream

        def found() -> Iterator[Compared]:
            for run in self.passes.runs:
                real = run.real(label).nonzero()
                chosen = real if run is self.short else real[:: max(1, len(real) // _LOOKED_AT)]
                texts, places = chosen.unbind(dim=1)
                stream = run.values[last][texts, places]
                logits = run.values["logits", None][texts, places]
                everywhere = torch.ones_like(texts, dtype=torch.bool)
                yield self.compared(run, last[1], logits, head.logits(stream), head.rounding(stream), everywhere)

        limit = self._product(self.model.d_model)
        return self.by_layer("logits", statement, ("logits",), found(), limit)

    def _middle(self) -> Check:
        """Begins a pass in the middle, as sweeps do; where that gives something else, sweeps run every block."""
        statement = "a pass that begins in the middle, with a stored stream, ends as the whole pass"
        if not can_begin_in_the_middle(self.model) or self.stack.n_layers < 2:
            return Check(MIDDLE, statement, (), None, detail="sweeps run every block of this model")
        start, last = self.layers[(len(self.layers) + 1) // 2], self.model.last_stream
        stream = self.short.values[self.stack.point("resid_pre"), start]
        ran = Blocks(self.model).run(self.batch, start=start, stream=stream, captures=[last])
        return self.compare(MIDDLE, statement, (), ran.values[last], self.short.values[last], self.local)

    # -- one layer at a time -------------------------------------------------------------------------------

    def _attn_in(self) -> Iterator[Compared]:
        norm = self.plan.attn_norm
        for run, layer in self.places():
            stream = run.values[self.stack.point("resid_pre"), layer]
            expected = stream if norm is None else self.model.plain_module(self.stack, layer, norm)(stream)
            yield self.compared(run, layer, self.at(run, "attn_in", layer), expected, by_row(expected, self.local))

    def _projections(self) -> Iterator[Compared]:
        rounding, steps = product_rounding(self.model.dtype, self.model.d_model), steps_rounding(self.model.dtype)
        for run, layer in self.places():
            w, x = self.stack.weights(layer), self.at(run, "attn_in", layer)
            other = self.block(run, layer).notes.key_input
            y = x if other is None else other.to(self.wide)
            for name, source, weight, b in (("q", x, w.W_Q, w.b_Q), ("k", y, w.W_K, w.b_K), ("v", y, w.W_V, w.b_V)):
                W = weight.to(self.wide)
                product = _by_heads(source, W)
                bias = product.new_zeros(()) if b is None else b.to(self.wide)
                summed = _norm(source)[..., None, None] * _norm(W, 1) + bias.abs()
                allowed = rounding * summed + steps * (product.abs() + bias.abs())
                keep = self.comparable(run, name, layer, product)
                yield self.compared(run, layer, self.at(run, name, layer), product + bias, allowed, keep)

    def _rotation(self) -> Check:
        tolerance = steps_rounding(self.model.dtype)
        return self.by_layer(
            "rotary", "q_rot, k_rot = R q, R k", ("q_rot", "k_rot"), self._rotary(tolerance), tolerance
        )

    def _rotary(self, tolerance: float) -> Iterator[Compared]:
        rotary = self.plan.rotary
        assert rotary is not None
        for run, layer in self.places():
            notes = self.block(run, layer).notes
            assert notes.rotary is not None
            cos, sin = (table[:, :, None].to(self.wide) for table in notes.rotary)
            for name, norm in (("q", notes.query_norm), ("k", notes.key_norm)):
                value = self.at(run, name, layer)
                after = self.plan.norm_after_rotary
                expected = self._normed(value, None if after else norm)
                expected = expected if layer in self.plan.unrotated else rotary(expected, cos, sin)
                expected = self._normed(expected, norm if after else None)
                allowed = tolerance * _norm(expected)[..., None]
                yield self.compared(run, layer, self.at(run, f"{name}_rot", layer), expected, allowed)

    def _normed(self, value: Tensor, norm: FrozenNorm | None) -> Tensor:
        if norm is None:
            return value
        return norm(value) if norm.shift is None else norm(value) + norm.shift

    def _rotary_tables(self) -> Check:
        statement = "rotary tables = cos, sin of position · θ^(−2i/d)"
        rotary = self.plan.rotary
        assert rotary is not None
        positions = torch.arange(self.passes.runs[-1].batch.ids.shape[1], device=self.model.device)
        parameters = dict(getattr(self.model.config, "rope_parameters", None) or {})
        if rotary.theta is not None:
            parameters["rope_theta"] = rotary.theta
        expected = rotary_tables(parameters, int(self.stack.d_head * rotary.share), positions)
        if expected is None:
            kind = parameters.get("rope_type", "that differs between layers")
            return Check("rotary tables", statement, (), None, detail=f"rope_type {kind!r} has no closed form here")

        # Angles are products of a position and a frequency, which a model may keep in its own precision.
        frequency = torch.atan2(expected[1][1:2], expected[0][1:2])
        slack = torch.finfo(min(self.model.dtype, torch.float32, key=lambda kind: kind.itemsize)).eps
        angles = rotary.spread(positions[:, None] * frequency)

        def found() -> Iterator[Compared]:
            for run, layer in self.places():
                tables = self.block(run, layer).notes.rotary
                if layer in self.plan.unrotated:
                    continue
                assert tables is not None
                for table, by_position in zip(tables, expected, strict=True):
                    length = table.shape[1]
                    closed = rotary.spread(by_position)[:length]
                    allowed = self.tables * closed.abs().amax() + slack * angles[:length]
                    everywhere = torch.ones_like(closed, dtype=torch.bool)
                    yield self.compared(run, layer, table[-1].double(), closed, allowed, everywhere)

        return self.by_layer("rotary tables", statement, ("q_rot", "k_rot", "scores"), found(), self.tables)

    def _alibi(self) -> Check:
        alibi = self.plan.alibi
        assert alibi is not None
        slopes = alibi.slopes(self.stack.n_heads).to(self.model.device) * alibi.factor
        tolerance = max(self.tables, table_tolerance(alibi.rounded_to))

        def found() -> Iterator[Compared]:
            for run, layer in self.places():
                real = run.real_keys(self.stack.label)
                place = (real.cumsum(dim=1) - 1) * real
                if alibi.from_end:
                    length = real.shape[1]
                    place = torch.arange(1 - length, 1, device=self.model.device).expand(real.shape)
                expected = einsum(slopes, place.to(slopes.dtype), "head, batch key -> batch head key")
                position = self.block(run, layer).position
                given = torch.zeros_like(expected) if position is None else position[:, :, -1].to(expected)
                everywhere = torch.ones_like(expected, dtype=torch.bool)
                allowed = tolerance * expected.abs().amax(dim=-1, keepdim=True)
                yield self.compared(run, layer, given.expand_as(expected), expected, allowed, everywhere)

        return self.by_layer("alibi", "position term = slope · key position", ("scores",), found(), tolerance)

    def _ledger(self) -> Iterator[Compared]:
        for run, layer in self.places():
            block = self.block(run, layer)
            audit = ScoreAudit(self.model.stacks, block, run.values[self.stack.point("attn_in"), layer], block.visible)
            audit.add(block)
            worst = int(audit.excess.nan_to_num(torch.inf).argmax())
            yield Compared(f"layer {layer}, head {worst}", float(audit.excess[worst]))

    def _softmax(self) -> Iterator[Compared]:
        for run, layer in self.places():
            scores, pattern = (self.at(run, name, layer).double() for name in ("scores", "pattern"))
            sink = self.block(run, layer).sink
            odds = (scores - scores.amax(dim=-1, keepdim=True)).exp()
            total = odds.sum(dim=-1, keepdim=True)
            if sink is not None:
                total = total + (sink.double()[:, None, None] - scores.amax(dim=-1, keepdim=True)).exp()
            expected = odds / total
            everywhere = torch.ones_like(pattern[..., 0], dtype=torch.bool)
            yield self.compared(run, layer, pattern, expected, by_row(expected, self.local), everywhere)
            whole = expected.sum(dim=-1, keepdim=True)
            yield self.compared(
                run, layer, pattern.sum(dim=-1, keepdim=True), whole, by_row(whole, self.local), everywhere
            )

    def _hidden(self) -> Iterator[Compared]:
        for run, layer in self.places():
            pattern, seen = self.at(run, "pattern", layer), self.block(run, layer).visible
            hidden = ~seen | ~run.real_keys(self.stack.label)[:, None, None, :]
            if self.plan.causal and not self.plan.within:
                hidden = hidden | torch.ones(pattern.shape[-2:], dtype=torch.bool, device=pattern.device).triu(1)
            # A row that sees nothing is uniform, as in transformers, and is not counted.
            leaked = pattern.masked_fill(~hidden | ~seen.any(dim=-1, keepdim=True), 0.0)
            everywhere = torch.ones_like(leaked[..., 0], dtype=torch.bool)
            # Relative to 1, the sum of a row.
            allowed = torch.full_like(leaked, sum_rounding(self.model.dtype))
            yield self.compared(run, layer, leaked, torch.zeros_like(leaked), allowed, everywhere)

    def _gates(self) -> Iterator[Compared]:
        gate = self.plan.gate
        assert gate is not None
        for run, layer in self.places():
            projection = self.stack.module(layer, f"{self.plan.attention}.{gate.path}")
            made = self.at(run, "attn_in", layer) @ matrix_of(projection).to(self.wide)
            bias = bias_of(projection)
            expected = gate.of(made if bias is None else made + bias.to(self.wide), self.stack.n_heads)
            yield self.compared(run, layer, self.at(run, "gate", layer), expected, by_row(expected, self.local))

    def _z(self) -> Iterator[Compared]:
        for run, layer in self.places():
            pattern, values = self.at(run, "pattern", layer), self._by_head(self.at(run, "v", layer))
            expected, summed = (
                einsum(pattern, each, "batch head query key, batch key head d -> batch query head d")
                for each in (values, values.abs())
            )
            if self.plan.gate is not None:
                gate = self.at(run, "gate", layer)
                expected, summed = expected * gate, summed * gate.abs()
            allowed = self._product(pattern.shape[-1]) * summed
            everywhere = torch.ones_like(expected[..., 0], dtype=torch.bool)
            yield self.compared(run, layer, self.at(run, "z", layer), expected, allowed, everywhere)

    def _by_head(self, value: Tensor) -> Tensor:
        group = self.stack.n_heads // self.stack.n_kv_heads
        return repeat(value, "batch position kv d_head -> batch position (kv group) d_head", group=group)

    def _heads(self) -> Iterator[Compared]:
        dtype, d_head = self.model.dtype, self.stack.d_head
        steps = steps_rounding(dtype)
        for run, layer in self.places():
            weights, z = self.stack.weights(layer), self.at(run, "z", layer)
            given = run.given[self.stack.label, layer].to(self.wide).reshape(z.shape)
            yield self.compared(run, layer, given, z, sum_rounding(dtype) * z.abs())
            W_O = weights.W_O.to(self.wide)
            pattern = "batch position head d_head, head d_head d_model -> batch position head d_model"
            result = einsum(z, W_O, pattern)
            summed = _norm(z)[..., None] * _norm(W_O, 1)
            allowed = product_rounding(dtype, d_head) * summed + steps * result.abs()
            yield self.compared(run, layer, self.at(run, "result", layer), result, allowed)
            bias = result.new_zeros(result.shape[-1]) if weights.b_O is None else weights.b_O.to(self.wide)
            product = result.sum(dim=2)
            rounding = product_rounding(dtype, self.stack.n_heads * d_head)
            allowed = rounding * (summed.sum(dim=2) + bias.abs()) + steps * (product.abs() + bias.abs())
            yield self.compared(run, layer, self.at(run, "attn_raw", layer), product + bias, allowed)
            if run is self.short:
                yield self._alone(layer, z, W_O, bias)

    def _alone(self, layer: int, z: Tensor, W_O: Tensor, bias: Tensor) -> Compared:
        """Sends each head's z through W_O's module alone, all brought to one size, so that no head hides another."""
        dtype = self.model.dtype
        rows = z[self.short.real(self.stack.label)][:_ALONE]
        # A power of two changes no digit.
        largest = rows.abs().amax(dim=(0, 2), keepdim=True)
        rows = rows * torch.where(largest > 0, torch.exp2(-largest.log2().round()), 1.0)
        rows = rows.to(dtype).to(self.wide)
        heads = torch.eye(len(W_O), device=z.device, dtype=self.wide)
        alone = einsum(rows, heads, "row head d_head, head other -> head row other d_head")
        given = rearrange(alone, "head row other d_head -> head row (other d_head)")
        found = self.model.plain_module(self.stack, layer, self.plan.out)(given.to(dtype).contiguous())
        product = einsum(rows, W_O, "row head d_head, head d_head d_model -> head row d_model")
        summed = rearrange(_norm(rows), "row head -> head row")[..., None] * _norm(W_O, 1)[:, None]
        rounding = product_rounding(dtype, given.shape[-1])
        allowed = rounding * (summed + bias.abs()) + steps_rounding(dtype) * (product.abs() + bias.abs())
        everywhere = torch.ones(product.shape[:2], dtype=torch.bool, device=z.device)
        compared = self.compared(self.short, layer, found, product + bias, allowed, everywhere)
        return replace(compared, where=f"layer {layer}, a head alone")

    def _attn_out(self) -> Check:
        factor, architecture = self.plan.attn_scale, self.plan
        statement = "attn_out = attn_raw" if factor == 1 else f"attn_out = {factor:.4g} attn_raw"
        if architecture.attn_out not in ("", architecture.out):
            return Check("attn_out", statement, (), None, detail="a norm stands between them")
        adding = sum_rounding(self.model.dtype)

        def found() -> Iterator[Compared]:
            for run, layer in self.places():
                raw = factor * self.at(run, "attn_raw", layer)
                yield self.compared(run, layer, self.at(run, "attn_out", layer), raw, adding * raw.abs())

        return self.by_layer("attn_out", statement, ("attn_raw", "attn_out"), found(), adding)

    def _stream(self) -> Check:
        statement = "resid_pre + attn_out = resid_mid"
        if self.plan.mid_norm is None:
            return Check(
                "stream", statement, (), None, detail=self.model.points[self.stack.point("resid_mid")].absent or ""
            )
        adding = sum_rounding(self.model.dtype)

        def found() -> Iterator[Compared]:
            for run, layer in self.places():
                before, added = self.at(run, "resid_pre", layer), self.at(run, "attn_out", layer)
                allowed = adding * (before.abs() + added.abs())
                yield self.compared(run, layer, self.at(run, "resid_mid", layer), before + added, allowed)

        return self.by_layer("stream", statement, ("resid_pre", "attn_out", "resid_mid"), found(), adding)

    def _mlp_statement(self) -> tuple[str, tuple[str, ...]]:
        plan = self.plan
        if plan.mlp_out is None:
            return "resid_post = resid_pre + attn_out", ("resid_pre", "attn_out", "resid_post")
        if plan.mid_norm is None:
            return "resid_post = resid_pre + attn_out + mlp_out", ("resid_pre", "attn_out", "mlp_out", "resid_post")
        between = f" + {plan.interposed}.attn_out" if plan.interposed else ""
        sum_ = f"resid_mid{between} + mlp_out" if plan.norm == "pre" else "N(N(resid_mid) + mlp_out)"
        return f"resid_post = {sum_}", ("resid_mid", "mlp_out", "resid_post")

    def _mlp(self) -> Iterator[Compared]:
        for run, layer in self.places():
            if self.plan.mid_norm is not None:
                middle = [self.at(run, "resid_mid", layer)]
            else:
                middle = [self.at(run, "resid_pre", layer), self.at(run, "attn_out", layer)]
            ended, allowed = self._block_end(layer, middle, run.values)
            yield self.compared(run, layer, self.at(run, "resid_post", layer), ended, allowed)

    def _block_end(self, layer: int, terms: list[Tensor], values: Mapping[PointKey, Tensor]) -> tuple[Tensor, Tensor]:
        """resid_post, from what stands before the MLP and what is added to it; and how far rounding may move it."""
        plan = self.plan
        if plan.interposed:
            terms = [*terms, values[full_name(plan.interposed, "attn_out"), layer].to(self.wide)]
        if plan.mlp_out is not None:
            terms = [*terms, values[self.stack.point("mlp_out"), layer].to(self.wide)]
        if plan.norm == "pre":
            each = torch.stack(terms)
            return each.sum(dim=0), sum_rounding(self.model.dtype) * each.abs().sum(dim=0)
        assert plan.mid_norm is not None and plan.post_norm is not None
        norms = (self.model.plain_module(self.stack, layer, path) for path in (plan.mid_norm, plan.post_norm))
        middle, added = (term.to(self.model.dtype) for term in terms)
        with torch.no_grad():
            ended = PostNormEnd(*norms)(middle, added)
        return ended, by_row(ended, self.local)

    def _chain(self) -> Iterator[Compared]:
        for run, layer in self.places():
            if layer + 1 not in run.layers[self.stack.label]:
                continue
            left = self.at(run, "resid_post", layer)
            allowed = sum_rounding(self.model.dtype) * left.abs()
            yield self.compared(run, layer, self.at(run, "resid_pre", layer + 1), left, allowed)

    def _embed(self) -> Check:
        scale = self.plan.embed_scale
        statement = "embed = row of the token embedding" + ("" if scale == 1 else f" · {scale:.4g}")
        if ("embed", None) not in self.short.values:
            return Check("embed", statement, (), None, detail=self.model.points["embed"].absent or "")
        expected = self.model.embedding[self.batch.ids] * torch.tensor(scale, dtype=torch.float32).to(self.model.dtype)
        return self.compare("embed", statement, ("embed",), self.short.values["embed", None], expected, self.local)

    # -- edits ---------------------------------------------------------------------------------------------

    @cached_property
    def _edits(self) -> "_Edits":
        return _Edits(self)

    def _pattern_edit(self) -> Check:
        """Puts each row's whole attention on the visible key that had the least."""
        statement = "an edit of the pattern moves attn_raw as it must, and the stream with it"
        dtype = self.model.dtype
        rounding, steps = product_rounding(dtype, self.stack.n_heads * self.stack.d_head), steps_rounding(dtype)
        least = least_rounding(dtype)

        def found() -> Iterator[Compared]:
            edits = self._edits
            for copy, layer in enumerate(self.edited):
                weights = self.stack.weights(layer)
                W_O = weights.W_O.to(self.wide)
                values = self._by_head(edits.at("v", layer))[copy : copy + 1]
                z = einsum(
                    edits.patterns[layer][None].to(self.wide),
                    values,
                    "batch head query key, batch key head d -> batch query head d",
                )
                if self.plan.gate is not None:
                    z = z * edits.at("gate", layer)[copy : copy + 1]
                bias = W_O.new_zeros(W_O.shape[-1]) if weights.b_O is None else weights.b_O.to(self.wide)
                product = einsum(z, W_O, "batch query head d, head d d_model -> batch query d_model")
                summed = einsum(_norm(z), _norm(W_O, 1), "batch query head, head d_model -> batch query d_model")
                allowed = rounding * (summed + bias.abs()) + steps * (product.abs() + summed + bias.abs())
                real = edits.real[copy : copy + 1]
                raw = edits.at("attn_raw", layer)
                where = f"layer {layer}"
                expected = (product + bias)[real]
                yield Compared(where, excess_of(raw[copy : copy + 1][real], expected, allowed[real] + least))
                shifted = excess_of(expected, raw[-1:][real], allowed[real]) > 1
                if shifted and torch.equal(edits.last[copy][edits.written], edits.last[-1][edits.written]):
                    yield Compared(f"{where}, on the way to the last stream", torch.inf)

        return self.by_layer("pattern edit", statement, ("pattern",), found(), rounding)

    def _resid_mid_edit(self) -> Check:
        statement = "an edit of resid_mid reaches the MLP and the stream"
        if self.plan.mid_norm is None:
            return self._parallel()

        def found() -> Iterator[Compared]:
            edits = self._edits
            for number, layer in enumerate(self.edited):
                copy = len(self.edited) + number
                ended, allowed = self._block_end(layer, [edits.at("resid_mid", layer)], edits.values)
                real = edits.real[copy]
                post = edits.at("resid_post", layer)
                limit = allowed[copy][real] + least_rounding(self.model.dtype)
                yield Compared(f"layer {layer}", excess_of(post[copy][real], ended[copy][real], limit))
                moved, still = (edits.at("mlp_out", layer)[each][real] for each in (copy, -1))
                # An MLP that writes the same at every token (a pruned one: 0) cannot show whether the edit reached it.
                if torch.equal(moved, still) and bool((still != still[:1]).any()):
                    yield Compared(f"layer {layer}, on the way to the MLP", torch.inf)

        return self.by_layer(
            "resid_mid edit",
            statement,
            ("resid_mid",),
            found(),
            sum_rounding(self.model.dtype) if self.plan.norm == "pre" else None,
        )

    def _parallel(self) -> Check:
        statement = "the MLP does not read what attention writes in its block"
        if self.plan.mlp_out is None:
            return Check("parallel", statement, (), None, detail="there is no MLP")

        def found() -> Iterator[Compared]:
            edits = self._edits
            for copy, layer in enumerate(self.edited):
                moved, still = (edits.at("mlp_out", layer)[each][edits.real[each]] for each in (copy, -1))
                yield Compared(f"layer {layer}", excess_of(moved, still, by_row(still, self.local)))

        return self.by_layer("parallel", statement, ("mlp_out",), found())


class _Edits:
    """Every edit that is tried on a stack, in one pass: each in a copy of one text, the last copy left as it is."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        model, stack, layers = probe.model, probe.stack, probe.edited
        text = beginning_of(probe.batch, 0, BEGINNING)
        batch = text.texts(torch.zeros(2 * len(layers) + 1, dtype=torch.long))
        self.real = batch.queries(stack.label).mask
        self.written = probe.written(batch).mask[0]
        self.patterns: dict[int, Tensor] = {}
        """The pattern that was put into each layer edited: `[head query key]`."""
        names = [stack.point(name) for name in ("v", "gate", "attn_raw", "resid_mid", "mlp_out", "resid_post")]
        if stack.architecture.interposed:
            names.append(full_name(stack.architecture.interposed, "attn_out"))
        there = [name for name in names if model.points[name].absent is None]
        edits: dict[PointKey, Edit] = {
            (stack.point("pattern"), layer): partial(self._pattern, n, layer) for n, layer in enumerate(layers)
        }
        if stack.architecture.mid_norm is not None:
            edits |= {
                (stack.point("resid_mid"), layer): partial(self._resid_mid, len(layers) + n)
                for n, layer in enumerate(layers)
            }
        with model.editing(edits):
            self.values = model.forward(
                batch, captures=[*((name, layer) for name in there for layer in layers), model.last_stream]
            )
        self.last = self.values[model.last_stream]

    def at(self, name: str, layer: int) -> Tensor:
        """A point of the stack in every copy, in float32 at least."""
        return self.values[self._probe.stack.point(name), layer].to(self._probe.wide)

    def _pattern(self, copy: int, layer: int, pattern: Tensor) -> Tensor:
        row = pattern[copy]
        least = row.masked_fill(row == 0, torch.inf).argmin(dim=-1, keepdim=True)
        self.patterns[layer] = torch.zeros_like(row).scatter(-1, least, 1.0)
        pattern[copy] = self.patterns[layer]
        return pattern

    def _resid_mid(self, copy: int, middle: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(SEED)
        noise = torch.randn(middle[copy].shape, generator=generator, dtype=torch.float32)
        middle[copy] += noise.to(middle)
        return middle


def _by_heads(x: Tensor, W: Tensor) -> Tensor:
    """x W of every head."""
    return einsum(x, W, "batch position d_model, head d_model d_head -> batch position head d_head")


def _norm(value: Tensor, dim: int = -1) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(value, dim=dim)
    return norms
