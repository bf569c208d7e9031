"""What a command says names the command's own options."""

from types import SimpleNamespace

import pytest

from attnmech.cli.wording import as_options

OPTIONS = [
    SimpleNamespace(name=name, opts=opts)
    for name, opts in (
        ("truncate", ["--truncate"]), ("dtype", ["--dtype"]), ("device", ["--device"]), ("k", ["-k"]),
        ("file", ["--file", "-f"]), ("target_text", ["--target-text"]),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("give truncate=True to cut it", "give --truncate to cut it"),
        ('in 16 bits (dtype="bfloat16") or device="cpu".', "in 16 bits (--dtype bfloat16) or --device cpu."),
        ("Try dtype=torch.float32.", "Try --dtype float32."),
        ("`k` must be at most 47", "-k must be at most 47"),
        ("dtype must be a floating-point type", "--dtype must be a floating-point type"),
        ("give `inputs`; `target` must have one text", "give --file; --target-text must have one text"),
        ('am.load(model, device="cpu") and `heads`', 'am.load(model, device="cpu") and `heads`'),
    ],
)
def test_arguments_are_named_as_options(message: str, expected: str) -> None:
    assert as_options(message, OPTIONS) == expected
    assert as_options(message, []) == message
