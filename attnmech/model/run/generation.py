"""Continues texts by transformers' `generate`, whose passes apply hooks and interventions, with or without a cache."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from typing import Any, Final, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, GenerationMixin
from transformers.generation.logits_process import (
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_outputs import BaseModelOutput

from ...activations.activations import Activations
from ...basics.arguments import finite_number, flag, shown, whole_number
from ...basics.messages import first_line, warn_user
from ...basics.public import nearest
from ...batch import Batch
from ...errors import InputError
from ...interventions import Intervention
from ...interventions.edits import PointEdit
from ...maths.precision import pass_tolerance
from ...points import PointKey
from ..attention.in_force import Earlier, Pass
from ..attention.local_global import GLOBAL_MASK
from ..inputs.encoders import AnyEncoder
from ..inputs.transcripts import TranscriptEncoder
from ..stack.carried import captured_norms
from ..structure.text_part import text_setting
from .wired import WiredModel, call

_WARPERS: Final[Mapping[str, Callable[[Any], LogitsProcessor]]] = {
    "temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper,
}  # fmt: skip
"""transformers' processors that restrict draws, in the order of its `generate`."""
_OPTIONS: Final = (
    "do_sample", *_WARPERS, "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens",
    "begin_suppress_tokens", "sequence_bias", "exponential_decay_length_penalty", "min_new_tokens", "max_time",
    "stop_strings", "eos_token_id",
)  # fmt: skip
"""The options of transformers' `GenerationConfig` that `generate` passes on."""
_ARGUMENTS: Final = ("logits_processor", "stopping_criteria", "streamer")  # of transformers' `generate`, passed on
_GENERATION_CONFIG: Any = GenerationConfig  # whose constructor has no annotations
_ALL_KEYS: Final = 2**40  # the window of a cache that forgets no keys


@dataclass(frozen=True, repr=False)
class Generated(Batch):
    """A prompt with its continuation, which `model.run` accepts as a batch, and the points captured at each step.

    `is_answer` is True at the tokens that the model wrote, and `answer_ids` are their ids.
    """

    steps: tuple[Activations, ...] = ()
    """The points captured in the pass of each step, in order; step n chose new token n from its last position."""

    def __repr__(self) -> str:
        count, length = self.ids.shape
        return f"Generated({count} × {length} tokens, {len(self.steps)} steps; .tokens has their texts)"

    @classmethod
    def of(cls, batch: Batch, steps: Sequence[Activations] = ()) -> Self:
        """Adds the steps to a batch."""
        return cls(**{field.name: getattr(batch, field.name) for field in fields(Batch)}, steps=tuple(steps))


@dataclass(frozen=True)
class Sampling:
    """How transformers' `generate` chooses tokens, and when it stops."""

    config: GenerationConfig
    arguments: Mapping[str, Any]  # logits processors, stopping criteria and a streamer
    ends: tuple[int, ...]  # the ids that end a text

    @classmethod
    def of(
        cls, options: Mapping[str, Any], count: int, generator: torch.Generator | None, ends: frozenset[int]
    ) -> Self:
        """Checks the options; raises `InputError` for unknown options and invalid values."""
        known = ("stop_at_eos", *_OPTIONS, *_ARGUMENTS)
        for name in options:
            if name not in known:
                raise InputError(
                    f"`generate` has no option `{name}`{nearest(name, known)}. It takes {', '.join(known)}."
                )
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InputError(f"`generator` must be a torch.Generator; got {shown(generator)}.")
        checked = {name: value for name, value in options.items() if name in _OPTIONS and value is not None}
        for name in ("do_sample", "stop_at_eos"):
            flag(name, options.get(name, False))
        if "temperature" in checked:
            checked["temperature"] = finite_number("temperature", checked["temperature"], above=0.0)
        if "top_k" in checked:
            checked["top_k"] = whole_number("top_k", checked["top_k"], least=1)
        if checked.get("top_p", 1) != 1:
            checked["top_p"] = finite_number("top_p", checked["top_p"], above=0.0, below=1.0)
        arguments = {name: options[name] for name in _ARGUMENTS if options.get(name) is not None}
        drawn = {name: checked.pop(name) for name in _WARPERS if name in checked}
        if checked.pop("do_sample", False):
            arguments["logits_processor"] = [
                *arguments.get("logits_processor", ()),
                *[_WARPERS[name](value) for name, value in drawn.items()],
                partial(_draw, generator=generator),
            ]
        own_ends = checked.pop("eos_token_id", sorted(ends))
        stops = tuple([own_ends] if isinstance(own_ends, int) else own_ends) if options.get("stop_at_eos", True) else ()
        try:
            config = _GENERATION_CONFIG(
                max_new_tokens=count, eos_token_id=list(stops) or None, pad_token_id=next(iter(stops), 0),
                do_sample=False, **checked,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise InputError(f"transformers refuses these options of `generate`: {first_line(error)}") from error
        return cls(config, arguments, stops)


def _draw(
    ids: Tensor, scores: Float[Tensor, "batch vocab"], generator: torch.Generator | None
) -> Float[Tensor, "batch vocab"]:
    """Draws each token, and hides all others; a logits processor of transformers."""
    drawn = torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)
    return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)


