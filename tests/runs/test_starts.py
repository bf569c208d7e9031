"""The first block, the caches and the skipped parts of sweeps change only the amount of computation."""

from itertools import cycle

import models
import pytest
import torch
from by_hand import losses
from torch import Tensor

import attnmech as am
from attnmech.interventions import Intervention
from attnmech.runs import engine
from attnmech.runs.corpus import CorpusBatch
from attnmech.runs.engine import Engine
from attnmech.runs.sweep import Sweeps

CAUSAL = ("gpt2", "llama", "bloom", "gpt_neox", "gpt_neox_serial", "opt", "opt_post", "gemma2", "mpt6", "bamba")
ONE = {1: torch.ones(1, 1, 5, 4)}


def whole_pass(hooked: am.HookedModel, ids: Tensor, change: tuple[Intervention, ...]) -> Tensor:
    """The loss of each text in a pass through every block."""
    with hooked.intervene(*change):
        return losses(hooked.run(ids, points=["logits"]).logits, ids, [ids.shape[1]] * len(ids))


def changes_of(hooked: am.HookedModel, ids: Tensor) -> list[tuple[Intervention, ...]]:
    """Every kind of ablation in every layer, and some ablations of several heads."""
    layers, stack = hooked.output_stack.layers, hooked.output_stack.label
    values = [am.mean_z(hooked, ids.flip(0)), am.mean_z(hooked, ids.roll(1, 1), per_position=True)]
    found: list[tuple[Intervention, ...]] = [(Intervention.zero([(layer, 1)], stack=stack),) for layer in layers]
    found += [(Intervention.replace([(layer, 0), (layer, 1)], each),) for layer in layers for each in values]
    last, first = layers[-1], layers[0]
    found += [(Intervention.zero([(last, 0)]), Intervention.replace([(first, 1)], values[0]))]
    found += [(Intervention.stream("attn_out", [first]), Intervention.stream("mlp_out", [last]))]
    return found


@pytest.mark.parametrize(("name", "dtype"), [*zip(CAUSAL, cycle((torch.float32, torch.float64)))])
def test_sweeps_equal_whole_passes(name: str, dtype: torch.dtype) -> None:
    hooked, ids = models.hooked(name, dtype), models.token_ids(name)
    changes = changes_of(hooked, ids)
    found = am.sweep(hooked, ids, changes).after
    expected = torch.stack([whole_pass(hooked, ids, change) for change in changes])
    torch.testing.assert_close(found, expected.double(), rtol=2e-6 if dtype == torch.float32 else 1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "change",
    [
        Intervention.replace([(1, 0)], ONE, point="q"),
        Intervention.replace([(1, 0)], ONE, point="v"),
        Intervention.zero_values([(1, 2)], "first"),
        Intervention.zero_values([(0, 1), (1, 2)], "first"),
        Intervention.remove_keys([(1, 2)], [1], positions=[3, 4]),
        Intervention.scale("key_bias", 0.5, [(1, 2)]),
        Intervention.attend([(1, 2)], "uniform"),
        Intervention.reweight([(1, 2)], "first", 0.3),
        Intervention.stream("resid_pre", [1], {1: torch.ones(1, 1, 20)}),
    ],
    ids=lambda change: f"{change.point} {change.edit}",
)
def test_changes_within_attention(change: Intervention) -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    zero = Intervention.zero([(1, 1)])
    changes = [(zero, change), (zero,), (change,)]  # in one batch, so one change must leave the others' texts alone
    found = am.sweep(hooked, ids, changes).after
    expected = torch.stack([whole_pass(hooked, ids, each) for each in changes])
    torch.testing.assert_close(found, expected.double(), rtol=2e-6, atol=1e-9)


def test_hooks_of_the_user_are_called() -> None:
    hooked, ids = models.hooked("llama"), models.token_ids("llama")
    with hooked.hooks({("q", 1): lambda q: 2 * q}):
        found = am.ablate_heads(hooked, ids, [(1, 2)], layers=[1]).after[1, 2]
        expected = whole_pass(hooked, ids, (Intervention.zero([(1, 2)]),))
    torch.testing.assert_close(found, expected.double(), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize(("memory", "kept_at"), [(1.0, [1, 2, 3, 4, 5]), (4e-4, [2, 4]), (1.2e-4, [])])
def test_what_joins_leaves_the_streams_below_as_they_are(memory: float, kept_at: list[int]) -> None:
    """A candidate below the removed head begins at that head's block, or where its stream was last cached."""
    hooked, ids = am.load(models.gpt2(layers=6)), models.token_ids("gpt2")
    counts: list[int] = []
    for block in hooked.output_stack.blocks.values():
        block.ln_1.register_forward_hook(lambda module, args, output: counts.append(len(output)))  # type: ignore[union-attr]
    left = [Intervention.zero([(layer, head)]) for layer in range(6) for head in range(5)]
    sweeps, held = Sweeps(hooked, ids, memory=memory), ()
    sweeps.sweep([(each,) for each in left], keep=True)
    assert list(sweeps._engine.kept_at) == kept_at
    for place in ((4, 1), (3, 0), (5, 2), (0, 3), (4, 4)):
        gone = next(each for each in left if each.heads == (place,))
        left.remove(gone)
        held = (*held, gone)
        changes = [(*held, each) for each in left]
        counts.clear()
        found = sweeps.sweep(changes, keep=True).after
        ran = sum(counts)
        expected = torch.stack([whole_pass(hooked, ids, change) for change in changes[::5]])
        torch.testing.assert_close(found[::5], expected.double(), rtol=2e-6, atol=1e-9)
        kept = {each.untyped_storage().data_ptr(): each for each in sweeps._engine._texts[0]._kept.values()}
        assert sum(each.untyped_storage().nbytes() for each in kept.values()) <= memory * 1e9 / 4
        layers = [each.touches[0] for each in left]
        begins = [max(layer, *(at for at in (0, *kept_at) if at <= place[0])) for layer in layers]
        assert ran == 3 * (6 - place[0] + sum(6 - begin for begin in begins)), place


def test_steps_are_as_large_as_an_activation_that_fits_the_cache() -> None:
    widest, cpu = 4 * 3072, torch.device("cpu")  # of GPT-2 small, in bytes
    assert engine.step_tokens(widest, cpu) == 512
    assert engine.step_tokens(widest // 4, cpu) == 2048
    assert engine.step_tokens(4 * widest, cpu) == 512


@pytest.mark.parametrize(("at_once", "memory", "passes"), [(10**6, 1e9, 1), (21, 1e9, 4), (10**6, 5e5, 2)])
def test_changes_share_a_pass_as_far_as_steps_and_memory_allow(
    at_once: int, memory: float, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve changes of a text of seven tokens."""
    monkeypatch.setattr(engine, "step_tokens", lambda *_: at_once)
    hooked = models.hooked("gpt2")
    made = Engine(hooked, memory, frozen=False, shifts=False)
    part = CorpusBatch(hooked.encode(models.token_ids("gpt2", batch=1)), torch.tensor([0]), 0, "")
    changes = [(Intervention.zero([(1, head % 5)]),) for head in range(12)]
    groups = list(made.groups(part, changes, range(12)))
    assert [number for group in groups for number in group] == [*range(12)]
    assert len(groups) == passes
