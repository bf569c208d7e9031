"""Makes an untrained model of the same shape, as a baseline."""

import copy

import torch

from ...basics.arguments import whole_number
from ...basics.public import public
from ...errors import InputError
from ..run.hooked import HookedModel, require_model
from .load import load


@public
def untrained(model: HookedModel, seed: int = 0) -> HookedModel:
    """A model of the same config and tokenizer with random weights, as transformers initialises them.

    >>> import attnmech as am
    >>> am.untrained(am.load(), seed=1).name
    'demo (random weights, seed 1)'

    Args:
        model: the model.
        seed: the seed of the random weights; torch's global generator is left alone.

    Returns:
        A new model, which takes as much memory as the original.
    """
    require_model(model)
    if model.is_own:
        raise InputError(
            "untrained is for transformers models, which can be made anew from their config; make a new instance of "
            "your module, and load it: am.load(module, example=...)."
        )
    seed = whole_number("seed", seed, most=2**63 - 1)
    kind = type(model.plain)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = kind._from_config(copy.deepcopy(model.plain.config), dtype=model.dtype)  # type: ignore[no-untyped-call]
    random = load(made.eval(), tokenizer=model.tokenizer, device=model.device, bos=getattr(model.encoder, "bos", None))
    random.name = f"{model.name} (random weights, seed {seed})"
    return random
