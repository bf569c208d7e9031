"""The exact interval of a share of independent tokens or texts."""

import torch
from scipy.stats import beta  # type: ignore[import-untyped]
from torch import Tensor


def exact_interval(share: Tensor, tokens: int, error: float) -> tuple[Tensor, Tensor]:
    """Returns the exact interval (Clopper & Pearson 1934) for a share of independent tokens.

    A share that is not a whole number of tokens is rounded down for the low end, and up for the high end.

    >>> [round(float(end), 4) for end in exact_interval(torch.tensor(0.5), 10, 0.05)]
    [0.1871, 0.8129]
    """
    hits = share.double().numpy() * tokens
    fewest, most = torch.tensor(hits + 1e-9).floor().numpy(), torch.tensor(hits - 1e-9).ceil().numpy()
    low = torch.as_tensor(beta.ppf(error / 2, fewest, tokens - fewest + 1)).nan_to_num(0.0)
    high = torch.as_tensor(beta.ppf(1 - error / 2, most + 1, tokens - most)).nan_to_num(1.0)
    return low, high
