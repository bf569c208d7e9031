"""The numbers of a config, to recognise measured factors."""

from typing import Any


class Factors:
    """The numbers of a config, to recognise measured factors."""

    def __init__(self, config: Any, epsilon: float) -> None:
        self.epsilon = epsilon
        self.numbers = {
            name: float(value)
            for name, value in config.to_dict().items()
            if isinstance(value, int | float) and not isinstance(value, bool) and value
        }
        self.has_rotary = bool(getattr(config, "rope_parameters", None))
        """Whether the config gives the base of rotary angles."""
        self._known, layers = [1.0], self.numbers.get("num_hidden_layers", 1.0)
        for value in self.numbers.values():
            self._known += [value, 1 / value]
            if value > 0:
                self._known += [value**0.5, value**-0.5, value * layers**-0.5]

    def knows(self, factor: float) -> bool:
        """Whether a factor is a number of the config, or simply derived from one."""
        return factor in self._known

    def named(self, factor: float, d_head: int = 1, within: float = 0.0) -> float:
        """The exact value of a measured factor; if no candidate is near, the measured factor.

        That number may be 1, 1/√d_head, a number of the config, its root, the inverse of either, or a number of the
        config over √layers (MiniCPM). `within` is the allowed error of the measurement, besides rounding.
        """
        within = max(within, max(1e-4, self.epsilon) * abs(factor))
        near = min([d_head**-0.5, *self._known], key=lambda known: abs(known - factor))
        return near if abs(near - factor) <= within else factor
