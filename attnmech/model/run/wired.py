"""Copies a model and wires attnmech's attention and points into the copy: its stacks, weights and passes."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...batch import Batch
from ...errors import UnsupportedModelError
from ...points import PointKey
from ..attention.attend import IMPLEMENTATION
from ..attention.in_force import InForce, Part, Pass, Watch
from ..attention.observed import LayerObserver, RowObserver
from ..attention.running import Balance, Directions
from ..inputs.embeddings import token_embedding, wire_embeddings
from ..inputs.lengths import trained_length
from ..own.module import OwnModule
from ..parts.modules import submodule
from ..parts.packed import is_packed_projection, packed_projections
from ..parts.settings import require_own_settings
from ..parts.weights import as_stored, at_home, matrix_of
from ..stack.points import ModelPoints, has_head, points_of
from ..stack.skipping import wire_end, wire_part
from ..stack.stack import Stack
from ..stack.wire_inputs import wire_projections, wire_qk_norm, wire_v_norm
from ..stack.wire_outputs import wire_output, wire_stream
from ..structure.architecture import Architecture
from ..structure.copies import copy_of, take_apart, use_attention
from ..structure.passes_apart import reading
from ..structure.signals import KINDS, below_head, size_options
from ..structure.text_part import towers_of

if TYPE_CHECKING:
    from ..parts.certificate import Certificate


ENCODED: Final = "encoder's final stream"  # a batch's entry that replaces its recordings by what their encoder returns


def _set_up_vector_functions() -> None:
    """Makes the first call of each of torch's vector functions in a single thread.

    That call sets up Intel's MKL. If two threads make that call at the same time, one of them occasionally gets less
    exact results, and the certificate then refuses the model.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in (torch.tanh, torch.exp, torch.erf, torch.log, torch.sin, torch.cos):
            function(one)


_set_up_vector_functions()


