"""What the live page asks of a model: what it writes with heads switched off or patched, and what without."""

from collections.abc import Sequence
from math import isfinite
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from ..batch import Batch
from ..draw.text import percent, quoted, with_minus_signs
from ..errors import InputError
from ..interventions import Intervention
from ..maths.float64 import as_float64
from ..methods.answers.contrast_answers import contrast_answers
from ..model.run.hooked import HookedModel
from ..runs.reference import mean_z

Way: TypeAlias = Literal["zero", "mean", "first", "patch"]
"""What happens to a head: its z becomes 0, its mean over the text, or ("patch") that of another prompt; "first": it
attends to the first token alone."""

MOST_HEADS: Final = 64
MOST_CHARACTERS: Final = 4000
"""The longest text."""
NEW_TOKENS: Final = 20
_LISTED: Final = 6
"""The next tokens listed."""


def address_of(heads: Sequence[tuple[int, int, str]]) -> str:
    """Edited heads as an address names them.

    >>> address_of([(2, 6, "zero"), (3, 1, "first")])
    'L2H6-zero.L3H1-first'
    """
    return ".".join(f"L{layer}H{head}-{way}" for layer, head, way in heads)


class Edits(NamedTuple):
    """Heads, and what happens to them: the edit of one address."""

    heads: tuple[tuple[int, int, Way], ...]
    prompt: str = ""
    """The other prompt, from which heads are patched."""
    position: int | None = None
    """The only token at which heads are patched; None for all."""
    stack: str = ""

    @classmethod
    def of(cls, asked: Any) -> "Edits":
        """The edits of a JSON object; raises `InputError` for anything else."""
        try:
            heads = tuple((int(layer), int(head), way) for layer, head, way in asked["heads"])
            place = asked.get("position")
            edits = cls(heads, asked.get("prompt", ""), None if place is None else int(place), asked.get("stack", ""))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise InputError(f'an edit is {{"heads": [[2, 6, "zero"]]}}; got something else ({error!r}).') from error
        if not (isinstance(edits.prompt, str) and isinstance(edits.stack, str)) or len(edits.prompt) > MOST_CHARACTERS:
            raise InputError(f"`prompt` and `stack` must be strings of at most {MOST_CHARACTERS:,} characters.")
        if not 1 <= len(heads) <= MOST_HEADS or len({head[:2] for head in heads}) < len(heads):
            raise InputError(f"an edit names 1 to {MOST_HEADS} heads, none of them twice; got {len(heads)}.")
        if unknown := [way for *_, way in heads if way not in get_args(Way)]:
            raise InputError(f"heads are edited by {', '.join(get_args(Way))}; got {str(unknown[0])[:40]!r}.")
        return edits

    @property
    def by_way(self) -> dict[Way, list[tuple[int, int]]]:
        """The heads of each way."""
        ways: dict[Way, list[tuple[int, int]]] = {}
        for layer, head, way in self.heads:
            ways.setdefault(way, []).append((layer, head))
        return ways

    def interventions(self, model: HookedModel, text: str) -> list[Intervention]:
        """The interventions on a text."""
        made = list[Intervention]()
        for way, heads in self.by_way.items():
            if way == "zero":
                made.append(Intervention.zero(heads, stack=self.stack))
            elif way == "first":
                made.append(Intervention.attend(heads, "first", stack=self.stack))
            elif way == "mean":
                means = mean_z(model, [text], stack=self.stack or None)
                made.append(Intervention.replace(heads, means, stack=self.stack))
            else:
                made += self._patches(model, text, heads)
        return made

    def _patches(self, model: HookedModel, text: str, heads: list[tuple[int, int]]) -> list[Intervention]:
        length, of_other = (model.encode(one).queries(self.stack).ids.shape[1] for one in (text, self.prompt))
        if length != of_other:
            raise InputError(f"the other prompt must have as many tokens as the text, {length}; it has {of_other}.")
        if self.position is not None and not 0 <= self.position < length:
            raise InputError(f"`position` must be from 0 to {length - 1}; got {self.position}.")
        other = model.run(self.prompt, points=[self._z])
        return [
            Intervention.replace(
                heads, {layer: other[self._z, layer][:, [row]] for layer, _ in heads}, positions=[row], stack=self.stack
            )
            for row in (range(length) if self.position is None else [self.position])
        ]

    @property
    def _z(self) -> Any:
        return f"{self.stack}.z" if self.stack else "z"

    @property
    def sentence(self) -> str:
        """What changes, without a full stop."""
        row = "" if self.position is None else f" at token {self.position}"
        words: dict[Way, str] = {
            "zero": "z of {} becomes 0",
            "mean": "z of {} becomes its mean over the text",
            "first": "attention of {} goes to the first token",
            "patch": f"z of {{}} becomes that of {quoted(self.prompt)}{row}",
        }
        names = {way: ", ".join(f"L{layer}H{head}" for layer, head in heads) for way, heads in self.by_way.items()}
        return " and ".join(words[way].replace("{}", heads) for way, heads in names.items())

    def python(self, new_tokens: int = NEW_TOKENS) -> str:
        """The Python that compares what the model writes with and without the edits."""
        stack = f", stack={self.stack!r}" if self.stack else ""
        lines, made = ["edits = []"], "edits.append(am.Intervention"
        for way, heads in self.by_way.items():
            if way == "zero":
                lines.append(f"{made}.zero({heads}{stack}))")
            elif way == "first":
                lines.append(f'{made}.attend({heads}, "first"{stack}))')
            elif way == "mean":
                lines.append(f"{made}.replace({heads}, am.mean_z(model, [text]{stack}){stack}))")
            else:
                rows = f"range({self._z_of}.shape[1])" if self.position is None else f"[{self.position}]"
                layers = sorted({layer for layer, _ in heads})
                lines += [
                    f"other = model.run({self.prompt!r}, points=[{self._z!r}])",
                    f"for row in {rows.replace('LAYER', str(layers[0]))}:",
                    f"    values = {{layer: {self._z_of.replace('LAYER', 'layer')}[:, [row]] for layer in {layers}}}",
                    f"    {made}.replace({heads}, values, positions=[row]{stack}))",
                ]
        return "\n".join([*lines, f"am.contrast_answers(model, text, edits, {new_tokens}).answers"])

    @property
    def _z_of(self) -> str:
        return f"other[{self._z!r}, LAYER]"


