"""A few probe tokens on one model, run through ours, transformers' and TransformerLens's; and how runs are compared."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from einops import repeat
from torch import Tensor

from ..activations import Batch
from ..axes import spread
from ..errors import UnsupportedModelError
from ..maths.precision import pass_tolerance, step_tolerance, table_tolerance
from ..points import PointKey
from .attention import RowBlock
from .certificate import Check, LensHook
from .hooked import HookedModel, call
from .stack import Stack
from .tap import Edit

_LENGTH: Final = 24
_EDITED_LAYERS: Final = 6
"""An edit takes a forward pass of its own: it is tried in so many layers; all else is checked in every layer."""

SEED: Final = 20

Compared = tuple[int, Tensor, Tensor] | tuple[int, Tensor, Tensor, Tensor]
"""A layer, what was found in it, what must be, and by how much rounding alone may part them."""


class Probe:
    """The probe's runs on one model, and comparisons that become checks."""

    def __init__(self, model: HookedModel, stack: Stack) -> None:
        self.model = model
        self.stack, self.plan = stack, stack.architecture
        self.layers = list(stack.layers)
        self.edited = [self.layers[place] for place in spread(stack.n_layers, _EDITED_LAYERS)]
        self.local = step_tolerance(model.dtype)
        self.whole = pass_tolerance(model.dtype)
        self.tables = table_tolerance(model.dtype)
        self.batch = probe_batch(model)
        self.real = self.batch.queries(stack.label).mask
        self.real_keys = self.batch.keys(stack.label).mask
        self.lens_hooks: tuple[LensHook, ...] = ()
        self.blocks: dict[int, RowBlock] = {}
        self.values: dict[PointKey, Tensor] = {}

    def run(self, captures: Sequence[PointKey]) -> dict[PointKey, Tensor]:
        def keep(block: RowBlock) -> None:
            if block.stack == self.stack.label:
                self.blocks.setdefault(block.layer, block)

        return self.model.forward(self.batch, captures=captures, rows=[keep])

    def output(self, batch: Batch | None = None) -> Tensor:
        """What our model puts out: logits or, without a head, the last stream after the final norm."""
        return output_of(self.model.output(batch or self.batch))

    def by_token(self, batch: Batch) -> Tensor:
        """Our output if it has a row a token, else (a head for whole texts) the last stream."""
        output = self.output(batch)
        if _has_row_a_token(output, self.written(batch)):
            return output
        last = self.model.last_stream
        return self.model.forward(batch, captures=[last])[last]

    def plain_by_token(self, batch: Batch) -> list[Tensor]:
        """The same of plain transformers; empty where its output has no row a token."""
        output = plain_output(self.model, batch)
        return [output] if _has_row_a_token(output, self.written(batch)) else []

    def written(self, batch: Batch) -> Batch:
        """The tokens that the output has rows for."""
        return batch.queries(self.model.output_stack.label)

    def at(self, name: str, layer: int) -> Tensor:
        """A captured point of the stack under proof."""
        return self.values[self.stack.point(name), layer]

    def comparable(self, name: str, layer: int | None, value: Tensor) -> Tensor:
        """Where two models must agree: at real tokens, and of scores at visible pairs."""
        if layer is not None and name in ("scores", "pattern"):
            mask = self.blocks[layer].mask
            visible = mask.visible(range(mask.queries)) & self.real[:, None, :, None]
            return visible.expand_as(value)
        real = self.written(self.batch).mask if layer is None else self.real
        if name in ("k", "v", "k_rot"):
            real = self.real_keys
        return real if value.shape[:2] == real.shape else torch.ones_like(value, dtype=torch.bool)

    def by_head(self, value: Tensor) -> Tensor:
        group = self.stack.n_heads // self.stack.n_kv_heads
        return repeat(value, "batch position kv d_head -> batch position (kv group) d_head", group=group)

    def by_layer(
        self,
        name: str,
        statement: str,
        points: tuple[str, ...],
        pairs: Iterable[Compared],
        tolerance: float | None = None,
    ) -> Check:
        """The worst of many comparisons, and the layer it is in; a fourth entry is rounding to be allowed."""
        limit = self.local if tolerance is None else tolerance
        worst, where, excess = 0.0, -1, -1.0
        with torch.no_grad():
            for layer, ours, theirs, *floor in pairs:
                residual = relative(ours, theirs)
                allowed = float(floor[0] / theirs.abs().amax()) if floor and theirs.abs().amax() > 0 else 0.0
                over = residual - max(limit, allowed)
                if where < 0 or not over <= excess:
                    worst, where, excess = residual, layer, over
        passed = excess <= 0
        detail = "" if passed else f"layer {where}: off by {worst:.1e} of the largest value"
        return Check(name, statement, () if passed else points, passed, worst, limit, detail)

    def compare(
        self,
        name: str,
        statement: str,
        points: tuple[str, ...],
        ours: Tensor,
        theirs: Tensor,
        tolerance: float | None = None,
        real: Tensor | None = None,
    ) -> Check:
        """One comparison of two tensors at real tokens, or whole where they hold one row a text."""
        limit = self.whole if tolerance is None else tolerance
        keep = self.comparable(name, None, ours) if real is None else real
        residual = relative(ours[keep], theirs[keep])
        passed = residual <= limit
        detail = "" if passed else f"off by {residual:.1e} of the largest value"
        return Check(name, statement, points, passed, residual, limit, detail)


