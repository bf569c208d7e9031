"""A training run on disk: what it needs to resume after an interruption."""

from collections.abc import Mapping
from pathlib import Path
from random import Random

import torch
from safetensors import SafetensorError

from attnmech.errors import InputError
from attnmech.results.tensor_file import read_tensors, write_tensors

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's state of each parameter."""


class Checkpoint:
    """One file with a run's weights, its optimizer's moments and its random state; written whole or not at all."""

    def __init__(self, file: Path, settings: Mapping[str, object]) -> None:
        self.file = file
        self._settings = dict(settings)

    def write(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rng: Random) -> None:
        """Write the state of a run after a step."""
        header = {"settings": self._settings, "step": step, "random": rng.getstate()}
        tensors = {}
        for name, parameter in model.named_parameters():
            tensors[f"weight {name}"] = parameter.detach()
            tensors |= {f"{moment} {name}": optimizer.state[parameter][moment] for moment in MOMENTS}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(self.file, tensors, header)

    def resume(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rng: Random) -> int:
        """Restore the run on disk into a new one; returns its step, or 0 if there is none.

        Raises `InputError`, and leaves the file unchanged, if it is another run's or not a run's file.
        """
        if not self.file.exists():
            return 0
        try:
            tensors, header = read_tensors(self.file)
        except (SafetensorError, KeyError, ValueError) as error:
            raise InputError(f"{self.file} is not a training run that can be resumed ({error}); remove it.") from error
        if header["settings"] != self._settings:
            raise InputError(
                f"{self.file} is a run with {header['settings']}; this one has {self._settings}. "
                "Use the same settings or another folder, or remove the file."
            )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(tensors[f"weight {name}"])
                moments = {moment: tensors[f"{moment} {name}"] for moment in MOMENTS}
                optimizer.state[parameter] = {moment: value.to(parameter.device) for moment, value in moments.items()}
        version, internal, gauss = header["random"]
        rng.setstate((version, tuple(internal), gauss))
        return int(header["step"])

    def remove(self) -> None:
        """Remove the file once the run has ended."""
        self.file.unlink(missing_ok=True)
