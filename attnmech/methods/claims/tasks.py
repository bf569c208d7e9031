"""The cases of a task on which a claim about heads is tested, split by template."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import torch
from jaxtyping import Float
from numpy.random import Philox
from torch import Tensor

from ...basics.arguments import integer, shown, whole_number
from ...basics.public import public
from ...batch import Batch
from ...demo.tasks import cases_of
from ...errors import InputError
from ...maths.intervals import LEAST_TEXTS
from ...model.run.hooked import HookedModel, require_model
from ...runs.ablations import checked_seed
from ...runs.haystacks import REQUESTED, Haystacks
from ...runs.metrics import HIGHER_IS_BETTER, MetricLike


@public
@dataclass(frozen=True)
class Case:
    """One text of a task and the template from which it was made.

    >>> Case("The keys beside the cabinet", " are", " is", group="beside")
    Case(prompt='The keys beside the cabinet', answer=' are', against=' is', group='beside')
    """

    prompt: str | tuple[int, ...]
    """A text, or token ids."""
    answer: str | int | tuple[int, ...] | None = None
    """The expected continuation: text with its leading space, a token id, or for "log_probability" several ids."""
    against: str | int | None = None
    """The continuation that the answer is compared with."""
    group: str = ""
    """The template, name or source of the text. Cases of one group are not independent evidence."""


@public
@dataclass(frozen=True, repr=False)
class Task:
    """Cases, and the metric that measures how well a model does on them.

    >>> task = Task.of_demo("agreement")
    >>> len(task.cases), len(task.groups), task.metric
    (48, 12, 'logit_difference')
    """

    name: str
    cases: Sequence[Any]
    """`Case`s, or tuples: (prompt, answer, against, group), or (text, group)."""
    metric: MetricLike = ""
    """By default "logit_difference" for cases with `answer` and `against`, "accuracy" for cases with `answer` alone,
    and "loss" otherwise. "log_probability" takes answers of several tokens: ln p of the whole answer after the prompt.
    """
    higher_is_better: bool | None = None
    """For a custom metric only: whether the metric falls when a model does worse."""

    def __repr__(self) -> str:
        return f"Task({self.name!r}, {len(self.cases)} cases in {len(self.groups)} groups, metric={self.metric!r})"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise InputError(f"a task needs a name, such as 'copying'; got {shown(self.name)}.")
        cases = tuple(map(_case, self.cases))
        object.__setattr__(self, "cases", cases)
        if not cases:
            raise InputError(f"the task {self.name!r} has no cases.")
        for name in ("answer", "against"):
            kinds = {type(getattr(case, name)) for case in cases}
            if len(kinds) > 1:
                raise InputError(
                    f"`{name}` must be text in all cases of {self.name!r}, a token id in all, or absent in all; got "
                    f"{' and '.join(sorted(kind.__name__ for kind in kinds))}."
                )
        if self.metric == "":
            answered = (cases[0].answer is not None) + (cases[0].against is not None)
            object.__setattr__(self, "metric", ("loss", "accuracy", "logit_difference")[answered])
        _ = self.higher
        if self.metric == "log_probability" and (cases[0].answer is None or cases[0].against is not None):
            raise InputError(
                'metric="log_probability" scores an answer alone: give cases (prompt, answer, None, group).'
            )

    @classmethod
    def of_demo(cls, name: str, *, templates: int | None = None, per_template: int = 4, seed: int = 0) -> Self:
        """Returns a task of the demo model: "copying", "agreement", "gender" or "recipient".

        It has `per_template` (at most 8) cases of every template, for the `templates` that fill first (by default 12,
        or all that the task has). The seeds 0 to 5 give different cases.
        """
        return cls(
            name,
            tuple(Case(x.text, x.right, x.wrong, x.template) for x in cases_of(name, templates, per_template, seed)),
        )

    @classmethod
    def of_retrieval(cls, model: HookedModel, context: int = 256, *, seed: int = 1) -> Self:
        """Returns the task of retrieving needles from 24 texts of random tokens, each a group.

        A needle of 12 tokens lies at another depth in each text; the text ends with its first 4 tokens, and the metric
        is ln p of the other 8. With `seed=0` and the same `context`, the texts are those on which `am.head_types` finds
        heads that retrieve; any other seed gives other tokens, on which these heads can be confirmed.

        >>> import attnmech as am
        >>> model = am.load()
        >>> Task.of_retrieval(model, 70)
        Task('retrieval from 70 tokens', 24 cases in 24 groups, metric='log_probability')

        Args:
            model: a decoder of text; its vocabulary and the length that it reads decide which texts are possible.
            context: the number of tokens of each text.
            seed: seed of the random tokens.

        Raises:
            InputError: for other models, and if `context` is too short or longer than the model reads.

        """
        require_model(model)
        context, seed = whole_number("context", context, least=1), checked_seed(seed)
        texts = [ids[0].tolist() for ids in Haystacks.of(model, context, seed)]
        groups = [f"needle {number} of seed {seed}" for number in range(len(texts))]
        cases = [
            Case(tuple(ids[:-REQUESTED]), tuple(ids[-REQUESTED:]), group=group)
            for ids, group in zip(texts, groups, strict=True)
        ]
        return cls(f"retrieval from {context} tokens", cases, "log_probability")

    @property
    def higher(self) -> bool:
        """Whether a higher value of the metric is better."""
        if isinstance(self.metric, str):
            if self.metric not in HIGHER_IS_BETTER:
                known = ", ".join(HIGHER_IS_BETTER)
                raise InputError(f"`metric` must be one of {known}, or a function; got {self.metric!r}.")
            if self.higher_is_better is not None:
                raise InputError(f"`higher_is_better` is for a custom metric; {self.metric!r} has a direction.")
            return HIGHER_IS_BETTER[self.metric]
        if not isinstance(self.higher_is_better, bool):
            raise InputError(
                "a task with a custom metric needs higher_is_better=True or False: whether the metric falls when a "
                "model does worse."
            )
        return self.higher_is_better

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups, in the order of their first cases."""
        return tuple(dict.fromkeys(self.group_of))

    @property
    def group_of(self) -> tuple[str, ...]:
        """The group of each case."""
        return tuple(case.group for case in self.cases)

    @property
    def inputs(self) -> Any:
        """The prompts in the form that a sweep reads, together with their answers if whole answers are scored."""
        answered = self.metric == "log_probability"
        texts = [_with_answer(case) if answered else case.prompt for case in self.cases]
        return [text if isinstance(text, str) else torch.tensor(text) for text in texts]

    @property
    def answers(self) -> Any:
        """The answers, or None."""
        return _all([case.answer for case in self.cases])

    @property
    def against(self) -> Any:
        """The continuations that the answers are compared with, or None."""
        return _all([case.against for case in self.cases])

    def only(self, groups: Sequence[str]) -> Self:
        """Returns the task with only the cases of some groups."""
        return replace(self, cases=tuple(case for case in self.cases if case.group in groups))

    def halves(self, seed: int = 0) -> tuple[Self, Self]:
        """Returns the discovery half and the confirmation half, which have different groups, drawn with `seed`. The
        confirmation half has half of the groups, rounded up, and at least five. Raises `InputError` for fewer than six
        groups.
        """
        groups = sorted(self.groups)
        if len(groups) < LEAST_TEXTS + 1:
            raise InputError(
                f"{self.name} has {len(groups)} {'group' if len(groups) == 1 else 'groups'} of cases; a claim needs "
                f"at least {LEAST_TEXTS + 1}: {LEAST_TEXTS} to confirm it and one to choose heads on. Use more "
                "templates, and give each case the template it was made from as its `group`."
            )
        # The bits are Philox's, so every version of numpy draws the same.
        drawn = Philox(key=[seed, len(groups)]).random_raw(len(groups)).tolist()
        order = [group for _, group in sorted(zip(drawn, groups, strict=True))]
        confirming = max(LEAST_TEXTS, math.ceil(len(order) / 2))
        return self.only(order[confirming:]), self.only(order[:confirming])


