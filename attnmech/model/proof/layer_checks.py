"""What must hold in every layer, statement by statement: compared with plain transformers, and from the weights."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor, nn

from ...maths.norms import FrozenNorm
from ...maths.precision import (
    product_rounding,
    step_tolerance,
    steps_rounding,
    sum_rounding,
    table_tolerance,
)
from ...points import PointKey, full_name
from ..attention.local_global import halves_of, patterns_of, sum_of_halves
from ..parts.certificate import Check
from ..parts.gates import Gate, HalfOfRow, NormGate
from ..parts.modules import submodule
from ..parts.norms import epsilon_of, weight_of
from ..parts.position import rotary_tables
from ..parts.weights import Expanded, bias_of, matrix_of, select
from ..stack.block import PostNormEnd
from ..stack.ledger import ScoreAudit, rotated_in
from .probe import (
    FROM_STREAM,
    Compared,
    Probe,
    ProbeRun,
    by_row,
)
from .relative_checks import relative_scores

_ALONE: Final = 4
"""At how many tokens each head is sent through W_O alone."""

_HANDED: Final = {
    "": {"streams": "hidden_states", "attentions": "attentions"},
    "encoder": {"streams": "encoder_hidden_states", "attentions": "encoder_attentions"},
    "decoder": {"streams": "decoder_hidden_states", "attentions": "decoder_attentions"},
    "cross": {"streams": "", "attentions": "cross_attentions"},
}
"""The names under which transformers returns a stack's streams and patterns."""


_EAGER: Final = "attentions of plain transformers (eager)"


