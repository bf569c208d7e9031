"""A rule evaluated for some rows and keys of a longer text is the mask of the whole text at these rows and keys."""

import torch

from attnmech.model.parts.mask import MaskRule


def test_offsets_count_rows_and_keys_of_a_longer_text() -> None:
    texts, length, window = 2, 7, 3
    real = torch.ones(texts, length, dtype=torch.bool)
    real[1, :3] = False
    rule = MaskRule(
        texts, 4, 5, 2, 1, lambda text, head, query, key: (key <= query) & (key > query - window), real,
        torch.device("cpu"),
    )  # fmt: skip
    seen = rule.visible(range(1, 4))
    assert seen.shape == (texts, 1, 3, 5)
    for text in range(texts):
        for row in range(3):
            for column in range(5):
                query, key = row + 1 + 2, column + 1
                expected = query - window < key <= query and bool(real[text, key])
                assert bool(seen[text, 0, row, column]) == expected, (text, query, key)
