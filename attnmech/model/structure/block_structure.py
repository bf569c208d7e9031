"""Reads the parts of one block from its calls in a traced pass.

Queries, keys and values are columns of what the modules inside the attention return; W_O is the matrix that reads z (or
z times a gate); norms and sums are recognised by their inputs and outputs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NoReturn

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ...maths.float64 import as_float64
from ..parts.gates import Gate, NormGate
from ..parts.mask import MaskRule
from ..parts.norms import kind_of
from ..parts.position import FORMS, Rotary, as_tables, rotary_tables, tables_for, tables_of
from ..parts.weights import Columns, Expanded, Latent, Separate, bias_of, has_matrix
from .architecture import Architecture
from .stream_sums import StreamSums
from .traced import Attended, Call, Factors, by_token, columns_of, distance, same

_ROUNDINGS: Final = 32  # two computations of one value differ by at most this many roundings
_USUAL_BASE: Final = 10_000.0  # the usual θ of rotary angles (Su et al. 2021)
_GATES: Final = ("sigmoid", "softplus", "silu", "tanh")  # by their names in torch.nn.functional

_Stream = Float[Tensor, "batch position features"]
_Normed = Float[Tensor, "batch position normed"]  # what reads the stream; as wide, unless a matrix reads it


class UnreadableError(UnsupportedModelError):
    """A model's structure could not be read; the message says what is missing."""


@dataclass(frozen=True, eq=False)
class _Source:
    """The source of queries, keys or values: columns of a projection, times a factor, perhaps normed, times another."""

    call: Call
    made: _Stream
    """The matrix that `columns` index: the projection's output; for keys from a latent, followed by the output of the
    latent's projection."""
    columns: tuple[int, ...]
    factor: float  # the factor between the projection and what follows: the norm or, without one, q, k or v
    norm: Call | None
    factor_after: float  # the factor between the norm and q, k or v; 1 without a norm
    latent: Latent | None  # the latent that the projection reads; None if it reads the attention's input


