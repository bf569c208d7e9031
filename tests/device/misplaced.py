"""`python misplaced.py`: tensors on a different device from the model's are moved, or refused with an error.

Prints a line of JSON per statement: what was tried, and its difference from the CPU's result, or the error's sentence.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import fake_device
import models
import torch
from torch import Tensor

import attnmech as am


def statements() -> Iterator[tuple[str, Callable[[], Any]]]:
    tokenizer, ids = models.tokenizer(), models.token_ids("gpt2")
    on_cpu, on_device = am.load(models.fresh("gpt2")), am.load(models.fresh("gpt2"), device=fake_device.NAME)
    expected = on_cpu.run(ids).logits
    torch.manual_seed(0)
    vectors = {layer: torch.randn(1, 1, on_cpu.d_model) for layer in range(on_cpu.n_layers)}

    def off(logits: Tensor, from_: Tensor = expected) -> float:
        return float((logits.cpu() - from_).abs().max())

    def changed(model: am.HookedModel, device: str) -> Tensor:
        moved = {layer: vector.to(device) for layer, vector in vectors.items()}
        with model.intervene(am.Intervention.add("resid_pre", moved)):
            return model.run(ids).logits

    def hooked(model: am.HookedModel, device: str) -> Tensor:
        with model.hooks({("pattern", 0): lambda pattern: torch.zeros_like(pattern, device=device)}):
            return model.run(ids).logits

    for model, other in ((on_cpu, fake_device.NAME), (on_device, "cpu")):
        place = f"to a model on {model.device.type}"
        batch = (on_device if model is on_cpu else on_cpu).encode(ids)
        yield f"ids {place}", lambda model=model, other=other: off(model.run(ids.to(other)).logits)
        yield f"batch {place}", lambda model=model, batch=batch: off(model.run(batch).logits)
        yield f"vectors {place}", lambda model=model, other=other: off(
            changed(model, other), changed(on_cpu, "cpu")
        )  # fmt: skip
        yield f"a hook's pattern {place}", lambda model=model, other=other: off(
            hooked(model, other), hooked(on_cpu, "cpu")
        )  # fmt: skip
    half = models.fresh("gpt2")
    half.transformer.h[1].to("meta")
    yield "half a model", lambda: am.load(half, tokenizer=tokenizer)
    yield "float64", lambda: am.load(models.fresh("gpt2").double(), device=fake_device.NAME)
    torch.set_default_device(fake_device.NAME)
    yield "a default device", lambda: am.load(half)
    yield "a run with a default device", lambda: on_device.run(ids)


if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)
    fake_device.install(float64=False)
    for name, call in statements():
        try:
            answer = call()
        except am.errors.AttnmechError as error:
            answer = str(error)
        print(json.dumps([name, answer]), flush=True)
    os._exit(0)  # torch shuts down before Python, and would call back into it
