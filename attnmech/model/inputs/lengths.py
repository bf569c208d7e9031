"""Finds the length of the texts on which a model's positions were trained, and warns of longer texts."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import nn

from ...basics.messages import LongTextWarning, warn_once
from ...batch import Batch

_STRETCHED: Final = ("linear", "dynamic")
"""The kinds of rotation whose factor multiplies the trained length; the configs of other kinds state the product."""


def trained_length(config: Any, *, rotates: bool, model: nn.Module) -> int | None:
    """The number of tokens of the longest texts that a model was trained on or, by scaling its rotation, extended to.

    None if the model does not extrapolate: it has no positions, relative ones, or a table that ends.
    """
    # Tables of sinusoids grow with the text (XGLM, M2M100).
    if not rotates and not any(hasattr(part, "make_weights") for part in model.modules()):
        return None
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        return None
    return max((longest, *_scaled(longest, getattr(config.get_text_config(), "rope_parameters", None) or {})))


def _scaled(longest: int, parameters: Mapping[str, Any]) -> Iterator[int]:
    factor = parameters.get("factor") or 1
    if parameters.get("rope_type") in _STRETCHED:
        yield int(longest * factor)
    elif parameters.get("rope_type") == "yarn":
        yield int((parameters.get("original_max_position_embeddings") or longest) * factor)


def warn_of_batch(batch: Batch, trained: int | None) -> None:
    """Warns if a text of a batch, or of its decoder, is longer than the texts of the training."""
    for part, whose in ((batch, ""), (batch.target, "decoder's ")):
        if trained is None or part is None or part.texts_of is None or part.ids.shape[1] <= trained:
            continue
        text = int(part.lengths.argmax())
        name = f"the {whose}text" if len(part.ids) == 1 else f"{whose}text {text}"
        warn_of_length(name, int(part.lengths[text]), trained, "shorten or split it")


def warn_of_length(text: str, length: int, trained: int, remedy: str) -> None:
    """Warns, once in a call, if a text is longer than those of the training."""
    if length > trained:
        warn_once(
            f"{text} has {length} tokens, but this model was trained on texts of at most {trained}, so what it "
            f"computes beyond may mean nothing; {remedy}.",
            LongTextWarning,
        )
