"""Computes the spectrogram of a model's input, to draw a recording."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float

from ...batch import Batch
from ...maths.float64 import as_float64
from .sounds import SoundEncoder

_WINDOW: Final = 0.025
"""The duration of the sound in one column, in seconds."""
_COLUMNS: Final = 1200
"""The maximum number of columns of a spectrogram."""
_FLOOR: Final = 80.0
"""The lowest level drawn, in dB below the loudest cell."""


@dataclass(frozen=True)
class Spectrogram:
    """Levels by frequency and time."""

    times: Float[np.ndarray, " time"]
    """The time of the middle of each column, in seconds."""
    bands: Float[np.ndarray, " band"]
    levels: Float[np.ndarray, "band time"]
    units: tuple[str, str]
    """The units of the bands and of the levels."""


def spectrogram_of(encoder: SoundEncoder, batch: Batch, row: int) -> Spectrogram:
    """The spectrogram of one recording of a batch.

    For samples: 10 log₁₀ of the power in windows of 25 ms, down to 80 dB below the loudest cell. If the input already
    is a spectrogram: the input itself.
    """
    from scipy import signal  # type: ignore[import-untyped]

    values = as_float64(batch.extra[encoder.signal.argument][row].detach()).cpu().numpy()
    if not encoder.signal.is_wave:
        levels = values if encoder.signal.argument == "input_features" else values.T
        step = encoder.seconds_per_column
        times = (np.arange(levels.shape[1]) + 0.5) * step
        return Spectrogram(times, np.arange(float(len(levels))), levels, ("mel band", "level, as given"))
    if "attention_mask" in batch.extra:
        values = values[batch.extra["attention_mask"][row].bool().cpu().numpy()]
    width = min(len(values), max(8, round(_WINDOW * encoder.rate)))
    step = max(1, width // 2, -(-len(values) // _COLUMNS))
    bands, times, power = signal.spectrogram(
        values, fs=encoder.rate, nperseg=width, noverlap=max(0, width - step), detrend=False
    )
    levels = 10 * np.log10(np.maximum(power, power.max() * 10 ** (-_FLOOR / 10) + np.finfo(float).tiny))
    return Spectrogram(times, bands, levels, ("frequency (Hz)", "power (dB)"))
