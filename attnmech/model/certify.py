"""The proof, at load, that every activation point means what its name says.

A few probe tokens run through three models that share their parameters: ours, transformers' own, and
TransformerLens's bridge. What must be equal is compared, and every comparison stands in the certificate with
its residual. A point whose meaning is not proven is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from ..activations import Batch
from ..errors import AttnmechError
from ..maths.precision import pass_tolerance, step_tolerance, table_tolerance
from ..maths.scores import rounding_floor
from ..points import POINTS, PointKey, lens_name
from .attention import RowBlock
from .certificate import Certificate, Check, LensHook
from .hooked import HookedModel, call
from .ledger import parts_of
from .position import alibi_slopes, rotary_tables
from .tap import Edit

_PROBE_LENGTH: Final = 8
_PROBED_LAYERS: Final = 6
_SEED: Final = 20

_EVERY_POINT: Final = tuple(POINTS)


def certify(model: HookedModel) -> Certificate:
    """Proves, on a few probe tokens, that the points of a model mean what their names say.

    Runs at load; run it again after changing weights, or inside `model.hooks` to see what an edit breaks.
    Never raises for a faulty model: the faults stand in the certificate.
    """
    layers = _probed_layers(model.n_layers)
    probe = _Probe(model, layers)
    checks = tuple(probe.checks())
    return Certificate(model.name, checks, probe.lens_hooks, tuple(layers))


def _probed_layers(n_layers: int) -> list[int]:
    if n_layers <= _PROBED_LAYERS:
        return list(range(n_layers))
    steps = torch.linspace(0, n_layers - 1, _PROBED_LAYERS)
    return sorted({round(float(step)) for step in steps})


class _Probe:
    """The runs that the checks compare."""

    def __init__(self, model: HookedModel, layers: list[int]) -> None:
        self.model = model
        self.layers = layers
        self.local = step_tolerance(model.dtype)
        self.whole = pass_tolerance(model.dtype)
        self.tables = table_tolerance(model.dtype)
        self.batch = _probe_batch(model)
        self.real = self.batch.mask
        self.lens_hooks: tuple[LensHook, ...] = ()
        self.blocks: dict[int, RowBlock] = {}
        self.values: dict[PointKey, Tensor] = {}

    def checks(self) -> Iterator[Check]:
        yield self._finite()
        reached = self._reached()
        yield reached
        if not reached.passed:
            return
        yield self._transformers()
        yield from self._eager()
        yield self._bridge()
        yield self._padding()
        yield self._look_ahead()
        yield self._by_layer("attn_in", *_ATTN_IN, self._attn_in())
        yield self._by_layer("projections", "q, k, v = attn_in W + b", ("attn_in", "q", "k", "v"), self._projections())
        if self.model.architecture.rotate is not None:
            yield self._by_layer("rotary", "q_rot, k_rot = R q, R k", ("q_rot", "k_rot"), self._rotary())
            yield self._rotary_tables()
        if self.model.architecture.position == "alibi":
            yield self._alibi()
        yield self._by_layer("ledger", "scores = Σ terms of the score ledger", ("q", "k", "scores"), self._ledger())
        yield self._by_layer(
            "softmax", "pattern = softmax(scores); rows sum to 1", ("scores", "pattern"), self._softmax()
        )
        yield self._by_layer("mask", "pattern = 0 where a key is hidden", ("scores", "pattern"), self._hidden())
        yield self._by_layer("z", "z = pattern v", ("pattern", "v", "z"), self._z())
        yield self._by_layer("heads", "Σ_h z W_O + b_O = attn_raw", ("z", "result", "attn_raw"), self._heads())
        yield self._attn_out()
        yield self._stream()
        yield self._by_layer("mlp", *self._mlp_statement(), self._mlp())
        yield self._by_layer(
            "chain",
            "resid_post of a layer = resid_pre of the next",
            ("resid_pre", "resid_post"),
            self._chain(),
        )
        yield self._embed()
        yield self._pattern_edit()
        yield self._resid_mid_edit()

    # -- the runs ------------------------------------------------------------------------------------------

    def _reached(self) -> Check:
        """Runs our model once, with every point."""
        statement = "every point is reached in a forward pass"
        names = [name for name, point in self.model.points.items() if point.absent is None]
        keys = self.model.points.resolve(names, self.layers)
        following: list[PointKey] = [
            ("resid_pre", layer + 1) for layer in self.layers if layer + 1 < self.model.n_layers
        ]
        try:
            self.values = self._run([*dict.fromkeys(keys + following)])
        except (AttnmechError, TypeError, AttributeError, IndexError) as error:
            return Check("points", statement, _EVERY_POINT, False, detail=_first_line(error))
        missing = [layer for layer in self.layers if layer not in self.blocks]
        if missing:
            detail = f"the attention of layer {missing[0]} does not go through attnmech's softmax"
            return Check("points", statement, _EVERY_POINT, False, detail=detail)
        return Check("points", statement, _EVERY_POINT, True)

    def _run(self, captures: Sequence[PointKey]) -> dict[PointKey, Tensor]:
        def keep(block: RowBlock, values: Mapping[PointKey, Tensor]) -> None:
            self.blocks.setdefault(block.layer, block)

        return self.model.forward(self.batch, captures=captures, observers=[keep])

    def _output(self, batch: Batch | None = None) -> Tensor:
        """What our model puts out: logits or, without a head, the last stream after the final norm."""
        return _output_of(self.model.output(batch or self.batch))

    def _at(self, name: str, layer: int) -> Tensor:
        return self.values[name, layer]

    # -- whole passes --------------------------------------------------------------------------------------

    def _finite(self) -> Check:
        statement = "every weight is finite"
        for name, parameter in self.model.named_parameters():
            if not torch.isfinite(parameter).all():
                return Check("weights", statement, _EVERY_POINT, False, detail=f"{name} holds NaN or infinity")
        return Check("weights", statement, (), True)

    def _transformers(self) -> Check:
        ours, theirs = self._output(), _plain_output(self.model, self.batch)
        return self._compare("transformers", "output = output of plain transformers", _EVERY_POINT, ours, theirs)

    def _eager(self) -> Iterator[Check]:
        """Compares streams and patterns with those that transformers hands out in eager attention."""
        streams = "resid_pre = hidden states of plain transformers"
        patterns = "pattern = attentions of plain transformers (eager)"
        try:
            with torch.no_grad():
                theirs = call(self.model.plain_eager, self.batch, output_hidden_states=True, output_attentions=True)
            states, attentions = theirs.hidden_states, theirs.attentions
            assert states is not None
            assert attentions is not None
        except Exception as error:
            yield Check("streams", streams, (), None, detail=_first_line(error))
            yield Check("attentions", patterns, (), None, detail=_first_line(error))
            return
        real_rows = self.real[:, None, :, None]
        yield self._by_layer(
            "streams",
            streams,
            ("resid_pre", "resid_post"),
            ((layer, self._at("resid_pre", layer)[self.real], states[layer][self.real]) for layer in self.layers),
            self.whole,
        )
        yield self._by_layer(
            "attentions",
            patterns,
            ("pattern",),
            (
                (layer, self._at("pattern", layer) * real_rows, attentions[layer].to(self.model.dtype) * real_rows)
                for layer in self.layers
            ),
            self.whole,
        )

    def _bridge(self) -> Check:
        statement = "output = output of TransformerLens's bridge"
        try:
            theirs, cache = _bridge_run(self.model, self.batch)
        except Exception as error:  # a bridge that cannot be built or run is TransformerLens's fault, not this model's
            return Check("bridge", statement, (), None, detail=_first_line(error))
        self.lens_hooks = tuple(self._lens_hooks(cache))
        check = self._compare("bridge", statement, (), self._output(), theirs)
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
            keep = self._comparable(name, ours)
            residual = _relative(ours[keep], theirs[keep])
            yield LensHook(name, hook, "agrees" if residual <= self.whole else "differs", residual)

    def _comparable(self, name: str, value: Tensor) -> Tensor:
        """Where two models must agree: at real tokens, and of scores at visible pairs."""
        if name in ("scores", "pattern"):
            visible = next(iter(self.blocks.values())).visible & self.real[:, None, :, None]
            return visible.expand_as(value)
        return self.real

    def _padding(self) -> Check:
        statement = "padding changes no output"
        if not self.batch.padded:
            return Check("padding", statement, (), None, detail="the probe is too short to pad")
        length = int(self.batch.lengths.min())
        alone = _cut(self.batch, slice(1, 2), length)
        ours = self._output()[1:2, :length]
        return self._compare("padding", statement, _EVERY_POINT, ours, self._output(alone), real=alone.mask)

    def _look_ahead(self) -> Check:
        statement = "no token sees a later one"
        if not self.model.causal:
            return Check("causal", statement, (), None, detail="an encoder: every token sees every other")
        if self.batch.ids.shape[1] < 2:
            return Check("causal", statement, (), None, detail="the probe has one token")
        first = _cut(self.batch, slice(0, 1), self.batch.ids.shape[1])
        changed = _with_last_token_changed(first, self.model.n_vocab)
        before = torch.cat((self._output(first)[:, :-1], _plain_output(self.model, first)[:, :-1]))
        after = torch.cat((self._output(changed)[:, :-1], _plain_output(self.model, changed)[:, :-1]))
        real = torch.ones(before.shape[:2], dtype=torch.bool, device=before.device)
        return self._compare("causal", statement, ("scores", "pattern", "z"), before, after, real=real)

    # -- one layer at a time -------------------------------------------------------------------------------

    def _attn_in(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        norm = self.model.architecture.attn_norm
        for layer in self.layers:
            stream = self._at("resid_pre", layer)
            expected = stream if norm is None else self.model.plain_module(layer, norm)(stream)
            yield layer, self._at("attn_in", layer)[self.real], expected[self.real]

    def _projections(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        pattern = "batch position d_model, head d_model d_head -> batch position head d_head"
        for layer in self.layers:
            w, x = self.model.weights(layer), self._at("attn_in", layer)
            for name, W, b in (("q", w.W_Q, w.b_Q), ("k", w.W_K, w.b_K), ("v", w.W_V, w.b_V)):
                expected = einsum(x, W, pattern)
                expected = expected if b is None else expected + b
                yield layer, self._at(name, layer)[self.real], expected[self.real]

    def _rotary(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        rotate = self.model.architecture.rotate
        assert rotate is not None
        for layer in self.layers:
            tables = self.blocks[layer].rotary
            assert tables is not None
            cos, sin = (rearrange(table, "batch position d_head -> batch position 1 d_head") for table in tables)
            for name in ("q", "k"):
                expected = rotate(self._at(name, layer), cos, sin)
                yield layer, self._at(f"{name}_rot", layer)[self.real], expected[self.real]

    def _rotary_tables(self) -> Check:
        statement = "rotary tables = cos, sin of position · θ^(−2i/d)"
        positions = torch.arange(self.batch.ids.shape[1], device=self.model.device)
        parameters = getattr(self.model.config, "rope_parameters", None) or {}
        expected = rotary_tables(parameters, self.model.d_head, positions)
        if expected is None:
            kind = parameters.get("rope_type", "of an unknown kind")
            return Check("rotary tables", statement, (), None, detail=f"rope_type {kind!r} has no closed form here")

        def pairs() -> Iterator[tuple[int, Tensor, Tensor]]:
            for layer in self.layers:
                tables = self.blocks[layer].rotary
                assert tables is not None
                for table, closed in zip(tables, expected, strict=True):
                    yield layer, table[0].double(), torch.cat((closed, closed), dim=-1)

        return self._by_layer("rotary tables", statement, ("q_rot", "k_rot", "scores"), pairs(), self.tables)

    def _alibi(self) -> Check:
        slopes = alibi_slopes(self.model.n_heads).to(self.model.device)
        place = (self.real.cumsum(dim=1) - 1) * self.real
        expected = einsum(slopes, place.to(slopes.dtype), "head, batch key -> batch head key")

        def pairs() -> Iterator[tuple[int, Tensor, Tensor]]:
            for layer in self.layers:
                position = self.blocks[layer].position
                found = torch.zeros_like(expected) if position is None else position[:, :, -1].to(expected)
                yield layer, found, expected

        return self._by_layer("alibi", "position term = slope · key position", ("scores",), pairs(), self.tables)

    def _ledger(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        for layer in self.layers:
            block = self.blocks[layer]
            total = parts_of(self.model, block, self._at("attn_in", layer), block.visible).total()
            keep = self._comparable("scores", total)
            yield (
                layer,
                self._at("scores", layer)[keep],
                total[keep],
                rounding_floor(block.q, block.k, block.scale),
            )

    def _softmax(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        for layer in self.layers:
            scores, pattern = self._at("scores", layer), self._at("pattern", layer)
            yield layer, pattern, torch.softmax(scores.double(), dim=-1).to(pattern)
            yield layer, pattern.double().sum(dim=-1), torch.ones_like(pattern[..., 0]).double()

    def _hidden(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        for layer in self.layers:
            pattern, seen = self._at("pattern", layer), self.blocks[layer].visible
            hidden = ~seen & self.real[:, None, :, None]
            if self.model.causal:
                later = torch.ones(pattern.shape[-2:], dtype=torch.bool, device=pattern.device).triu(1)
                hidden = hidden | (later & self.real[:, None, :, None])
            leaked = pattern.masked_fill(~hidden.expand_as(pattern), 0.0)
            # Beside 1, the sum of a row, so that the residual is the probability that leaks.
            one = torch.ones_like(leaked[..., :1])
            yield layer, torch.cat((leaked, one), -1), torch.cat((torch.zeros_like(leaked), one), -1)

    def _z(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        for layer in self.layers:
            values = self._heads_of(self._at("v", layer))
            yield (
                layer,
                self._at("z", layer),
                einsum(
                    self._at("pattern", layer),
                    values,
                    "batch head query key, batch key head d -> batch query head d",
                ),
            )

    def _heads_of(self, value: Tensor) -> Tensor:
        group = self.model.n_heads // self.model.n_kv_heads
        return repeat(value, "batch position kv d_head -> batch position (kv group) d_head", group=group)

    def _heads(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        for layer in self.layers:
            weights = self.model.weights(layer)
            result = einsum(
                self._at("z", layer),
                weights.W_O,
                "batch position head d_head, head d_head d_model -> batch position head d_model",
            )
            yield layer, self._at("result", layer)[self.real], result[self.real]
            total = result.sum(dim=2) if weights.b_O is None else result.sum(dim=2) + weights.b_O
            yield layer, self._at("attn_raw", layer)[self.real], total[self.real]

    def _attn_out(self) -> Check:
        statement, architecture = "attn_out = attn_raw", self.model.architecture
        if architecture.attn_out != architecture.out:
            return Check("attn_out", statement, (), None, detail="a norm stands between them")
        pairs = (
            (layer, self._at("attn_out", layer)[self.real], self._at("attn_raw", layer)[self.real])
            for layer in self.layers
        )
        return self._by_layer("attn_out", statement, ("attn_raw", "attn_out"), pairs)

    def _stream(self) -> Check:
        statement = "resid_pre + attn_out = resid_mid"
        if self.model.architecture.mid_norm is None:
            return Check("stream", statement, (), None, detail="a parallel block")
        pairs = (
            (
                layer,
                self._at("resid_mid", layer)[self.real],
                (self._at("resid_pre", layer) + self._at("attn_out", layer))[self.real],
            )
            for layer in self.layers
        )
        return self._by_layer("stream", statement, ("resid_pre", "attn_out", "resid_mid"), pairs)

    def _mlp_statement(self) -> tuple[str, tuple[str, ...]]:
        if self.model.architecture.norm == "post":
            return "resid_post = N(N(resid_mid) + mlp_out)", ("resid_mid", "mlp_out", "resid_post")
        return "resid_post = resid_mid + mlp_out", ("resid_mid", "mlp_out", "resid_post")

    def _mlp(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        for layer in self.layers:
            middle, added = self._at("resid_mid", layer), self._at("mlp_out", layer)
            yield (
                layer,
                self._at("resid_post", layer)[self.real],
                self._block_end(layer, middle, added)[self.real],
            )

    def _block_end(self, layer: int, middle: Tensor, added: Tensor) -> Tensor:
        """resid_post, from resid_mid and mlp_out."""
        architecture = self.model.architecture
        if architecture.norm == "pre":
            return middle + added
        assert architecture.mid_norm is not None and architecture.post_norm is not None
        with torch.no_grad():
            normed: Tensor = self.model.plain_module(layer, architecture.mid_norm)(middle)
            ended: Tensor = self.model.plain_module(layer, architecture.post_norm)(normed + added)
        return ended

    def _chain(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        for layer in self.layers:
            if layer + 1 < self.model.n_layers:
                yield (
                    layer,
                    self._at("resid_pre", layer + 1)[self.real],
                    self._at("resid_post", layer)[self.real],
                )

    def _embed(self) -> Check:
        statement = "embed = row of the token embedding"
        expected = self.model.embedding[self.batch.ids]
        return self._compare("embed", statement, ("embed",), self.values["embed", None], expected, self.local)

    # -- edits ---------------------------------------------------------------------------------------------

    def _pattern_edit(self) -> Check:
        """Puts each row's whole attention on the visible key that had the least, in one layer at a time."""
        statement = "an edit of the pattern moves attn_raw as it must, and the output with it"
        clean = self._output()

        def pairs() -> Iterator[tuple[int, Tensor, Tensor]]:
            for layer in self.layers:
                seen = self.blocks[layer].visible
                least = self._at("pattern", layer).masked_fill(~seen, torch.inf).argmin(dim=-1, keepdim=True)
                edited = torch.zeros_like(self._at("pattern", layer)).scatter(-1, least, 1.0)
                weights = self.model.weights(layer)
                expected = einsum(
                    edited,
                    self._heads_of(self._at("v", layer)),
                    weights.W_O,
                    "batch head query key, batch key head d, head d d_model -> batch query d_model",
                )
                expected = expected if weights.b_O is None else expected + weights.b_O
                with self.model.editing({("pattern", layer): _always(edited)}):
                    moved = self.model.forward(self.batch, captures=[("attn_raw", layer)])["attn_raw", layer]
                    output = self._output()
                yield layer, moved[self.real], expected[self.real]
                shifted = _relative(expected[self.real], self._at("attn_raw", layer)[self.real]) > self.local
                if shifted and torch.equal(output[self.real], clean[self.real]):
                    yield layer, torch.zeros(1), torch.ones(1)

        return self._by_layer("pattern edit", statement, ("pattern",), pairs())

    def _resid_mid_edit(self) -> Check:
        statement = "an edit of resid_mid reaches the MLP and the stream"
        if self.model.architecture.mid_norm is None:
            return Check("resid_mid edit", statement, (), None, detail="a parallel block")
        generator = torch.Generator().manual_seed(_SEED)

        def pairs() -> Iterator[tuple[int, Tensor, Tensor]]:
            for layer in self.layers:
                middle = self._at("resid_mid", layer)
                edited = middle + torch.randn(middle.shape, generator=generator, dtype=torch.float32).to(middle)
                with self.model.editing({("resid_mid", layer): _always(edited)}):
                    found = self.model.forward(self.batch, captures=[("mlp_out", layer), ("resid_post", layer)])
                expected = self._block_end(layer, edited, found["mlp_out", layer])
                yield layer, found["resid_post", layer][self.real], expected[self.real]
                if torch.equal(found["mlp_out", layer], self._at("mlp_out", layer)):
                    yield layer, torch.zeros(1), torch.ones(1)

        return self._by_layer("resid_mid edit", statement, ("resid_mid",), pairs())

    # -- comparing -----------------------------------------------------------------------------------------

    def _by_layer(
        self,
        name: str,
        statement: str,
        points: tuple[str, ...],
        pairs: Iterator[tuple[int, Tensor, Tensor]] | Iterator[tuple[int, Tensor, Tensor, Tensor]],
        tolerance: float | None = None,
    ) -> Check:
        """The worst of many comparisons, and the layer it is in; a fourth entry is rounding to be allowed."""
        limit = self.local if tolerance is None else tolerance
        worst, where, excess = 0.0, -1, -1.0
        with torch.no_grad():
            for layer, ours, theirs, *floor in pairs:
                residual = _relative(ours, theirs)
                allowed = float(floor[0] / theirs.abs().amax()) if floor and theirs.abs().amax() > 0 else 0.0
                over = residual - max(limit, allowed)
                if where < 0 or not over <= excess:
                    worst, where, excess = residual, layer, over
        passed = excess <= 0
        detail = "" if passed else f"layer {where}: off by {worst:.1e} of the largest value"
        return Check(name, statement, () if passed else points, passed, worst, limit, detail)

    def _compare(
        self,
        name: str,
        statement: str,
        points: tuple[str, ...],
        ours: Tensor,
        theirs: Tensor,
        tolerance: float | None = None,
        real: Tensor | None = None,
    ) -> Check:
        """One comparison of two tensors at real tokens."""
        limit = self.whole if tolerance is None else tolerance
        keep = self.real if real is None else real
        residual = _relative(ours[keep], theirs[keep])
        passed = residual <= limit
        detail = "" if passed else f"off by {residual:.1e} of the largest value"
        return Check(name, statement, points, passed, residual, limit, detail)


