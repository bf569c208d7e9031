"""Path patching equals patching by hand, with hooks on the modules of transformers' own models."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any, Final

import models
import pytest
import torch
from by_hand import AGAINST, ANSWERS, JUDGED, columns, logit_differences, output_changed, plan_of, z_changed
from comparing import refuses
from torch import Tensor

import attnmech as am

MAKERS: Final[dict[str, Callable[[], Any]]] = {
    "gpt2": lambda: models.gpt2(layers=4),
    "llama": lambda: models.llama(layers=4),
    "bloom": lambda: models.bloom(layers=4),
    "gpt_neox": lambda: models.gpt_neox(layers=4),
    "gemma2": lambda: models.gemma2(layers=4),
    "qwen3": lambda: models.like_llama("Qwen3", layers=4, attention_bias=False),
}
LAYERS: Final = 4


@cache
def both(family: str) -> tuple[am.HookedModel, Any]:
    """attnmech's model of four layers, and transformers' model with the same weights."""
    hooked = am.load(models.randomised(MAKERS[family]()))
    return hooked, models.in_attention(models.randomised(MAKERS[family]()), "eager")


def prompts() -> tuple[Tensor, Tensor]:
    clean, other = torch.randint(3, 43, (2, 3, 7), generator=torch.Generator().manual_seed(1))
    corrupted = clean.clone()
    corrupted[:, [2, 5]] = other[:, [2, 5]]
    return clean, corrupted


@cache
def kept(family: str, of: int, what: str) -> list[Tensor]:
    """z, or the MLP's output, in every layer, for the clean (0) or the corrupted (1) prompts."""
    plain, ids = both(family)[1], prompts()[of]
    found: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        found.append(value.clone())
        return value

    with torch.no_grad(), ExitStack() as stack:
        for layer in range(LAYERS):
            path = plan_of(plain).mlp_out
            assert path is not None
            stack.enter_context(
                z_changed(plain, layer, keep) if what == "z" else output_changed(plain, layer, path, keep)
            )
        plain(ids)
    return found


