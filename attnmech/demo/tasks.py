"""Cases of the tasks that the demo model can do: a text, the next word, a wrong next word, and a template.

`copying`: random words that repeat (a template for each period). `agreement`: a verb after a noun whose number is
not the subject's (a template for each verb). `gender`: the first pronoun for the only person named (a template for each
verb and pronoun). `recipient`: the person who receives something (a template for each verb of giving).
"""

import json
from dataclasses import dataclass
from typing import Final

from ..basics.arguments import whole_number
from ..errors import InputError
from .text import STORED, stored

TASKS: Final = ("copying", "agreement", "gender", "recipient")

PER_TEMPLATE: Final = 8
"""The number of cases stored for each template and seed."""


@dataclass(frozen=True)
class DemoCase:
    """One case."""

    text: str
    right: str
    wrong: str
    template: str


def cases_of(task: str, templates: int | None = None, count: int = 4, seed: int = 0) -> list[DemoCase]:
    """Cases of a task, `count` of every template, for the first `templates` with enough cases: by default 12, or all.

    >>> case = cases_of("agreement")[-1]
    >>> case.text, case.right, case.wrong, case.template
    ('The monitors from the calendar', ' were', ' was', 'were')
    """
    if task not in TASKS:
        raise InputError(f"the demo model's tasks are {', '.join(TASKS)}; got {task!r}.")
    seed = whole_number("seed", seed, most=len(STORED) - 1)
    cases = [DemoCase(*json.loads(line)) for line in stored(f"cases/{task}/{seed}")]
    most = len({case.template for case in cases})
    wanted = whole_number("templates", templates or min(12, most), least=1, most=most)
    count = whole_number("per_template", count, least=1, most=PER_TEMPLATE)
    by_template: dict[str, list[DemoCase]] = {}
    for case in cases:
        by_template.setdefault(case.template, []).append(case)
    # The lines stand in the order in which the grammar made them: the first templates to be full are chosen.
    full = sorted(by_template, key=lambda name: cases.index(by_template[name][count - 1]))[:wanted]
    return [case for name in sorted(full) for case in by_template[name][:count]]
