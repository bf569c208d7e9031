"""Sweeps, patches and sinks of Longformer with global tokens, against transformers' own model with hooks."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import product
from typing import Any, Final

import models
import pytest
import torch
from by_hand import block_of, divergences, logit_differences, output_changed, z_changed, zeroed
from einops import rearrange
from torch import Tensor

import attnmech as am
from attnmech.methods.null_attention.result import INTERVENTIONS

F64 = torch.float64
WINDOWS: Final = (4, 8, 4)
LAYERS, HEADS, LENGTH = 3, 3, 13
HEADED: Final = list(product(range(LAYERS), range(HEADS)))
ANSWERS, AGAINST = torch.tensor([5, 9]), torch.tensor([7, 4])
JUDGED: Final[dict[str, Any]] = {"answers": ANSWERS, "against": AGAINST}
CLOSE: Final[dict[str, Any]] = {"rtol": 1e-5, "atol": 1e-6}
"""transformers' Longformer computes its softmax in float32."""


def inputs(seed: int = 3, globals_of_second: tuple[int, ...] = (5, 6)) -> dict[str, Tensor]:
    """Two texts of 13 and 10 tokens, with global tokens 0 and 9, and two others."""
    real = torch.ones(2, LENGTH, dtype=torch.long)
    real[1, 10:] = 0
    is_global = torch.zeros_like(real)
    is_global[0, [0, 9]] = 1
    is_global[1, list(globals_of_second)] = 1
    ids = torch.randint(3, 59, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": real, "global_attention_mask": is_global}


LENGTHS: Final = [13, 10]


def hooked() -> am.HookedModel:
    return models.hooked("longformer", F64)


def plain() -> Any:
    return models.plain("longformer", F64)


def logits(given: dict[str, Tensor] | None = None) -> Tensor:
    with torch.no_grad():
        found: Tensor = plain()(**(inputs() if given is None else given)).logits
    return found


def kl(found: Tensor) -> Tensor:
    return divergences(found, _clean(), LENGTHS)


@cache
def _clean() -> Tensor:
    return logits()


def differences(found: Tensor) -> Tensor:
    """The metric at each text's last token."""
    last = torch.stack([row[length - 1 : length] for row, length in zip(found, LENGTHS, strict=True)])
    return logit_differences(last, ANSWERS, AGAINST)


def z_of(given: dict[str, Tensor], layer: int) -> Tensor:
    """z at the texts' own length, as transformers' output projection receives it."""
    kept: list[Tensor] = []
    with z_changed(plain(), layer, lambda z: (kept.append(z.clone()), z)[1]):
        logits(given)
    return kept[0][:, :LENGTH]


@contextmanager
def z_put(layer: int, head: int, z: Tensor) -> Iterator[None]:
    """The plain model with one head's z `[batch position d_head]` replaced."""

    def change(now: Tensor) -> Tensor:
        now[:, :LENGTH, head] = z
        return now

    with z_changed(plain(), layer, change):
        yield


class ByHand:
    """Attention of one layer, row by row, from transformers' hidden states and raw weights."""

    def __init__(self, layer: int) -> None:
        given = inputs()
        with torch.no_grad():
            states = plain()(**given, output_hidden_states=True).hidden_states
        self.x = states[layer]
        self.real = given["attention_mask"].bool()
        self.chosen = given["global_attention_mask"].bool() & self.real
        module = block_of(plain(), layer).attention.self
        self.made = {
            (name, suffix): getattr(module, name + suffix)(self.x).detach().view(2, LENGTH, HEADS, 7)
            for name in ("query", "key", "value")
            for suffix in ("", "_global")
        }
        self.W_O = rearrange(
            block_of(plain(), layer).attention.output.dense.weight.detach(), "d (head e) -> head e d", head=HEADS
        )
        self.seen = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
        for text, i, j in product(range(2), range(LENGTH), range(LENGTH)):
            near = abs(i - j) <= WINDOWS[layer] // 2
            either = bool(self.chosen[text, i] or self.chosen[text, j])
            self.seen[text, i, j] = (near or either) and bool(self.real[text, j])

    def suffix(self, text: int, i: int) -> str:
        return "_global" if self.chosen[text, i] else ""

    def pattern(self, head: int, seen: Tensor | None = None, added: Callable[..., Any] = lambda *_: 0.0) -> Tensor:
        """The pattern `[text row key]` over the keys in `seen`, with a term added to each row's scores."""
        seen = self.seen if seen is None else seen
        found = torch.zeros(2, LENGTH, LENGTH, dtype=F64)
        for text, i in self.real.nonzero().tolist():
            suffix = self.suffix(text, i)
            scores = self.made["key", suffix][text, :, head] @ self.made["query", suffix][text, i, head] / 7**0.5
            scores = scores + added(text, i, suffix)
            if seen[text, i].any():
                found[text, i] = scores.masked_fill(~seen[text, i], -torch.inf).softmax(dim=0)
        return found

    def z(self, head: int, pattern: Tensor, values: dict[str, Tensor] | None = None) -> Tensor:
        """`[text row d_head]`, with values `[text key d_head]` of local and global rows, the model's own if None."""
        values = values or {suffix: self.made["value", suffix][:, :, head] for suffix in ("", "_global")}
        found = torch.zeros(2, LENGTH, 7, dtype=F64)
        for text, i in self.real.nonzero().tolist():
            found[text, i] = pattern[text, i] @ values[self.suffix(text, i)][text]
        return found


@cache
def by_hand(layer: int) -> ByHand:
    return ByHand(layer)


def after(layer: int, head: int, z: Tensor) -> Tensor:
    with z_put(layer, head, z):
        return logits()


def test_updates_are_compared_with_what_the_rows_kind_reads() -> None:
    """A global row's most attended key has the global value."""
    found = am.residual_updates(hooked(), inputs())
    of_rows, of_keys = found.by_row("magnitude"), found.by_row("target_magnitude")
    for layer, head in HEADED:
        hand = by_hand(layer)
        pattern = hand.pattern(head)
        z = hand.z(head, pattern)
        for text, i in hand.real.nonzero().tolist():
            top = int(pattern[text, i].argmax())
            value = hand.made["value", hand.suffix(text, i)][text, top, head]
            for rows, read, place in ((of_rows, z[text, i], i), (of_keys, value, top)):
                size = float((read @ hand.W_O[head]).norm() / hand.x[text, place].norm())
                assert float(rows[layer, head, text, i]) == pytest.approx(size, rel=1e-5)


def test_zeroing_and_resampling_each_head() -> None:
    found = am.ablate_heads(hooked(), inputs(), metric="kl")
    # The donor texts' global tokens are at other positions.
    donors = inputs(seed=8, globals_of_second=(2, 7, 8)) | {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}
    drawn = am.ablate_heads(hooked(), inputs(), method="resample", reference=donors, metric="kl", seed=1)
    means = am.ablate_heads(hooked(), inputs(), method="mean", reference=donors, metric="kl")
    for layer, head in HEADED:
        with z_changed(plain(), layer, zeroed(head)):
            without = logits()
        torch.testing.assert_close(found.after[layer, head], kl(without), **CLOSE)
        theirs = z_of(donors, layer)[:, :, head]
        mean = theirs.mean(dim=(0, 1))
        torch.testing.assert_close(means.after[layer, head], kl(after(layer, head, mean.expand(2, LENGTH, 7))), **CLOSE)
        # Each text's donor is one of the two other texts.
        either = torch.stack(
            [kl(after(layer, head, theirs[[donor, donor]])) - drawn.after[layer, head] for donor in (0, 1)]
        )
        assert float(either.abs().amin(dim=0).max()) < 1e-6


def interventions(head: tuple[int, int]) -> dict[str, am.Intervention]:
    change, keys = am.Intervention, torch.zeros(2, LENGTH, dtype=torch.bool)
    keys[0, [0, 4]] = keys[1, [5, 8]] = True
    return {
        "remove": change.remove_keys([head], keys),
        "zero values": change.zero_values([head], keys),
        "cut": change.cut((2, 7), (4, 10), [head]),
        "uniform": change.attend([head], "uniform"),
        "first": change.attend([head], "first"),
        "self": change.attend([head], "self"),
        "half key_bias": change.scale("key_bias", 0.5, [head]),
        "no query_key": change.scale("query_key", 0.0, [head]),
    }


def changed_by_hand(what: str, layer: int, head: int) -> Tensor:
    """z under one of `interventions`."""
    hand = by_hand(layer)
    keys = torch.zeros(2, LENGTH, dtype=torch.bool)
    keys[0, [0, 4]] = keys[1, [5, 8]] = True
    place = torch.arange(LENGTH)
    module = block_of(plain(), layer).attention.self

    def biases(name: str, suffix: str) -> Tensor:
        return getattr(module, name + suffix).bias.detach()[7 * head : 7 * head + 7]

    def half_key_bias(text: int, i: int, suffix: str) -> Tensor:
        content = hand.made["key", suffix][text, :, head] - biases("key", suffix)
        return -0.5 * content @ biases("query", suffix) / 7**0.5

    def no_query_key(text: int, i: int, suffix: str) -> Tensor:
        content = hand.made["key", suffix][text, :, head] - biases("key", suffix)
        return -content @ (hand.made["query", suffix][text, i, head] - biases("query", suffix)) / 7**0.5

    if what == "remove":
        return hand.z(head, hand.pattern(head, hand.seen & ~keys[:, None]))
    if what == "cut":
        cells = ((place >= 2) & (place < 7))[:, None] & ((place >= 4) & (place < 10))
        return hand.z(head, hand.pattern(head, hand.seen & ~cells))
    if what == "zero values":
        values = {
            suffix: hand.made["value", suffix][:, :, head].masked_fill(keys[..., None], 0) for suffix in ("", "_global")
        }
        return hand.z(head, hand.pattern(head), values)
    if what == "uniform":
        return hand.z(head, hand.seen / hand.seen.sum(dim=-1, keepdim=True).clamp_min(1).double())
    if what in ("first", "self"):
        pattern = torch.eye(LENGTH, dtype=F64) if what == "self" else (place == 0).double().expand(LENGTH, LENGTH)
        return hand.z(head, pattern.expand(2, -1, -1))
    return hand.z(head, hand.pattern(head, added=half_key_bias if what == "half key_bias" else no_query_key))


@pytest.mark.parametrize("head", [(0, 2), (1, 0), (2, 1)])
def test_a_sweep_of_every_kind_of_change(head: tuple[int, int]) -> None:
    given = interventions(head)
    found = am.sweep(hooked(), inputs(), given, metric="kl")
    for place, what in enumerate(given):
        expected = kl(after(*head, changed_by_hand(what, *head)))
        torch.testing.assert_close(found.after[place], expected, **CLOSE, msg=lambda text, what=what: f"{what}: {text}")
    assert found.rows_without_keys.tolist() == [0] * len(given)


def corrupted() -> dict[str, Tensor]:
    given = inputs()
    given["input_ids"][:, [2, 9]] = inputs(seed=8)["input_ids"][:, [2, 9]]
    return given


def keeping(kept: dict[str, Tensor], path: str, columns: slice) -> Callable[[Tensor], None]:
    return lambda now: kept.__setitem__(path, now[..., columns])


def putting(given: Tensor, columns: slice) -> Callable[[Tensor], Tensor]:
    def put(now: Tensor) -> Tensor:
        now[..., columns] = given
        return now

    return put


def test_patching_z_queries_keys_and_values() -> None:
    other = corrupted()
    for at, name in (("z", ""), ("q", "query"), ("k", "key"), ("v", "value")):
        found = am.patch(hooked(), inputs(), other, at=at, heads=[(0, 1), (2, 2)], **JUDGED)
        torch.testing.assert_close(found.before, differences(logits(other)), **CLOSE)
        for layer, head in ((0, 1), (2, 2)):
            chosen = slice(7 * head, 7 * head + 7)
            kept: dict[str, Tensor] = {}
            paths = [f"attention.self.{name}{suffix}" for suffix in ("", "_global")] if name else []
            with ExitStack() as stack:
                for path in paths:
                    stack.enter_context(output_changed(plain(), layer, path, keeping(kept, path, chosen)))
                theirs = z_of(inputs(), layer)[:, :, head]
            with ExitStack() as stack:
                for path in paths:
                    stack.enter_context(output_changed(plain(), layer, path, putting(kept[path], chosen)))
                if not paths:
                    stack.enter_context(z_put(layer, head, theirs))
                expected = differences(logits(other))
            torch.testing.assert_close(found.after[layer, head], expected, **CLOSE)


def sink_of(target: str, pattern: Tensor, real: list[int]) -> int:
    if target == "first":
        return real[0]
    return max(real, key=lambda j: sum(float(pattern[i, j]) for i in real if i != j))


@pytest.mark.parametrize("target", ["first", "most_attended"])
def test_sinks(target: str) -> None:
    found = am.null_attention(hooked(), inputs(), sink=target, metric="kl")
    for layer, head in HEADED:
        hand = by_hand(layer)
        pattern = hand.pattern(head)
        values = {suffix: hand.made["value", suffix][:, :, head] for suffix in ("", "_global")}
        others, sinks = [], []
        for text in range(2):
            real = hand.real[text].nonzero()[:, 0].tolist()
            sink = sink_of(target, pattern[text], real)
            sinks.append(sink)
            others.append([i for i in real if i != sink])
            norm = {j: float((values[""][text, j] @ hand.W_O[head]).norm()) for j in real}
            mass = sum(float(pattern[text, i, sink]) for i in others[text]) / len(others[text])
            ratio = norm[sink] / statistics.median(norm[j] for j in others[text])
            assert found.facts[:2, layer, head, text].tolist() == pytest.approx([mass, ratio], rel=1e-6)
        mean = {
            suffix: torch.cat([value[text, others[text]] for text in range(2)]).mean(dim=0)
            for suffix, value in values.items()
        }
        for name in INTERVENTIONS:
            seen, now = hand.seen.clone(), {suffix: value.clone() for suffix, value in values.items()}
            for text, sink in enumerate(sinks):
                if name == "remove":
                    seen[text, :, sink] = False
                for suffix, value in now.items():
                    if name == "only_sink":
                        value[text, [j for j in range(LENGTH) if j != sink]] = 0
                    elif name != "remove":
                        value[text, sink] = mean[suffix] if name == "mean_value" else 0
            expected = kl(after(layer, head, hand.z(head, hand.pattern(head, seen), now)))
            effect = found.effects[name].after[layer, head]
            torch.testing.assert_close(effect, expected, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
