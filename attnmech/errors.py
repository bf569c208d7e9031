"""The errors that attnmech raises on purpose; `AttnmechError` catches them all.

Each message says what was expected, what arrived and what to try. Each class also derives from the built-in error
that a caller would expect (`ValueError`, `FileNotFoundError`, …).
"""


class AttnmechError(Exception):
    """Base of every error that attnmech raises on purpose."""


class InputError(AttnmechError, ValueError):
    """A text, a token id, a layer, a head or an option that the model or the call cannot take."""


class ModelNotFoundError(AttnmechError, FileNotFoundError):
    """No weights at a model's name or folder."""


class UnsupportedModelError(AttnmechError, TypeError):
    """The model has no attention, or a kind that attnmech cannot express exactly."""


class WeightsError(AttnmechError, ValueError):
    """The weights cannot be used: not finite, missing, or in a precision that this device does not support."""


class DeviceMemoryError(AttnmechError, MemoryError):
    """The device has too little memory."""


class MissingPointError(AttnmechError, KeyError):
    """An activation point that this model does not have, or that the run did not capture."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ExactnessError(AttnmechError, ArithmeticError):
    """A decomposition does not add up to what the model computed, so nothing is reported."""


class CertificateError(AttnmechError, RuntimeError):
    """A check of the certificate failed: a hook does not mean what its name says."""


class OutputError(AttnmechError, OSError):
    """A result cannot be written to the given path."""


class JournalError(AttnmechError, ValueError):
    """A journal that a run cannot resume from: another run's, one in use, or a damaged one."""


class ReducerError(AttnmechError, ValueError):
    """A reducer that returned something other than the tensors of its state, or NaN."""


class EngineError(AttnmechError, RuntimeError):
    """Workers on other processes or machines that cannot be reached, started or used."""
