"""Makes backward passes follow the rules of layer-wise relevance propagation, for relevance patching.

Formulas: docs/formulas.md#attribution.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...batch import Batch
from ...errors import InputError, UnsupportedModelError
from ...maths.float64 import as_float64
from ...maths.precision import pass_tolerance, step_tolerance
from ...model.parts.norms import epsilon_of, frozen_norm, kind_of
from ...model.parts.weights import bias_of
from ...model.run.hooked import HookedModel


@contextmanager
def relevance_rules(model: HookedModel, batch: Batch) -> Iterator[None]:
    """Makes gradients of the model's runs follow the rules of relevance patching within the `with` block.

    - Norms are linear: the scale 1 / √(variance + ε) is a constant (LN-rule).
    - Patterns are constants, so nothing flows into queries and keys (AH-rule).
    - Activation functions are f(x) = x · c with the constant c = f(x) / x, or 0 where x is 0 (identity rule).
    - Products of two values, such as act(gate) · up, pass on half of the gradient to each (half rule).

    The logits' soft cap and the metric are differentiated as usual. Values stay the same, up to the rounding of
    attention, which computes whole rows. The rules hold in the context of the caller: other threads and tasks that run
    the model get ordinary gradients.

    A forward and a backward pass of the first text of `batch` prove at the start that the rules cover the model: each
    layer must conserve relevance, Σ stream · gradient plus Σ bias · gradient.

    Raises:
        InputError: for models with several stacks, and for models that do not conserve relevance.
        CertificateError: for models whose patterns or streams could not be proven.
    """
    stack = model.output_stack
    if len(model.stacks) > 1:
        raise InputError(
            'method="relp" propagates relevance through one stack, and this model has several; use method="gradient".'
        )
    for name in ("pattern", "resid_pre"):
        if (reason := model.points[stack.point(name)].absent) is not None:
            raise InputError(f'method="relp" needs the point {name!r} ({reason}); use method="gradient".')
    rules = _Rules(model)
    # In an empty context, since relevance is not conserved under the caller's own edits.
    Context().run(_require_conserved, rules, batch.alone(0))
    with rules.in_force():
        yield


_current: ContextVar["_Rules | None"] = ContextVar("relevance rules", default=None)


class _Rules:
    """The rules, as hooks on the modules of one model."""

    def __init__(self, model: HookedModel) -> None:
        self.model = model
        self.leaves = [module for module in model.modules() if not any(True for _ in module.children())]
        self._activations = [module for module in self.leaves if _is_activation(module, model)]
        self._norms = [module for module in self.leaves if _has_epsilon(module)]
        self._known: dict[nn.Module, bool] = {}
        """Whether a module with an ε computes the formula of a norm."""

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Applies the rules in the caller's context; however the block ends, the hooks are gone afterwards."""
        outer, handles = _current.get(), []
        try:
            # The rules come first, so that captured values are part of the graph that they make.
            for module in self.leaves:
                handles.append(module.register_forward_pre_hook(self._at_input))
            for module in self._activations:
                handles.append(module.register_forward_hook(self._at_activation, prepend=True))
            for module in self._norms:
                handles.append(module.register_forward_hook(self._at_norm, prepend=True))
            _current.set(self)
            with self.model.hooks({self.model.output_stack.point("pattern"): Tensor.detach}):
                yield
        finally:
            _current.set(outer)
            for handle in handles:
                handle.remove()

    def applies_to(self, value: object) -> bool:
        """Whether the rules apply in this context to a value, which must be part of a graph."""
        return _current.get() is self and isinstance(value, Tensor) and value.requires_grad

    def _at_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or not self.applies_to(args[0]) or not _is_product(args[0]):
            return None
        return _with_gradient_of(args[0], args[0] / 2), *args[1:]

    def _at_activation(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
        if not args or not self.applies_to(output):
            return None
        x, y = args[0], output.detach()
        return _with_gradient_of(y, x * torch.where(x.detach() == 0, 0, y / x.detach()))

    def _at_norm(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
        if len(args) != 1 or not self.applies_to(output):
            return None
        x, y = args[0].detach(), output.detach()
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.no_grad():
            if module not in self._known:
                self._known[module] = kind_of(module, x) is not None
            if not self._known[module]:
                return None
            frozen = frozen_norm(module, x, wide, y)
        return _with_gradient_of(y, frozen(args[0].to(wide)).to(y.dtype))


class _Surrogate(torch.autograd.Function):
    """Returns the first argument; its gradient is that of the second."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, surrogate: Tensor) -> Tensor:
        # A copy, which the model may change in place.
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def _with_gradient_of(value: Tensor, surrogate: Tensor) -> Tensor:
    result: Tensor = _Surrogate.apply(value.detach(), surrogate)  # type: ignore[no-untyped-call]
    return result


def _is_product(value: Tensor) -> bool:
    """Whether a value was computed as the product of two values of the graph; its parameters do not count."""
    node = value.grad_fn
    if node is None or node.name() != "MulBackward0":
        return False
    return all(factor is not None and not hasattr(factor, "variable") for factor, _ in node.next_functions)


def _has_epsilon(module: nn.Module) -> bool:
    try:
        return epsilon_of(module) > 0
    except UnsupportedModelError:
        return False


def _is_activation(module: nn.Module, model: HookedModel) -> bool:
    """Whether a module applies one nonlinear function f to each entry, with f(0) = 0; identified by its values."""
    if any(parameter.ndim > 1 for parameter in module.parameters()):
        return False
    x = torch.tensor([-2.5, -0.75, 0.0, 0.5, 1.25, 3.0], dtype=model.dtype, device=model.device)
    try:
        with torch.no_grad():
            y, scaled, parts = (module.forward(value) for value in (x, -2 * x, x.view(3, 2)))
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return False
    if not all(isinstance(value, Tensor) for value in (y, scaled, parts)) or parts.numel() != len(x):
        return False
    close = partial(torch.allclose, rtol=pass_tolerance(model.dtype) / 10, atol=0.0)
    return y.shape == x.shape and close(parts.flatten(), y) and bool(y[2] == 0) and not close(scaled, -2 * y)


def _require_conserved(rules: _Rules, text: Batch) -> None:
    model = rules.model
    stack = model.output_stack
    point, cap = stack.point("resid_pre"), stack.architecture.logit_softcap
    entered: list[Tensor] = []
    shifts: list[list[Tensor]] = [[] for _ in stack.layers]
    at_output: list[Tensor] = []

    def at_shift(module: nn.Module, args: Any, output: Any) -> None:
        if not entered or not rules.applies_to(output):
            return
        if (shift := bias_of(module)) is not None and shift.shape == output.shape[-1:]:
            terms, added = shifts[len(entered) - 1], as_float64(shift.detach())
            output.register_hook(lambda gradient: terms.append(as_float64(gradient) * added))

    def measure(logits: Tensor) -> Tensor:
        last = logits[:, -1] if logits.ndim > 2 else logits
        noise = torch.randn(last.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(last)
        value = as_float64(last.detach())
        if cap is not None:
            # The derivative of the soft cap c · tanh(l / c), times l.
            share = value / cap
            value = (cap * (1 - share**2) * share.atanh()).nan_to_num(0.0, 0.0, 0.0)
        at_output.append(as_float64(noise) * value)
        return (last * noise).sum()

    # Registered before the hooks of the rules, which then run first.
    handles = [module.register_forward_hook(at_shift, prepend=True) for module in rules.leaves]
    try:
        with rules.in_force(), model.hooks({point: entered.append}):
            run = model.run(text, [point], gradients_of=measure)
    finally:
        for handle in handles:
            handle.remove()
    assert run.gradients is not None
    streams = [as_float64(run[point, layer]) * as_float64(run.gradients[point, layer]) for layer in stack.layers]
    for place, layer in enumerate(stack.layers):
        entering = _sums([streams[place], *shifts[place]])
        leaving = _sums(streams[place + 1 : place + 2] or at_output)
        change, size = float((entering[0] - leaving[0]).abs()), float((entering[1] + leaving[1]).sqrt())
        if not change <= step_tolerance(model.dtype) * size:
            last = " or the head" if layer == stack.layers[-1] else ""
            raise InputError(
                f'method="relp" needs rules that conserve relevance, and layer {layer}{last} does not conserve it '
                f"(relative difference {change / size:.1g}). There are rules for norms, attention, activation "
                'functions that are modules, and products of two values before a module; use method="gradient".'
            )


def _sums(terms: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    whole = torch.cat([values.flatten() for values in terms])
    return whole.sum(), whole.pow(2).sum()
