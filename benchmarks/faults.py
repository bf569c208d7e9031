"""`python benchmarks/faults.py`: plants a fault in each room of the package, and lists the tests that see it.

Each fault of `faults.txt` replaces one piece of source, runs the tests of its room until the first failure, and
restores the file. A change of the tests must leave every fault seen. Numbers select faults; `--all` runs the README's
test command instead. The checkout must be clean.
"""

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    """A piece of source that occurs once, what replaces it, and the tests of its room."""

    file: str
    right: str
    wrong: str
    tests: str


def faults() -> list[Fault]:
    """The faults of `faults.txt`: a sign, a mask, an axis, a bound, a merge, a page's script, in every room."""
    found = []
    for entry in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").strip().split("\n\n"):
        head, right, wrong = entry.split("\n")
        file, tests = head.split(": ")
        found.append(Fault(file, right.removeprefix("- "), wrong.removeprefix("+").removeprefix(" "), tests))
    return found


def main() -> None:
    """Prints a row for each fault: the first test that fails, or "MISSED"."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    if subprocess.run(["git", "status", "--porcelain", "attnmech"], cwd=ROOT, capture_output=True, check=True).stdout:
        raise SystemExit("attnmech/ has changes that are not committed.")
    planted, missed = faults(), 0
    for number in options.numbers or range(len(planted)):
        began = time.monotonic()
        test = seen(planted[number], everywhere=options.all)
        missed += test is None
        print(f"{number:3} {planted[number].file:40} {time.monotonic() - began:5.0f} s  {test or 'MISSED'}", flush=True)
    raise SystemExit(bool(missed))


def seen(fault: Fault, *, everywhere: bool) -> str | None:
    """The first test that fails with the fault planted."""
    path = ROOT / "attnmech" / fault.file
    source = path.read_text(encoding="utf-8")
    if source.count(fault.right) != 1:
        raise SystemExit(f"{fault.file} must hold {fault.right!r} once; it has it {source.count(fault.right)} times.")
    tests = [] if everywhere else [f"tests/{name}" for name in fault.tests.split()]
    try:
        path.write_text(source.replace(fault.right, fault.wrong), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", *tests], cwd=ROOT, capture_output=True, text=True, check=False
        )
    finally:
        path.write_text(source, encoding="utf-8")
    return next(iter(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)), None)


if __name__ == "__main__":
    main()
