"""The products of all heads against products head by head, in float64."""

import torch

from attnmech.maths.scores import product_by_head


def test_by_head() -> None:
    generator = torch.Generator().manual_seed(3)
    x, W = torch.randn(2, 3, 96, generator=generator), torch.randn(5, 96, 72, generator=generator)
    wanted = torch.stack([x.double() @ each.double() for each in W], dim=1)
    torch.testing.assert_close(product_by_head(x, W).double(), wanted, rtol=0, atol=3e-5)
