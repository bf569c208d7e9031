"""Represents masks as rules over positions, so that no [query key] mask is needed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...batch import Batch
from ...errors import UnsupportedModelError

Found = TypeVar("Found")

_LEAST_ROWS: Final = 32  # smaller blocks would read the keys and values of a long text too often

HIDDEN: Final = -1e4  # a number this low, added to a score, hides the key: exp(-10⁴) is 0 in every precision


@dataclass(frozen=True)
class MaskRule:
    """Which keys each query can see: a rule over positions, evaluated for a block of rows."""

    batch: int
    queries: int
    keys: int
    query_offset: int
    key_offset: int
    allows: Callable[..., Tensor]
    padding: Bool[Tensor, "batch key"] | None
    device: torch.device
    bias: Float[Tensor, "#batch #head query key"] | None = None
    """A position bias that the model adds to its scores together with its mask (BEiT)."""
    _known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    ndim = 0  # models that would inspect a mask tensor (Falcon) see that this is not one

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key; False if there is only one query."""
        return self.queries > 1 and not bool(self.visible(range(self.queries))[..., : self.queries].triu(1).any())

    @property
    def shape(self) -> torch.Size:
        """The shape of the mask tensor that the rule replaces; some models check it."""
        return torch.Size((self.batch, 1, self.queries, self.keys))

    def to(self, *_: Any) -> "MaskRule":
        """The rule itself: it has no dtype (MPT calls this method)."""
        return self

    def size(self) -> torch.Size:
        """The same as `shape`."""
        return self.shape

    def __radd__(self, other: Any) -> Any:
        """Adds the rule to postponed scores; to a position bias instead, returns the rule with that bias."""
        if hasattr(other, "hidden_by"):
            return other.hidden_by(self)
        return replace(self, bias=other if self.bias is None else other + self.bias)

    def visible(self, rows: range) -> Bool[Tensor, "batch 1 row key"]:
        """True where the query of a row can see the key."""
        row = torch.arange(rows.start, rows.stop, device=self.device) + self.query_offset
        key = torch.arange(self.keys, device=self.device) + self.key_offset
        sequence = torch.arange(self.batch, device=self.device)
        head = torch.zeros(1, dtype=torch.long, device=self.device)
        seen = self.allows(sequence[:, None, None, None], head[None, :, None, None], row[:, None], key[None, :])
        seen = torch.as_tensor(seen, device=self.device)
        if self.padding is not None:
            seen = seen & self.padding[:, None, None, self.key_offset : self.key_offset + self.keys]
        return seen.expand(self.batch, 1, len(rows), self.keys)

    def span(self, rows: range) -> range:
        """The span of keys for which the mask must be evaluated: all rows see every key before it, and no key after it.

        If one of the rows sees nothing at all (padding on the left), the span reaches to the last key.
        """
        return self._looked_at(rows)[0]

    def hidden(self, rows: range) -> tuple[range, Bool[Tensor, "batch 1 row key"]]:
        """The keys for which the mask must be evaluated (`span`), and True where a row cannot see one.

        For a causal mask, a block of rows has few such keys, and the result is cached for all layers.
        """
        span = self.span(rows)

        def evaluate() -> Tensor:
            return ~self.visible(rows)[..., span.start : span.stop]

        return span, self.once(("hidden", rows), evaluate) if len(span) <= 2 * len(rows) else evaluate()

    def _looked_at(self, rows: range) -> tuple[range, Tensor | None]:
        """`span` and `gathered`, from one evaluation of the mask."""
        return self.once(("looked at", rows), lambda: _looked_at(self.visible(rows)))

    def row_blocks(self, cells: int, *, gathered: bool) -> Iterator[range]:
        """Splits the rows into blocks of roughly `cells` cells (row, key), counting the `gathered` keys or all keys."""
        step = max(_LEAST_ROWS, cells // self.keys)
        for start in range(0, self.queries, step):
            yield range(start, min(self.queries, start + step))

    def gathered(self, rows: range) -> Int[Tensor, " key"] | None:
        """The keys that any of the rows can see, in order, if they are few; None if all keys must be read."""
        return self._looked_at(rows)[1]

    def visible_at(self, rows: range, keys: Int[Tensor, " key"] | None) -> Bool[Tensor, "batch 1 row key"]:
        """`visible` for some of the keys; for all keys if `keys` is None."""
        return self.visible(rows) if keys is None else self.visible(rows)[..., keys]

    def within(self, window: int) -> "MaskRule":
        """The same rule, restricted to the last `window` keys of each query."""

        def allows(text: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return torch.as_tensor(self.allows(text, head, query, key)) & (query - key < window)

        return self.once(("within", window), lambda: replace(self, allows=allows, _known={}))

    def once(self, key: Any, make: Callable[[], Found]) -> Found:
        """The result of `make`, cached for all layers that share this mask."""
        if key not in self._known:
            self._known[key] = make()
        value: Found = self._known[key]
        return value


def _looked_at(visible: Bool[Tensor, "batch 1 row key"]) -> tuple[range, Tensor | None]:
    """The keys for which the mask of a block of rows must be evaluated, and all keys seen, if they are few."""
    by_all, by_any, sees = visible.all(dim=(0, 1, 2)), visible.any(dim=(0, 1, 2)), visible.any(dim=3).all()
    # Read together, since reading makes the CPU wait for the device.
    by_all, by_any, sees = torch.cat([by_all, by_any, sees[None]]).cpu().tensor_split([len(by_all), 2 * len(by_all)])
    partly, seen = (~by_all).nonzero(), by_any.nonzero()[:, 0]
    bound = len(seen) > 0 and bool(sees)
    end = int(seen[-1]) + 1 if bound else visible.shape[-1]
    start = int(partly[0]) if len(partly) else end
    return range(min(start, end), end), seen.to(visible.device) if bound and 2 * len(seen) <= end else None


def mask_rule(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | MaskRule | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> MaskRule:
    """transformers calls this function instead of building a mask; the arguments are transformers'.

    A model inside another may receive the rule that the other has made (PaliGemma), and keeps it.
    """
    if isinstance(attention_mask, MaskRule):
        return attention_mask
    padding = None if attention_mask is None else attention_mask.to(device=device, dtype=torch.bool)
    return MaskRule(
        batch_size, q_length, kv_length, int(q_offset), int(kv_offset), mask_function, padding, torch.device(device)
    )


def everything(text: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key >= 0


def all_allow(rules: Sequence[MaskRule]) -> MaskRule:
    """The rule by which a query sees a key if it does so by every one of these rules."""
    first, *others = rules
    if not others:
        return first

    def allows(text: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = torch.as_tensor(first.allows(text, head, query, key))
        for other in others:
            seen = other.allows(text, head, query - first.query_offset + other.query_offset, key)
            visible = visible & torch.as_tensor(seen)
            if other.padding is not None:
                visible = visible & other.padding[text, key]
        return visible

    return replace(first, allows=allows, _known={})


def rule_of(mask: Any, queries: int, keys: int, batch: Batch) -> MaskRule:
    """Converts the mask that a model passes to its attention to a rule; None and tensors of 0 and −∞ are converted too.

    Raises `UnsupportedModelError` for a tensor with other numbers.
    """
    if isinstance(mask, MaskRule):
        return mask
    texts, device = len(batch.ids), batch.ids.device
    if mask is None:
        return MaskRule(texts, queries, keys, 0, 0, everything, None, device)
    seen = mask if mask.dtype == torch.bool else mask == 0
    adds = mask.dtype != torch.bool and bool((mask[~seen] > HIDDEN).any())
    if mask.ndim != 4 or mask.shape[1] != 1 or adds:
        raise UnsupportedModelError(
            f"this model adds a tensor {list(mask.shape)} to its scores that is not a mask; attnmech cannot split it."
        )
    seen = seen[:, 0].expand(texts, queries, keys)
    return MaskRule(texts, queries, keys, 0, 0, lambda text, head, query, key: seen[text, query, key], None, device)