class WiredModel:
    """A copy of a model's modules, which shares its parameters, with attnmech's attention and points in its layers."""

    certificate: "Certificate"  # the latest certificate of this model, from loading or from a later `certify`
    prove_merged: Callable[[Any, Batch], frozenset[int]]
    """Proves how it merges pictures and sounds with its tokens, at the first batch that holds some."""

    def __init__(self, original: PreTrainedModel, plans: Sequence[Architecture]) -> None:
        self.config = original.config
        self.original = original
        """The caller's model, which is never changed."""
        self.in_force = InForce()
        """The hooks and interventions that are active in the current context."""
        self._model = copy_of(original)
        # Hooks and replaced forwards refer to the modules that hold them. Unless they are removed, weights stay in
        # memory until Python collects reference cycles.
        weakref.finalize(self, take_apart, self._model).atexit = False
        base: nn.Module = self._model.base_model
        self.towers = towers_of(base, [plan.blocks for plan in plans]) if plans[0].reads == "tokens" else []
        """The paths of its parts that read pictures or sounds."""
        use_attention(self._model, IMPLEMENTATION, self.towers)
        for plan in plans:
            if plan.adapt is not None:
                plan.adapt(base)
        self.stacks = {plan.stack: wired_stack(base, plan, self.in_force) for plan in plans}
        first = next(iter(self.stacks.values()))
        self.architecture: Architecture = first.architecture
        self.n_layers, self.n_heads, self.n_kv_heads = first.n_layers, first.n_heads, first.n_kv_heads
        self.d_model, self.d_head = first.d_model, first.d_head
        self.device = first.weights(first.layers[0]).W_Q.device
        packed = next(packed_projections(self._model), None) is not None
        self._directions = Directions(first.d_model, self.device, packed=packed)
        self.points: ModelPoints = points_of(list(self.stacks.values()), has_logits=has_head(self._model))
        self.further_embeddings: tuple[str, ...] = ()
        """Labels of the embeddings besides the tokens' ("position embedding"), which a pass can capture too."""
        if self.embeds_tokens:
            self.further_embeddings = wire_embeddings(
                self._model, plans, self.in_force, self.d_model, is_point=self.points["embed"].absent is None
            )

    @property
    def inner(self) -> PreTrainedModel:
        """The copy of the caller's model that its passes run."""
        return self._model

    @property
    def is_own(self) -> bool:
        """Whether it is a user's own module instead of a transformers model."""
        return self.architecture.reads == "tensors"

    @property
    def reads_tokens(self) -> bool:
        """Whether its positions are tokens of a vocabulary, in every stack."""
        return self.architecture.reads == "tokens"

    @property
    def writes_tokens(self) -> bool:
        """Whether the positions of its output are tokens of a vocabulary."""
        return self.output_stack.architecture.reads == "tokens"

    @property
    def embeds_tokens(self) -> bool:
        """Whether one of its modules embeds tokens of a vocabulary."""
        return self.reads_tokens or (not self.is_own and "decoder" in self.stacks)

    @property
    def causal(self) -> bool:
        """Whether tokens in the output's stack can attend only to themselves and to earlier tokens."""
        return self.output_stack.architecture.causal

    @property
    def output_stack(self) -> Stack:
        """The stack from which the model's output comes."""
        return self.stacks["decoder"] if "decoder" in self.stacks else next(iter(self.stacks.values()))

    @cached_property
    def trained_length(self) -> int | None:
        """The number of tokens of the longest texts that trained its positions, if it also takes longer ones."""
        if not self.embeds_tokens:
            return None
        rotates = any(stack.architecture.rotary is not None for stack in self.stacks.values())
        return trained_length(self.config, rotates=rotates, model=self._model)

    @property
    def longest_text(self) -> int | None:
        """The largest number of tokens that it has positions for and was trained on; None without limit."""
        limits = [limit for limit in (self.architecture.position_limit, self.trained_length) if limit is not None]
        return min(limits, default=None)

    @property
    def last_stream(self) -> tuple[str, int]:
        """The point where the stream leaves the last block; without a stream, `attn_raw` of the last layer."""
        if not self.output_stack.architecture.streams:
            return self.output_stack.point("attn_raw"), self.output_stack.layers[-1]
        return self.output_stack.point("resid_post"), self.output_stack.layers[-1]

    @property
    def dtype(self) -> torch.dtype:
        """The current precision of the weights."""
        return self._weight.dtype

    @property
    def _weight(self) -> Tensor:
        """A weight of what its passes run; a model's first one may belong to a part that reads pictures."""
        return token_embedding(self._model) if self.embeds_tokens else next(self._model.parameters())

    @property
    def refused(self) -> dict[str, str]:
        """The points whose meaning the certificate could not prove, each with the reason."""
        certificate = self.__dict__.get("certificate")
        return {} if certificate is None else certificate.refused

    def forward(
        self,
        batch: Batch,
        *,
        captures: Iterable[PointKey] = (),
        rows: Sequence[RowObserver] = (),
        ends: Sequence[LayerObserver] = (),
        passing: Iterable[PointKey] = (),
        layers: Iterable[tuple[str, int]] | None = None,
        part: Part | None = None,
    ) -> dict[PointKey, Tensor]:
        """One pass without gradients; returns the captured values and feeds the observers.

        `rows` are called with every block of rows, and `ends` with every finished layer, of the (stack, layer) in
        `layers` or of all; they can read the points in `passing`, which are freed when their layer ends. `part` says
        which blocks run. Besides points, `captures` may name `further_embeddings`, with None as the layer.
        """
        if layers is None:
            layers = [(stack.label, layer) for stack in self.stacks.values() for layer in stack.layers]
        places = {layer: place for place, layer in enumerate(layers)}
        watch = Watch(places, rows, ends, frozenset(passing)) if rows or ends else Watch()
        wanted = Pass(batch, frozenset(captures), watch, part=part)
        with torch.no_grad():
            self._run_pass(wanted)
        return wanted.values

    def output(self, batch: Batch) -> Any:
        """transformers' output for a batch, computed with attnmech's attention."""
        with torch.no_grad(), self._checked(Pass(batch)):
            output = call(self._model, batch)
            if getattr(output, "logits", None) is not None:
                output.logits = self.in_force.visit("logits", None, output.logits)
            return output

    def step(self, wanted: Pass, run: Callable[[], Any]) -> Any:
        """transformers' output for one step of a generation, which `run` computes with this model's modules."""
        with torch.no_grad(), self._checked(wanted):
            output = run()
            output.logits = self.in_force.visit("logits", None, output.logits)
            return output

    def _run_pass(self, wanted: Pass) -> Tensor | None:
        """Runs a pass, which stores the captured values in `wanted`; returns the logits if they were computed."""
        with self._checked(wanted):
            # With a large vocabulary, the logits may take longer than all layers together.
            needs_head = wanted.gradients or self.in_force.wants("logits", None)
            output = call(self._model if needs_head else below_head(self._model), wanted.batch)
            logits = getattr(output, "logits", None)
            if logits is not None:
                logits = self.in_force.visit("logits", None, logits)
        missed = (wanted.captures | wanted.watch.points) - set(wanted.values) - wanted.reached
        if missed:
            name, layer = sorted(missed, key=str)[0]
            raise UnsupportedModelError(
                f"point {name!r} of layer {layer} was never reached: this model's attention or block does not use the "
                f"modules of its family, so attnmech cannot read it."
            )
        return logits

    @contextmanager
    def _checked(self, wanted: Pass) -> Iterator[None]:
        """Makes `wanted` the current pass; raises `ExactnessError` if its values do not add up."""
        require_own_settings(self._weight.device)
        if self.in_force.checks:
            between = self.prove_merged(self, wanted.batch) if any(wanted.batch.senses) else frozenset[int]()
            columns = [stack.column for stack in self.stacks.values()]
            wanted.balance = Balance(self._directions, columns, self.dtype, self.refused, between)
        with self.in_force.recording(wanted):
            yield
        balance = wanted.balance
        if balance is None or (failure := balance.unbalanced(wanted.batch.later(wanted.past))) is None:
            return
        if failure.identity == "heads":
            stack = self.stacks[failure.stack]
            out = stack.module(failure.layer, stack.architecture.out)
            if self._directions.forget_changed((failure.stack, failure.layer), out):
                balance.skip("heads", failure.stack, failure.layer, "the weights were just changed")
                return
        raise failure.error(wanted.batch.later(wanted.past), wanted.past)

    @cached_property
    def plain(self) -> PreTrainedModel:
        """The caller's model as transformers itself runs it: another copy, in eval mode.

        It has the caller's attention implementation, or the other implementation if the caller's does not compute what
        was trained.
        """
        plain, trusted = copy_of(self.original), self.architecture.trusted
        return plain if trusted is None else use_attention(plain, trusted, self.towers)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters under transformers' names."""
        return self._model.named_parameters()

    def modules(self) -> Iterator[nn.Module]:
        """The modules that its passes run, with the head."""
        return self._model.modules()

    @property
    def embedding(self) -> Float[Tensor, "vocab d_model"]:
        """The token embedding W_E."""
        return at_home(self._model.get_input_embeddings(), token_embedding(self._model))

    @property
    def unembedding(self) -> Float[Tensor, "vocab d_model"] | None:
        """W_U, one row per token; None if the model has no such matrix."""
        head: nn.Module | None = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if head is not None and is_packed_projection(head):
            return matrix_of(head).T
        return None if head is None else as_stored(head, "weight")

    @property
    def base(self) -> nn.Module:
        """The model without its head."""
        return self._model.base_model