_ATTN_IN: Final = (
    "attn_in = the input norm of resid_pre, or resid_pre where there is none",
    ("resid_pre", "attn_in"),
)


def _always(value: Tensor) -> Edit:
    return lambda _: value


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """max |ours − theirs| / max |theirs|; NaN where either holds NaN, which no tolerance admits."""
    if ours.numel() == 0:
        return 0.0
    wide = torch.float64
    difference = (ours.to(wide) - theirs.to(wide)).abs().amax()
    if difference == 0:
        return 0.0
    size = theirs.to(wide).abs().amax()
    return float(difference / size) if size > 0 else float("inf")


def _probe_batch(model: HookedModel) -> Batch:
    """Two sequences of seeded random tokens, the second shorter and padded on the right."""
    generator = torch.Generator().manual_seed(_SEED)
    limit = model.position_limit
    length = _PROBE_LENGTH if limit is None else min(_PROBE_LENGTH, limit)
    ids = torch.randint(0, model.n_vocab, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    if length > 3:
        mask[1, -3:] = 0
    return model.encode({"input_ids": ids, "attention_mask": mask})


def _cut(batch: Batch, rows: slice, length: int) -> Batch:
    ids, mask = batch.ids[rows, :length], batch.mask[rows, :length]
    return Batch(ids, mask, tuple(row[:length] for row in batch.tokens[rows]), batch.bos)


def _with_last_token_changed(batch: Batch, n_vocab: int) -> Batch:
    ids = batch.ids.clone()
    ids[:, -1] = (ids[:, -1] + max(1, n_vocab // 2)) % n_vocab
    return Batch(ids, batch.mask, batch.tokens, batch.bos)


def _output_of(output: object) -> Tensor:
    logits = getattr(output, "logits", None)
    found = output.last_hidden_state if logits is None else logits  # type: ignore[attr-defined]
    assert isinstance(found, torch.Tensor)
    return found


def _plain_output(model: HookedModel, batch: Batch) -> Tensor:
    with torch.no_grad():
        return _output_of(call(model.plain, batch))


def _bridge_run(model: HookedModel, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    mask = batch.mask.long() if batch.padded else None
    with torch.no_grad():
        logits, cache = model.bridge.run_with_cache(batch.ids, attention_mask=mask)
    assert isinstance(logits, torch.Tensor)
    return logits, dict(cache.items())  # type: ignore[no-untyped-call]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
