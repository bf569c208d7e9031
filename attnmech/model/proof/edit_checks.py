"""Checks that an edit changes what it must, and nothing else: each edit acts on one copy of a text."""

import weakref
from collections.abc import Iterator
from functools import cached_property, partial

import torch
from einops import einsum
from torch import Tensor

from ...maths.precision import least_rounding, steps_rounding, sum_rounding
from ...points import PointKey, full_name
from ..attention.in_force import Hook
from ..attention.observed import RowBlock
from ..parts.certificate import Check
from ..parts.gates import NormGate
from .layer_checks import block_end
from .output_checks import by_head, with_further
from .probe import Compared, Probe, by_row, excess_of, norm_of
from .texts import SEED


class EditChecks(Probe):
    """The statements about edits of the pattern and of `resid_mid`."""

    @cached_property
    def _edits(self) -> "list[_Edits]":
        return [_Edits(self, layers) for layers in self.edited_by_pass]

    @property
    def _edited_copies(self) -> "Iterator[tuple[_Edits, int, int]]":
        """Each edited layer, with its pass and its number there."""
        for edits in self._edits:
            yield from ((edits, number, layer) for number, layer in enumerate(edits.layers))

    def _pattern_edit(self) -> Check:
        """Checks an edit that moves the whole attention of each row to the visible key that had the least."""
        statement = "an edit of the pattern changes attn_raw as computed from W_O and v, and the stream with it"
        dtype = self.model.dtype
        rounding, steps = self.weighted(self.stack.n_heads * self.stack.d_value), steps_rounding(dtype)
        least = least_rounding(dtype)
        if isinstance(self.plan.gate, NormGate):
            # Even in a float64 model, the norm computes in float32.
            steps = max(steps, steps_rounding(torch.float32))

        def comparisons() -> Iterator[Compared]:
            for edits, copy, layer in self._edited_copies:
                weights = self.stack.weights(layer)
                W_O = weights.W_O.to(self.wide)
                z = einsum(
                    edits.patterns[layer][None].to(self.wide),
                    with_further(by_head(self, edits.at("v", layer))[copy : copy + 1], edits.further.get(layer)),
                    "batch head query key, batch key head d -> batch query head d",
                )
                if self.plan.gate is not None:
                    z = z * edits.at("gate", layer)[copy : copy + 1]
                bias = W_O.new_zeros(W_O.shape[-1]) if weights.b_O is None else weights.b_O.to(self.wide)
                product = einsum(z, W_O, "batch query head d, head d d_model -> batch query d_model")
                summed = einsum(norm_of(z), norm_of(W_O, 1), "batch query head, head d_model -> batch query d_model")
                allowed = rounding * (summed + bias.abs()) + steps * (product.abs() + summed + bias.abs())
                real = edits.real[copy : copy + 1]
                raw = edits.at("attn_raw", layer)
                where = f"layer {layer}"
                expected = (product + bias)[real]
                yield Compared(where, excess_of(raw[copy : copy + 1][real], expected, allowed[real] + least))
                shifted = excess_of(expected, raw[-1:][real], allowed[real]) > 1
                if shifted and not edits.moves(copy):
                    yield Compared(f"{where}, on the way to the final stream", torch.inf)

        return self.by_layer("pattern edit", statement, ("pattern",), comparisons(), rounding)

    def _resid_mid_edit(self) -> Check:
        statement = "an edit of resid_mid reaches the MLP and the stream"
        if self.plan.mid_norm is None:
            return self._parallel()

        def comparisons() -> Iterator[Compared]:
            for edits, number, layer in self._edited_copies:
                copy = len(edits.layers) + number
                ended, allowed = block_end(self, layer, [edits.at("resid_mid", layer)], edits.values)
                real = edits.real[copy]
                post = edits.at("resid_post", layer)
                limit = allowed[copy][real] + least_rounding(self.model.dtype)
                yield Compared(f"layer {layer}", excess_of(post[copy][real], ended[copy][real], limit))
                moved, still = (edits.at("mlp_out", layer)[text][real] for text in (copy, -1))
                # An MLP with the same output at every token (0, if it is pruned) cannot show whether the edit reached
                # it.
                if torch.equal(moved, still) and bool((still != still[:1]).any()):
                    yield Compared(f"layer {layer}, on the way to the MLP", torch.inf)

        return self.by_layer(
            "resid_mid edit",
            statement,
            ("resid_mid",),
            comparisons(),
            sum_rounding(self.model.dtype) if self.plan.norm == "pre" else None,
        )

    def _parallel(self) -> Check:
        statement = "the MLP does not read the output of the attention in its block"
        if self.plan.mlp_out is None:
            return Check.untried("parallel", statement, "there is no MLP")

        def comparisons() -> Iterator[Compared]:
            for edits, copy, layer in self._edited_copies:
                moved, still = (edits.at("mlp_out", layer)[text][edits.real[text]] for text in (copy, -1))
                yield Compared(f"layer {layer}", excess_of(moved, still, by_row(still, self.local)))

        return self.by_layer("parallel", statement, ("mlp_out",), comparisons())


