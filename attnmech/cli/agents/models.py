"""Loads the models that the user allows, one at a time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import InputError

if TYPE_CHECKING:
    from ...model.run.hooked import HookedModel


class Models:
    """The models by the names that the user gave; an agent cannot load others."""

    def __init__(self, names: Sequence[str], device: str | None, dtype: str | None) -> None:
        self.names = tuple(names) or (DEMO,)
        self._device, self._dtype = device, dtype
        self._loaded: tuple[str, HookedModel] | None = None

    def load(self, name: str | None) -> "HookedModel":
        """Returns a model, the first by default; the model loaded before is dropped."""
        name = self.names[0] if name is None else name
        if name not in self.names:
            raise InputError(f"`model` must be one of {', '.join(self.names)}; got {name[:200]!r}.")
        if self._loaded is None or self._loaded[0] != name:
            from ...model.files.load import load

            self._loaded = None
            loaded = load(None if name == DEMO else name, device=self._device, dtype=self._dtype)
            self._loaded = name, loaded
        return self._loaded[1]


DEMO = "demo"
"""The name of the demo model."""
