"""Results of every kind, on the same texts: plain, under a hook, with other weights, or on other texts."""

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import models
import torch
from torch import Tensor

import attnmech as am

MODEL: Final = "gpt2"
CHANGE: Final = am.Intervention
CIRCUITS: Final = [am.Circuit(nodes=("L0H0",)), am.Circuit(nodes=("L0H0", "L2H1", "L1 MLP"))]
PAIRS: Final = [((0, 1), (2, 3)), ((0, 0), (1, 1))]
Call = Callable[[am.HookedModel, Tensor], Any]


def answers(ids: Tensor) -> dict[str, Any]:
    return {"answers": [5] * len(ids), "against": [9] * len(ids)}


def on_pairs(call: Callable[..., Any], *given: Any, **options: Any) -> Call:
    """A call on texts, each with a corrupted one."""
    return lambda model, ids: call(model, ids, ids.roll(2, dims=1), *given, **options, **answers(ids))


SUBTRACTED: Final[dict[str, Call]] = {
    "focus": am.attention_focus,
    "focus of a corpus": lambda model, ids: am.attention_focus(model, iter(list(ids))),
    "updates": am.residual_updates,
    "blocks": lambda model, ids: am.residual_updates(model, ids).blocks,
    "ablation": lambda model, ids: am.ablate_heads(model, ids, shifts=True),
    "patching heads": on_pairs(am.patch),
    "patching positions": on_pairs(am.patch, at="resid_pre"),
    "attribution": on_pairs(am.attribute, nodes="heads+mlps"),
    "importance": am.head_importance,
    "null": am.null_attention,
    "pairs": lambda model, ids: am.ablate_pairs(model, ids, PAIRS),
    "sweep": lambda model, ids: am.sweep(model, ids, [CHANGE.remove_keys([(0, 1)], "first"), CHANGE.zero([(1, 2)])]),
    "paths": on_pairs(am.path_patch, [(2, 1)]),
}
"""Kinds that have a difference."""

FURTHER: Final[dict[str, Call]] = {
    "kv heads": lambda model, ids: on_pairs(am.patch, at="k")(models.hooked("llama"), ids % 40),
    "edges": on_pairs(am.attribute, nodes="heads", edges=True, confirm=2, controls=2),
    "draws": lambda model, ids: am.ablate_heads(model, ids, [(0, 1), (2, 4)], "resample", draws=2),
    "pruning": lambda model, ids: am.prune_heads(model, ids, layers=[2], random=2),
    "doses": lambda model, ids: am.steer(
        model, {1: torch.ones(1, 1, model.d_model)}, ids, at="resid_post", factors=[0, 1.0, -3.0], side_inputs=ids
    ),
    "circuits": lambda model, ids: am.faithfulness(model, CIRCUITS, ids, ids.roll(2, dims=1), **answers(ids)),
    "variance": am.variance_shares,
}
KINDS: Final = SUBTRACTED | FURTHER


@cache
def result(kind: str, run: str, texts: int = 7) -> Any:
    """A result on some texts, on these under a hook, with other weights, or on five other texts."""
    model, ids = models.hooked(MODEL), models.token_ids(MODEL, batch=texts)
    if run == "hooked":
        with model.hooks({("resid_pre", 1): lambda stream: stream.flip(-1)}):
            return KINDS[kind](model, ids)
    if run == "trained":
        return KINDS[kind](am.load(models.fresh(MODEL, seed=8)), ids)
    return KINDS[kind](model, models.token_ids(MODEL, batch=5, seed=9) if run == "others" else ids)
