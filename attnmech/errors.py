"""The errors that attnmech raises on purpose; `AttnmechError` catches them all.

Each message says what was expected, what arrived and what to try. Each class also derives from the built-in error
that a caller would expect (`ValueError`, `FileNotFoundError`, …).
"""


class AttnmechError(Exception):
    """Base of every error that attnmech raises on purpose."""


class InputError(AttnmechError, ValueError):
    """The model or the function does not accept this text, token id, layer, head or option."""


class ModelNotFoundError(AttnmechError, FileNotFoundError):
    """There are no weights under this name or in this folder."""


class UnsupportedModelError(AttnmechError, TypeError):
    """The model has no attention, or a kind that attnmech cannot express exactly."""


class WeightsError(AttnmechError, ValueError):
    """The weights cannot be used: not finite, missing, or in a precision that this device does not support."""


class DeviceMemoryError(AttnmechError, MemoryError):
    """The device has too little memory for this call."""


class MissingPointError(AttnmechError, KeyError):
    """This model has no such activation point, or the run did not capture it."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ExactnessError(AttnmechError, ArithmeticError):
    """A decomposition does not add up to what the model computed, so nothing is reported."""


class CertificateError(AttnmechError, RuntimeError):
    """A check of the certificate failed: a point does not hold what its name says."""


class OutputError(AttnmechError, OSError):
    """A result cannot be written to the given path."""


class JournalError(AttnmechError, ValueError):
    """A run cannot resume from this journal: it belongs to another run, is in use, or is damaged."""


class ReducerError(AttnmechError, ValueError):
    """A reducer returned NaN, or something other than the tensors of its state."""


class EngineError(AttnmechError, RuntimeError):
    """Workers in other processes or on other machines cannot be reached, started or used."""
