"""Postpones the products of a module that multiplies queries, keys and values itself, so that `attend` computes them.

Inside the module, a product q kᵀ is not computed but recorded, with every step that follows: factors, added tensors
(masks, position biases), hidden keys, softmax. When the softmax is multiplied by v, the record goes to
`attention_of_site`, the function that transformers would call. So the scores of all heads are never in memory at once,
unless the model makes other tensors of that shape (MPNet's position bias, the zeros that GPT-NeoX-Japanese starts
from). Any other use of a product computes it as written; the pass is then refused, since `attend` never saw that
attention.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...errors import UnsupportedModelError
from ..parts.mask import HIDDEN, MaskRule, all_allow, everything
from .attend import attention_of_site
from .replaced_mha import joined_masks

_PRODUCTS: Final = ("matmul", "__matmul__", "bmm")
_OF_THE_SHAPE: Final = frozenset(
    ("size", "dim", "ndimension", "numel", "is_floating_point", "is_complex", "element_size", "__len__", "__hash__")
)
_ATTRIBUTES: Final = frozenset(("shape", "ndim", "dtype", "device", "is_cuda", "layout", "requires_grad", "is_nested"))
_IN_PLACE: Final = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow", "and", "or"))
_AS_IT_IS: Final = frozenset(("contiguous", "float", "double", "half", "bfloat16", "to", "type_as", "type", "clone"))


class Taker(ABC):
    """Receives the recorded products."""

    @abstractmethod
    def take(self, made: "Product", values: Tensor) -> Tensor:
        """Computes z from a recorded pattern and v."""

    @abstractmethod
    def give_up(self, step: str) -> None:
        """Is called when a step that is not part of attention needs the value of a product."""


@dataclass(frozen=True, eq=False)
class Product:
    """factor · q kᵀ + added terms, as recorded up to the module's current step."""

    left: Float[Tensor, "*#batch query d_head"]
    right: Float[Tensor, "*#batch d_head key"]
    taker: Taker
    factor: float = 1.0
    added: tuple[Tensor, ...] = ()
    rules: tuple[MaskRule, ...] = ()
    seen: tuple[Tensor, ...] = ()  # tensors that are True where a key is not hidden
    zeroed: tuple[Tensor, ...] = ()
    """Tensors that are True where a score or, after the softmax, a weight was multiplied by 0; those keys must be
    hidden."""
    by_head: tuple[int, int] | None = None  # the numbers of texts and heads, if `left` and `right` have one axis for it
    is_pattern: bool = False

    def value(self) -> Tensor:
        scores = self.factor * (self.left @ self.right)
        scores = scores if self.by_head is None else _unflattened(scores, self.by_head)
        for term in self.added:
            scores = scores + term
        for rule in self.rules:
            scores = scores.masked_fill(~rule.visible(range(rule.queries)), torch.finfo(scores.dtype).min)
        for shown in self.seen:
            scores = scores.masked_fill(~shown, torch.finfo(scores.dtype).min)
        values = scores.softmax(dim=-1) if self.is_pattern else scores
        for zeroed in self.zeroed:
            values = values.masked_fill(zeroed, 0.0)
        return values

    def of_texts(self, texts: int) -> "Product":
        """The product with separate axes for texts and heads, whether or not the module has separated them."""
        if self.left.ndim == 4 or self.by_head is not None:
            return self
        by_head = (texts, self.left.shape[0] // texts)
        return replace(self, by_head=by_head, added=tuple(_with_heads(term, by_head) for term in self.added))

    def queries_and_keys(self) -> tuple[Tensor, Tensor]:
        """q and k `[batch head position d_head]`."""
        q, k = self.left, self.right.mT
        return (q, k) if self.by_head is None else (_unflattened(q, self.by_head), _unflattened(k, self.by_head))

    def masked(self) -> tuple[MaskRule, Tensor | None]:
        """The mask as a rule, and the sum of the other terms that are added to the scores.

        Raises `UnsupportedModelError` if the module sets weights of visible keys to 0.
        """
        q, k = self.queries_and_keys()
        texts, _, queries, _ = q.shape
        masked = joined_masks(texts, queries, k.shape[2], q.device, self.added, self.seen)
        alone = masked.rule.allows is everything and self.rules
        rule = all_allow([*self.rules, *([] if alone else [masked.rule])])
        for zeroed in self.zeroed:
            if bool((zeroed & rule.visible(range(queries))).any()):
                raise UnsupportedModelError(
                    "its attention multiplies scores or weights of visible keys by 0, which attnmech cannot reproduce."
                )
        return rule, masked.position


class Postponed(Tensor):
    """A tensor that stands for a product not yet computed: it has a shape, but no memory."""

    _made: Product

    @classmethod
    def of(cls, made: Product, like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> "Postponed":
        """A postponed product of this shape, with the dtype and device of `like`."""
        empty = torch.empty((), dtype=dtype or like.dtype, device=like.device).expand(tuple(shape))
        postponed: Postponed = empty.as_subclass(cls)
        postponed._made = made
        return postponed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one step: a step of attention is recorded; any other computes the product first."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if (made := _step(func, args, kwargs)) is not None:
                return made
            name = getattr(func, "__name__", "")
            if name in _OF_THE_SHAPE or (name == "__get__" and getattr(func.__self__, "__name__", "") in _ATTRIBUTES):
                return func(*args, **kwargs)
            if _in_place(name) or kwargs.get("inplace") or kwargs.get("out") is not None:
                # It would change only a computed copy of the product.
                what = f"its attention changes scores in place by {name!r}"
                raise UnsupportedModelError(f"{what}, which attnmech cannot split.")
            args, kwargs = pytree.tree_map_only(Postponed, partial(computed, step=name), (args, kwargs))
            return func(*args, **kwargs)

    def hidden_by(self, rule: MaskRule) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            shape, made = self.shape, self._made
            if made.is_pattern or len(shape) != 4 or shape[2:] != (rule.queries, rule.keys):
                raise UnsupportedModelError(
                    f"its attention adds a mask of {[rule.batch, 1, rule.queries, rule.keys]} to {list(shape)}."
                )
            return Postponed.of(replace(made, rules=(*made.rules, rule)), self, shape)

    def masked_fill(self, mask: Any, value: Any) -> Tensor:
        """torch's method, which takes no rule; a rule hides the keys that it does not allow (MPT)."""
        return self.hidden_by(mask) if isinstance(mask, MaskRule) else super().masked_fill(mask, value)


def computed(postponed: Postponed, step: str) -> Tensor:
    """The value of a postponed product, computed for a step that is not part of attention."""
    with torch._C.DisableTorchFunctionSubclass():
        postponed._made.taker.give_up(step)
        made, shape, dtype = postponed._made, postponed.shape, postponed.dtype
        return made.value().reshape(shape).to(dtype)


def _in_place(name: str) -> bool:
    return name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _step(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a function applied to postponed products; None if the function is not a step of attention."""
    name = getattr(func, "__name__", "")
    plain = name.removeprefix("__i") if name in _IN_PLACE else name
    step = _STEPS.get(plain.strip("_"))
    made = None if step is None else step(name, *args, **kwargs)
    if _in_place(name) and isinstance(made, Postponed):
        args[0]._made = made._made
        return args[0]
    return made


def _like(scores: Postponed, **changes: Any) -> Postponed:
    return Postponed.of(replace(scores._made, **changes), scores, scores.shape)


def _number(value: Any) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Tensor) and not isinstance(value, Postponed) and value.numel() == 1 and value.ndim == 0:
        return float(value)
    return None


def _by_four(scores: Postponed, value: Tensor) -> Tensor | None:
    """Gives a tensor that is combined with scores their four axes, or three if texts and heads share an axis."""
    if isinstance(value, Postponed) or value.ndim > scores.ndim:
        return None
    whole = value.reshape((1,) * (scores.ndim - value.ndim) + tuple(value.shape))
    if any(size not in (1, length) for size, length in zip(whole.shape, scores.shape, strict=True)):
        return None
    by_head = scores._made.by_head
    return _with_heads(whole, by_head) if scores.ndim == 3 and by_head is not None else whole


def _times(name: str, one: Any, other: Any, *_: Any) -> Any:
    scores, value = (one, other) if isinstance(one, Postponed) else (other, one)
    if scores._made.is_pattern:
        return None
    if (number := _number(value)) is not None:
        return _scaled(scores, number)
    zero = _by_four(scores, value) if isinstance(value, Tensor) else None
    if zero is None or zero.ndim < 4 or not bool(((zero == 0) | (zero == 1)).all()) or scores._made.added:
        return None
    return _like(scores, zeroed=(*scores._made.zeroed, zero == 0))


def _divided(name: str, scores: Any, by: Any, *_: Any, **options: Any) -> Any:
    number = _number(by)
    if options or not isinstance(scores, Postponed) or scores._made.is_pattern or number is None:
        return None
    return _scaled(scores, 1 / number)


def _scaled(scores: Postponed, number: float) -> Postponed | None:
    made = scores._made
    if made.seen or made.rules:
        return None
    return _like(scores, factor=made.factor * number, added=tuple(number * term for term in made.added))


def _plus(name: str, one: Any, other: Any, *_: Any, alpha: float | int = 1.0) -> Any:
    scores, value = (one, other) if isinstance(one, Postponed) else (other, one)
    if scores._made.is_pattern or alpha != 1 or not isinstance(value, Tensor):
        return None
    term = _by_four(scores, value)
    return None if term is None else _like(scores, added=(*scores._made.added, term))


def _minus(name: str, one: Any, other: Any, *_: Any, alpha: float | int = 1.0) -> Any:
    plain = isinstance(one, Postponed) and isinstance(other, Tensor) and not isinstance(other, Postponed)
    return _plus(name, one, -other, alpha=alpha) if plain else None


def _filled(name: str, scores: Any, hidden: Any, value: Any) -> Any:
    number = _number(value)
    mask = _by_four(scores, hidden) if isinstance(scores, Postponed) and isinstance(hidden, Tensor) else None
    if mask is None or number is None or mask.ndim < 4:
        return None
    made = scores._made
    if made.is_pattern:
        return _like(scores, zeroed=(*made.zeroed, mask)) if number == 0 else None
    return _like(scores, seen=(*made.seen, ~mask)) if number <= HIDDEN else None


def _where(name: str, condition: Any, shown: Any, otherwise: Any) -> Any:
    return _filled(name, shown, ~condition, otherwise) if isinstance(condition, Tensor) else None


def _at_least(name: str, scores: Any, least: Any = None, *_: Any, **options: Any) -> Any:
    """max(score, lowest number), which is the score; None for any other bound."""
    number = _number(least)
    return scores if not options and number is not None and number <= torch.finfo(torch.float16).min else None


def _softmax(name: str, scores: Any, dim: Any = None, *_: Any, **options: Any) -> Any:
    if not isinstance(scores, Postponed) or scores._made.is_pattern or dim not in (-1, scores.ndim - 1):
        return None
    return Postponed.of(replace(scores._made, is_pattern=True), scores, scores.shape, options.get("dtype"))


def _dropped(name: str, pattern: Any, p: float | int = 0.5, training: bool = True, *_: Any, **__: Any) -> Any:
    if not p or not training:
        return pattern
    raise UnsupportedModelError("it applies attention dropout although it is in eval mode.")


def _same(name: str, value: Any, *args: Any, **options: Any) -> Any:
    """A change of precision, which has no effect: `attend` computes in float32 at least."""
    if not isinstance(value, Postponed):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        changed = getattr(value[..., :1, :1].as_subclass(Tensor), name)(*args, **options)
    return Postponed.of(value._made, changed, value.shape) if changed.dtype.is_floating_point else None


def _reshaped(name: str, value: Any, *shape: Any) -> Any:
    """A reshape that merges the axes of texts and heads, or separates them."""
    if not isinstance(value, Postponed):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        new = tuple(torch.empty((), device="meta").expand(value.shape).reshape(*shape).shape)
    made = value._made
    if new == tuple(value.shape):
        return value
    if new[-2:] != tuple(value.shape[-2:]) or {len(new), value.ndim} != {3, 4}:
        return None
    if made.left.ndim == 3 and made.by_head is None and len(new) == 4:
        made = made.of_texts(new[0])
    elif len(new) == 4 and new[:2] != tuple(made.by_head or made.left.shape[:2]):
        return None
    return Postponed.of(made, value, new)


def _with_heads(term: Tensor, by_head: tuple[int, int]) -> Tensor:
    return _unflattened(term, by_head) if term.shape[0] > 1 else term[None]


def _unflattened(value: Tensor, by_head: tuple[int, int]) -> Tensor:
    return value.reshape(*by_head, *value.shape[1:])


def _weighted(name: str, pattern: Any, values: Any) -> Any:
    if not isinstance(pattern, Postponed) or not pattern._made.is_pattern or isinstance(values, Postponed):
        return None
    if not isinstance(values, Tensor) or values.ndim != pattern.ndim:
        return None
    return pattern._made.taker.take(pattern._made, values)


_STEPS: Final[Mapping[str, Callable[..., Any]]] = {
    **dict.fromkeys(("mul", "rmul"), _times),
    **dict.fromkeys(("div", "true_divide", "truediv"), _divided),
    **dict.fromkeys(("add", "radd"), _plus),
    "sub": _minus,
    "masked_fill": _filled,
    "where": _where,
    **dict.fromkeys(("max", "maximum", "clamp_min"), _at_least),
    "softmax": _softmax,
    "dropout": _dropped,
    **dict.fromkeys(("view", "reshape"), _reshaped),
    **dict.fromkeys(("matmul", "bmm"), _weighted),
    **dict.fromkeys(_AS_IT_IS, _same),
}


class _Postponing(TorchFunctionMode):
    """Intercepts torch's functions, and postpones products of tensors that have heads."""

    def __init__(self, taker: Taker) -> None:
        super().__init__()
        self._taker = taker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _PRODUCTS and not kwargs and _are_by_head(*args):
            return Postponed.of(
                Product(args[0], args[1], self._taker), args[0], (*args[0].shape[:-1], args[1].shape[-1])
            )
        if name == "baddbmm" and set(kwargs) <= {"batch1", "batch2", "beta", "alpha"}:
            start, left, right = (*args, kwargs.get("batch1"), kwargs.get("batch2"))[:3]
            if _are_by_head(left, right):
                made = Product(left, right, self._taker, float(kwargs.get("alpha", 1.0)))
                scores = Postponed.of(made, left, (*left.shape[:-1], right.shape[-1]))
                term = float(kwargs.get("beta", 1.0)) * start
                return _like(scores, added=(term,)) if bool(term.any()) else scores
        return func(*args, **kwargs)


def _are_by_head(left: Any, right: Any, *_: Any) -> bool:
    if isinstance(left, Postponed) or isinstance(right, Postponed):
        return False
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or left.ndim not in (3, 4):
        return False
    if left.ndim != right.ndim or left.shape[0] != right.shape[0] or not left.is_floating_point():
        return False
    return left.ndim == 3 or right.shape[1] in (1, left.shape[1])


def through_attend(module: nn.Module) -> nn.Module:
    """Makes an attention module of a private copy that multiplies q, k and v itself use `attend`; returns it."""
    return through(attention_of_site, module)


def through(attention: Callable[..., tuple[Tensor, None]], module: nn.Module) -> nn.Module:
    """Makes a module call `attention`, which has the signature of transformers' attention functions, once in each pass.

    A pass raises `UnsupportedModelError` if the module attends in another way, or more than once.
    """
    forward = module.forward

    def ours(*args: Any, **kwargs: Any) -> Any:
        texts = next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        handed = _Handed(attention, module, texts)
        with _Postponing(handed):
            try:
                made = forward(*args, **kwargs)
            finally:
                handed.raise_its_error()
        handed.require_one()
        return made

    module.forward = ours
    return module


class _Handed(Taker):
    """Hands the products of one call of a module to an attention function."""

    def __init__(self, attention: Callable[..., tuple[Tensor, None]], module: nn.Module, texts: int) -> None:
        self._attention, self._module, self._texts = attention, module, texts
        self._count, self._steps = 0, list[str]()
        self._error: Exception | None = None

    def take(self, made: Product, values: Tensor) -> Tensor:
        try:
            z = self._attended(made, values)
        except Exception as error:
            self._error = error
            raise
        self._count += 1
        return z

    def raise_its_error(self) -> None:
        """Raises the attention's error: operators take a TypeError as a reason to try the other operand."""
        if self._error is not None:
            raise self._error

    def _attended(self, made: Product, values: Tensor) -> Tensor:
        made = made.of_texts(self._texts)
        q, k = made.queries_and_keys()
        rule, position = made.masked()
        v = values if values.ndim == 4 else _unflattened(values, (self._texts, -1))
        z, _ = self._attention(self._module, q, k, v, rule, scaling=made.factor, position_bias=position)
        by_head = z.transpose(1, 2)
        return by_head if values.ndim == 4 else by_head.flatten(0, 1)

    def give_up(self, step: str) -> None:
        self._steps.append(step)

    def require_one(self) -> None:
        """Raises `UnsupportedModelError` unless one pattern was multiplied by values."""
        if self._count == 1:
            return
        name = type(self._module).__name__
        if self._count:
            raise UnsupportedModelError(f"{name} attends {self._count} times in one call.")
        what = f"does {self._steps[0]!r} with the product of queries and keys" if self._steps else "does not attend"
        raise UnsupportedModelError(
            f"{name} {what} on these inputs, so it is not softmax(scale · q·k + added terms) v, the only form that "
            f"attnmech reads."
        )


@contextmanager
def watching_for_products(model: nn.Module) -> Iterator["Watching"]:
    """Finds the modules in which a pass run in the block multiplies a softmax of products by values."""
    watching = Watching()
    with ExitStack() as hooks, _Postponing(watching):
        for module in model.modules():
            if next(module.parameters(), None) is not None:
                hooks.enter_context(module.register_forward_pre_hook(watching.entering))
                hooks.enter_context(module.register_forward_hook(watching.leaving))
        yield watching


class Watching(Taker):
    """Records what a pass does with products."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []  # the innermost ones, with parameters, that multiply a softmax by values
        self._under_way: list[nn.Module] = []

    def entering(self, module: nn.Module, args: Any) -> None:
        self._under_way.append(module)

    def leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._under_way.pop()

    def take(self, made: Product, values: Tensor) -> Tensor:
        self.modules.append(self._under_way[-1])
        pattern = made.value().to(values.dtype)
        return (pattern if pattern.ndim == values.ndim else pattern.flatten(0, 1)) @ values

    def give_up(self, step: str) -> None:
        pass