class _Edits:
    """The edits of some layers of a stack: one pass runs copies of a text, each with one edit, and the last without."""

    def __init__(self, probe: Probe, layers: list[int]) -> None:
        self._probe = weakref.proxy(probe)  # a proxy, since the probe holds the edits
        self.layers = layers
        model, stack = probe.model, probe.stack
        batch = probe.beginning.texts(torch.zeros(2 * len(layers) + 1, dtype=torch.long))
        if stack.label != "encoder":
            batch = probe.passes.encoded(batch)
        self.real = batch.queries(stack.label).mask
        self.written = probe.written(batch).mask[0]
        self.patterns: dict[int, Tensor] = {}  # the pattern put into each edited layer, `[head query key]`
        names = [stack.point(name) for name in ("v", "gate", "attn_raw", "resid_mid", "mlp_out", "resid_post")]
        if stack.architecture.interposed:
            names.append(full_name(stack.architecture.interposed, "attn_out"))
        there = [name for name in names if model.points[name].absent is None]
        edits: dict[PointKey, Hook] = {
            (stack.point("pattern"), layer): partial(self._pattern, n, layer) for n, layer in enumerate(layers)
        }
        if stack.architecture.mid_norm is not None:
            edits |= {
                (stack.point("resid_mid"), layer): partial(self._resid_mid, len(layers) + n)
                for n, layer in enumerate(layers)
            }
        self._end = ("logits", None) if model.is_own else model.last_stream
        self.further: dict[int, Tensor] = {}  # of layers with values that belong to no token

        def keep(block: RowBlock) -> None:
            if block.notes.further_values is not None:
                self.further[block.layer] = block.notes.further_values[:1].to(probe.wide)

        with model.in_force.editing(list(edits.items())):
            self.values = model.forward(
                batch,
                captures=[*((name, layer) for name in there for layer in layers), self._end],
                rows=[keep],
                layers=[(stack.label, layer) for layer in layers],
            )

    def moves(self, copy: int) -> bool:
        """Whether the edit in a copy changes the final stream at a real token, or the output of a user's own module."""
        ended = self.values[self._end]
        one, other = ended[copy], ended[-1]
        if not self._probe.model.is_own:
            one, other = one[self.written], other[self.written]
        return not torch.equal(one, other)

    def at(self, name: str, layer: int) -> Tensor:
        return self.values[self._probe.stack.point(name), layer].to(self._probe.wide)

    def _pattern(self, copy: int, layer: int, pattern: Tensor) -> Tensor:
        row = pattern[copy]
        least = row.masked_fill(row == 0, torch.inf).argmin(dim=-1, keepdim=True)
        self.patterns[layer] = torch.zeros_like(row).scatter(-1, least, 1.0)
        pattern[copy] = self.patterns[layer]
        return pattern

    def _resid_mid(self, copy: int, middle: Tensor) -> Tensor:
        noise = torch.randn(middle[copy].shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.float32)
        middle[copy] += noise.to(middle)
        return middle
