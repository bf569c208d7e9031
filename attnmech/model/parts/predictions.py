"""What a model's logits predict: the next token, the token behind a mask, or classes."""

from typing import Literal, TypeAlias

from transformers import PreTrainedModel

Prediction: TypeAlias = Literal["next token", "masked token", "output", "other"]
"""What a model predicts at each token; "output" are classes, or whatever a module of the user's own returns."""


def predicted_by(model: PreTrainedModel, *, causal: bool, writes_tokens: bool) -> Prediction:
    """What a model with logits predicts, by its class in transformers and its attention."""
    names = [kind.__name__ for kind in type(model).__mro__]
    if not writes_tokens or any(part in name for name in names for part in ("Classification", "SentencePrediction")):
        return "output"
    if causal:
        return "next token"
    # XLM's and FlauBERT's heads are older than the others' name.
    masked = any(name.endswith(("ForMaskedLM", "XLMWithLMHeadModel", "FlaubertWithLMHeadModel")) for name in names)
    return "masked token" if masked else "other"