TaskLike: TypeAlias = Task | str | Sequence[Case] | Sequence[tuple[Any, ...]]
"""A task, the name of a task of the demo model, or cases: `Case`, (prompt, answer, against, group) or (text, group)."""


def task_of(task: Any) -> Task:
    """Returns the task that an argument describes."""
    if isinstance(task, Task):
        return task
    if isinstance(task, str):
        return Task.of_demo(task)
    if isinstance(task, Mapping | Tensor) or not isinstance(task, Iterable):
        raise InputError(
            "`task` must be an am.Task, a list of cases (prompt, answer, against, group), or the name of a task of the "
            f"demo model; got {shown(task)}."
        )
    return Task("the task", tuple(task))


def require_apart(model: HookedModel, discovery: Task, confirmation: Task, bos: bool | None) -> None:
    """Raises `InputError` if the halves share a group or a prompt, or the second has too few groups."""
    both = [group for group in discovery.groups if group in confirmation.groups]
    if both:
        raise InputError(
            f"the group {both[0]!r} is in both halves; texts of one template are not independent evidence. Leave it "
            "out of `discovery` or of `task`."
        )
    require_one_group_a_prompt(model, (*discovery.cases, *confirmation.cases), bos)
    if len(confirmation.groups) < LEAST_TEXTS:
        raise InputError(
            f"{confirmation.name} has {len(confirmation.groups)} groups to confirm a claim on; it needs at "
            f"least {LEAST_TEXTS}."
        )


