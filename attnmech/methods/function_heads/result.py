"""Function-vector heads: whose mean output on examples of a task restores the answer when the examples are wrong.

Formulas: docs/formulas.md#function-heads.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final, Self, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...basics.arguments import listed, shown, whole_number
from ...basics.nouns import counted
from ...basics.public import public
from ...draw.section import Section
from ...draw.text import with_minus_signs
from ...errors import InputError
from ...interventions import Head, Heads, Intervention, Values
from ...maths.float64 import as_float64
from ...maths.intervals import TextMeans
from ...model.run.hooked import HookedModel, require_model
from ...results.by_layer import by_layer, subtracted
from ...results.sentences import interval_note
from ...runs.ablations import checked_seed, one_by_one
from ...runs.effects import HeadEffects, head_fields
from ...runs.in_context import divided
from ...runs.journal import owning_journal
from ...runs.options import RunOptions
from ...runs.residual_graph import Steps
from ...runs.sweep import batches_of, run_sweep

Pair = tuple[str, str]  # (question, answer)


@dataclass(frozen=True)
class Prompts:
    """Token ids of prompts; each ends with the first token of the right answer."""

    right: list[Int[Tensor, " position"]]  # with right examples
    shuffled: list[Int[Tensor, " position"]]  # with the same examples and their answers in another order
    answers: list[int]  # the first token of each prompt's answer


def prompts_of(
    model: HookedModel, pairs: Sequence[Pair], shots: int, count: int, template: str, seed: int, bos: bool | None
) -> Prompts:
    """Draws prompts: a question, after `shots` other pairs as examples."""
    drawn = Random(seed)
    right: list[Tensor] = []
    shuffled: list[Tensor] = []
    answers: list[int] = []
    order = list(range(len(pairs)))
    for number in range(count):
        asked = order[number % len(order)]
        others = [pair for place, pair in enumerate(pairs) if place != asked]
        examples = drawn.sample(others, shots)
        while len({y for _, y in examples}) < 2 <= len({y for _, y in others}):
            examples = drawn.sample(others, shots)
        question, answer = pairs[asked]
        wrong = _deranged([example_answer for _, example_answer in examples], drawn)
        asks = template.partition("{y}")[0].format(x=question)
        tokens = set[int]()
        for prompts, given_answers in ((right, [y for _, y in examples]), (shuffled, wrong)):
            shown = "".join(template.format(x=x, y=y) for (x, _), y in zip(examples, given_answers, strict=True))
            ids, token = divided(model, shown + asks, answer, bos)
            prompts.append(torch.tensor([*ids, token]))
            tokens.add(token)
        if len(tokens) > 1:
            raise InputError(f"the first token of {answer!r} depends on the examples before it; give other pairs.")
        answers.append(token)
    return Prompts(right, shuffled, answers)


def _deranged(answers: list[str], drawn: Random) -> list[str]:
    """The answers in another order; none stands where it stood, unless one of them stands at most places."""
    if len(set(answers)) < 2:
        raise InputError(f"shuffled examples need different answers; all are {answers[0]!r}. Give other pairs.")
    for _ in range(1000):
        order = drawn.sample(answers, len(answers))
        if all(now != before for now, before in zip(order, answers, strict=True)):
            return order
    return answers[1:] + answers[:1]


@dataclass(frozen=True, eq=False)
class AgainstFoils(TextMeans):
    """Means that are clear only if the difference from the foils has the same sign, clearly."""

    foils: TextMeans | None = None  # the effect on the right answer minus that on the foil; None if it was not measured

    @property
    def clear_alone(self) -> Bool[Tensor, "*place"]:
        """Whether the direction of a mean is clear, whatever happens to the foils."""
        return (self.direction != 0) & (self.direction == self.mean.sign())

    @property
    def clear(self) -> Bool[Tensor, "*place"]:
        """Whether the direction is clear, and the same against the foils."""
        return self.clear_alone if self.foils is None else self.clear_alone & (self.foils.direction == self.direction)

    @property
    def clear_size(self) -> Bool[Tensor, "*place"]:
        """Whether the size is clear, and against the foils too, with the same sign."""
        alone = TextMeans(self.above, self.below).clear_size
        if self.foils is None:
            return alone
        return alone & self.foils.clear_size & (self.foils.mean.sign() == self.mean.sign())

    def texts_needed(self, at: tuple[int, ...]) -> int | None:
        """As for other means; None where texts are not what is missing."""
        return None if bool(self.clear_alone[at]) else super().texts_needed(at)


def foils_of(prompts: Sequence[Sequence[int]], answers: Sequence[int]) -> list[int | None]:
    """Returns another prompt's answer for each prompt: one that occurs in the prompt as often as the right answer.

    Every answer is the foil about as often as the others, so that no answer decides the sign of many differences. None
    where no answer occurs as often.

    >>> foils_of([[7, 1], [7, 2], [1, 3]], [1, 2, 3])
    [2, 3, 2]
    """
    distinct = list(dict.fromkeys(answers))
    used: Counter[int] = Counter()
    foils: list[int | None] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        shown = Counter(prompt[:-1])
        start = distinct.index(answer) + 1
        others = [
            foil for foil in distinct[start:] + distinct[:start] if foil != answer and shown[foil] == shown[answer]
        ]
        foil = min(others, key=lambda other: used[other], default=None)
        foils.append(foil)
        if foil is not None:
            used[foil] += 1
    return foils


TEMPLATE: Final = "Q: {x}\nA: {y}\n\n"


@dataclass(frozen=True, repr=False)
class FunctionHeads(HeadEffects):
    """How much each head's mean output on right examples raises ln p of the answer after shuffled ones: `.effect`.

    `before` is ln p of the answer after shuffled examples, `clean` after right ones, in nats.
    """

    _TITLE = "Heads that carry the task of the examples"
    _SAMPLE = "answer"

    clean: Float[Tensor, " text"]
    """ln p of each answer after right examples."""
    written: Float[Tensor, "layer head d_model"] | None
    """What each head writes on average at the last token, after right examples; None if a norm follows the heads."""
    against_foils: Float[Tensor, "layer head text"] | None = None
    """For heads whose effect is clear by itself, the effect on the right answer's logit minus that on another answer's;
    0 for other heads, and NaN for prompts in which no answer is comparable. None if no head was measured."""

    def vector(self, count: int = 10) -> Values:
        """The function vector: the sum of what the `count` heads with the largest effects write, for every layer.

        >>> am.steer(model, heads.vector(), prompts, at="resid_post", layers=[9], positions="last")   # doctest: +SKIP

        Raises `InputError` for models with a norm after attention, in which writes of single heads do not add up.
        """
        if self.written is None:
            raise InputError("a norm follows the heads of this model, so what they write does not add up to a vector.")
        effect = self.effect.nan_to_num(-torch.inf).flatten()
        count = whole_number("count", count, least=1, most=int(self.swept.sum()), most_is="the number of heads")
        total = self.written.flatten(0, 1)[effect.topk(count).indices].sum(dim=0)
        return Values(
            dict.fromkeys(self.layers, total[None, None]), f"a function vector of {counted(count, noun='head')}"
        )

    def _distinct_means(self, name: str, every: TextMeans) -> TextMeans:
        means = super()._distinct_means(name, every)
        copies = self.provenance.copies
        foils = None if self.against_foils is None else TextMeans.of_values(self.against_foils, copies)
        return AgainstFoils(means.above, means.below, foils)

    @property
    def lead(self) -> str:
        """The finding in one sentence, and how many clear effects are not on the right answer alone."""
        if self.parts is not None:
            return super().lead
        means = self._main.means
        assert isinstance(means, AgainstFoils)
        count = int((means.clear_alone & ~means.clear).sum())
        sentence = super().lead
        if not count:
            return sentence
        heads = counted(count, noun="head")
        return f"{sentence} In {heads}, the change favours the right answer no more clearly than another answer."

    @property
    def note(self) -> str:
        """A note on the intervals, which are over answers."""
        prompts, answers = self._n_texts, self._n_distinct
        same = "" if prompts == answers else f" Prompts with the same answer count as one ({prompts} prompts)."
        copies = self.provenance.options.get("copies", 0)
        are = "pair is a copy of another" if copies == 1 else "pairs are copies of others"
        merged = f" {copies:,} {are} and counted once." if copies else ""
        return f"{interval_note(answers, sample=self._SAMPLE)}{same}{merged}"

    @property
    def _about(self) -> str:
        right, shuffled = float(self.clean.mean()), float(self.before.nanmean())
        return with_minus_signs(
            f"{self._opening}giving each of {counted(int(self.swept.sum()), noun='head')} its mean output after right "
            f"examples, on {self._prompts} with shuffled ones (ln p of the answer {shuffled:.2f}, after right examples "
            f"{right:.2f})"
        )

    @property
    def _prompts(self) -> str:
        if self.parts is not None or self._n_texts == self._n_distinct:
            return self._texts.replace("answer", "prompt")
        return f"{counted(self._n_texts, noun='prompt')} ({counted(self._n_distinct, noun='answer')})"

    def _minus(self, other: Self, paired: bool) -> Self:
        difference = super()._minus(other, paired)
        return replace(difference, clean=subtracted(self.clean, other.clean, paired), written=None, against_foils=None)

    def _sections(self) -> "Sequence[Section]":
        reading = (
            "Each cell is one head. At the last token after shuffled examples, its output becomes its mean after right "
            "examples. Blue: ln p of the answer rises; pale where its effect is not clear among all shown, or not "
            "clearly larger than on another answer."
        )
        return [Section("Effects", reading, {"effects": self.plot()}, "heads.plot()")]


@public
@owning_journal
def function_heads(
    model: HookedModel,
    examples: Iterable[Pair],
    *,
    shots: int = 5,
    prompts: int = 24,
    template: str = TEMPLATE,
    heads: Heads = "all",
    seed: int = 0,
    **options: Unpack[RunOptions],
) -> FunctionHeads:
    """Measures which heads carry a task from examples in the prompt to the answer (function-vector heads).

    One half of the pairs makes prompts with right examples, from which each head's mean z at the last token is taken.
    The other half makes prompts whose examples have shuffled answers. There, each head's z at the last token is
    replaced by its mean, one head at a time: effect = ln p(answer) after − before, in nats, where answer is the first
    token of the right one.

    Prompts with the same answer count as one text: any change of a head favours some answers. An effect is clear only
    if the answer's logit also rises more than that of another prompt's answer, which is measured for heads whose effect
    is clear by itself.

    >>> import attnmech as am
    >>> pairs = [("hot", "cold"), ("big", "small"), ("up", "down"), ("wet", "dry"), ("old", "new"), ("far", "near")]
    >>> heads = am.function_heads(am.load(), pairs, shots=2, prompts=6)
    >>> heads.effect.shape
    torch.Size([4, 8])

    Args:
        model: a model that predicts the next token, with a tokenizer.
        examples: (question, answer), at least 2 · (`shots` + 1) different ones; a copy counts as its pair.
        shots: the number of examples in a prompt, at least 2.
        prompts: the number of prompts in each half.
        template: one example, with {x} and {y}; a prompt ends before {y}.
        heads: a list of (layer, head), or "all".
        seed: draws halves and examples.
        options: bos, journal, engine and progress, as in `am.ablate_heads`.

    Returns:
        Effects `[layer head]` in nats, with intervals over answers, and `.vector(count)`, the sum of what the strongest
        heads write, for `am.steer`.

    Raises:
        InputError: for too few pairs, equal answers, templates without {x} or {y}, and models that do not predict the
            next token.

    Source: Todd et al. 2023 (average indirect effect; there on the same pairs, and p instead of ln p).
    """
    require_model(model)
    shots = whole_number("shots", shots, least=2)
    prompts = whole_number("prompts", prompts, least=1)
    seed = checked_seed(seed)
    task, copies = _checked_pairs(examples, shots)
    if template.count("{x}") != 1 or template.count("{y}") != 1 or template.index("{x}") > template.index("{y}"):
        raise InputError(f"`template` must hold {{x}} once, and {{y}} once after it; got {shown(template)}.")
    if not model.causal or not model.writes_tokens or len(model.stacks) > 1:
        raise InputError("examples in a prompt are for models with one stack that predict the next token.")
    chosen, bos = model.check_heads(heads), options.get("bos")
    order = torch.randperm(len(task), generator=torch.Generator().manual_seed(seed)).tolist()
    halves = [[task[place] for place in order[half::2]] for half in (0, 1)]
    teaching, asking = (
        prompts_of(model, half, shots, prompts, template, seed + number, bos) for number, half in enumerate(halves)
    )
    layers = sorted({layer for layer, _ in chosen})
    means = _mean_z(model, teaching.right, layers)
    values = one_by_one(Values(means, f"the mean over {prompts} prompts with right examples"))
    changes = [(Intervention.replace([head], values[head[0]], positions=[-2]),) for head in chosen]
    noted = {"pairs": len(task), "copies": copies, "shots": shots, "template": template, "seed": seed}
    shared: Any = {"answers": asking.answers, **{name: value for name, value in options.items() if name != "bos"}}
    # Even in a random model, a changed head favours some answers: prompts with the same answer are one text.
    shared["contents"] = asking.answers
    swept = run_sweep(model, asking.shuffled, changes, "log_probability", noted=noted, **shared)
    clean = run_sweep(model, asking.right, changes[:1], "log_probability", answers=asking.answers)
    along, written = Steps(model), None
    if along.norm_of_output(layers[0]) is None:
        parts = [along.raw(layer, means[layer])[:, 0, 0] for layer in layers]
        scale = model.output_stack.architecture.attn_scale
        written = by_layer(scale * torch.stack(parts).cpu(), layers, len(model.output_stack.places))
    fields = head_fields(model, chosen, swept, "the mean output on right examples")
    effects = FunctionHeads(**fields, clean=clean.before, written=written)
    return replace(effects, against_foils=_against_foils(model, effects, asking, chosen, changes, options))


def _against_foils(
    model: HookedModel,
    effects: FunctionHeads,
    asking: Prompts,
    heads: Sequence[Head],
    changes: Sequence[tuple[Intervention, ...]],
    options: RunOptions,
) -> Float[Tensor, "layer head text"] | None:
    tested = effects.clear | effects.clear_size
    chosen = [place for place, head in enumerate(heads) if bool(tested[head])]
    foils = foils_of([prompt.tolist() for prompt in asking.shuffled], asking.answers)
    there = [number for number, foil in enumerate(foils) if foil is not None]
    if not chosen:
        return None
    if not there:
        return torch.full_like(effects.after, torch.nan)
    before = [(replace(changes[place][0], positions=(-1,)),) for place in chosen]
    swept = run_sweep(
        model, [asking.shuffled[number][:-1] for number in there], before, "logit_difference",
        answers=[asking.answers[number] for number in there], against=[foils[number] for number in there],
        engine=options.get("engine", "local"),
    )  # fmt: skip
    values = torch.zeros_like(effects.after)
    values[..., [number for number, foil in enumerate(foils) if foil is None]] = torch.nan
    for place, effect in zip(chosen, swept.after - swept.before, strict=True):
        values[(*heads[place], there)] = effect
    return values.masked_fill(effects.swept[..., None] == 0, torch.nan)


def _checked_pairs(examples: Any, shots: int) -> tuple[list[Pair], int]:
    """The distinct pairs, and the number of copies, which would be examples of their own questions."""
    wanted = 'a list of (question, answer), such as [("hot", "cold")]'
    task = [tuple(pair) if isinstance(pair, list | tuple) else pair for pair in listed("examples", examples, wanted)]
    for pair in task:
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise InputError(f"`examples` must be {wanted}; got {shown(pair)}.")
    distinct: list[Any] = list(dict.fromkeys(task))
    needed = 2 * (shots + 1)
    if len(distinct) < needed:
        raise InputError(
            f"{shots} examples and a question in each half need {needed} pairs; got "
            f"{counted(len(task), len(distinct), 'pair')}. Give more pairs, or fewer `shots`."
        )
    return distinct, len(task) - len(distinct)


def _mean_z(
    model: HookedModel, prompts: Sequence[Tensor], layers: Sequence[int]
) -> dict[int, Float[Tensor, "1 1 head d_value"]]:
    keys = model.points.resolve(["z"], layers, model.refused)
    sums: dict[int, Tensor] = {}
    for part in batches_of(model, list(prompts), 2048, False):
        last = part.batch.lengths - 2
        for (_, layer), z in model.forward(part.batch, captures=keys).items():
            assert layer is not None
            rows = as_float64(z[torch.arange(len(last), device=z.device), last.to(z.device)]).sum(dim=0)
            sums[layer] = sums[layer] + rows if layer in sums else rows
    return {layer: (total / len(prompts)).to(model.device, model.dtype)[None, None] for layer, total in sums.items()}
