"""Proves, at the first batch with pictures or sounds, that they are merged with the tokens as transformers merges them.

The points are proven on text at load. Here the same statements are checked on a text of the batch, and on the same text
with other pictures and a few more tokens, beside which the first is padded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import RLock
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...basics.messages import first_line
from ...batch import Batch
from ...errors import CertificateError, InputError
from ...interventions import Intervention
from ...maths.precision import sum_rounding
from ...points import PointKey
from ..attention.observed import LayerEnd
from ..parts.certificate import Certificate, Check
from ..parts.modules import submodule
from ..run.hooked import HookedModel
from ..stack.stack import Stack
from .certify import EVERY_POINT, Statements, still_holds
from .depth import SHORT
from .probe import Compared, Passes, attempt, hidden_states, plain_output
from .remembered import remember, remembered
from .texts import continued

_TYPES: Final = "token_type_ids"
_CLOSED: Final = "rotary_tables"  # the check of a closed form, which knows the positions of text


@dataclass(frozen=True)
class _Proof:
    """How a model merges one kind of inputs with its tokens."""

    certificate: Certificate
    types: Sequence[str]  # the inputs that it needs beside them
    between: frozenset[int]  # the layers before which it adds them to the stream
    check: Check  # the line of the model's certificate


class MergedProof:
    """Proves once how a model merges pictures and sounds with its tokens, and refuses what is not proven."""

    def __init__(self, *, kept: bool = False, again: bool = False) -> None:
        """With `kept`, an earlier process's proof is taken unless it is wanted `again`, and a new one is kept."""
        self._lock, self._kept, self._again = RLock(), kept, again
        self._proofs: dict[str, _Proof] = {}

    @property
    def certificates(self) -> list[Certificate]:
        """The certificates of texts with pictures or sounds, one for each kind of inputs so far."""
        return [proof.certificate for proof in self._proofs.values()]

    def __call__(self, model: HookedModel, batch: Batch) -> frozenset[int]:
        """The layers before which the model adds pictures to the stream, at their tokens (DeepStack).

        Raises `InputError` for inputs that transformers cannot run or that lack token types, and `CertificateError` if
        a statement does not hold, then and at each later batch.
        """
        kinds = {", ".join(sorted(own)): number for number, own in enumerate(batch.senses) if own}
        between = [Context().run(self._proven, model, batch, *kind) for kind in kinds.items()]  # without edits in force
        return frozenset[int]().union(*between)

    def _proven(self, model: HookedModel, batch: Batch, kind: str, number: int) -> frozenset[int]:
        with self._lock, model.in_force.unchecked():
            proof = self._proofs.get(kind)
            # A certificate made since, as for other weights, lacks the check.
            if proof is None or proof.check not in model.certificate.checks:
                proof = self._proofs[kind] = self._prove(model, batch, kind, batch.alone(number))
                others = [check for check in model.certificate.checks if check.statement != proof.check.statement]
                model.certificate = replace(model.certificate, checks=(*others, proof.check))
        _require(proof.types, batch)
        if not proof.certificate.ok:
            first = proof.certificate.failed[0]
            raise CertificateError(
                f"how {model.name} merges {kind} with its tokens is not proven: {first.statement} does not hold "
                f"({first.detail}). Its text alone is certified."
            )
        return proof.between

    def _prove(self, model: HookedModel, batch: Batch, kind: str, text: Batch) -> _Proof:
        """The proof on one text, or that of an earlier process if this text gives the logits of transformers."""
        known = remembered(model, f"merged: {kind}") if self._kept and not self._again else None
        if known is not None and still_holds(Passes(model, SHORT, text)):
            certificate, (types, between) = known
            on = f"proven on {certificate.proven_on}"
        else:
            types = _types_that_matter(model, text)
            _require(types, batch)
            longer = continued(model, text)
            changed = replace(longer, senses=(longer.senses[0], _changed(longer.senses[1])))
            statements = _Merged(_MergedPasses(model, SHORT, changed), model.output_stack)
            read = [*statements.of_model(lambda run, label, layer: statements.read(run, layer)), *statements.of_stack()]
            certificate = Certificate(model.name, model.weights_hash, tuple(read), (), ())
            between = frozenset(statements.between)
            on = "at the first such text"
            if self._kept:
                remember(model, certificate, f"merged: {kind}", (types, sorted(between)))
        statement = f"a text with {kind} is what plain transformers makes of it"
        check = Check("merged", statement, (), certificate.ok, detail=f"{on}, {certificate.verdict}")
        return _Proof(certificate, types, frozenset(between), check)


def _types_that_matter(model: HookedModel, text: Batch) -> list[str]:
    """The inputs by which the model tells the tokens of pictures from others, if they change its output (Gemma 3)."""
    besides = getattr(model.encoder, "besides", None)
    names = sorted(name for name in (besides.taken if besides else ()) if name.endswith(_TYPES))
    typed = {**dict.fromkeys(names, text.is_sensed.long()), **text.extra}

    def output(without: str = "") -> Tensor | Exception:
        extra = {name: value for name, value in typed.items() if name != without}
        made: Tensor | Exception = attempt(partial(plain_output, model, replace(text, extra=extra)))
        return made

    expected = output()
    if isinstance(expected, Exception):
        raise InputError(f"transformers cannot run these inputs: {first_line(expected).rstrip('.')}.") from expected
    bare = {name: output(name) for name in names}
    return [name for name, value in bare.items() if isinstance(value, Exception) or not torch.equal(value, expected)]