def require_one_group_a_prompt(model: HookedModel, cases: Iterable[Case], bos: bool | None) -> None:
    """Raises `InputError` if two groups share a prompt, or prompts that become the same tokens."""
    first: dict[tuple[int, ...], Case] = {}
    for case in cases:
        ids = case.prompt
        if isinstance(ids, str):
            ids = tuple(model.encode(ids, bos=bos).ids[0].tolist())
        other = first.setdefault(ids, case)
        if other.group != case.group:
            same = "" if other.prompt == case.prompt else f" (the same tokens as {shown(other.prompt)})"
            raise InputError(
                f"the prompt {shown(case.prompt)}{same} is in two groups, {other.group!r} and {case.group!r}; copies "
                "of a prompt are no further evidence. Give them one group."
            )


def group_means(values: Float[Tensor, "*place case"], group_of: Sequence[str]) -> Float[Tensor, "*place group"]:
    """Averages over the cases of each group, in the order of the groups' first cases; `group_of` names each case's
    group.

    >>> group_means(torch.tensor([1.0, 3.0, 5.0]), ["a", "b", "a"])
    tensor([3., 3.])
    """
    place = {group: number for number, group in enumerate(dict.fromkeys(group_of))}
    number = torch.tensor([place[group] for group in group_of])
    sums = values.new_zeros(*values.shape[:-1], len(place)).index_add(-1, number, values)
    return sums / torch.bincount(number, minlength=len(place))


def _case(case: Any) -> Case:
    parts: Any = (case.prompt, case.answer, case.against, case.group) if isinstance(case, Case) else case
    if not isinstance(parts, tuple | list) or len(parts) not in (2, 4):
        raise InputError(
            "a case must be an am.Case, (prompt, answer, against, group), or (text, group) for a metric of the text; "
            f"got {shown(case)}."
        )
    prompt, answer, against, group = parts if len(parts) == 4 else (parts[0], None, None, parts[1])
    if not isinstance(group, str) or not group.strip():
        raise InputError(f"a case needs a `group`: the template it was made from; got {shown(group)}.")
    if answer is None and against is not None:
        raise InputError(f"a case with `against` needs an `answer`; got {shown(case)}.")
    right = _ids("answer", answer) if isinstance(answer, tuple | list) else _token("answer", answer)
    if isinstance(prompt, Batch | Mapping):
        raise InputError(f"the prompt of a case must be a text or token ids; got {type(prompt).__name__}.")
    text = prompt if isinstance(prompt, str) else _ids("prompt", prompt)
    return Case(text, right, _token("against", against), group)


def _ids(name: str, ids: Any) -> tuple[int, ...]:
    try:
        return tuple(integer(token) for token in ids)
    except TypeError:
        raise InputError(f"the {name} of a case must be a text or a list of token ids; got {shown(ids)}.") from None


def _token(name: str, token: Any) -> str | int | None:
    if token is None or isinstance(token, str):
        return token
    try:
        return integer(token)
    except TypeError:
        raise InputError(f"`{name}` of a case must be text or a token id; got {shown(token)}.") from None


def _with_answer(case: Case) -> str | tuple[int, ...]:
    """Returns the prompt followed by its answer, as one text."""
    if isinstance(case.prompt, str) and isinstance(case.answer, str):
        return case.prompt + case.answer
    if isinstance(case.prompt, tuple) and isinstance(case.answer, int | tuple):
        return (*case.prompt, *((case.answer,) if isinstance(case.answer, int) else case.answer))
    raise InputError(
        f'with metric="log_probability", prompt and answer must both be text, or both ids; got {shown(case)}.'
    )


def _all(values: Sequence[Any]) -> Any:
    return None if values[0] is None else list(values)
