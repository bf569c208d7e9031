"""A device that runs out of memory while a model is loaded raises an error that says so, at whatever point that
happens."""

import gc
import itertools
import weakref
from typing import Any

import models
import pytest
import torch
from torch import nn

import attnmech as am

RAN_OUT = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Limited:
    """A module that fails at one of its calls, counted over all copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], fails_at: float) -> None:
        self.calls, forward = 0, kind.forward

        def limited(module: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == fails_at:
                raise torch.OutOfMemoryError(RAN_OUT)
            return forward(module, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", limited)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_wherever_memory_runs_out_the_error_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = models.fresh(name)
    kind = type(next(module for module in raw.modules() if type(module).__name__.endswith(("Block", "DecoderLayer"))))
    with monkeypatch.context() as patched:
        counted = Limited(patched, kind, torch.inf)
        assert am.load(raw).certificate.ok
    for fails_at in itertools.chain(range(1, counted.calls, 7), [counted.calls]):
        with monkeypatch.context() as patched:
            Limited(patched, kind, fails_at)
            with pytest.raises(am.errors.DeviceMemoryError, match=r"out of memory\. .*dtype=\"bfloat16\"") as raised:
                am.load(raw)
        assert raised.value.__context__ is None and raised.value.__cause__ is None, fails_at


def test_what_was_made_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = models.fresh("gpt2")
    kind = type(raw.transformer.h[0])
    with monkeypatch.context() as patched:
        Limited(patched, kind, 30)
        made: list[weakref.ref[am.HookedModel]] = []
        start = am.HookedModel.__init__

        def kept(self: Any, *args: Any, **kwargs: Any) -> None:
            made.append(weakref.ref(self))
            start(self, *args, **kwargs)

        patched.setattr(am.HookedModel, "__init__", kept)
        try:
            am.load(raw)
        except am.errors.DeviceMemoryError as error:
            stays = error
    gc.collect()
    assert stays is not None and made and made[0]() is None
