"""Determines what a model's logits predict: the next token, the token behind a mask, or classes."""

from typing import Literal, TypeAlias

from transformers import PreTrainedModel

Prediction: TypeAlias = Literal["next token", "masked token", "output", "other"]
"""What a model predicts at each token; "output" stands for classes, or whatever a user's own module returns."""


def predicted_by(model: PreTrainedModel, *, causal: bool, writes_tokens: bool) -> Prediction:
    """What a model with logits predicts, judged by its class in transformers and its attention."""
    names = [kind.__name__ for kind in type(model).__mro__]
    if not writes_tokens or any(part in name for name in names for part in ("Classification", "SentencePrediction")):
        return "output"
    if causal:
        return "next token"
    # The heads of XLM and FlauBERT have an older name than those of other families.
    masked = any(name.endswith(("ForMaskedLM", "XLMWithLMHeadModel", "FlaubertWithLMHeadModel")) for name in names)
    return "masked token" if masked else "other"
