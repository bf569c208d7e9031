"""Continues a text under hooks and interventions, with a full pass for every token and no cache."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ...activations.activations import Activations
from ...basics.arguments import finite_number, flag, shown, whole_number
from ...basics.public import nearest
from ...batch import Batch
from ...errors import InputError
from ...points import PointKey, PointName, parse, split_stack
from ..attention.local_global import GLOBAL_MASK
from ..inputs.encoders import AnyEncoder
from ..inputs.transcripts import TranscriptEncoder
from ..structure.text_part import text_setting

OPTIONS: Final = ("do_sample", "temperature", "top_k", "top_p", "stop_at_eos")
"""The sampling options of generation by attnmech's passes, besides the generator."""


@dataclass(frozen=True, repr=False)
class Generated(Batch):
    """A prompt with its continuation, which `model.run` accepts as a batch, and the points captured at each step."""

    steps: tuple[Activations, ...] = ()
    """The points captured in the pass of each step, in order; step n chose new token n from its last position."""

    def __repr__(self) -> str:
        count, length = self.ids.shape
        return f"Generated({count} × {length} tokens, {len(self.steps)} steps; .tokens has their texts)"

    @classmethod
    def of(cls, batch: Batch, steps: Sequence[Activations] = ()) -> Self:
        """Adds the steps to a batch."""
        return cls(**{field.name: getattr(batch, field.name) for field in fields(Batch)}, steps=tuple(steps))

    def joined(self, point: str = "pattern") -> Activations:
        """The attention that led to each token: the newest row of every step, joined as if one pass had computed them.

        >>> text = model.generate("The keys", 5, points=["cross.pattern"])    # doctest: +SKIP
        >>> text.joined("cross.pattern").show("cross.pattern")                # doctest: +SKIP

        The rows of the prompt come from the first step. The label of a row is the token at its position; the token that
        it predicts labels the next row. Unless hooks change from step to step, the result equals `run` on all but the
        last token.

        Raises `InputError` unless the point is a pattern or scores, captured at every step.
        """
        name = parse(point)[0]
        stack, bare = split_stack(name)
        if bare not in ("pattern", "scores") or stack == "encoder":
            raise InputError(f"steps can be joined at the pattern or the scores of the generated text; got {point!r}.")
        if not self.steps:
            raise InputError(f"no step captured anything; give generate points=[{point!r}].")
        first, *later = self.steps
        joined: dict[PointKey, Tensor] = {}
        for layer in sorted(layer for held, layer in first.values if held == name and layer is not None):
            rows = [first[name, layer], *(step[name, layer][:, :, -1:] for step in later)]
            width, hidden = rows[-1].shape[-1], 0.0 if bare == "pattern" else torch.finfo(rows[0].dtype).min
            joined[name, layer] = torch.cat([pad(row, (0, width - row.shape[-1]), value=hidden) for row in rows], dim=2)
        if not joined:
            raise InputError(f"the steps hold no {point!r}; give generate points=[{point!r}].")
        last = self.steps[-1]
        return Activations(last.batch, joined, model=last.model, lens_points=last.lens_points)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    stop_at_eos: bool = True
    generator: torch.Generator | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any], generator: torch.Generator | None) -> Self:
        """Checks the options; raises `InputError` for unknown options and invalid values."""
        for name in options:
            if name not in OPTIONS:
                raise InputError(
                    f"`generate` has no option `{name}`{nearest(name, OPTIONS)}. With hooks, `points` or `generator`, "
                    f"and for encoder-decoders, it takes {', '.join(OPTIONS)}."
                )
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InputError(f"`generator` must be a torch.Generator; got {shown(generator)}.")
        checked = {**options}
        for name in ("do_sample", "stop_at_eos"):
            if name in checked:
                flag(name, checked[name])
        if "temperature" in checked:
            checked["temperature"] = finite_number("temperature", checked["temperature"], above=0.0)
        if checked.get("top_k") is not None:
            checked["top_k"] = whole_number("top_k", checked["top_k"], least=1)
        if checked.get("top_p") is not None and checked["top_p"] != 1:
            checked["top_p"] = finite_number("top_p", checked["top_p"], above=0.0, below=1.0)
        return cls(**checked, generator=generator)

    def choose(self, logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, " batch"]:
        """The token with the highest logit, or a draw from softmax(logits / temperature) among `top_k` or within mass
        `top_p`.
        """
        if not self.do_sample:
            return logits.argmax(dim=-1)
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[:, -1:], -torch.inf)
        if self.top_p is not None:
            ranked, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
            # Keeps the tokens that have less than `top_p` of the mass before them.
            outside = ranked.cumsum(dim=-1) - ranked >= self.top_p
            logits = logits.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)
        return torch.multinomial(logits.softmax(dim=-1), 1, generator=self.generator)[:, 0]


