"""Finds the stacks and layers of a user's module from one traced call of `example`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...basics.messages import first_line
from ...errors import AttnmechError, InputError, UnsupportedModelError
from ..structure.architecture import Architecture
from ..structure.copies import copy_of
from .call import CallForm
from .module import EachUse, OwnModule, first_output
from .stacks import described_stack, named_by_user, stacks_of
from .trace import Traced, above, named, traced

_MOST_SHARED: Final = 8  # modules that are called several times may be nested this deep


def read_own(
    module: nn.Module, example: Any, architecture: Architecture | None = None
) -> tuple[OwnModule, tuple[Architecture, ...]]:
    """A private copy of a user's module, with the architecture of each stack, read from a trace or given by the user.

    Raises `InputError` for an example that does not run or has no batch axis, and `UnsupportedModelError` for a module
    without attention, or with attention that is not a list of layers; the message says what was found.
    """
    plain = _private(module, CallForm.of(example))
    if architecture is not None:
        plain.named = named_by_user(plain, architecture)
    form, axis = _with_batch(plain, example, _run_plain(plain, example))
    plain.form, plain.output_axis = form, axis
    rows = form.perturbed(form.rows(example))
    _unroll(plain, rows)
    trace = traced(plain, rows)
    if architecture is not None:
        return plain, (described_stack(plain, trace, architecture),)
    layers, plans = stacks_of(plain, trace)
    plain.build(layers)
    return plain, plans


def _private(module: nn.Module, form: CallForm) -> OwnModule:
    if isinstance(module, torch.jit.ScriptModule) or any(
        isinstance(part, torch.jit.ScriptModule) for part in module.modules()
    ):
        raise UnsupportedModelError(
            f"{type(module).__name__} is scripted or traced by torch.jit, and nothing inside it can be replaced; give "
            f"the original Python module."
        )
    if next(module.parameters(), None) is None:
        raise UnsupportedModelError(f"{type(module).__name__} is a module without attention: it has no parameters.")
    private = copy_of(OwnModule(module, form))
    assert isinstance(private, OwnModule)
    return private


def _run_plain(plain: OwnModule, example: Any) -> Tensor:
    """The module's output for the example, when it is called as the user calls it."""
    form = plain.form
    try:
        with torch.no_grad():
            args, kwargs = form.arguments(form.rows(example))
            return first_output(plain.module(*args, **kwargs))
    except AttnmechError:
        raise
    except Exception as error:  # modules raise many kinds of errors for a wrong call
        _check_masks(plain, example)
        raise InputError(
            f"{type(plain.module).__name__} does not run on `example`: {type(error).__name__}: {first_line(error)}. "
            "Give what the module is called with: a tensor, a tuple of arguments, or a mapping of keyword arguments."
        ) from error


def _check_masks(plain: OwnModule, example: Any) -> None:
    """Raises `InputError` for a mask of the wrong shape; torch's own message may not mention the mask."""
    try:
        traced(plain, plain.form.rows(example))
    except InputError as error:
        raise InputError(f"{type(plain.module).__name__} does not run on `example`: {error}") from error
    except Exception:  # the module raises its own error later
        return


def _with_batch(plain: OwnModule, example: Any, output: Tensor) -> tuple[CallForm, int | None]:
    """The form with the batch axis of every tensor, and the output's batch axis, proved by a batch of two examples."""
    form = plain.form
    tensors = form.tensors(example)
    first = traced(plain, form.rows(example))
    _require_attention(plain, first)
    texts = {use.texts for use in first.uses}
    if len(texts) > 1:
        one, other = next((a, b) for a in first.uses for b in first.uses if a.texts != b.texts)
        raise UnsupportedModelError(
            f"all attention must run on the same batch, but {named(one.path)} runs on {one.texts} sequences and "
            f"{named(other.path)} on {other.texts}. Load the parts of the module one by one."
        )
    (count,) = texts
    batched = any(use.batched for use in first.uses)
    why = ""
    for candidate in form.candidates(tensors, count, batched=batched):
        try:
            axis = _proven(plain, candidate, example, first, output)
        except Exception as error:  # modules raise many kinds of errors if the reading is wrong
            why = why or first_line(error)
            continue
        return candidate, axis
    raise UnsupportedModelError(
        f"no batch axis was found in `example`: its attention runs on {count} sequences, and no axis of that length "
        f"can be repeated{f' ({why})' if why else ''}. Give an example with one row per text; a module that folds "
        "other axes into the batch can be loaded below that step."
    )


class _WrongReadingError(Exception):
    pass


def _proven(plain: OwnModule, form: CallForm, example: Any, first: Traced, output: Tensor) -> int | None:
    rows = form.rows(example)
    twice = {name: torch.cat((value, value)) if form.is_by_text(name) else value for name, value in rows.items()}
    plain_form, plain.form = plain.form, form
    try:
        second = traced(plain, twice)
    finally:
        plain.form = plain_form
    if len(second.uses) != len(first.uses) or not all(
        two.z.shape == (2 * one.texts, *one.z.shape[1:])
        and all(torch.allclose(half, one.z, rtol=1e-3, atol=1e-4, equal_nan=True) for half in two.z.chunk(2))
        for one, two in zip(first.uses, second.uses, strict=True)
    ):
        raise _WrongReadingError
    whole = first_output(second.output.whole)
    if whole.ndim == output.ndim + 1:  # the axis was inserted
        grown = [at for at in range(whole.ndim) if whole.shape[at] == 2 and _without(whole.shape, at) == output.shape]
    else:
        grown = [
            at for at in range(min(whole.ndim, output.ndim)) if whole.shape[at] == 2 * output.shape[at]
            and _without(whole.shape, at) == _without(output.shape, at)
        ]  # fmt: skip
    return grown[0] if grown else None


def _without(shape: Sequence[int], at: int) -> tuple[int, ...]:
    return (*shape[:at], *shape[at + 1 :])


def _require_attention(plain: OwnModule, trace: Traced) -> None:
    if trace.uses:
        return
    kind = type(plain.module).__name__
    if any(isinstance(part, nn.MultiheadAttention) for part in plain.modules()):
        raise UnsupportedModelError(f"{kind} holds an nn.MultiheadAttention, but `example` never reaches it.")
    raise UnsupportedModelError(
        f"{kind} is a module without attention: it holds no nn.MultiheadAttention, and makes no call of "
        f"scaled_dot_product_attention. If it has its own attention code, describe it: am.load(module, example=..., "
        f"architecture=am.Architecture(...))."
    )


def _unroll(plain: OwnModule, rows: Mapping[str, Tensor]) -> None:
    """Replaces each module with attention that the pass calls several times by one copy for each call."""
    for _ in range(_MOST_SHARED):
        trace = traced(plain, rows)
        attending = {path for use in trace.uses for path in (use.path, *above(use.path))}
        counts = Counter(
            call.path for call in trace.calls if call.path in attending and not isinstance(call.module, EachUse)
        )
        twice = sorted((path for path, count in counts.items() if count > 1), key=lambda path: path.count("."))
        if not twice:
            return
        shared = plain.get_submodule(twice[0])
        copies = EachUse(shared, counts[twice[0]], named(twice[0]))
        for path, part in list(plain.named_modules(remove_duplicate=False)):
            if part is shared:
                plain.set_submodule(path, copies)
    raise UnsupportedModelError(
        f"modules that are called several times are nested more than {_MOST_SHARED} deep in "
        f"{type(plain.module).__name__}; load its parts one by one."
    )