def writes_text(model: HookedModel) -> bool:
    """Whether a model predicts next tokens."""
    return model.writes_tokens and model.causal


def compared(model: HookedModel, text: str, edits: Edits | None) -> dict[str, Any]:
    """What the model predicts, and with edits also what it then writes and predicts, as the live page shows it.

    Returns:
        "sentences"; "next", the most probable next tokens with their probabilities in each run; "tokens" of the text,
        with "losses" in each run, in nats, None where nothing predicts the token. With edits, also "answers", the
        tokens that the model writes in both runs; "parting", the first that differs, or -1; "python".

    """
    if not writes_text(model):
        raise InputError(f"next tokens are predicted by models that write text; {model.name} does not.")
    batch = model.encode(text)
    if batch.target is not None:
        batch = model.generate(batch, NEW_TOKENS)
    read, runs = batch.target or batch, [_log_probs(model, batch)]
    block = dict[str, Any]()
    if edits is not None:
        interventions, limit = edits.interventions(model, text), model.output_stack.architecture.position_limit
        room = NEW_TOKENS if limit is None or batch.target is not None else limit - read.ids.shape[1]
        contrast = contrast_answers(model, text, interventions, max(1, min(NEW_TOKENS, room)))
        with model.intervene(*interventions):
            runs.append(_log_probs(model, batch))
        block = {"parting": int(contrast.parting[0]), "python": edits.python()}
        block["answers"] = [list(contrast.plain[0]), list(contrast.edited[0])]
    ids = read.ids[0].cpu()[1:, None]
    losses = [_finite(-log_probs[:-1].gather(1, ids)[:, 0]) for log_probs in runs]
    following = most_probable(model, torch.stack([log_probs[-1] for log_probs in runs]).exp())
    if edits is None:
        sentences = [f"The most probable next token is {best_of(following)}."]
    else:
        sentences = [f"If {edits.sentence}, {contrast.parted(0)}."]
    means = [f"{sum(filter(None, of_run)) / len(ids):.3f}" for of_run in losses if len(ids) and None not in of_run]
    if len(means) == len(runs):
        both = " nats without the edit, ".join(means) + (" nats" if edits is None else " with it")
        sentences.append(f"The mean loss of the text's tokens is {both}.")
    return block | {
        "sentences": list(map(with_minus_signs, sentences)),
        "next": following,
        "tokens": list(read.real_tokens[0]),
        "losses": [[None, *of_run] for of_run in losses],
    }


def most_probable(model: HookedModel, runs: Float[Tensor, "run vocab"]) -> list[tuple[Any, ...]]:
    """The tokens of the largest probabilities in any run, with their probabilities in each."""
    ids = runs.amax(dim=0).topk(min(_LISTED, runs.shape[1])).indices
    return [*zip(model.position_texts(ids.tolist(), model.output_stack.label), *runs[:, ids].tolist(), strict=True)]


def best_of(tokens: Sequence[tuple[Any, ...]], run: int = 0) -> str:
    """The most probable token of a run, in words."""
    token, *chances = max(tokens, key=lambda entry: entry[run + 1])
    return f"{quoted(token)} ({percent(chances[run], 0)})"


def _log_probs(model: HookedModel, batch: Batch) -> Float[Tensor, "position vocab"]:
    logits = model.forward(batch, captures=[("logits", None)])["logits", None][0]
    return as_float64(logits).cpu().log_softmax(dim=-1)


def _finite(values: Float[Tensor, " position"]) -> list[float | None]:
    return [value if isfinite(value) else None for value in values.tolist()]