def by_hand(
    family: str, sender: tuple[int, int], receivers: list[tuple[int, int]], through: str, mlps: str = "recompute"
) -> Tensor:
    """The logit differences by the two passes of Wang et al.; without receivers, those of the first pass."""
    plain, clean = both(family)[1], prompts()[0]
    z, sent, mlp = kept(family, 0, "z"), kept(family, 1, "z"), kept(family, 0, "mlp")
    first, head = sender

    def held(layer: int) -> Callable[[Tensor], Tensor]:
        def change(now: Tensor) -> Tensor:
            if layer > first:
                return z[layer]
            if layer == first:
                now[:, :, head] = sent[layer][:, :, head]
            return now

        return change

    received: dict[tuple[int, str, int], Tensor] = {}
    shared = both(family)[0].n_heads // both(family)[0].n_kv_heads
    places = [
        (layer, point, head if point == "q" else head // shared) for layer, head in receivers for point in through
    ]
    with torch.no_grad(), ExitStack() as stack:
        for layer in range(LAYERS):
            stack.enter_context(z_changed(plain, layer, held(layer)))
            if mlps == "frozen" and layer >= first:
                path = plan_of(plain).mlp_out
                assert path is not None
                stack.enter_context(output_changed(plain, layer, path, lambda now, layer=layer: mlp[layer]))
        for layer, point, own in places:
            path, chosen = columns(family, point, own, plain)

            def keep(now: Tensor, key: Any = (layer, point, own), chosen: slice = chosen) -> None:
                received[key] = now[..., chosen]

            stack.enter_context(output_changed(plain, layer, path, keep))
        logits = plain(clean).logits
    if not receivers:
        return logit_differences(logits, ANSWERS, AGAINST)
    with torch.no_grad(), ExitStack() as stack:
        for layer, point, own in places:
            path, chosen = columns(family, point, own, plain)

            def put(now: Tensor, key: Any = (layer, point, own), chosen: slice = chosen) -> Tensor:
                now[..., chosen] = received[key]
                return now

            if layer > first:
                stack.enter_context(output_changed(plain, layer, path, put))
        return logit_differences(plain(clean).logits, ANSWERS, AGAINST)


@pytest.mark.core
@pytest.mark.parametrize(
    ("family", "mlps"), [*((family, "recompute") for family in MAKERS), ("gpt2", "frozen"), ("gemma2", "frozen")]
)
def test_paths_to_the_logits_equal_the_raw_model(family: str, mlps: str) -> None:
    hooked = both(family)[0]
    found = am.path_patch(hooked, *prompts(), mlps=mlps, **JUDGED)
    before = logit_differences(hooked.run(prompts()[0]).logits, ANSWERS, AGAINST)
    torch.testing.assert_close(found.before, before, rtol=1e-4, atol=1e-4)
    for layer in range(LAYERS):
        for head in (layer % hooked.n_heads, hooked.n_heads - 1):
            expected = by_hand(family, (layer, head), [], "", mlps)
            torch.testing.assert_close(found.after[layer, head], expected, rtol=1e-4, atol=1e-4)
    assert found.complete and float(found.effect.abs().max()) > 1e-2
    assert found.receivers == () and found.through == ()


@pytest.mark.parametrize(
    ("family", "receivers", "through", "mlps"),
    [
        ("gpt2", [(3, 1)], "q", "recompute"), ("gpt2", [(3, 1)], "v", "frozen"),
        ("llama", [(2, 2), (3, 0)], "k", "recompute"), ("llama", [(3, 2), (1, 1)], "qkv", "recompute"),
        ("bloom", [(2, 2)], "v", "recompute"), ("gpt_neox", [(2, 2), (3, 0)], "k", "frozen"),
        ("gemma2", [(3, 2), (1, 1)], "qkv", "recompute"), ("gemma2", [(3, 1)], "v", "frozen"),
        ("qwen3", [(3, 1)], "q", "recompute"), ("qwen3", [(2, 2)], "v", "frozen"),
    ],
)  # fmt: skip
def test_paths_to_heads_equal_the_raw_model(
    family: str, receivers: list[tuple[int, int]], through: str, mlps: str
) -> None:
    hooked = both(family)[0]
    found = am.path_patch(hooked, *prompts(), receivers, list(through), mlps=mlps, **JUDGED)
    last = max(layer for layer, _ in receivers)
    for layer in range(last):
        for head in ((layer + 1) % hooked.n_heads, hooked.n_heads - 1):
            expected = by_hand(family, (layer, head), receivers, through, mlps)
            torch.testing.assert_close(found.after[layer, head], expected, rtol=1e-4, atol=1e-4)
    assert found.swept[:last].all() and not found.swept[last:].any() and found.after[last:].isnan().all()
    assert float(found.effect[:last].abs().max()) > 1e-3


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_receivers_may_act_on_the_logits_alone(family: str) -> None:
    """With later="frozen" the receiver changes only the final stream; its norm and the head are computed by hand."""
    hooked, (clean, corrupted) = both(family)[0], prompts()
    found = am.path_patch(hooked, clean, corrupted, [(2, 1)], "v", senders=[(0, 2)], later="frozen", **JUDGED)
    held = {layer: hooked.run(clean, points=[("z", layer)])["z", layer] for layer in (1, 2)}
    sent = hooked.run(corrupted, points=[("z", 0)])["z", 0]

    def at_sender(z: Tensor) -> Tensor:
        z[:, :, 2] = sent[:, :, 2]
        return z

    with hooked.hooks({("z", 0): at_sender, ("z", 1): lambda z: held[1]}):
        v = hooked.run(clean, points=[("v", 2)])["v", 2]
    own = 1 // (hooked.n_heads // hooked.n_kv_heads)

    def at_receiver(now: Tensor) -> Tensor:
        now[:, :, own] = v[:, :, own]
        return now

    outs = {
        (point, layer): hooked.run(clean, points=[(point, layer)])[point, layer]
        for point, layer in (("mlp_out", 2), ("mlp_out", 3), ("attn_out", 3))
    }
    frozen: Any = {key: lambda now, value=value: value for key, value in outs.items()}
    with hooked.hooks({("v", 2): at_receiver, **frozen}):
        after = logit_differences(hooked.run(clean).logits, ANSWERS, AGAINST)
    torch.testing.assert_close(found.after[0, 2], after, rtol=1e-4, atol=1e-4)
    assert float(found.effect[0, 2].abs()) > 1e-3


def test_what_it_says() -> None:
    hooked, (clean, corrupted) = both("gpt2")[0], prompts()
    found = am.path_patch(hooked, clean, corrupted, [(3, 1), (2, 0)], ["v", "q"], **JUDGED)
    assert repr(found).startswith(
        "PathEffects(The path from each of 15 heads in turn to q and v of L2H0, L3H1, on 3 pairs: L"
    )
    assert found.receivers == ((2, 0), (3, 1)) and found.through == ("q", "v")
    assert "to q and v of L2H0, L3H1, the sender&#39;s output is that of the" in found.to_html()
    other = am.path_patch(hooked, clean, corrupted, [(3, 1)], "q", **JUDGED)
    refuses("must have the same receivers", lambda: found - other)
    one = am.path_patch(hooked, clean, corrupted, senders=[(1, 1)], **JUDGED)
    assert repr(one).startswith("PathEffects(The path from 1 head to the logits, on 3 pairs: L1H1 has an")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"receivers": "head"}, '`receivers` must be "logits" or a list of'),
        ({"receivers": [(3, 9)]}, "`head` must be from 0 to 4"),
        ({"receivers": [(0, 1)]}, "no head is below the receivers, which are in layer 0"),
        ({"receivers": [(2, 1)], "senders": [(1, 0), (2, 3)]}, "of the last receiver .layer 2.; got L2H3"),
        ({"receivers": [(2, 1)], "through": "z"}, "`through` must be one of q, k, v; got 'z'"),
        ({"receivers": [(2, 1)], "through": []}, "`through` must name q, k or v"),
        ({"senders": [(0, 7)]}, "`head` must be from 0 to 4"),
        ({"mlps": "no"}, "`mlps` must be one of recompute, frozen"),
        ({"later": "frozen"}, 'with receivers="logits", use mlps="frozen"'),
        ({"corrupted": torch.tensor([[5, 6]])}, "every clean prompt needs a corrupted one; got 3 clean and 1"),
    ],
)
def test_bad_input(options: dict[str, Any], said: str) -> None:
    clean, corrupted = prompts()
    refuses(said, am.path_patch, both("gpt2")[0], clean, **{"corrupted": corrupted, **JUDGED, **options})