class BlockReader:
    """Reads one block; `plan` is `start`, completed with what was read.

    `cross` is the call of the cross-attention between self-attention and MLP, if there is one.
    """

    def __init__(
        self,
        start: Architecture,
        attended: Attended,
        calls: Sequence[Call],
        factors: Factors,
        cross: Call | None = None,
    ) -> None:
        self._cross = cross
        self._path, self._attended, self._calls, self._factors = start.attention, attended, calls, factors
        # A class token is the same in every image, so the first position tells little; if nothing rotates, use all of
        # them.
        self._has_patches = start.reads == "pixels"
        self._first = slice(1) if start.reads == "tokens" else slice(None)
        self._batch, self._length = attended.q.shape[:2]
        self._z = rearrange(attended.z, "batch position head d -> batch position (head d)")
        self._own, block = (next(call for call in calls if call.path == path) for path in (self._path, ""))
        stream, attn_in = self._by_token(block.input), self._by_token(self._own.input)
        ended = self._by_token(block.output)
        if attn_in is None:
            _refuse("its attention is not given one tensor with a row for each token")
        if not start.streams:
            stream = ended = attn_in
        if stream is None or ended is None or ended.shape != stream.shape:
            _refuse("its block does not take and return a stream")
        self._stream, self._attn_in, self._ended = stream, attn_in, ended
        self._sums = StreamSums(stream, ended, calls, factors, self._path)
        self._below_path = f"{self._path}." if self._path else ""
        self._inside = [call for call in calls if call.path != self._path and call.path.startswith(self._below_path)]
        self.plan = self._around(self._attention(start))

    def _attention(self, plan: Architecture) -> Architecture:
        attended = self._attended
        heads, d_head = attended.q.shape[2:]
        v = self._source("v", attended.v)
        others = [] if self._first == slice(1) else [slice(-1, None), slice(1)]
        while True:
            try:
                q, k = self._source("q", attended.q), self._source("k", attended.k, v)
                break
            except UnreadableError:
                if not others:
                    raise
                self._first = others.pop()  # a class token before or after rotated patches is not rotated
        if v.norm is not None and v.latent is not None:
            _refuse("it has a norm of values that are expanded from a latent")
        if v.latent is None and (q.latent is not None or k.latent is not None):
            _refuse("its queries or keys are expanded from a latent, but not its values")
        if v.latent is not None and q.norm is not None:
            _refuse("it has a norm of queries that are expanded from a latent")
        if (q.norm is None) != (k.norm is None):
            _refuse("it has a norm of queries or of keys, but not of both")
        rotary, scale = self._rotary(q, k)
        asked, key_scale = attended.options, self._factors.named(k.factor * k.factor_after / scale)
        plan = replace(
            plan,
            n_heads=heads,
            query_scale=self._factors.named(q.factor * q.factor_after / scale, d_head),
            key_scale=key_scale if self._factors.knows(key_scale) else 1.0,
            rotary=rotary,
            causal=isinstance(attended.mask, MaskRule) and attended.mask.causal,
            trusted="eager" if asked.get("softcap") or asked.get("s_aux") is not None else None,
        )
        if q.norm is not None and k.norm is not None:
            plan = replace(
                plan,
                qk_norm=(self._below(q.norm), self._below(k.norm)),
                qk_norm_axes=self._axes_of(q.norm),
                norm_after_rotary=rotary is not None and self._norm_is_last(q),
            )
        if v.norm is not None:
            plan = replace(plan, v_norm=self._below(v.norm), v_norm_axes=self._axes_of(v.norm))
        return self._with_layout(plan, q, k, v)

    def _source(self, name: str, value: Tensor, values: _Source | None = None) -> _Source:
        """The columns of a projection that make q, k or v.

        q and k are compared at position 0, where a rotation is the identity, up to a factor. If the values are expanded
        from a latent, the keys are columns of the same projection and of the one that makes the latent.
        """
        places = slice(None) if name == "v" else self._first
        wanted, norm, after = rearrange(value, "batch position head d -> batch position (head d)"), None, 1.0
        latent = None if values is None else values.latent
        if values is not None and latent is not None:
            shared = next(call for call in self._inside if self._below(call) == latent.projection)
            both = torch.cat((values.made, self._known(shared.made[0])), dim=-1)
            held = self._columns(wanted, both, places)
            if held is None:
                _refuse("its keys are not columns of the projections that make its values and their latent")
            return _Source(values.call, both, *held, None, 1.0, latent)
        while True:
            holding = list(self._holding(wanted, places))
            for call, columns, factor in reversed(holding):
                if has_matrix(call.module):
                    latent = None if same(self._by_token(call.input), self._attn_in) else self._latent(name, call)
                    return _Source(call, self._known(call.made[0]), columns, factor, norm, after, latent)
            before = [held for held in holding if self._by_token(held[0].input) is not None]
            if norm is not None or not before:
                _refuse(f"its {name} are not columns of one projection")
            norm, columns, after = before[-1]
            if columns != tuple(range(len(columns))):
                _refuse(f"the norm of its {name} orders them differently from its heads")
            wanted = self._known(norm.input)

    def _holding(self, target: _Stream, places: slice) -> Iterator[tuple[Call, tuple[int, ...], float]]:
        """The calls inside the attention whose output holds the target's columns."""
        for call in self._inside:
            for made in call.made[:2] if call.order < self._attended.order else ():
                value = self._by_token(made)
                held = None if value is None else self._columns(target, value, places)
                if held is not None:
                    yield call, *held

    def _columns(
        self,
        target: Float[Tensor, "batch position wanted"],
        there: Float[Tensor, "batch position there"],
        places: slice,
    ) -> tuple[tuple[int, ...], float] | None:
        """Compares by `columns_of` at some positions, up to the scale of rotary tables."""
        _, tables = next(self._tables(), ("", None))
        scale = 1.0 if tables is None else float(torch.hypot(*(table[0, 0, 0] for table in tables))) or 1.0
        wanted, there = (stream[:, places].flatten(0, 1) for stream in (target, there))
        return columns_of(wanted, there, self._factors.epsilon, scale)

    def _latent(self, name: str, reader: Call) -> Latent:
        """The latent that a projection reads, for a projection that does not read the attention's input."""
        read = self._by_token(reader.input)
        for norm in self._inside:
            normed_input = self._by_token(norm.input)
            if normed_input is None or not same(self._by_token(norm.output), read):
                continue
            for call, columns, factor in self._holding(normed_input, slice(None)):
                if has_matrix(call.module) and self._reads(call, self._attn_in) and factor == 1:
                    return Latent(self._below(call), columns, self._below(norm))
        _refuse(f"the projection {reader.path!r} of its {name} reads neither the input of its attention nor a latent")

    def _with_layout(self, plan: Architecture, q: _Source, k: _Source, v: _Source) -> Architecture:
        """Adds the projections, and the number of key heads before each is repeated for its group of queries."""
        made = self._attended.k.shape[2]
        kv_heads = len({tuple(columns) for columns in torch.tensor(k.columns).view(made, -1).tolist()})
        # Each head as it was before the model repeated it for its group of queries.
        groups = (torch.tensor(source.columns).view(kv_heads, made // kv_heads, -1) for source in (k, v))
        once = [tuple(group[:, 0].flatten().tolist()) for group in groups]
        columns, paths = (q.columns, once[0], once[1]), tuple(self._below(source.call) for source in (q, k, v))
        if v.latent is not None:
            return replace(plan, qkv=Expanded(paths[0], paths[2], columns, v.latent, q.latent), n_kv_heads=kv_heads)
        in_order = all(one_columns == tuple(range(len(one_columns))) for one_columns in columns)
        layout: Columns | Separate = Columns((paths[0], paths[1], paths[2]), columns)
        if len(set(paths)) == 3 and in_order:
            layout = Separate(*paths)
        return replace(plan, qkv=layout, n_kv_heads=kv_heads)

    def _axes_of(self, norm: Call) -> str:
        """The axes of the input of the queries' norm."""
        assert norm.input is not None
        if norm.input.ndim == 3:
            return "batch position (head d_head)"
        first = norm.input.shape[1] == self._length
        return "batch position head d_head" if first else "batch head position d_head"

    def _rotary(self, q: _Source, k: _Source) -> tuple[Rotary | None, float]:
        """How queries and keys are rotated (None if not), and the factor of the tables in their first column (YaRN)."""
        d_head = self._attended.q.shape[-1]
        pairs = [self._before_and_after(q, self._attended.q), self._before_and_after(k, self._attended.k)]
        fits: list[tuple[float, Rotary | None, float]] = [(max(distance(*pair) for pair in pairs), None, 1.0)]
        for path, tables in self._tables():
            cos, sin = (as_float64(table[:, :, None]) for table in tables)
            for form in FORMS:
                width = form.width(cos.shape[-1])
                for first in dict.fromkeys((0, d_head - width)) if width <= d_head and width % 2 == 0 else ():
                    rotary = replace(form, share=width / d_head, first=first, tables=path)
                    scale = 1.0 if first else float(torch.hypot(cos[0, 0, 0, 0], sin[0, 0, 0, 0]))
                    apart = max(distance(rotary(before, cos, sin), scale * after) for before, after in pairs)
                    fits.append((apart, rotary, scale))
        apart, rotary_found, scale = min(fits, key=lambda fit: fit[0])
        if apart <= _ROUNDINGS * self._factors.epsilon:
            return self._with_base(rotary_found), scale
        _refuse("its queries and keys are rotated in an unknown way, or by tables that were not found")

    def _with_base(self, rotary: Rotary | None) -> Rotary | None:
        """The rotation with the base of its angles, if the config lacks the base and it is the usual one (RoFormer)."""
        if rotary is None or self._factors.has_rotary:
            return rotary
        tables = next(tables for path, tables in self._tables() if path == rotary.tables)
        width, places = rotary.width(tables[0].shape[-1]), torch.arange(self._length)
        closed = rotary_tables({"rope_theta": _USUAL_BASE}, width, places)
        assert closed is not None
        apart = max(
            distance(as_float64(table[0]).cpu(), rotary.spread(one)) for table, one in zip(tables, closed, strict=True)
        )
        return replace(rotary, theta=_USUAL_BASE) if apart <= _ROUNDINGS * self._factors.epsilon else rotary

    def _before_and_after(self, source: _Source, value: Tensor) -> tuple[Tensor, Tensor]:
        """Queries or keys, by head, before and after the step that may rotate them."""
        d_head, by_head = value.shape[-1], "batch position (head d) -> batch position head d"
        before, after = source.factor * as_float64(self._projected(source)), value
        if source.norm is not None and self._norm_is_last(source):
            after = rearrange(self._known(source.norm.input), by_head, d=d_head)
        elif source.norm is not None:
            before = source.factor_after * as_float64(self._known(source.norm.made[0]))
        before = rearrange(before, by_head, d=d_head)
        if before.shape[2] != after.shape[2]:
            before = before.repeat_interleave(after.shape[2] // before.shape[2], dim=2)
        return before, as_float64(after)

    def _norm_is_last(self, source: _Source) -> bool:
        """Whether queries or keys are normed after the rotation."""
        normed_input = None if source.norm is None else self._by_token(source.norm.input)
        if normed_input is None:
            return False
        return distance(source.factor * self._projected(source), normed_input) > _ROUNDINGS * self._factors.epsilon

    def _projected(self, source: _Source) -> _Stream:
        return source.made[..., list(source.columns)]

    def _tables(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Cosine and sine tables among the attention's arguments, or returned by a module inside it, with its path."""
        candidates = [("", tables_of(self._own.args, self._own.kwargs))]
        candidates += [(self._below(call), as_tables(call.made)) for call in self._inside]
        for path, tables in candidates:
            fewer = range(2, self._length) if self._has_patches else ()
            if tables is not None and (self._length in tables[0].shape[:2] or tables[0].shape[1] in fewer):
                yield path, tables_for(tables, self._length)

    def _around(self, plan: Architecture) -> Architecture:
        out = self._out()
        if not plan.streams:
            return replace(plan, out=out.path, gate=self._gate(out), attn_norm=self._norm_before())
        plan = replace(plan, out=out.path, gate=self._gate(out), attn_norm=self._attn_norm())
        raw = self._known(out.made[0])
        written = [(out, raw), *((call, made) for call, made in self._sums.writes(out.order) if self._reads(call, raw))]
        later = [call for call in self._calls if call.order > out.order and call.path]
        middle = self._sums.middle(written, later)
        if middle is None and (beside := self._sums.beside(written, later)) is not None:
            middle, mixer, mixer_scale = beside
            plan = replace(plan, mixer=mixer.path, mixer_scale=mixer_scale)
        if middle is None:
            return self._parallel(plan, written)
        norm, writer, factor = middle
        plan = replace(plan, mid_norm=norm.path, attn_scale=factor, attn_out="" if writer is out else writer.path)
        return self._ending(plan, norm, later)

    def _ending(self, plan: Architecture, norm: Call, later: Sequence[Call]) -> Architecture:
        """Adds the end of a block: cross-attention, MLP and, in post-norm blocks, the norm after each."""
        entering, normed, cross = self._known(norm.input), self._by_token(norm.output), self._cross
        if cross is None:
            return self._with_mlp(plan, entering, normed, norm.order, later)
        plan, crossed = replace(plan, interposed="cross"), cross.made[0]
        if normed is None or not same(normed, cross.input):
            _refuse("its cross-attention does not read a norm of the stream after self-attention")
        for between in later:
            read = between.input
            if between.order < cross.order or read is None or read.shape != normed.shape:
                continue
            fit = self._sums.fitted(read, normed, [crossed])
            if fit is not None and fit.factors[0] == 1:
                plan = replace(plan, interposed_norm=between.path)
                return self._with_mlp(plan, normed + crossed, between.made[0], between.order, later)
        return self._with_mlp(plan, entering + crossed, None, cross.order, later)

    def _with_mlp(
        self, plan: Architecture, entering: _Stream, normed: _Normed | None, after: int, later: Sequence[Call]
    ) -> Architecture:
        if (added := self._sums.added(entering, self._ended, after)) is not None:
            return replace(plan, mlp_out=added[0].path, mlp_scale=added[1])
        if (both := self._sums.added_together(entering, after)) is not None:
            first, last, factor = both
            return replace(plan, mlp_out=last.path, mlp_further=(first.path,), mlp_scale=factor)
        for last in reversed(later):
            entered, left = self._by_token(last.input), self._by_token(last.output)
            if normed is None or entered is None or entered.shape != normed.shape or not same(left, self._ended):
                continue
            added = self._sums.added(normed, entered, after, last.order)
            if added is not None and plan.attn_norm is None and plan.attn_scale == added[1] == 1:
                return replace(plan, norm="post", mlp_out=added[0].path, post_norm=last.path)
        _refuse("its block does not end in the sum of the stream and its MLP's output")

    def _out(self) -> Call:
        """The projection that reads z or, failing that, a tensor of the shape of z."""
        z = self._z
        readers = [
            call for call in self._calls
            if call.order > self._attended.order and has_matrix(call.module)
            and (reading := self._by_token(call.input)) is not None and reading.shape == z.shape
        ]  # fmt: skip
        if not readers:
            _refuse("no matrix reads z, so W_O was not found")
        return next((call for call in readers if self._reads(call, z)), readers[0])

    def _gate(self, out: Call) -> Gate | NormGate | None:
        z, gated = self._z, self._known(out.input)
        if same(gated, z):
            return None
        for call in self._inside:
            made = self._by_token(call.output)
            if self._reads(call, z) and same(made, gated):
                kind = kind_of(call.module, z)
                if kind is None or kind.centred or bias_of(call.module) is not None:
                    _refuse(f"{call.path!r}, between z and W_O, is neither a gate nor an RMSNorm")
                return NormGate(self._below(call), kind.offset)
        whole, part = as_float64(z), as_float64(gated)
        ratio = torch.where(whole == 0, 0.0, part / whole).flatten(0, 1)
        for call in self._inside:
            value = self._by_token(call.output)
            if value is None or not has_matrix(call.module) or not self._reads(call, self._attn_in):
                continue
            for function in _GATES:
                made = getattr(nn.functional, function)(as_float64(value)).flatten(0, 1)
                mapping = columns_of(ratio, made, _ROUNDINGS * self._factors.epsilon)
                if mapping is not None and mapping[1] == 1:
                    return Gate(self._below(call), mapping[0], function)
        _refuse(f"{out.path!r} reads neither z nor z times a known gate (a norm of z?)")

    def _attn_norm(self) -> str | None:
        """The norm of the stream that returns `attn_in`; None if `attn_in` is the stream itself."""
        if same(self._attn_in, self._stream):
            return None
        for call in self._calls:
            before = call.order < self._attended.order and self._reads(call, self._stream)
            if before and same(self._by_token(call.output), self._attn_in):
                return call.path
        _refuse("the input of its attention is neither the stream nor a norm of it")

    def _norm_before(self) -> str | None:
        """The norm that returns `attn_in`, whatever it reads."""
        for call in (call for call in self._calls if call.order < self._attended.order and call.path):
            is_norm = call.input is not None and call.input.is_floating_point() and kind_of(call.module, call.input)
            if is_norm and same(self._by_token(call.output), self._attn_in):
                return call.path
        return None

    def _parallel(self, plan: Architecture, written: Sequence[tuple[Call, _Stream]]) -> Architecture:
        """The plan of a block that adds attention and MLP in one step."""
        others = [
            (call, value) for call, value in self._sums.writes(0)
            if call.path != self._path and not call.path.startswith(f"{self._path}.")
        ]  # fmt: skip
        others.sort(key=lambda candidate: (candidate[0].path.count("."), candidate[0].order))
        pairs = [[one, other] for one in written for other in others if not same(one[1], other[1])]
        for parts in (*([one] for one in written), *pairs):
            (writer, *mlp), values = zip(*parts, strict=True)
            if (fit := self._sums.fitted(self._ended, self._stream, values)) is not None:
                plan = replace(plan, attn_out="" if writer.path == plan.out else writer.path, attn_scale=fit.factors[0])
                return replace(plan, mlp_out=mlp[0].path, mlp_scale=fit.factors[1]) if mlp else plan
        _refuse("no sum of the stream and the output of attention was found")

    def _reads(self, call: Call, value: _Stream) -> bool:
        return same(self._by_token(call.input), value)

    def _below(self, call: Call) -> str:
        """The path of a call, from the attention module down."""
        return call.path[len(self._below_path) :]

    def _by_token(self, value: Tensor | None) -> _Stream | None:
        return by_token(value, self._batch, self._length)

    def _known(self, value: Tensor | None) -> _Stream:
        """`_by_token` of a tensor that is known to have a row for each token."""
        stream = self._by_token(value)
        assert stream is not None
        return stream


def _refuse(reason: str) -> NoReturn:
    raise UnreadableError(reason)
