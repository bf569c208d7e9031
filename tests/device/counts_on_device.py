"""`python counts_on_device.py KIND`: counts launches and waits on a simulated device, and plants faults.

Prints a line of JSON: how often each call launches a kernel and waits for the device; whether a changed weight changes
the hash; and, by kind of fault, the error on the CPU and on the device.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import fake_device
import torch
import transformers
from torch import nn

import attnmech as am
from attnmech.model.attention import attend

LAYERS, WORDS = 12, 512
SIZES = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=LAYERS, n_head=4, n_embd=48, vocab_size=WORDS, bos_token_id=0, eos_token_id=0)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, hidden_size=64,
            intermediate_size=96, vocab_size=WORDS,
        )
    ),
}  # fmt: skip
IDS = torch.randint(0, WORDS, (1, 128), generator=torch.Generator().manual_seed(5))


def made(kind: str) -> Any:
    torch.manual_seed(0)
    return SIZES[kind]().eval()


def counts(model: am.HookedModel, plain: nn.Module) -> dict[str, dict[str, int]]:
    """Launches and waits of the second call of each kind, and the waits of the running certificate among them."""
    ids = IDS.to(fake_device.NAME)
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: plain(ids),
        "run": lambda: model.run(IDS, points=["logits"]),
        "focus": lambda: am.attention_focus(model, IDS),
        "updates": lambda: am.residual_updates(model, IDS),
    }
    by_call = {}
    for name, call in calls.items():
        with torch.no_grad():
            call()
            with fake_device.counting() as count:
                call()
        launches, waits = count.total()
        checks = sum(number for place, number in count.waits.items() if "attention/running.py" in place)
        by_call[name] = {"launches": launches, "waits": waits, "checks": checks}
    return by_call


def hashes(model: am.HookedModel, plain: nn.Module) -> list[str]:
    """The hash of the weights before and after an untraced change of one bit, and after the change is undone."""
    values = [model.weights_hash]
    weight = list(plain.parameters())[7].data.view(torch.int32).view(-1)
    for _ in range(2):
        weight[-3] ^= 1
        values.append(model.weights_hash)
    return values


@contextmanager
def doubled_z(model: am.HookedModel) -> Iterator[None]:
    """W_O of layer 2 reads a z that is doubled from token 9 on."""
    stack = model.stack()
    out = stack.module(2, stack.architecture.out)
    with out.register_forward_pre_hook(lambda _, args: (torch.cat((args[0][:, :9], 2 * args[0][:, 9:]), dim=1),)):
        yield


@contextmanager
def changed_values(model: am.HookedModel) -> Iterator[None]:
    """Layer 1 attends with values that its projection did not make, from token 9 on."""
    path = "attn.c_attn" if isinstance(model.original, transformers.GPT2LMHeadModel) else "self_attn.v_proj"

    def change(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return torch.cat((output[:, :9], 1.001 * output[:, 9:]), dim=1)

    with model.stack().module(1, path).register_forward_hook(change):
        yield


@contextmanager
def leaking_rows(_: am.HookedModel) -> Iterator[None]:
    with mock.patch.object(attend, "softmax_with_sink", lambda scores, _: (scores.softmax(dim=-1) * 0.999, None)):
        yield


FAULTS = (doubled_z, changed_values, leaking_rows)


def errors(model: am.HookedModel) -> list[str]:
    sentences = []
    for fault in FAULTS:
        with fault(model):
            try:
                model.run(IDS[:, :14])
                sentences.append("")
            except am.errors.ExactnessError as error:
                sentences.append(str(error))
    return sentences


if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    fake_device.install()
    (kind,) = sys.argv[1:]
    raw = made(kind).to(fake_device.NAME)
    raw.tie_weights()
    there = am.load(raw)
    both = zip(FAULTS, errors(am.load(made(kind))), errors(there), strict=True)
    of_faults = {fault.__name__: sentences for fault, *sentences in both}
    print(json.dumps({"counts": counts(there, raw), "hashes": hashes(there, raw), "errors": of_faults}), flush=True)
    os._exit(0)  # torch shuts down before Python, and would call back into the device
