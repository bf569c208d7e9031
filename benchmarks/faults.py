"""`python benchmarks/faults.py`: plants a fault in each room of the package, and lists the tests that see it.

Each fault replaces one piece of source, runs the tests of its room until the first failure, and restores the file. A
change of the tests must leave every fault seen. NUMBERS select faults; `--all` runs the README's test command instead.
The checkout must be clean.
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


FAULTS: Final = (
    Fault("maths/softmax.py", "return whole[..., :-1], whole[..., -1]", "return whole[..., :-1], whole[..., 0]", "maths"),
    Fault("maths/softmax.py", "scatter(-1, highest.indices, -torch.inf)", "scatter(-1, highest.indices, 0.0)", "maths"),
    Fault("maths/divergence.py", "(one_log + other_log) / 2 - torch", "(one_log + other_log) - torch", "maths methods/likeness"),
    Fault("maths/ranks.py", "x, y = x - x.mean(), y - y.mean()", "x, y = x - x.mean(), y - x.mean()", "maths"),
    Fault("maths/received.py", "distance.abs() if length is None", "distance if length is None", "maths methods/focus"),
    Fault("maths/intervals.py", "* (self.texts - 1) / self.texts", "", "maths"),
    Fault("maths/copies.py", "return () if len(first) == len(numbers) else numbers", "return ()", "methods/test_copies.py"),
    Fault("maths/norms.py", "x.pow(2).mean(dim=-1) + epsilon", "x.pow(2).mean(dim=-1)", "maths"),
    Fault("model/parts/mask.py", "device=self.device) + self.query_offset", "device=self.device)", "model/attention"),
    Fault("model/parts/position.py", "(slopes[1::2] + slopes[::2])", "(slopes[::2] + slopes[1::2])", "model/parts families/test_families.py"),
    Fault("model/parts/position.py", "turned * cos + swapped * sin, rest", "turned * cos - swapped * sin, rest", "model/parts"),
    Fault("model/parts/hashes.py", "sort_keys=True, default=str)", "sort_keys=True, default=str)[:40]", "model/parts model/run"),
    Fault("model/attention/applied.py", "(factor[:, heads, None, None] - 1) * value", "factor[:, heads, None, None] * value", "interventions"),
    Fault("model/attention/attend.py", "z + pattern @ change[:, :, keys]", "z - pattern @ change[:, :, keys]", "interventions"),
    Fault("model/structure/copies.py", 'for name in ("forward", "as_used"):', 'for name in ("as_used",):', "model/structure model/run"),
    Fault("runs/journal.py", "_ROUNDING * torch.finfo(precision).eps, _MOST_ROUNDING)", "1.0, 1.0)", "runs"),
    Fault("model/run/generation.py", "ranked.cumsum(dim=-1) - ranked >= self.top_p", "ranked.cumsum(dim=-1) >= self.top_p", "model/run"),
    Fault("model/stack/skipping.py", "place == part.stop - 1 and part.runs(place)", "place == part.stop and part.runs(place)", "runs model/stack"),
    Fault("model/reading/unembedding.py", "self.softcap * torch.tanh(uncapped / self.softcap)", "torch.tanh(uncapped / self.softcap)", "model/reading families"),
    Fault("model/proof/edit_checks.py", "if shifted and not edits.moves(copy):", "if False:", "model/proof model/structure"),
    Fault("model/proof/remembered.py", "if digest != _digest(body):", "if False:", "model/proof"),
    Fault("model/files/adapters.py", "stored = tensors_in_file(folder / WEIGHTS)", "stored = {}", "model/files"),
    Fault("runs/row_means.py", "return self._n_groups >= LEAST_TEXTS", "return True", "methods/focus runs"),
    Fault("interventions/selection.py", "(position < 0, position)", "position", "interventions"),
    Fault("results/codec.py", "return kind(**values)", "return kind(**dict(sorted(values.items())[:-1]))", "results"),
    Fault("methods/patching/patch.py", "gap = self.clean - self.before", "gap = self.before - self.clean", "methods/patching"),
    Fault("methods/drift/formulas.py", "return 1 - shared.double() / one.shape[-1]", "return 1 - shared.double()", "methods/drift"),
    Fault("methods/drift/formulas.py", "others = start + place != self._own[stream]", "others = start + place >= 0", "methods/drift"),
    Fault("methods/head_types/sums.py", "share = 1 / as_float64(seen.sum(dim=-1).clamp_min(1))", "share = 1 / as_float64(seen.sum(dim=-1) + 1)", "methods/head_types"),
    Fault("methods/claims/formulas.py", "return (alone + together[:, None] - others) / 2", "return alone + together[:, None] - others", "methods/claims"),
    Fault("methods/attribution/formulas.py", "(step + 0.5) / steps", "step / steps", "methods/attribution"),
    Fault("methods/faithfulness/formulas.py", "half = (x[1:] - x[:-1]) / 2", "half = x[1:] - x[:-1]", "methods/faithfulness"),
    Fault("methods/null_attention/formulas.py", "inside = -delta <= low and high <= delta", "inside = -delta <= low", "methods/null_attention"),
    Fault("methods/ov_tokens/formulas.py", "return self.vocab - 1 - self.from_top", "return self.vocab - self.from_top", "methods/ov_tokens"),
    Fault("methods/segments/formulas.py", "weights = torch.where(reached > 0, wanted * weights / reached, 0.0)", "weights = torch.where(reached > 0, wanted * weights, 0.0)", "methods/segments"),
    Fault("methods/joint_embedding/formulas.py", "return k / self.c + self.offset.to(k)", "return k / self.c - self.offset.to(k)", "methods/joint_embedding"),
    Fault("methods/likeness/overlaps.py", "block.visible[text, 0, row].sum(dim=-1) >= 2", "block.visible[text, 0, row].sum(dim=-1) >= 1", "methods/likeness"),
    Fault("methods/groups/sums.py", "(match.causal and key > query)", "(match.causal and key >= query)", "methods/groups"),
    Fault("methods/flow/result.py", "whole / whole.sum(dim=-1, keepdim=True)", "whole / whole.sum(dim=-2, keepdim=True)", "methods/flow"),
    Fault("draw/packing.py", "np.rint(np.sqrt(pattern.clip(0, 1)) * 255)", "np.rint(pattern.clip(0, 1) * 255)", "draw/test_packing.py draw/test_all_heads.py"),
    Fault("draw/graph.js", "weight >= state.threshold).sort", "weight > state.threshold + 0.1).sort", "draw/test_graph.py"),
    Fault("cli/inputs.py", "islice(Corpus(file), most + 1)", "islice(Corpus(file), most)", "cli pages"),
    Fault("distributed/merging.py", "2 * place), (level - 1, 2 * place + 1)", "2 * place + 1), (level - 1, 2 * place)", "distributed/test_parts.py"),
)  # fmt: skip
"""One or more in every room: a sign, a mask, an axis, a bound, a merge, a page's script."""


def main() -> None:
    """Prints a row for each fault: the first test that fails, or "MISSED"."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    if subprocess.run(["git", "status", "--porcelain", "attnmech"], cwd=ROOT, capture_output=True, check=True).stdout:
        raise SystemExit("attnmech/ has changes that are not committed.")
    missed = 0
    for number in options.numbers or range(len(FAULTS)):
        began = time.monotonic()
        test = seen(FAULTS[number], everywhere=options.all)
        missed += test is None
        print(f"{number:3} {FAULTS[number].file:40} {time.monotonic() - began:5.0f} s  {test or 'MISSED'}", flush=True)
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
