"""Prints a model's certificate: every check, and every activation point."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ..basics.messages import capitalised
from .terminal import Column, Rows, Summary, console, print_files

if TYPE_CHECKING:
    from ..model.parts.certificate import Certificate
    from ..model.run.hooked import HookedModel


def certificate_summary(model: "HookedModel", certificate: "Certificate", files: Sequence[str]) -> Summary:
    """Summarises the certificate as every command summarises its result."""
    frame = certificate.to_frame()
    points = [
        {"point": point.name, "shape": point.shape, "meaning": point.meaning, "absent": point.absent,
         "refused": certificate.refused.get(point.name)}
        for point in model.points.values()
    ]  # fmt: skip
    return Summary(
        "check",
        model,
        [f"{capitalised(certificate.verdict)}."],
        Rows("Checks", frame, [Column(str(name)) for name in frame.columns]),
        notes=[certificate.left_out] if certificate.left_out else [],
        files=files,
        more={"ok": certificate.ok, "points": points},
    )


def print_certificate(model: "HookedModel", certificate: "Certificate", files: Sequence[str]) -> None:
    """Prints the checks and the points as tables; the verdict is last."""
    out = console()
    out.print(repr(model), soft_wrap=True)
    for stack in model.stacks.values():
        out.print(f"built as {stack.architecture}", soft_wrap=True, style="dim")
    table = Table(
        title=f"every layer checked; edits tried in layers {', '.join(map(str, certificate.edited))}",
        title_justify="left",
    )
    for column in ("check", "", "statement", "evidence"):
        table.add_column(column, overflow="fold")
    for check in certificate.checks:
        style = {"holds": "green", "differs": "yellow", "FAILS": "bold red"}.get(check.status, "dim")
        table.add_row(check.name, Text(check.status, style), check.statement, check.evidence)
    out.print(table)
    if certificate.left_out:
        out.print(certificate.left_out)
    differing = [hook for hook in certificate.lens if hook.verdict == "differs"]
    if differing:
        out.print(
            "TransformerLens hooks that mean something else on this model (attnmech's own points have the right "
            "values): " + ", ".join(f"{hook.hook} ≠ {hook.point}" for hook in differing),
        )
    points = Table(title="points", title_justify="left")
    for column in ("point", "shape", "meaning"):
        points.add_column(column, overflow="fold")
    for point in model.points.values():
        refused = certificate.refused.get(point.name)
        meaning = point.meaning if point.absent is None else f"absent: {point.absent}"
        points.add_row(point.name, point.shape, meaning if refused is None else f"REFUSED: {refused}")
    out.print(points)
    if files:
        print_files(out, files)
    out.print(certificate.verdict, style="green" if certificate.ok else "bold red")
