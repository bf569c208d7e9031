"""Makes one `Batch` from the tensors for a user's own module, with names for its positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Final, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from ...basics.arguments import listed, shown, strings
from ...basics.messages import first_line
from ...batch import Batch
from ...errors import InputError
from ..attention.replaced_mha import further_keys, hides, pad_nested
from ..own.call import CallForm
from ..own.module import OwnModule
from ..structure.copies import copy_of
from ..structure.traced import tensors_of
from .images import PatchGrid

Labels: TypeAlias = Sequence[str] | Mapping[str, Sequence[str]] | PatchGrid | None
"""Names of positions: one list, a list each for "source" and "target", or the grid of patches of an image."""

SIDES: Final = ("source", "target")  # of a module with cross-attention: keys come from source, queries from target


@dataclass(frozen=True)
class OwnInputs:
    """The arguments of `am.load` that describe a user's module."""

    example: Any
    labels: Labels = None


@dataclass(frozen=True)
class _Seen:
    """The sizes and the padding mask in one call of an attention."""

    texts: int
    queries: int
    keys: int
    key_padding_mask: Tensor | None


class OwnEncoder:
    """Turns the arguments of the module into a batch."""

    special: Final[frozenset[int]] = frozenset()  # empty, since these positions are not special tokens of a tokenizer

    def __init__(self, original: OwnModule, labels: Labels, device: torch.device, example: Any) -> None:
        self.form: CallForm = original.form
        self.device = device
        self.grid = labels if isinstance(labels, PatchGrid) else None
        self._labels = _by_side(labels)
        self._layers = original.layers
        watched = copy_of(original)
        assert isinstance(watched, OwnModule)
        self._watched = watched
        self._seen: list[_Seen] = []
        # One call of the watched copy at a time, since it records into `_seen`.
        self._calling = Lock()
        pad_nested(watched)
        for module in watched.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.register_forward_pre_hook(self._watch, with_kwargs=True)
        modules = dict(watched.named_modules(remove_duplicate=False))
        for path in (*original.products, *original.described):
            modules[path].register_forward_pre_hook(self._watch_own, with_kwargs=True)
        self._further: dict[str, tuple[str, ...]] = {}
        for layer in self._layers:
            module = modules[layer.attention]
            if isinstance(module, nn.MultiheadAttention):
                self._further[layer.stack] = further_keys(module)
        sizes = {name: list(value.shape) for name, value in self.form.rows(example).items()}
        self._shapes = ", ".join(f"{name} was {size}" for name, size in sizes.items())
        self._known: dict[object, list[_Seen]] = {}
        self._pads = False
        self.example = self.encode(example)
        # The places of padding may then differ between inputs of the same shape.
        self._pads = any(call.key_padding_mask is not None for call in self._seen)

    def encode(self, inputs: Any, bos: bool | None = None) -> Batch:
        """One batch from the arguments of the module: a tensor, a tuple of arguments, or a mapping of them.

        Its positions are those of the sequences over which the module attends, found by calling it. `key_padding_mask`
        shows which positions are padding.
        """
        if bos is not None:
            raise InputError("bos is only for texts; this model is given tensors. Leave it out.")
        if isinstance(inputs, str) or (isinstance(inputs, list) and inputs and isinstance(inputs[0], str)):
            raise InputError(
                f"this model is a module of your own and takes tensors, as in its example; got {shown(inputs)}."
            )
        return self.batch({name: self._placed(value) for name, value in self.form.rows(inputs).items()})

    def batch(self, rows: Mapping[str, Tensor]) -> Batch:
        """The batch made from tensors with one row per text."""
        texts = self.form.texts(rows)
        seen = self._call(rows)
        for call in seen:
            if call.texts != texts:
                raise InputError(
                    f"the attention runs on {call.texts} sequences for {texts} texts; give one row per text, as in the "
                    "example."
                )
        source, target = self._sides(seen, texts)
        assert source is not None
        further = {stack: labels for stack, labels in self._further.items() if labels}
        return replace(source, target=target, extra=dict(rows), further=further)

    @property
    def probe(self) -> Batch:
        """The texts of the example, followed by the same texts with noise."""
        return self.batch(self.form.perturbed(self.example.extra))

    def position_texts(self, ids: Sequence[int], stack: str = "") -> tuple[str, ...]:
        """The labels of the source's positions; in stacks whose queries come from the target, those of the target."""
        names = self._names("target" if stack in ("decoder", "cross") else "source", max(ids, default=0) + 1)
        return tuple(names[place] for place in ids)

    def _placed(self, value: Tensor) -> Tensor:
        wanted = next(self._watched.parameters()).dtype
        value = value.detach()
        return value.to(self.device, wanted) if value.is_floating_point() else value.to(self.device)

    def _call(self, rows: Mapping[str, Tensor]) -> list[_Seen]:
        shapes = tuple((name, tuple(value.shape)) for name, value in rows.items())
        if not self._pads and shapes in self._known:
            return self._known[shapes]
        with self._calling, torch.no_grad():
            self._seen = []
            try:
                self._watched(rows)
            except InputError:
                raise
            except Exception as error:  # modules raise many kinds of errors for wrong inputs
                raise InputError(
                    f"the module does not run on these inputs: {type(error).__name__}: {first_line(error)}. In its "
                    f"example, argument {self._shapes}."
                ) from error
            seen = self._known[shapes] = self._seen
        return seen

    def _watch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        arguments = dict(zip(("query", "key", "value", "key_padding_mask"), args, strict=False)) | kwargs
        query, key = arguments["query"], arguments["key"]
        batched = query.ndim == 3
        first = 0 if not batched or module.batch_first else 1
        texts, queries = (1, len(query)) if not batched else (query.shape[first], query.shape[1 - first])
        keys = len(key) if not batched else key.shape[1 - first]
        padding = arguments.get("key_padding_mask")
        padding = padding[None] if padding is not None and padding.ndim == 1 else padding
        self._seen.append(_Seen(texts, queries, keys, padding))

    def _watch_own(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        x = next(tensors_of((*args, *kwargs.values())))
        self._seen.append(_Seen(x.shape[0], x.shape[1], x.shape[1], None))

    def _sides(self, seen: Sequence[_Seen], texts: int) -> tuple[Batch | None, Batch | None]:
        """The positions of the source and, if there is cross-attention, of the target."""
        known_sides: dict[str, tuple[int, Tensor | None]] = {}

        def is_(side: str, length: int, padding: Tensor | None) -> None:
            known = known_sides.get(side)
            if known is not None and known[0] != length:
                raise InputError(f"the {side} has {known[0]} positions in one layer and {length} in another.")
            if known is None or known[1] is None:
                known_sides[side] = (length, padding)

        for layer, call in zip(self._layers, seen, strict=True):
            if layer.stack == "cross":
                is_("source", call.keys, call.key_padding_mask)
                is_("target", call.queries, None)
            else:
                is_("target" if layer.stack == "decoder" else "source", call.queries, call.key_padding_mask)
        sides = [self._side(side, *known_sides[side], texts) if side in known_sides else None for side in SIDES]
        return sides[0], sides[1]

    def _side(self, side: str, length: int, padding: Tensor | None, texts: int) -> Batch:
        ids = torch.arange(length, device=self.device).expand(texts, -1)
        mask: Bool[Tensor, "batch position"] = torch.ones_like(ids, dtype=torch.bool)
        if padding is not None:
            mask = (~hides(padding)).to(self.device).expand(texts, -1)
        return Batch(ids, mask, (self._names(side, length),) * texts, None)

    def _names(self, side: str, length: int) -> tuple[str, ...]:
        names = self._labels.get(side)
        if names is None:
            return tuple(str(number) for number in range(length))
        # If there is a class token, it precedes the patches.
        names = names[1:] if self.grid is not None and len(names) == length + 1 else names
        if len(names) < length:
            raise InputError(f"`labels` must name all {length} positions of the {side}; got {len(names)} labels.")
        return tuple(names[:length])


def _by_side(labels: Labels) -> dict[str, tuple[str, ...]]:
    if labels is None:
        return {}
    if isinstance(labels, PatchGrid):
        return {"source": labels.labels}
    if isinstance(labels, Mapping):
        unknown = sorted(map(str, set(labels) - set(SIDES)))
        if unknown:
            raise InputError(
                f'`labels` must be a list of strings, or a mapping of "source" and "target" to one each; got also '
                f"{', '.join(unknown)}."
            )
        return {side: tuple(strings("labels", names)) for side, names in labels.items()}
    return {"source": tuple(strings("labels", listed("labels", labels, "a list of strings")))}
