"""The texts of a live page: each is read once, first without types and ablations, then whole."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

from ..draw.page import Live
from ..errors import InputError
from ..methods.head_types.head_types import HeadTypes
from ..model.run.hooked import HookedModel
from ..pages.report import reports
from ..pages.result import Report, first_page
from ..runs.progress import watched
from .edits import MOST_CHARACTERS, Edits, compared, writes_text

KEPT: Final = 12
"""The texts whose pages are kept."""

State: TypeAlias = tuple[str, ...]
"""The weights' hash and the edits in force, on which a page depends."""

Step: TypeAlias = Callable[[str], None]
"""Called with what comes next; an exception that it raises ends the work, which leaves the model as it was."""


def _no_step(_: str) -> None:
    return


class Session:
    """A model, and what was read with it. Its calls run one at a time."""

    def __init__(self, model: HookedModel, first: str) -> None:
        self.model, self.first = model, first
        self._read: OrderedDict[tuple[str, State], tuple[Report, bool]] = OrderedDict()
        self._types: dict[State, dict[str, HeadTypes | None]] = {}
        self.scripts: dict[str, str] = {}
        """The texts of the scripts that pages link to, by name."""

    @property
    def _state(self) -> State:
        model = self.model
        return model.weights_hash, *model.edited, *(change.digest for change in model.interventions)

    def page(self, text: str, through: Literal["server", "notebook"], start: str = "", step: Step = _no_step) -> str:
        """The page on a text, whole if it was measured whole."""
        report, whole = self._report(text, step)
        others = [other for other in dict.fromkeys(read for read, _ in reversed(self._read)) if other != text]
        edits = writes_text(self.model)
        live = Live(text, others, through, MOST_CHARACTERS, edits, start=start, linked=self.scripts)
        return report.live_html(live) if whole else first_page(report, live)

    def measure(self, text: str, step: Step = _no_step) -> None:
        """Measures types and ablations, if they were not."""
        first, whole = self._report(text, step)
        if not whole:
            stages, state = _Stages(step), self._state
            with watched(stages.watch):
                types = self._types.setdefault(state, {})
                *_, report = reports(self.model, [text], step=stages, types=types, first=first)
            self._read[text, state] = report, True

    def compare(self, text: Any, edits: Edits, step: Step = _no_step) -> dict[str, Any]:
        """What the model writes with and without the edits."""
        stages = _Stages(step)
        stages("comparing")
        with watched(stages.watch):
            return compared(self.model, _checked(text), edits)

    def saved(self, text: Any, start: str, edits: Edits | None, step: Step = _no_step) -> str:
        """The page as a file that opens offline, with these choices and the answer to the edits."""
        report, _ = self._report(text, step)
        block = {} if edits is None else self.compare(text, edits, step)
        return report.live_html(Live(text, edit=block, start=start))

    def _report(self, text: Any, step: Step) -> tuple[Report, bool]:
        key = _checked(text), self._state
        if key not in self._read:
            step("reading")
            with watched(_Stages(step).watch):
                self._read[key] = next(reports(self.model, [text])), False
            while len(self._read) > KEPT:
                self._read.popitem(last=False)
        self._read.move_to_end(key)
        return self._read[key]


class _Stages:
    """Tells `step` the stage of the work, and how far it is."""

    def __init__(self, step: Step) -> None:
        self._step, self._stage = step, "reading"

    def __call__(self, stage: str) -> None:
        self._stage = stage
        self._step(stage)

    def watch(self, kind: str, done: int, total: int | None) -> None:
        self._step(f"{self._stage}, {kind} {done:,}" + ("" if total is None else f" of {total:,}"))


def _checked(text: Any) -> str:
    if not isinstance(text, str) or not text.strip() or len(text) > MOST_CHARACTERS:
        what = f"{len(text):,} characters" if isinstance(text, str) else type(text).__name__
        raise InputError(f"a text has 1 to {MOST_CHARACTERS:,} characters, not only spaces; got {what}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the text is not valid Unicode ({error.reason}).") from error
    return text
