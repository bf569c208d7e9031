"""No change of a tensor is missed."""

import pytest
import torch
from torch import Tensor

from attnmech.maths.fingerprint import fingerprint_of


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(37, 29),
        "b": torch.randn(5).to(torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
        "none": torch.zeros(0),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "transposed": torch.randn(6, 4).T,
    }


def test_equal_bytes_equal_fingerprints() -> None:
    assert fingerprint_of(tensors()) == fingerprint_of(tensors())


@pytest.mark.parametrize("name", ["a", "b", "mask", "scalar", "transposed"])
def test_every_entry_counts(name: str) -> None:
    before = fingerprint_of(tensors())
    for place in range(tensors()[name].numel()):
        changed = tensors()
        flat = changed[name].contiguous().view(-1)
        flat.view(torch.uint8)[place * flat.element_size()] ^= 1
        changed[name] = flat.view(changed[name].shape)
        assert fingerprint_of(changed) != before, place


def test_large_tensors_are_read_to_their_end_on_any_number_of_threads() -> None:
    large = torch.arange(2 * 2**18 + 77, dtype=torch.float32)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(fingerprint_of({"large": large, **tensors()}))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]
    for place in (0, 2**18 - 1, 2**18, 2**19 - 1, 2**19, len(large) - 2, len(large) - 1):
        changed = large.clone()
        changed[place] += 1
        assert fingerprint_of({"large": changed, **tensors()}) != found[0], place
    halves = torch.cat([large[2**18 : 2**19], large[: 2**18], large[2**19 :]])
    assert fingerprint_of({"large": halves, **tensors()}) != found[0]


def test_order_names_shapes_and_types_count() -> None:
    here = tensors()
    before = fingerprint_of(here)
    for row in range(1, 37):
        swapped = here["a"].clone()
        swapped[[0, row]] = swapped[[row, 0]]
        assert fingerprint_of(here | {"a": swapped}) != before
    assert fingerprint_of(here | {"a": here["a"].T.contiguous()}) != before
    assert fingerprint_of(here | {"a": here["a"].view(29, 37)}) != before
    assert fingerprint_of(here | {"a": here["a"].view(torch.int32)}) != before
    assert fingerprint_of({f"{name}.": each for name, each in here.items()}) != before


def test_other_devices_are_left_to_sha256() -> None:
    assert fingerprint_of({"a": torch.zeros(3, device="meta")}) is None
