"""Inside `torch.autocast`, and with a default device that is not the CPU, nothing is computed."""

import models
import torch
from comparing import refuses

import attnmech as am

EXPECTED = r"own precision, and torch\.autocast\('cpu'\) is in force"


def test_every_call_is_refused_and_leaves_the_model_as_it_was() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    before = hooked.run(ids).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for call in (
            hooked.run,
            hooked.loss,
            lambda ids: am.attention_focus(hooked, ids),
            lambda _: am.composition(hooked),
        ):
            refuses(EXPECTED, call, ids, error=am.errors.InputError)
        refuses(EXPECTED, am.load, models.fresh("gpt2"), error=am.errors.InputError)
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(hooked.run(ids).logits, before)
    assert torch.equal(hooked.run(ids).logits, before)
    assert am.certify(hooked).ok


def test_a_default_device_other_than_the_cpu_is_refused() -> None:
    hooked, ids, raw = models.hooked("gpt2"), models.token_ids("gpt2"), models.fresh("gpt2")
    expected = "needs the CPU as torch's default device, and 'meta' is in force"
    with torch.device("meta"):
        for call in (hooked.run, lambda ids: am.attention_focus(hooked, ids), lambda _: am.load(raw)):
            refuses(expected, call, ids, error=am.errors.InputError)
        with torch.device("cpu"):
            hooked.run(ids)
    assert am.certify(hooked).ok
