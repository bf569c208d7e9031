"""The proof, at load, that every activation point means what its name says.

A few probe tokens run through three models that share their parameters: ours, transformers' own, and
TransformerLens's bridge. What must be equal is compared, and every comparison stands in the certificate with
its residual. A point whose check fails is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final

import torch
from einops import einsum
from torch import Tensor

from ..errors import UnsupportedModelError, WeightsError, first_line
from ..maths.precision import table_tolerance
from ..maths.scores import rounding_floor
from ..points import POINTS, PointKey, full_name, lens_name
from .certificate import Certificate, Check, LensHook
from .hooked import HookedModel
from .ledger import parts_of
from .position import rotary_tables
from .probe import (
    SEED,
    Compared,
    Probe,
    always,
    attempt,
    bridge_run,
    each_token_changed,
    one_text,
    output_of,
    plain_output,
    plain_run,
    probe_batch,
    relative,
)
from .weights import check_finite

_EVERY_POINT: Final = tuple(POINTS)
_WHOLE: Final = ("weights", "points", "transformers", "implementations", "bridge", "padding", "causal", "embed")
"""The checks of whole passes, which speak of every stack."""

_HANDED: Final = {
    "": {"streams": "hidden_states", "attentions": "attentions"},
    "encoder": {"streams": "encoder_hidden_states", "attentions": "encoder_attentions"},
    "decoder": {"streams": "decoder_hidden_states", "attentions": "decoder_attentions"},
    "cross": {"streams": "", "attentions": "cross_attentions"},
}
"""Under which names transformers hands out the streams and patterns of a stack."""


def certify(model: HookedModel) -> Certificate:
    """Proves, on a few probe tokens, that the points of a model mean what their names say.

    Runs at load; run it again after changing weights, which renews `model.certificate` too, or inside `model.hooks`
    to see what an edit breaks.
    Never raises for a faulty model: the faults stand in the certificate.
    """
    statements = [_Statements(model, stack) for stack in model.stacks.values()]
    checks = list(statements[0].of_model())
    for each in statements:
        checks += each.of_stack()
    certificate = Certificate(
        model.name, model.weights_hash, tuple(checks), statements[0].lens_hooks, tuple(statements[0].edited)
    )
    if not model.edited:
        model.certificate = certificate
    return certificate


def check_runs(model: HookedModel) -> None:
    """Raises `WeightsError` where transformers itself cannot run the model in its precision on its device."""
    try:
        plain_output(model, probe_batch(model))
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever transformers raises over sizes and precisions that it cannot run
        kind = str(model.dtype).removeprefix("torch.")
        hint = "" if model.dtype == torch.float32 else " Try dtype=torch.float32."
        raise WeightsError(
            f"transformers cannot run {type(model.plain).__name__} in {kind} on {model.device}: "
            f"{first_line(error).rstrip('.')}.{hint}"
        ) from error


class _Statements(Probe):
    """What must hold of every model, statement by statement."""

    def of_model(self) -> Iterator[Check]:
        """The checks of whole passes."""
        yield self._spelled_out(self._finite())
        reached = self._reached()
        yield self._spelled_out(reached)
        if reached.passed:
            yield from self._computed(self._whole_passes())

    def of_stack(self) -> Iterator[Check]:
        """The checks of the stack's layers; none where a pass did not come through."""
        if self.values or self._reached().passed:
            yield from self._computed([*self._layer_by_layer(), self._pattern_edit, self._resid_mid_edit])

    def _computed(self, makers: list[Callable[[], Check]]) -> Iterator[Check]:
        """One that cannot even be computed on a broken model counts as failed."""
        for make in makers:
            try:
                check = make()
            except Exception as error:
                name = make.args[0] if isinstance(make, partial) else make.__name__.strip("_")
                check = Check(name, f"{name} can be checked", _EVERY_POINT, False, detail=first_line(error))
            yield self._spelled_out(check)

    def _spelled_out(self, check: Check) -> Check:
        """The check with its points under their full names: a whole pass speaks of every stack, a layer of its own."""
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
            self._look_ahead,
            self._embed,
        ]

    def _layer_by_layer(self) -> list[Callable[[], Check]]:
        plan = self.plan
        alibi: list[Callable[[], Check]] = [self._alibi] if plan.alibi is not None else []
        rotary: list[Callable[[], Check]] = [self._rotation, self._rotary_tables] if plan.rotary is not None else []
        chained: Callable[[], Check] = partial(
            self.by_layer,
            "chain",
            "resid_post of a layer = resid_pre of the next",
            ("resid_pre", "resid_post"),
            self._chain(),
        )
        chain = [] if plan.within else [chained]
        return [
            self._streams,
            self._attentions,
            partial(
                self.by_layer,
                "attn_in",
                "attn_in = the input norm of resid_pre, or resid_pre where there is none",
                ("resid_pre", "attn_in"),
                self._attn_in(),
            ),
            partial(
                self.by_layer,
                "projections",
                "q, k, v = attn_in W + b",
                ("attn_in", "q", "k", "v"),
                self._projections(),
            ),
            *rotary,
            *alibi,
            partial(
                self.by_layer,
                "ledger",
                "scores = Σ terms of the score ledger",
                ("q", "k", "scores"),
                self._ledger(),
            ),
            partial(
                self.by_layer,
                "softmax",
                "pattern = softmax(scores); rows sum to 1, less a sink's mass",
                ("scores", "pattern"),
                self._softmax(),
            ),
            partial(self.by_layer, "mask", "pattern = 0 where a key is hidden", ("scores", "pattern"), self._hidden()),
            partial(self.by_layer, "z", "z = pattern v", ("pattern", "v", "z"), self._z()),
            partial(self.by_layer, "heads", "Σ_h z W_O + b_O = attn_raw", ("z", "result", "attn_raw"), self._heads()),
            self._attn_out,
            self._stream,
            partial(self.by_layer, "mlp", *self._mlp_statement(), self._mlp()),
            *chain,
        ]

    # -- the runs ------------------------------------------------------------------------------------------

    def _reached(self) -> Check:
        """Runs our model once, with every point."""
        statement = "every point is reached in a forward pass"
        names = [name for name, point in self.model.points.items() if point.absent is None]
        keys = self.model.points.resolve(names)
        try:
            self.values = self.run(keys)
        except Exception as error:  # whatever a broken model raises is what the certificate has to say
            return Check("points", statement, _EVERY_POINT, False, detail=first_line(error))
        missing = [layer for layer in self.layers if layer not in self.blocks]
        if missing:
            where = f"layer {missing[0]}" + (f" of the {self.stack.label} stack" if self.stack.label else "")
            detail = f"the attention of {where} does not go through attnmech's softmax"
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
        ours, theirs = self.output(), plain_output(self.model, self.batch)
        return self.compare("transformers", "output = output of plain transformers", _EVERY_POINT, ours, theirs)

    @cached_property
    def _eager_run(self) -> Any:
        return attempt(lambda: plain_run(self.model, self.batch, "eager", output_attentions=True))

    def _streams(self) -> Check:
        trusted = self.plan.trusted == "sdpa"
        theirs = attempt(lambda: plain_run(self.model, self.batch, "sdpa")) if trusted else self._eager_run
        return self._against("streams", "resid_pre = hidden states of plain transformers", theirs)

    def _attentions(self) -> Check:
        statement = "pattern = attentions of plain transformers (eager)"
        if self.plan.trusted == "sdpa":
            return Check("attentions", statement, (), None, detail="eager attention computes something else here")
        return self._against("attentions", statement, self._eager_run)

    def _against(self, name: str, statement: str, theirs: Any) -> Check:
        handed = getattr(theirs, _HANDED[self.stack.label][name], None)
        if not handed or len(handed) < self.stack.n_layers or any(value is None for value in handed):
            detail = str(theirs) if isinstance(theirs, Exception) else "transformers does not hand them out"
            return Check(name, statement, (), None, detail=detail)
        if name == "streams":
            pairs = ((n, self.at("resid_pre", n)[self.real], handed[n][self.real]) for n in self.layers)
            return self.by_layer(name, statement, ("resid_pre", "resid_post"), pairs, self.whole)
        padding = ~self.real[:, None, :, None]
        # A hybrid hands out the patterns of its layers with attention, and no others.
        patterns = dict(zip(self.layers, handed, strict=True)) if len(handed) == len(self.layers) else handed
        pairs = (
            (n, self.at("pattern", n).masked_fill(padding, 0), patterns[n].to(self.model.dtype).masked_fill(padding, 0))
            for n in self.layers
        )
        return self.by_layer(name, statement, ("pattern",), pairs, self.whole)

    def _implementations(self) -> Check:
        """Says where transformers' two implementations of a family disagree, and which one is followed."""
        statement = "eager and sdpa attention of transformers agree"
        eager = self._eager_run
        if isinstance(eager, Exception):
            return Check("implementations", statement, (), None, detail=str(eager))
        check = self.compare("implementations", statement, (), output_of(eager), plain_output(self.model, self.batch))
        if check.passed:
            return check
        followed = f"{check.detail}; attnmech follows {self.plan.trusted}, which computes what was trained"
        return replace(check, detail=followed)

    def _bridge(self) -> Check:
        statement = "output = output of TransformerLens's bridge"
        if len(self.model.stacks) > 1:
            return Check("bridge", statement, (), None, detail="not compared on models of several stacks")
        try:
            theirs, cache = bridge_run(self.model, self.batch)
        except Exception as error:  # a bridge that cannot be built or run is TransformerLens's fault, not this model's
            return Check("bridge", statement, (), None, detail=first_line(error))
        self.lens_hooks = tuple(self._lens_hooks(cache))
        check = self.compare("bridge", statement, (), self.output(), theirs)
        if not check.passed and self.plan.trusted == "sdpa":
            return replace(check, detail=f"{check.detail}; the bridge runs transformers' eager attention")
        wrong = [hook.point for hook in self.lens_hooks if hook.verdict == "differs"]
        if wrong and check.passed:
            detail = f"hooks that mean something else, given their right value here: {', '.join(wrong)}"
            return Check(check.name, statement, (), True, check.residual, check.tolerance, detail)
        return check

    def _lens_hooks(self, cache: Mapping[str, Tensor]) -> Iterator[LensHook]:
        layer = self.layers[len(self.layers) // 2]
        for name, point in POINTS.items():
            key: PointKey = (name, layer if point.per_layer else None)
            if key not in self.values:
                continue
            hook, ours = lens_name(key), self.values[key]
            theirs = cache.get(hook)
            if theirs is None or theirs.shape != ours.shape:
                yield LensHook(name, hook, "absent" if theirs is None else "differs", None)
                continue
            keep = self.comparable(name, key[1], ours)
            residual = relative(ours[keep], theirs[keep])
            yield LensHook(name, hook, "agrees" if residual <= self.whole else "differs", residual)

    def _padding(self) -> Check:
        statement = "padding on the right changes no output"
        if not self.batch.padded:
            return Check("padding", statement, (), None, detail="this probe has no padding")
        alone = one_text(self.batch, 1, int(self.batch.lengths.min()))
        real = self.written(alone).mask
        ours = self.by_token(self.batch)[1:2, : real.shape[1]]
        return self.compare("padding", statement, _EVERY_POINT, ours, self.by_token(alone), real=real)

    def _look_ahead(self) -> Check:
        statement = "no token sees a later one"
        if not self.model.causal:
            return Check("causal", statement, (), None, detail="an encoder: every token sees every other")
        if self.written(self.batch).ids.shape[1] < 2:
            return Check("causal", statement, (), None, detail="the probe has one token")
        text = one_text(self.batch, 0, self.batch.ids.shape[1])
        changed = each_token_changed(text, self.model.n_vocab)
        copies = len(self.written(changed).ids)
        before, after = (
            torch.stack([self.by_token(batch), *self.plain_by_token(batch)]).expand(-1, copies, -1, -1)
            for batch in (text, changed)
        )
        # Copy n differs from the text at place n + 1: whatever stands before that must not move.
        untouched = torch.ones(copies, copies + 1, dtype=torch.bool, device=before.device).tril()
        real = untouched.expand(len(before), -1, -1)
        return self.compare("causal", statement, ("scores", "pattern", "z"), before, after, real=real)

    # -- one layer at a time -------------------------------------------------------------------------------

    def _attn_in(self) -> Iterator[Compared]:
        norm = self.plan.attn_norm
        for layer in self.layers:
            stream = self.at("resid_pre", layer)
            expected = stream if norm is None else self.model.plain_module(self.stack, layer, norm)(stream)
            yield layer, self.at("attn_in", layer)[self.real], expected[self.real]

    def _projections(self) -> Iterator[Compared]:
        pattern = "batch position d_model, head d_model d_head -> batch position head d_head"
        for layer in self.layers:
            w, x = self.stack.weights(layer), self.at("attn_in", layer)
            other = self.blocks[layer].notes.key_input
            y = x if other is None else other
            for name, source, W, b in (("q", x, w.W_Q, w.b_Q), ("k", y, w.W_K, w.b_K), ("v", y, w.W_V, w.b_V)):
                expected = einsum(source, W, pattern)
                expected = expected if b is None else expected + b
                keep = self.comparable(name, layer, expected)
                yield layer, self.at(name, layer)[keep], expected[keep]

    def _rotation(self) -> Check:
        return self.by_layer("rotary", "q_rot, k_rot = R q, R k", ("q_rot", "k_rot"), self._rotary())

    def _rotary(self) -> Iterator[Compared]:
        rotary = self.plan.rotary
        assert rotary is not None
        for layer in self.layers:
            notes = self.blocks[layer].notes
            assert notes.rotary is not None
            cos, sin = (table[:, :, None] for table in notes.rotary)
            for name, norm in (("q", notes.query_norm), ("k", notes.key_norm)):
                value = self.at(name, layer)
                expected = rotary.rotate(value if norm is None else value * norm, cos, sin)
                yield layer, self.at(f"{name}_rot", layer)[self.real], expected[self.real]

    def _rotary_tables(self) -> Check:
        statement = "rotary tables = cos, sin of position · θ^(−2i/d)"
        rotary = self.plan.rotary
        assert rotary is not None
        positions = torch.arange(self.batch.ids.shape[1], device=self.model.device)
        parameters = dict(getattr(self.model.config, "rope_parameters", None) or {})
        if rotary.theta is not None:
            parameters["rope_theta"] = rotary.theta
        expected = rotary_tables(parameters, int(self.stack.d_head * rotary.share), positions)
        if expected is None:
            kind = parameters.get("rope_type", "that differs between layers")
            return Check("rotary tables", statement, (), None, detail=f"rope_type {kind!r} has no closed form here")

        def pairs() -> Iterator[Compared]:
            for layer in self.layers:
                tables = self.blocks[layer].notes.rotary
                assert tables is not None
                for table, closed in zip(tables, expected, strict=True):
                    yield layer, table[0].double(), rotary.spread(closed)

        return self.by_layer("rotary tables", statement, ("q_rot", "k_rot", "scores"), pairs(), self.tables)

    def _alibi(self) -> Check:
        alibi = self.plan.alibi
        assert alibi is not None
        slopes = alibi.slopes(self.stack.n_heads).to(self.model.device) * alibi.factor
        place = (self.real.cumsum(dim=1) - 1) * self.real
        if alibi.from_end:
            length = self.real.shape[1]
            place = torch.arange(1 - length, 1, device=self.model.device).expand(self.real.shape)
        expected = einsum(slopes, place.to(slopes.dtype), "head, batch key -> batch head key")

        def pairs() -> Iterator[Compared]:
            for layer in self.layers:
                position = self.blocks[layer].position
                found = torch.zeros_like(expected) if position is None else position[:, :, -1].to(expected)
                yield layer, found.expand_as(expected), expected

        tolerance = max(self.tables, table_tolerance(alibi.rounded_to))
        return self.by_layer("alibi", "position term = slope · key position", ("scores",), pairs(), tolerance)

    def _ledger(self) -> Iterator[Compared]:
        for layer in self.layers:
            block = self.blocks[layer]
            total = parts_of(self.model, block, self.at("attn_in", layer), block.visible).total()
            keep = self.comparable("scores", layer, total)
            yield (
                layer,
                self.at("scores", layer)[keep],
                total[keep],
                rounding_floor(block.q, block.k, block.scale),
            )

    def _softmax(self) -> Iterator[Compared]:
        for layer in self.layers:
            scores, pattern = self.at("scores", layer).double(), self.at("pattern", layer).double()
            sink = self.blocks[layer].sink
            odds = (scores - scores.amax(dim=-1, keepdim=True)).exp()
            total = odds.sum(dim=-1, keepdim=True)
            if sink is not None:
                total = total + (sink.double()[:, None, None] - scores.amax(dim=-1, keepdim=True)).exp()
            yield layer, pattern, odds / total
            yield layer, pattern.sum(dim=-1, keepdim=True), odds.sum(dim=-1, keepdim=True) / total

    def _hidden(self) -> Iterator[Compared]:
        for layer in self.layers:
            pattern, seen = self.at("pattern", layer), self.blocks[layer].visible
            hidden = ~seen | ~self.real_keys[:, None, None, :]
            if self.plan.causal and not self.plan.within:
                hidden = hidden | torch.ones(pattern.shape[-2:], dtype=torch.bool, device=pattern.device).triu(1)
            # A row that sees nothing is uniform, as in transformers, and nobody's.
            leaked = pattern.masked_fill(~hidden | ~seen.any(dim=-1, keepdim=True), 0.0)
            # Beside 1, the sum of a row, so that the residual is the probability that leaks.
            one = torch.ones_like(leaked[..., :1])
            yield layer, torch.cat((leaked, one), -1), torch.cat((torch.zeros_like(leaked), one), -1)

    def _z(self) -> Iterator[Compared]:
        for layer in self.layers:
            values = self.by_head(self.at("v", layer))
            yield (
                layer,
                self.at("z", layer),
                einsum(
                    self.at("pattern", layer),
                    values,
                    "batch head query key, batch key head d -> batch query head d",
                ),
            )

    def _heads(self) -> Iterator[Compared]:
        for layer in self.layers:
            weights = self.stack.weights(layer)
            result = einsum(
                self.at("z", layer),
                weights.W_O,
                "batch position head d_head, head d_head d_model -> batch position head d_model",
            )
            yield layer, self.at("result", layer)[self.real], result[self.real]
            total = result.sum(dim=2) if weights.b_O is None else result.sum(dim=2) + weights.b_O
            yield layer, self.at("attn_raw", layer)[self.real], total[self.real]

    def _attn_out(self) -> Check:
        statement, architecture = "attn_out = attn_raw", self.plan
        if architecture.attn_out not in ("", architecture.out):
            return Check("attn_out", statement, (), None, detail="a norm stands between them")
        pairs = (
            (layer, self.at("attn_out", layer)[self.real], self.at("attn_raw", layer)[self.real])
            for layer in self.layers
        )
        return self.by_layer("attn_out", statement, ("attn_raw", "attn_out"), pairs)

    def _stream(self) -> Check:
        statement = "resid_pre + attn_out = resid_mid"
        if self.plan.mid_norm is None:
            return Check(
                "stream", statement, (), None, detail=self.model.points[self.stack.point("resid_mid")].absent or ""
            )
        pairs = (
            (
                layer,
                self.at("resid_mid", layer)[self.real],
                (self.at("resid_pre", layer) + self.at("attn_out", layer))[self.real],
            )
            for layer in self.layers
        )
        return self.by_layer("stream", statement, ("resid_pre", "attn_out", "resid_mid"), pairs)

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
        for layer in self.layers:
            serial = self.plan.mid_norm is not None
            middle = self.at("resid_mid", layer) if serial else self.at("resid_pre", layer) + self.at("attn_out", layer)
            ended = self._block_end(layer, middle, self.values)
            yield layer, self.at("resid_post", layer)[self.real], ended[self.real]

    def _block_end(self, layer: int, middle: Tensor, values: Mapping[PointKey, Tensor]) -> Tensor:
        """resid_post, from resid_mid and what is added to it."""
        plan = self.plan
        if plan.interposed:
            middle = middle + values[full_name(plan.interposed, "attn_out"), layer]
        if plan.mlp_out is None:
            return middle
        added = values[self.stack.point("mlp_out"), layer]
        if plan.norm == "pre":
            return middle + added
        assert plan.mid_norm is not None and plan.post_norm is not None
        with torch.no_grad():
            normed: Tensor = self.model.plain_module(self.stack, layer, plan.mid_norm)(middle)
            ended: Tensor = self.model.plain_module(self.stack, layer, plan.post_norm)(normed + added)
        return ended

    def _chain(self) -> Iterator[Compared]:
        for layer in self.layers:
            if layer + 1 not in self.layers:
                continue
            yield layer, self.at("resid_pre", layer + 1)[self.real], self.at("resid_post", layer)[self.real]

    def _embed(self) -> Check:
        scale = self.plan.embed_scale
        statement = "embed = row of the token embedding" + ("" if scale == 1 else f" · {scale:.4g}")
        if ("embed", None) not in self.values:
            return Check("embed", statement, (), None, detail=self.model.points["embed"].absent or "")
        expected = self.model.embedding[self.batch.ids] * torch.tensor(scale, dtype=torch.float32).to(self.model.dtype)
        return self.compare("embed", statement, ("embed",), self.values["embed", None], expected, self.local)

    # -- edits ---------------------------------------------------------------------------------------------

    def _pattern_edit(self) -> Check:
        """Puts each row's whole attention on the visible key that had the least, in one layer at a time."""
        statement = "an edit of the pattern moves attn_raw as it must, and the output with it"
        clean = self.by_token(self.batch)
        written = self.written(self.batch).mask

        def pairs() -> Iterator[Compared]:
            for layer in self.edited:
                seen = self.blocks[layer].visible
                least = self.at("pattern", layer).masked_fill(~seen, torch.inf).argmin(dim=-1, keepdim=True)
                edited = torch.zeros_like(self.at("pattern", layer)).scatter(-1, least, 1.0)
                weights = self.stack.weights(layer)
                expected = einsum(
                    edited,
                    self.by_head(self.at("v", layer)),
                    weights.W_O,
                    "batch head query key, batch key head d, head d d_model -> batch query d_model",
                )
                expected = expected if weights.b_O is None else expected + weights.b_O
                raw: PointKey = (self.stack.point("attn_raw"), layer)
                with self.model.editing({(self.stack.point("pattern"), layer): always(edited)}):
                    moved = self.model.forward(self.batch, captures=[raw])[raw]
                    output = self.by_token(self.batch)
                yield layer, moved[self.real], expected[self.real]
                shifted = relative(expected[self.real], self.at("attn_raw", layer)[self.real]) > self.local
                if shifted and torch.equal(output[written], clean[written]):
                    yield layer, torch.zeros(1), torch.ones(1)

        return self.by_layer("pattern edit", statement, ("pattern",), pairs())

    def _resid_mid_edit(self) -> Check:
        statement = "an edit of resid_mid reaches the MLP and the stream"
        if self.plan.mid_norm is None:
            return Check("resid_mid edit", statement, (), None, detail="there is no resid_mid")
        generator = torch.Generator().manual_seed(SEED)

        def pairs() -> Iterator[Compared]:
            for layer in self.edited:
                middle = self.at("resid_mid", layer)
                edited = middle + torch.randn(middle.shape, generator=generator, dtype=torch.float32).to(middle)
                mlp_out, resid_post = self.stack.point("mlp_out"), self.stack.point("resid_post")
                between: list[PointKey] = (
                    [(full_name(self.plan.interposed, "attn_out"), layer)] if self.plan.interposed else []
                )
                with self.model.editing({(self.stack.point("resid_mid"), layer): always(edited)}):
                    found = self.model.forward(self.batch, captures=[(mlp_out, layer), (resid_post, layer), *between])
                expected = self._block_end(layer, edited, found)
                yield layer, found[resid_post, layer][self.real], expected[self.real]
                if torch.equal(found[mlp_out, layer], self.at("mlp_out", layer)):
                    yield layer, torch.zeros(1), torch.ones(1)

        return self.by_layer("resid_mid edit", statement, ("resid_mid",), pairs())
