"""The Python calls that reproduce a page's numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..model.inputs.encoder import Inputs
from ..model.run.hooked import HookedModel
from ..points import full_name
from ..results.mean_qk import MeanQK
from . import limits


@dataclass(frozen=True)
class ReportInputs:
    """One input of a report, for the calls that reproduce its numbers."""

    inputs: Inputs | None
    """The input as the user passed it; None if it is one of several that are not strings."""
    bos: bool | None
    target: str | None
    continued: int
    """The largest number of tokens that the model wrote as the target; 0 if the user supplied the target."""
    part: tuple[int, int] | None
    """The start and the length of the part of a cut text."""

    @property
    def text(self) -> str:
        """The text as a Python expression."""
        text = repr(self.inputs) if isinstance(self.inputs, str) else "..."
        if self.part is None and self.target is None and not self.continued:
            return text
        options = ("" if self.bos is None else f", bos={self.bos}") + (
            "" if self.target is None else f", target={self.target!r}"
        )
        cut = "" if self.part is None else f".part{self.part}"
        encoded = f"model.encode({text}{options}){cut}" if options or cut else text
        return f"model.generate({encoded}, {self.continued})" if self.continued else encoded

    @property
    def note(self) -> str:
        """A comment on a text that is not a string."""
        return "" if isinstance(self.inputs, str) else "  # what this report was given"

    @property
    def options(self) -> str:
        """The further arguments of calls that take the text."""
        return "" if self.bos is None or self.text.startswith("model.") else f", bos={self.bos}"


def calls_of(
    model: HookedModel,
    inputs: Sequence[ReportInputs],
    number: int,
    stack: str,
    centre: Literal["mean"] | MeanQK | None,
    *,
    weighted: bool,
) -> dict[str, str]:
    """Returns the Python calls that reproduce the page's numbers about the input with this number."""
    captured, weight = ('"pattern", "v"', ", weighted={weight}") if weighted else ('"pattern"', "")
    if stack:
        captured = captured.replace('"pattern', f'"{stack}.pattern').replace('"v"', f'"{stack}.v"')
    options = f", stack={stack!r}" if stack else ""
    with_bos = inputs[number].options
    arguments = f"(model, text{options}{with_bos})"
    split = "" if centre is None else ", centre={split}" if centre == "mean" else ", centre=means"
    imports = ["import attnmech as am", *["from attnmech.demo.text import documents"] * model.is_demo]
    setup = [*imports, "", f"model = {model.source}", *_texts(inputs, number)]
    if model.is_demo:
        setup.append(f"texts += documents({limits.OTHER_TEXTS})")
    if isinstance(centre, MeanQK):
        setup.append("means = ...  # the means that this report was made with")
    return {
        "setup": "\n".join(setup),
        "scores": f"am.decompose_scores{arguments[:-1]}{split})",
        "view": f"model.run(text{with_bos}, points=[{captured}])"
        f'.show("{full_name(stack, "pattern")}", layer={{layer}}, head={{head}}, view="{{figure}}"{weight})',
        "focus": f"am.attention_focus{arguments}",
        "updates": f"am.residual_updates{arguments}",
        "arguments": arguments,
    }


def _texts(inputs: Sequence[ReportInputs], number: int) -> list[str]:
    """The lines of Python that name the page's texts, and the one with this number."""
    if len(inputs) == 1:
        return [f"text = {inputs[0].text}{inputs[0].note}", "texts = [text]"]
    listed = [f"    {one.text},{one.note}" for one in inputs]
    return ["texts = [", *listed, "]", f"text = texts[{number}]"]