def require_tokens(batch: Batch, count: int, encoder: AnyEncoder) -> None:
    """Raises `InputError` if the model has too few positions, and for inputs besides tokens."""
    length, limit = batch.ids.shape[1], getattr(encoder, "position_limit", None)
    if batch.target is None and limit is not None and length + count > limit:
        raise InputError(
            f"this model has {limit} positions; a prompt of {length} tokens and {count} new ones do not fit. Give "
            "a smaller `max_new_tokens`."
        )
    others = sorted(batch.extra.keys() - {GLOBAL_MASK})
    if others and not batch.senses and not isinstance(encoder, TranscriptEncoder):
        raise InputError(f"generate takes only tokens; got {', '.join(others)} as well.")


def require_kept(interventions: Sequence[Intervention], earlier: Earlier) -> None:
    """Raises `InputError` for an intervention that changes other rows of earlier tokens as the text grows."""
    for one in interventions:
        rows = one.positions if one.stack != "encoder" else None
        keys = getattr(one.edit, "keys", None) if one.stack not in ("encoder", "cross") else None
        by_row = isinstance(one.edit, PointEdit) or one.point == "pattern"
        if by_row and not any(earlier.feeds_cache(one.point, layer) for layer in one.touches or (None,)):
            continue
        counted = [*(rows or ()), *(keys if isinstance(keys, tuple) else ())]
        if any(position < 0 for position in counted):
            raise InputError(
                f"{one}: a position counted from the end moves with every token, and the cache holds keys and values "
                "computed from earlier rows. Count from the first token, or give generate cache=False: a full pass "
                "for each token."
            )


def _full_cache(config: Any) -> DynamicCache:
    """An empty cache that keeps all keys; in layers with a window, the mask hides those outside."""
    cache = DynamicCache(config=config)
    layer: Any
    for layer in cache.layers:
        if getattr(layer, "is_sliding", False):
            layer.sliding_window = _ALL_KEYS
    return cache