def _has_row_a_token(output: Tensor, tokens: Batch) -> bool:
    return output.ndim == 3 and output.shape[:2] == tokens.mask.shape


def always(value: Tensor) -> Edit:
    """An edit that puts one value in place of whatever stands there."""
    return lambda _: value


def relative(ours: Tensor, theirs: Tensor) -> float:
    """max |ours − theirs| / max |theirs|; NaN where either holds NaN, which no tolerance admits."""
    if ours.numel() == 0:
        return 0.0
    wide = torch.float64
    difference = (ours.to(wide) - theirs.to(wide)).abs().amax()
    if difference == 0:
        return 0.0
    size = theirs.to(wide).abs().amax()
    return float(difference / size) if size > 0 else float("inf")


def probe_batch(model: HookedModel) -> Batch:
    """Two sequences of seeded random tokens, the second shorter and padded on the right; or two random images."""
    generator = torch.Generator().manual_seed(SEED)
    if model.grid is not None:
        return model.encode(torch.randn((2, *model.grid.shape), generator=generator))
    limit = model.architecture.position_limit
    length = _LENGTH if limit is None else min(_LENGTH, limit)
    ids = torch.randint(0, model.n_vocab, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    if length > 1:
        # One token only: in a sliding window, rows of padding that see nothing are NaN in transformers' float64.
        mask[1, -1] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if "decoder" in model.stacks:
        given["decoder_input_ids"] = torch.randint(0, model.n_vocab, (2, length - 2), generator=generator)
    return model.encode(given)


def one_text(batch: Batch, number: int, length: int) -> Batch:
    """The beginning of one text of a batch."""
    rows = slice(number, number + 1)
    target = None if batch.target is None else one_text(batch.target, number, batch.target.ids.shape[1])
    return Batch(batch.ids[rows], batch.mask[rows], batch.tokens[rows], batch.bos, target).beginning(length)


def each_token_changed(batch: Batch, n_vocab: int) -> Batch:
    """Copies of one text, the n-th with another token at place n + 1; of the decoder's tokens, where there are any."""
    if batch.target is not None:
        target = each_token_changed(batch.target, n_vocab)
        copies = len(target.ids)
        whole = replace(batch, ids=batch.ids.expand(copies, -1), mask=batch.mask.expand(copies, -1))
        return replace(whole, tokens=batch.tokens * copies, target=target)
    copies = batch.ids.shape[1] - 1
    ids = batch.ids.repeat(copies, 1)
    places = torch.arange(copies, device=ids.device)
    ids[places, places + 1] = (ids[places, places + 1] + max(1, n_vocab // 2)) % n_vocab
    return replace(batch, ids=ids, mask=batch.mask.expand(copies, -1), tokens=batch.tokens * copies)


def output_of(output: object) -> Tensor:
    """The logits or, of a model without a head, the last stream after the final norm."""
    logits = getattr(output, "logits", None)
    found = getattr(output, "last_hidden_state", None) if logits is None else logits
    if not isinstance(found, torch.Tensor):
        raise UnsupportedModelError(
            f"expected a model that puts out logits or its last stream; this one puts out a {type(output).__name__}. "
            "Load what stands below its head: am.load(model.base_model)."
        )
    return found


def plain_output(model: HookedModel, batch: Batch) -> Tensor:
    with torch.no_grad():
        return output_of(call(model.plain, batch))


def plain_run(model: HookedModel, batch: Batch, implementation: str, **options: Any) -> Any:
    with torch.no_grad():
        return call(model.plain_in(implementation), batch, output_hidden_states=True, **options)


def attempt(run: Callable[[], Any]) -> Any:
    """What a run returns, or the exception that it raises: a model that transformers cannot run so is not at fault."""
    try:
        return run()
    except Exception as error:
        return error


def bridge_run(model: HookedModel, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    mask = batch.mask.long() if batch.padded else None
    inputs = batch.extra.get("pixel_values", batch.ids)
    options: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
    with torch.no_grad():
        logits, cache = model.bridge.run_with_cache(inputs, return_cache_object=True, **options)
    assert isinstance(logits, torch.Tensor)
    return logits, dict(cache.items())  # type: ignore[no-untyped-call]