def wired_stack(base: nn.Module, architecture: Architecture, in_force: InForce) -> Stack:
    """A stack with every point of every block connected to `in_force`.

    In each pass, `in_force` decides whether a value is edited or captured.
    """
    stack = Stack(base, architecture, in_force)
    if not architecture.within:
        for place, block in enumerate(stack.places):
            wire_part(stack, place, block)
    for layer, block in stack.blocks.items():
        wire_stream(stack, layer, block)
        wire_projections(stack, layer, block)
        wire_qk_norm(stack, layer, block)
        wire_v_norm(stack, layer, submodule(block, architecture.attention))
        wire_output(stack, layer, block)
    if not architecture.within:
        wire_end(stack)
    return stack


def call(model: nn.Module, batch: Batch, **options: Any) -> Any:
    """One forward pass of a model on a batch, by default without a cache."""
    if isinstance(model, OwnModule):
        return model(batch.extra, **options)
    inputs: dict[str, Any] = {**batch.extra, **options}
    without = {} if "use_cache" in options else {"use_cache": False}
    if (states := inputs.pop(ENCODED, None)) is not None:
        inputs["encoder_outputs"] = (states,)
    elif KINDS.keys() & batch.extra.keys():
        inputs |= size_options(model, batch.extra)
        if batch.target is None:
            with reading(batch):
                return model(**inputs, return_dict=True)
    else:
        inputs |= {"input_ids": batch.ids, **batch.sensed}
        # Some models place pictures by the mask (Qwen2.5-Omni).
        if batch.padded or batch.senses:
            inputs["attention_mask"] = batch.mask.long()
    if batch.target is not None:
        inputs["decoder_input_ids"] = batch.target.ids
        if batch.target.padded:
            inputs["decoder_attention_mask"] = batch.target.mask.long()
    with reading(batch):
        return model(**inputs, **without, return_dict=True)