class Continuing:
    """One generation: transformers' `generate` calls a copy of a model's outermost module, and each call is a pass."""

    def __init__(
        self,
        model: WiredModel,
        encoder: AnyEncoder,
        batch: Batch,
        captures: Sequence[PointKey] = (),
        *,
        cache: bool,
        watched: bool,
    ) -> None:
        self.batch = batch if batch.target is not None or not cache else _padded_on_the_left(batch)
        """The text so far, as the model reads it."""
        self.steps: list[Activations] = []  # the points that the passes captured
        self._model, self._encoder, self._captures, self._cache = model, encoder, frozenset(captures), cache
        self._watched = watched
        self._module: Any = model.inner if self._watched else model.plain
        self._start = self._written.ids.shape[1]
        self._began, self._states = False, torch.empty(0)
        stack, last = model.output_stack, model.output_stack.running[-1]
        ends = stack.architecture.streams and last in stack.blocks
        self.earlier = Earlier(last if ends else None) if cache else None

    @property
    def _written(self) -> Batch:
        return self.batch if self.batch.target is None else self.batch.target

    def __call__(self, sampling: Sampling) -> tuple[Batch, Int[Tensor, "batch new"], Bool[Tensor, "batch new"]]:
        """The prompt as read, the new tokens, and which of them are real: those up to an end token.

        Ctrl-C ends the text, with a warning, if it has new tokens.
        """
        prompt, inputs = self.batch, self._inputs()
        try:
            ids: Any = GenerationMixin.generate(
                self._shell(), generation_config=sampling.config, **inputs, **sampling.arguments
            )
        except KeyboardInterrupt:
            ids = self._written.ids
            if ids.shape[1] == self._start:
                raise
            warn_user(f"generation was interrupted; the text has the {ids.shape[1] - self._start} tokens so far.")
        except (TypeError, ValueError) as error:
            if self._began:
                raise
            raise InputError(f"transformers cannot generate with these options: {first_line(error)}") from error
        new = ids[:, self._start :]
        ended = torch.isin(new, torch.tensor(sampling.ends, device=new.device, dtype=new.dtype)).long()
        return prompt, new, ended.cumsum(dim=1) - ended == 0

    def _inputs(self) -> dict[str, Any]:
        """The inputs of transformers' `generate`."""
        ids, config = self._written.ids, self._module.config
        if self.batch.target is None:
            inputs: dict[str, Any] = {"inputs": ids}
            if self._cache:
                inputs |= {"attention_mask": self.batch.mask.long()}
                inputs |= {**self.batch.extra, **self.batch.sensed} if self.batch.senses else {}
        else:
            # The first pass runs the encoder too.
            unused = BaseModelOutput(last_hidden_state=torch.empty(*self.batch.ids.shape[:2], 1, device=ids.device))
            inputs = {"encoder_outputs": unused, "decoder_input_ids": ids}
        if self._cache and self.batch.target is not None:
            inputs["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
        elif self._cache and self._watched:
            inputs["past_key_values"] = _full_cache(config.get_text_config(decoder=True))
        return inputs

    def _shell(self) -> Any:
        """The outermost module, with a `forward` of this generation; the modules inside are the model's."""
        shell = copy.copy(self._module)
        if not isinstance(shell, GenerationMixin):
            shell.__class__ = type(type(shell).__name__, (type(shell), GenerationMixin), {})
        start = int(self._written.ids[0, 0])
        shell.generation_config = _GENERATION_CONFIG(decoder_start_token_id=start, use_cache=self._cache)
        if self._cache and self.batch.target is None:
            shell.forward = wraps(self._module.forward)(lambda **inputs: self._run(**inputs))
        else:
            shell.forward, shell.prepare_inputs_for_generation = self._run, _ids_alone
        return shell

    def _run(self, **inputs: Any) -> Any:
        """One pass, which transformers' `generate` calls."""
        ids = inputs["input_ids" if "input_ids" in inputs else "decoder_input_ids"]
        first, self._began = not self._began, True
        if not first:
            new = ids[:, -1:]
            self.batch = longer(self.batch, new, torch.ones_like(new, dtype=torch.bool), self._encoder)
        if not self._watched:
            with torch.no_grad():
                return self._output(inputs, first)
        past = self._written.ids.shape[1] - 1 if self._cache and not first else 0
        wanted = Pass(self.batch, self._captures, past=past, earlier=self.earlier)
        output = self._model.step(wanted, lambda: self._output(inputs, first))
        if self._captures:
            norms = {} if past else captured_norms(self._model.stacks, wanted.values)
            self.steps.append(Activations(self.batch, wanted.values, unchecked=wanted.skipped, value_norms=norms))
        return output

    def _output(self, inputs: dict[str, Any], first: bool) -> Any:
        if not self._cache:
            return call(self._module, self.batch)
        if self.batch.target is None:
            if self._watched and self._model.in_force.wants("logits", None):
                inputs.pop("logits_to_keep", None)
            return self._module(**inputs)
        cached = {"past_key_values": inputs["past_key_values"], "use_cache": True}
        if first:
            output = call(self._module, self.batch, **cached)
            self._states = output.encoder_last_hidden_state
            return output
        masked = {"attention_mask": self.batch.mask.long()} if self.batch.padded else {}
        states = BaseModelOutput(last_hidden_state=self._states)
        ids = inputs["decoder_input_ids"]
        return self._module(encoder_outputs=states, decoder_input_ids=ids, return_dict=True, **masked, **cached)


def cache_agrees(model: WiredModel, encoder: AnyEncoder, batch: Batch, *, padded: bool, watched: bool) -> bool:
    """Whether steps with a cache give the logits of full passes, on a few tokens; with pictures, on the first text."""
    noted: list[Tensor] = []

    def note(ids: Tensor, scores: Tensor) -> Tensor:
        noted.append(scores)
        return scores

    try:
        probe = batch.texts(torch.tensor([0]))
        if batch.target is None and not batch.senses:
            ids = batch.ids[0][batch.mask[0]].repeat(5)[:5]
            probe = encoder.encode([ids, ids[1:4]] if padded else ids[None])
        chosen = Sampling.of({"logits_processor": [note]}, 3, None, frozenset())
        prompt, new, real = Continuing(model, encoder, probe, cache=True, watched=watched)(chosen)
        whole = continued(prompt, new, real, encoder)
        logits = model.forward(whole, captures=[("logits", None)])["logits", None].float()
    except Exception:  # a family whose cache or whose inputs differ
        return False
    last = (prompt if prompt.target is None else prompt.target).lengths - 1
    texts = torch.arange(len(last), device=last.device)
    full = torch.stack([logits[texts, last + step] for step in range(len(noted))])
    return bool((torch.stack(noted) - full).norm() <= pass_tolerance(model.dtype) * full.norm())


def continued(
    prompt: Batch, new: Int[Tensor, "batch new"], real: Bool[Tensor, "batch new"], encoder: AnyEncoder
) -> Batch:
    """A prompt with its continuation, padded on the right."""
    whole = prompt if prompt.target is None else prompt.target
    lengths = tuple(whole.lengths.tolist())
    if prompt.senses:
        return replace(longer(prompt, new, real, encoder), prompt_lengths=lengths)
    ids, mask = torch.cat((whole.ids, new), dim=1), torch.cat((whole.mask, real), dim=1)
    columns = torch.argsort(~mask, dim=1, stable=True)
    ids, mask = ids.gather(1, columns), mask.gather(1, columns).long()
    if prompt.target is None:
        return replace(encoder.encode({"input_ids": ids, "attention_mask": mask}), prompt_lengths=lengths)
    inputs = dict(prompt.extra)
    if prompt.texts_of is not None:
        inputs |= {"input_ids": prompt.ids, "attention_mask": prompt.mask.long()}
    made = encoder.encode({**inputs, "decoder_input_ids": ids, "decoder_attention_mask": mask})
    assert made.target is not None
    return replace(made, target=replace(made.target, prompt_lengths=lengths))


def _ids_alone(
    ids: Tensor, next_sequence_length: int | None = None, past_key_values: Any = None, encoder_outputs: Any = None,
    **kwargs: Any,
) -> dict[str, Any]:  # fmt: skip
    """Leaves all inputs but the new ids and the cache to `Continuing`."""
    new = ids if next_sequence_length is None else ids[:, -next_sequence_length:]
    return {"decoder_input_ids": new, "past_key_values": past_key_values}


def _padded_on_the_left(batch: Batch) -> Batch:
    if not batch.padded:
        return batch
    columns = torch.argsort(batch.mask.int(), dim=1, stable=True)

    def moved(rows: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(row[at] for at in order) for row, order in zip(rows, columns.tolist(), strict=True))

    ids, mask = batch.ids.gather(1, columns), batch.mask.gather(1, columns)
    return replace(batch, ids=ids, mask=mask, tokens=moved(batch.tokens), pieces=batch.pieces and moved(batch.pieces))


def longer(
    batch: Batch, new: Int[Tensor, "batch new"], real: Bool[Tensor, "batch new"], encoder: AnyEncoder, stack: str = ""
) -> Batch:
    """The batch with further tokens, `real` or padding; in an encoder-decoder, the decoder's text grows."""
    if batch.target is not None:
        return replace(batch, target=longer(batch.target, new, real, encoder, "decoder"))
    labels = [encoder.position_texts(row, stack) for row in new.tolist()]
    extra = {name: pad(value, (0, new.shape[1])) for name, value in batch.extra.items()}
    return replace(
        batch, ids=torch.cat((batch.ids, new), dim=1), mask=torch.cat((batch.mask, real), dim=1), extra=extra,
        tokens=tuple((*row, *further) for row, further in zip(batch.tokens, labels, strict=True)),
        pieces=batch.pieces and tuple((*row, *further) for row, further in zip(batch.pieces, labels, strict=True)),
    )  # fmt: skip


def ends_of(tokenizer: Any, config: Any) -> frozenset[int]:
    """The ids that end a text, according to the tokenizer and the config."""
    ends: set[int] = set()
    for ids in (getattr(tokenizer, "eos_token_id", None), text_setting(config, "eos_token_id")):
        ends.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(ends)