def _require(types: Sequence[str], batch: Batch) -> None:
    if lacking := [name for name in types if name not in batch.extra]:
        raise InputError(
            f"this model needs {lacking[0]} beside pictures, as its processor returns them (for mm_token_type_ids: "
            "return_mm_token_type_ids=True)."
        )


class _MergedPasses(Passes):
    @cached_property
    def states(self) -> Any:
        """The output of plain transformers, with what enters each block: no hidden state holds DeepStack's sums."""
        entered = list[Tensor]()

        def keep(module: nn.Module, args: Sequence[Tensor], options: Mapping[str, Any]) -> None:
            entered.append(args[0] if args else options["hidden_states"])

        blocks = submodule(self.model.plain.base_model, self.model.output_stack.architecture.blocks)
        hooks = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in blocks.children()]
        output = attempt(partial(hidden_states, self.model.plain, self.batch))
        for hook in hooks:
            hook.remove()
        return output if isinstance(output, Exception) else replace(output, hidden_states=tuple(entered))


class _Merged(Statements):
    def __init__(self, passes: Passes, stack: Stack) -> None:
        super().__init__(passes, stack)
        self.between: set[int] = set()  # the layers before which something is added to the stream

    def of_stack(self) -> Iterator[Check]:
        if self.passes.runs:
            made = {name: made for name, made in self._made_of_layers.items() if name != _CLOSED}
            yield from self._computed(made | ({"chain": self._chain} if "chain" in made else {}))

    def _chain(self) -> Check:
        """Compares each block's input with the stream before it.

        Between blocks, something may be added at tokens of pictures, if it depends on the pictures alone: it is the
        same in a pass without the first layer's heads.
        """
        statement = "resid_pre = resid_post of the layer before, and what is added there at tokens of pictures"
        whole, heads = self._added(), [(self.layers[0], head) for head in range(self.stack.n_heads)]
        held = self.batch.is_sensed[..., None]
        self.between.update(
            layer for layer, (added, rounding) in whole.items() if bool((held & (added.abs() > rounding)).any())
        )
        without = {}
        if self.between:
            with self.model.intervene(Intervention.zero(heads)):
                without = self._added()

        def comparisons() -> Iterator[Compared]:
            for layer, (added, rounding) in whole.items():
                again, further = without.get(layer, (torch.zeros_like(added), 0.0))
                expected = torch.where(held, again, 0.0)
                yield self.compared(self.short, layer, added, expected, rounding + further, self.batch.mask)

        return self.by_layer("chain", statement, ("resid_pre", "resid_post"), comparisons())

    def _added(self) -> dict[int, tuple[Tensor, Tensor]]:
        """What is added to the stream before each layer but the first, and how far rounding may move it."""
        names, by_layer = [self.stack.point(name) for name in ("resid_pre", "resid_post")], {}
        before = dict[int | None, Tensor]()

        def end(layer: LayerEnd) -> None:
            entered, left = (layer.values[name, layer.layer].to(self.wide) for name in names)
            ended = before.pop(self.stack.before(layer.layer), None)
            if ended is not None:
                sizes = entered.abs() + ended.abs()
                by_layer[layer.layer] = entered - ended, sum_rounding(self.model.dtype) * sizes
            before[layer.layer] = left

        self.model.forward(self.batch, passing=[(name, layer) for name in names for layer in self.layers], ends=[end])
        return by_layer

    def _whole_passes(self) -> dict[str, Callable[[], Check]]:
        return {
            "transformers": self._transformers,
            "alone": self._alone,
            "pixels": self._pixels,
            "logits": self._logits,
        }

    @property
    def _of_bridge(self) -> list[PointKey]:
        return []

    def _alone(self) -> Check:
        """Compares the first text, which is padded here, with the same text alone."""
        statement = "neither other texts of a batch nor their pictures change any output"
        alone, together = self.output(self.batch.alone(0)), self._output[:1, self.batch.mask[0]]
        everywhere = torch.ones(alone.shape[:2], dtype=torch.bool, device=alone.device)
        return self.compare("alone", statement, EVERY_POINT, together, alone, real=everywhere)

    def _pixels(self) -> Check:
        """Changes the pictures: what enters the stream changes at tokens that stand for them, and is else W_E."""
        statement = "embed = what a picture's tokens hold of it, and elsewhere the row of the token embedding"
        other = tuple(map(_changed, self.batch.senses))
        before = self.short.values["embed", None]
        after = self.model.forward(replace(self.batch, senses=other), captures=[("embed", None)])["embed", None]
        moved = (before != after).any(dim=-1)
        text = self.batch.mask & ~self.batch.is_sensed
        rows = self.model.embedding[self.batch.ids] * torch.tensor(self.plan.embed_scale).to(before)
        stays = self.batch.mask & self.batch.is_sensed & (before == rows).all(dim=-1)
        wrong = {
            "no token changes with the pictures": not bool(moved.any()),
            "tokens of the text change with the pictures": bool((moved & text).any()),
            "a token that should stand for a picture keeps its own embedding": bool(stays.any()),
        }
        if any(wrong.values()):
            return Check("pixels", statement, EVERY_POINT, False, detail=next(name for name in wrong if wrong[name]))
        return self.compare("pixels", statement, EVERY_POINT, before, rows, self.local, real=text)


def _changed(senses: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other pictures of the same sizes; whole numbers (sizes, masks) stay."""
    return {name: value.flip(-1) + 0.5 if value.is_floating_point() else value for name, value in senses.items()}
