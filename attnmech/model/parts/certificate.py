"""Defines the certificate of a model: its checks, the residual of each statement, and the points to be trusted."""

from dataclasses import dataclass

import pandas as pd

from ...basics.public import public
from ...errors import InputError


@dataclass(frozen=True)
class Check:
    """One statement about the model, and the largest residual found when checking it."""

    name: str
    statement: str
    """The statement, in the names of the points."""
    points: tuple[str, ...]
    """The points that are refused if the statement does not hold."""
    passed: bool | None
    """Whether the statement holds; None if it does not apply to this model or was not tried (`detail` says why)."""
    residual: float | None = None
    """The largest difference, relative to the terms of the sum (for whole passes, to the row's largest value)."""
    tolerance: float | None = None
    """The largest residual that rounding can explain."""
    detail: str = ""

    @classmethod
    def untried(cls, name: str, statement: str, why: str) -> "Check":
        """A statement that does not apply to this model, or could not be tried."""
        return cls(name, statement, (), None, detail=why)

    @property
    def status(self) -> str:
        """One of holds, FAILS and not checked; or "differs", if only another implementation disagrees."""
        if self.passed is False and not self.points:
            return "differs"
        return {True: "holds", False: "FAILS", None: "not checked"}[self.passed]

    @property
    def evidence(self) -> str:
        """The residual with its tolerance, and the detail: "1.9e-07 ≤ 1.0e-05"."""
        sign = "≤" if self.passed else "not ≤"
        residual = f"{self.residual:.1e}" if self.residual else "0"
        measured = "" if self.residual is None else f"{residual} {sign} {self.tolerance:.1e}"
        return "; ".join(part for part in (measured, self.detail) if part)


@dataclass(frozen=True)
class LensHook:
    """The comparison of a TransformerLens hook with attnmech's point."""

    point: str
    hook: str
    verdict: str
    """"agrees", "differs" or "absent"."""
    residual: float | None


@public
@dataclass(frozen=True)
class Certificate:
    """What was proven about a model: every check with its residual, and the points that can be trusted.

    `model.run` returns attnmech's own values, whose meaning these checks prove; `lens` says which hooks of
    TransformerLens (`model.bridge`) hold the same values.
    """

    model: str
    weights: str
    """The hash of the weights for which the checks were made (`model.weights_hash`)."""
    checks: tuple[Check, ...]
    lens: tuple[LensHook, ...]
    edited: tuple[int, ...]
    """The layers in which edits were tried: all layers, or some of a deep model unless the proof was full.

    All other checks cover every layer on short texts and, on longer texts padded on either side, the first, a middle
    and the last layer, or every layer in a full proof.
    """

    left_out: str = ""
    """Maps each layer without attention to what it has instead."""
    proven_on: str = ""
    """The day of the proof, if an earlier load made it ("2026-11-27")."""

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed and thus leave points unproven."""
        return tuple(check for check in self.checks if check.passed is False and check.points)

    @property
    def remarks(self) -> tuple[Check, ...]:
        """The failed checks that leave all points valid, since only another implementation differs."""
        return tuple(check for check in self.checks if check.passed is False and not check.points)

    @property
    def refused(self) -> dict[str, str]:
        """The points whose meaning is not proven, each with the first failed check."""
        reasons: dict[str, str] = {}
        for check in self.failed:
            for point in check.points:
                reasons.setdefault(point, f"{check.statement} does not hold ({check.detail})")
        return reasons

    @property
    def lens_points(self) -> frozenset[str]:
        """The points whose TransformerLens hook holds the same value; `result`, which a bridge leaves off, included."""
        return frozenset(hook.point for hook in self.lens if hook.verdict == "agrees" or hook.point == "result")

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        tried = sum(check.passed is not None for check in self.checks)
        if self.ok:
            remarks = f" ({', '.join(f'{check.name} differs' for check in self.remarks)})" if self.remarks else ""
            return f"certified: {tried - len(self.remarks)} checks hold{remarks}"
        first = self.failed[0]
        return f"NOT certified: {len(self.failed)} of {tried} checks fail, first {first.name!r} ({first.detail})"

    def __sub__(self, other: object) -> "Certificate":
        raise InputError("certificates cannot be subtracted; compare their checks: one.checks, other.checks.")

    def to_frame(self) -> pd.DataFrame:
        """One row per check: check, status, residual, tolerance, statement, detail."""
        return pd.DataFrame(
            [(c.name, c.status, c.residual, c.tolerance, c.statement, c.detail) for c in self.checks],
            columns=["check", "status", "residual", "tolerance", "statement", "detail"],
        )

    def lens_frame(self) -> pd.DataFrame:
        """One row per TransformerLens hook: point, hook, verdict, residual."""
        return pd.DataFrame(
            [(h.point, h.hook, h.verdict, h.residual) for h in self.lens],
            columns=["point", "hook", "verdict", "residual"],
        )

    def __repr__(self) -> str:
        lines = [
            f"Certificate({self.model!r}: {self.verdict}; edits tried in layers {', '.join(map(str, self.edited))})"
        ]
        if self.left_out:
            lines.append(f"  {self.left_out}")
        for check in self.checks:
            lines.append(f"  {check.status:<11}  {check.name:<14}  {check.statement}  [{check.evidence}]")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self.to_frame().to_html(index=False, escape=True, na_rep="")