class LayerChecks(Probe):
    """The statements about one layer at a time."""

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
            *([self._streams] if plan.streams else []),
            self._attentions,
            *(
                [
                    checking(
                        "attn_in",
                        "attn_in = the input norm of resid_pre, or resid_pre without one",
                        ("resid_pre", "attn_in"),
                        self._attn_in(),
                    )
                ]
                if plan.streams
                else []
            ),
            checking(
                "projections",
                "q, k, v = attn_in W + b" if plan.expanded is None else "q, k, v = what they are expanded from, W + b",
                ("attn_in", "q", "k", "v"),
                self._projections(),
                self._product(self.model.d_model),
            ),
            *(
                []
                if plan.expanded is None
                else [
                    checking(
                        "latent",
                        "latent = norm of columns of attn_in W + b; the queries' latent, too",
                        ("attn_in", "latent", "q", "k", "v"),
                        self._latents(plan.expanded),
                        max(self.local, step_tolerance(torch.float32)),
                    )
                ]
            ),
            *([self._rotation, self._rotary_tables] if plan.rotary is not None else []),
            *([self._alibi] if plan.alibi is not None else []),
            *(
                []
                if not plan.relative
                else [
                    checking(
                        "relative positions",
                        "scores = (q·k + q·K + k·Q) / √(d_head · n), K and Q from the weights, row by distance"
                        if plan.relative == "DeBERTa"
                        else "scores = ((q + u)·k + (q + v)·r) / √d_head, r the projected sinusoids of the distance",
                        ("q", "k", "scores"),
                        relative_scores(self),
                        self._product(self.model.d_model),
                    )
                ]
            ),
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
                else [checking("gate", _statement_of(plan.gate), ("gate", "z"), self._gates(), self._gate_limit)]
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
                self._product(self.stack.n_heads * self.stack.d_value),
            ),
            *(self._of_stream(checking) if plan.streams else []),
            *(self._of_crossing(checking) if self.stack.label == "cross" else []),
        ]

    def _of_crossing(self, checking: Callable[..., Callable[[], Check]]) -> list[Callable[[], Check]]:
        """The statements about what cross-attention reads and where it writes."""
        decoder = self.model.output_stack.architecture
        reads_middle = not self.model.is_own and decoder.streams and decoder.mid_norm is not None
        reads = ("queries", "attn_in = the middle norm of decoder.resid_mid", ("attn_in",))
        states = ("states", "keys and values are made of the encoder's last stream, normed", ("k", "v"))
        return [
            *([checking(*reads, self._crossed_queries())] if reads_middle else []),
            *([] if self.model.is_own else [checking(*states, self._crossed_states())]),
            *([] if self.plan.streams or not self.plan.attn_out else [self._attn_out]),
        ]

    def _of_stream(self, checking: Callable[..., Callable[[], Check]]) -> list[Callable[[], Check]]:
        """The statements about what enters and leaves a block."""
        plan, adding = self.plan, sum_rounding(self.model.dtype)
        chained = plan.chained and not plan.within
        chain = ("chain", "resid_post of a layer = resid_pre of the next", ("resid_pre", "resid_post"))
        return [
            self._attn_out,
            self._stream,
            checking("mlp", *self._mlp_statement(), self._mlp(), adding if plan.norm == "pre" else None),
            *([checking(*chain, self._chain(), adding)] if chained else []),
        ]

    def _product(self, terms: int) -> float:
        """The share of Σ|t| by which a product of `terms` terms may be off, including the rounding of the result."""
        return product_rounding(self.model.dtype, terms) + steps_rounding(self.model.dtype)

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

        return self.by_layer("streams", statement, FROM_STREAM, found(), self.whole)

    def _comes_through(self, theirs: Tensor) -> Tensor:
        """Where transformers gives numbers: in float64, padding that sees no key is NaN, in all layers above too."""
        if self.model.dtype != torch.float64:
            return torch.ones(theirs.shape[:2], dtype=torch.bool, device=theirs.device)
        return theirs.isfinite().all(dim=-1).all(dim=-1, keepdim=True).expand(theirs.shape[:2])

    def _attentions(self) -> Check:
        statement = f"pattern = {'weights of nn.MultiheadAttention' if self.model.is_own else _EAGER}"
        if self.plan.trusted == "sdpa":
            return Check("attentions", statement, (), None, detail="eager attention computes something else here")
        handed = self._handed("attentions", self.passes.eager)
        if isinstance(handed, str):
            return Check("attentions", statement, (), None, detail=handed)
        # A hybrid returns only the patterns of its layers with attention.
        if self.plan.windows:
            rows = getattr(self.passes.eager, f"{self.stack.label}_global_attentions".lstrip("_"), None)
            handed = patterns_of(handed, rows, self.batch, self.plan.windows)
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

    def _attn_in(self) -> Iterator[Compared]:
        norm = self.plan.attn_norm
        for run, layer in self.places():
            stream = run.values[self.stack.point("resid_pre"), layer]
            expected = stream if norm is None else self.model.plain_module(self.stack, layer, norm)(stream)
            yield self.compared(run, layer, self.at(run, "attn_in", layer), expected, by_row(expected, self.local))

    def _crossed_queries(self) -> Iterator[Compared]:
        decoder = self.model.output_stack
        norm = decoder.architecture.mid_norm
        assert norm is not None
        for run, layer in self.places():
            middle = run.values[decoder.point("resid_mid"), layer]
            expected = self.model.plain_module(decoder, layer, norm)(middle)
            yield self.compared(run, layer, self.at(run, "attn_in", layer), expected, by_row(expected, self.local))

    def _crossed_states(self) -> Iterator[Compared]:
        encoder = self.model.stacks["encoder"]
        norm = encoder.architecture.final_norm
        for run, layer in self.places():
            last = run.values[encoder.point("resid_post"), encoder.layers[-1]]
            if norm is not None:
                last = submodule(self.model.plain.base_model, norm)(last)
            found = self.block(run, layer).notes.key_input
            assert found is not None
            keep = run.real_keys(self.stack.label)
            yield self.compared(run, layer, found.to(self.wide), last, by_row(last, self.local), keep)

    def _projections(self) -> Iterator[Compared]:
        steps = steps_rounding(self.model.dtype)
        for run, layer in self.places():
            w, notes = self.stack.weights(layer), self.block(run, layer).notes
            inputs = notes.inputs(self.at(run, "attn_in", layer))
            parts = zip("qkv", inputs, (w.W_Q, w.W_K, w.W_V), (w.b_Q, w.b_K, w.b_V), strict=True)
            for name, source, weight, b in parts:
                W, rounding = weight.to(self.wide), product_rounding(self.model.dtype, source.shape[-1])
                product = _by_heads(source, W)
                bias = product.new_zeros(()) if b is None else b.to(self.wide)
                summed = norm_of(source)[..., None, None] * norm_of(W, 1) + bias.abs()
                allowed = rounding * summed + steps * (product.abs() + bias.abs())
                keep = self.comparable(run, name, layer, product)
                if name == "v" and self.plan.v_norm:
                    yield self._normed_values(run, layer, product + bias, keep)
                    continue
                yield self.compared(run, layer, self.at(run, name, layer), product + bias, allowed, keep)

    def _normed_values(self, run: ProbeRun, layer: int, value: Tensor, keep: Tensor) -> Compared:
        """v against the norm, without hooks, of each head's attn_in W_V + b_V."""
        norm = self.model.plain_module(self.stack, layer, f"{self.plan.attention}.{self.plan.v_norm}")
        by_head = "batch position head d_head"
        given = rearrange(value.to(self.model.dtype), f"{by_head} -> {self.plan.v_norm_axes}")
        made = norm.forward(given).to(self.wide)
        expected = rearrange(made, f"{self.plan.v_norm_axes} -> {by_head}", head=self.stack.n_kv_heads)
        # Norms compute in float32, in a float64 model too.
        limit = max(self.local, step_tolerance(torch.float32))
        return self.compared(run, layer, self.at(run, "v", layer), expected, by_row(expected, limit), keep)

    def _latents(self, layout: Expanded) -> Iterator[Compared]:
        for run, layer in self.places():
            notes = self.block(run, layer).notes
            for latent, found in ((layout.latent, notes.latent), (layout.query_latent, notes.query_latent)):
                if latent is None:
                    continue
                assert found is not None
                path = f"{self.plan.attention}."
                projection = self.stack.module(layer, path + latent.projection)
                made, bias = self.at(run, "attn_in", layer) @ matrix_of(projection).to(self.wide), bias_of(projection)
                made = select(made if bias is None else made + bias.to(self.wide), latent.columns)
                # Its formula, without hooks of the model's owner.
                norm = self.model.plain_module(self.stack, layer, path + latent.norm)
                expected = norm.forward(made.to(self.model.dtype)).to(self.wide)
                # Norms of these families compute in float32, also in a float64 model.
                limit = max(self.local, step_tolerance(torch.float32))
                yield self.compared(run, layer, found.to(self.wide), expected, by_row(expected, limit))

    def _rotation(self) -> Check:
        tolerance = max(self._rotated_to(run, layer) for run, layer in self.places())
        return self.by_layer("rotary", "q_rot, k_rot = R q, R k", ("q_rot", "k_rot"), self._rotary(), tolerance)

    def _rotated_to(self, run: ProbeRun, layer: int) -> float:
        """The rounding of a layer's rotation; some families rotate in float32 in a float64 model, too."""
        rotation = self.stack.rotation(layer, self.block(run, layer).notes)
        values = [run.values[self.stack.point(f"{name}_rot"), layer] for name in "qk"]
        by_head = "batch position head d_head -> batch head position d_head"
        used = {rotated_in(rearrange(value, by_head), rotation) for value in values}
        return steps_rounding(torch.float32 if used == {torch.float32} else self.model.dtype)

    def _rotary(self) -> Iterator[Compared]:
        rotary = self.plan.rotary
        assert rotary is not None
        for run, layer in self.places():
            notes = self.block(run, layer).notes
            assert notes.rotary is not None
            cos, sin = (table[:, :, None].to(self.wide) for table in notes.rotary)
            for name, norm in (("q", notes.query_norm), ("k", notes.key_norm)):
                value = self.at(run, name, layer) * (self.plan.key_scale if name == "k" else 1.0)
                after = self.plan.norm_after_rotary
                expected = self._normed(value, None if after else norm)
                expected = expected if layer in self.plan.unrotated else rotary(expected, cos, sin)
                expected = self._normed(expected, norm if after else None)
                allowed = self._rotated_to(run, layer) * norm_of(expected)[..., None]
                yield self.compared(run, layer, self.at(run, f"{name}_rot", layer), expected, allowed)

    def _normed(self, value: Tensor, norm: FrozenNorm | None) -> Tensor:
        if norm is None:
            return value
        return norm(value) if norm.shift is None else norm(value) + norm.shift

    def _rotary_tables(self) -> Check:
        statement = "rotary tables = cos, sin of position · θ^(−2i/d)"
        rotary = self.plan.rotary
        assert rotary is not None
        if not self.model.reads_tokens:
            return Check("rotary tables", statement, (), None, detail="angles of rows and columns, not of one position")
        positions = torch.arange(self.passes.runs[-1].batch.ids.shape[1], device=self.model.device)
        parameters = dict(getattr(self.model.config.get_text_config(), "rope_parameters", None) or {})
        if rotary.theta is not None:
            parameters["rope_theta"] = rotary.theta
        expected = rotary_tables(parameters, round(self.stack.d_head * rotary.share), positions)
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
            # Padding may see itself (XLNet).
            padding = ~run.real_keys(self.stack.label)[:, None, None, :] & run.real(self.stack.label)[:, None, :, None]
            hidden = ~seen | padding
            if self.plan.causal and not self.plan.within:
                tokens = pattern.shape[-2]
                later = torch.ones((tokens, tokens), dtype=torch.bool, device=pattern.device).triu(1)
                hidden = hidden | nn.functional.pad(later, (0, pattern.shape[-1] - tokens))
            # A row that sees nothing is uniform, as in transformers, and is not counted.
            leaked = pattern.masked_fill(~hidden | ~seen.any(dim=-1, keepdim=True), 0.0)
            everywhere = torch.ones_like(leaked[..., 0], dtype=torch.bool)
            # Relative to 1, the sum of a row.
            allowed = torch.full_like(leaked, sum_rounding(self.model.dtype))
            yield self.compared(run, layer, leaked, torch.zeros_like(leaked), allowed, everywhere)

    @property
    def _gate_limit(self) -> float:
        """How far a gate may be off: norms compute in float32, in a float64 model too."""
        return max(self.local, step_tolerance(torch.float32)) if isinstance(self.plan.gate, NormGate) else self.local

    def _gates(self) -> Iterator[Compared]:
        gate = self.plan.gate
        assert gate is not None
        for run, layer in self.places():
            if isinstance(gate, NormGate):
                norm = self.model.plain_module(self.stack, layer, f"{self.plan.attention}.{gate.path}")
                ungated = self._pattern_v(run, layer, self.at(run, "v", layer))
                weight = weight_of(norm, rearrange(ungated, "batch position head d -> batch position (head d)"))
                expected = gate.of(weight, epsilon_of(norm), ungated)
                yield self.compared(
                    run, layer, self.at(run, "gate", layer), expected, by_row(expected, self._gate_limit)
                )
                continue
            if isinstance(gate, HalfOfRow):
                found = self.at(run, "gate", layer)
                yield self.compared(run, layer, found, halves_of(run.batch, found), torch.zeros_like(found))
                continue
            projection = self.stack.module(layer, f"{self.plan.attention}.{gate.path}")
            made = self.at(run, "attn_in", layer) @ matrix_of(projection).to(self.wide)
            bias = bias_of(projection)
            expected = gate.of(made if bias is None else made + bias.to(self.wide), self.stack.n_heads)
            yield self.compared(run, layer, self.at(run, "gate", layer), expected, by_row(expected, self.local))

    def _z(self) -> Iterator[Compared]:
        for run, layer in self.places():
            pattern, v = self.at(run, "pattern", layer), self.at(run, "v", layer)
            expected, summed = (self._pattern_v(run, layer, v, size=size) for size in (False, True))
            if self.plan.gate is not None:
                gate = self.at(run, "gate", layer)
                expected, summed = expected * gate, summed * gate.abs()
            allowed = self._product(pattern.shape[-1]) * summed
            if isinstance(self.plan.gate, NormGate):
                # The norm computes in float32, in a float64 model too.
                allowed = allowed + max(steps_rounding(each) for each in (self.model.dtype, torch.float32)) * summed
            everywhere = torch.ones_like(expected[..., 0], dtype=torch.bool)
            yield self.compared(run, layer, self.at(run, "z", layer), expected, allowed, everywhere)

    def _pattern_v(self, run: ProbeRun, layer: int, v: Tensor, *, size: bool = False) -> Tensor:
        """Σ_j p_ij v_j of each head, or Σ_j p_ij |v_j|."""
        values = self._with_further(self._by_head(v), self.block(run, layer).notes.further_values)
        return einsum(
            self.at(run, "pattern", layer),
            values.abs() if size else values,
            "batch head query key, batch key head d -> batch query head d",
        )

    def _with_further(self, values: Tensor, further: Tensor | None) -> Tensor:
        """Values by position, and after them those that are no tokens'."""
        if further is None:
            return values
        return torch.cat((values, rearrange(further, "batch head key d -> batch key head d").to(values)), dim=1)

    def _by_head(self, value: Tensor) -> Tensor:
        group = self.stack.n_heads // self.stack.n_kv_heads
        return repeat(value, "batch position kv d_head -> batch position (kv group) d_head", group=group)

    def _heads(self) -> Iterator[Compared]:
        dtype, d_value = self.model.dtype, self.stack.d_value
        steps = steps_rounding(dtype)
        for run, layer in self.places():
            weights, z = self.stack.weights(layer), self.at(run, "z", layer)
            given = run.given[self.stack.label, layer].to(self.wide).reshape(z.shape)
            yield self.compared(run, layer, given, z, sum_rounding(dtype) * z.abs())
            W_O = weights.W_O.to(self.wide)
            pattern = "batch position head d_head, head d_head d_model -> batch position head d_model"
            result = einsum(z, W_O, pattern)
            summed = norm_of(z)[..., None] * norm_of(W_O, 1)
            allowed = product_rounding(dtype, d_value) * summed + steps * result.abs()
            yield self.compared(run, layer, self.at(run, "result", layer), result, allowed)
            bias = result.new_zeros(result.shape[-1]) if weights.b_O is None else weights.b_O.to(self.wide)
            product = result.sum(dim=2)
            rounding = product_rounding(dtype, self.stack.n_heads * d_value)
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
        alone = sum_of_halves(given, self.stack.n_heads) if self.plan.windows else given
        found = self.model.plain_module(self.stack, layer, self.plan.out)(alone.to(dtype).contiguous())
        product = einsum(rows, W_O, "row head d_head, head d_head d_model -> head row d_model")
        summed = rearrange(norm_of(rows), "row head -> head row")[..., None] * norm_of(W_O, 1)[:, None]
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
        mixes = bool(self.plan.mixer)
        statement = f"resid_pre + attn_out{' + mixer_out' if mixes else ''} = resid_mid"
        if self.plan.mid_norm is None:
            return Check(
                "stream", statement, (), None, detail=self.model.points[self.stack.point("resid_mid")].absent or ""
            )
        adding = sum_rounding(self.model.dtype)

        def found() -> Iterator[Compared]:
            for run, layer in self.places():
                terms = torch.stack([self.at(run, point, layer) for point in summed])
                allowed = adding * terms.abs().sum(dim=0)
                yield self.compared(run, layer, self.at(run, "resid_mid", layer), terms.sum(dim=0), allowed)

        summed = ("resid_pre", "attn_out", *(["mixer_out"] if mixes else []))
        return self.by_layer("stream", statement, (*summed, "resid_mid"), found(), adding)

    def _mlp_statement(self) -> tuple[str, tuple[str, ...]]:
        plan = self.plan
        if plan.mlp_out is None:
            return "resid_post = resid_pre + attn_out", ("resid_pre", "attn_out", "resid_post")
        if plan.mid_norm is None:
            return "resid_post = resid_pre + attn_out + mlp_out", ("resid_pre", "attn_out", "mlp_out", "resid_post")
        between = f" + {plan.interposed}.attn_out" if plan.interposed else ""
        sum_ = f"resid_mid{between} + mlp_out"
        if plan.norm == "post":
            sum_ = f"N(N(N(resid_mid){between}) + mlp_out)" if between else "N(N(resid_mid) + mlp_out)"
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
        mid_norm, post_norm = (
            self.model.plain_module(self.stack, layer, path) for path in (plan.mid_norm, plan.post_norm)
        )
        middle, *crossed, added = (term.to(self.model.dtype) for term in terms)
        with torch.no_grad():
            if crossed:
                assert plan.interposed_norm is not None
                cross_norm = self.model.plain_module(self.stack, layer, plan.interposed_norm)
                ended = post_norm(cross_norm(mid_norm(middle) + crossed[0]) + added)
            else:
                ended = PostNormEnd(mid_norm, post_norm)(middle, added)
        return ended, by_row(ended, self.local)

    def _chain(self) -> Iterator[Compared]:
        for run, layer in self.places():
            if layer + 1 not in run.layers[self.stack.label]:
                continue
            left = self.at(run, "resid_post", layer)
            allowed = sum_rounding(self.model.dtype) * left.abs()
            yield self.compared(run, layer, self.at(run, "resid_pre", layer + 1), left, allowed)


def _statement_of(gate: Gate | NormGate | HalfOfRow) -> str:
    if isinstance(gate, NormGate):
        return "gate = γ / √(mean (pattern v)² + ε), over all heads"
    if isinstance(gate, HalfOfRow):
        return "gate = 1 in the half that a row uses, by the tokens that are global"
    return f"gate = {gate.function}(attn_in W + b)"


def _by_heads(x: Tensor, W: Tensor) -> Tensor:
    """x W of every head."""
    return einsum(x, W, "batch position d_in, head d_in d_head -> batch position head d_head")


def norm_of(value: Tensor, dim: int = -1) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(value, dim=dim)
    return norms
