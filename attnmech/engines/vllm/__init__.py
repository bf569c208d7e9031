"""vLLM as the engine: `Heads` extends its workers, `watching` and `scaling` its offline `LLM`."""

from .client import Seen, repeated_sequences, scaling, watching
from .worker import Heads

__all__ = ["Heads", "Seen", "repeated_sequences", "scaling", "watching"]