@dataclass(frozen=True)
class Continuing:
    """A model that continues texts, step by step."""

    run: Callable[[Batch, Sequence[PointName]], Activations]
    encode: Callable[[Mapping[str, Tensor]], Batch]
    encoder: AnyEncoder
    ends: frozenset[int]
    """The ids that end a text."""

    def __call__(self, batch: Batch, count: int, sampling: Sampling, points: Sequence[PointName]) -> Generated:
        """Adds up to `count` tokens to each text; stops early if all texts have ended.

        Raises `InputError` if the model has too few positions, and for inputs besides tokens.
        """
        self._require_fitting(batch, count)
        keeps_logits = any(parse(point) == ("logits", None) for point in points)
        asked = list(points) if keeps_logits else [*points, "logits"]
        ends = torch.tensor(sorted(self.ends), device=batch.ids.device, dtype=torch.long)
        ended = torch.zeros(len(batch.ids), dtype=torch.bool, device=batch.ids.device)
        steps = []
        for _ in range(count):
            acts = self.run(batch, asked)
            chosen = sampling.choose(acts.logits[:, -1])
            if points:
                kept = {key: value for key, value in acts.values.items() if keeps_logits or key != ("logits", None)}
                steps.append(acts if keeps_logits else replace(acts, values=kept, value_norms={}))
            batch = self._longer(batch, chosen, ended, ends)
            ended = ended | torch.isin(chosen, ends)
            if sampling.stop_at_eos and bool(ended.all()):
                break
            if not sampling.stop_at_eos:
                ended = torch.zeros_like(ended)
        return Generated.of(batch, steps)

    def _require_fitting(self, batch: Batch, count: int) -> None:
        length, limit = batch.ids.shape[1], getattr(self.encoder, "position_limit", None)
        if batch.target is None and limit is not None and length + count > limit:
            raise InputError(
                f"this model has {limit} positions; a prompt of {length} tokens and {count} new ones do not fit. Give "
                "a smaller `max_new_tokens`."
            )
        others = sorted(batch.extra.keys() - {GLOBAL_MASK})
        if others and not batch.senses and not isinstance(self.encoder, TranscriptEncoder):
            raise InputError(f"generate takes only tokens; got {', '.join(others)} as well.")

    def _longer(
        self, batch: Batch, chosen: Int[Tensor, " batch"], ended: Bool[Tensor, " batch"], ends: Tensor
    ) -> Batch:
        """The batch with one more token per text, which is padding if the text had ended."""
        whole = batch if batch.target is None else batch.target
        token = torch.where(ended, ends[0], chosen) if len(ends) else chosen
        ids = torch.cat((whole.ids, token[:, None]), dim=1)
        mask = torch.cat((whole.mask, ~ended[:, None]), dim=1).long()
        if batch.senses:
            extra = {name: torch.nn.functional.pad(value, (0, 1)) for name, value in batch.extra.items()}
            (labels,) = zip(*(self.encoder.position_texts([one]) for one in token.tolist()), strict=True)
            tokens = tuple((*row, label) for row, label in zip(batch.tokens, labels, strict=True))
            pieces = batch.pieces and tuple((*row, label) for row, label in zip(batch.pieces, labels, strict=True))
            return replace(batch, ids=ids, mask=mask.bool(), tokens=tokens, pieces=pieces, extra=extra)
        if batch.target is None:
            return self.encode({"input_ids": ids, "attention_mask": mask})
        inputs = dict(batch.extra)
        if batch.texts_of is not None:
            inputs |= {"input_ids": batch.ids, "attention_mask": batch.mask.long()}
        return self.encode({**inputs, "decoder_input_ids": ids, "decoder_attention_mask": mask})


def ends_of(tokenizer: Any, config: Any) -> frozenset[int]:
    """The ids that end a text, according to the tokenizer and the config."""
    ends: set[int] = set()
    for ids in (getattr(tokenizer, "eos_token_id", None), text_setting(config, "eos_token_id")):
        ends.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(ends)
