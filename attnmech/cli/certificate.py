"""What does `attnmech check` say of a model's certificate?"""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from .terminal import Column, Rows, Said, plain

if TYPE_CHECKING:
    from ..model.parts.certificate import Certificate
    from ..model.run.hooked import HookedModel


def certificate_said(model: "HookedModel", certificate: "Certificate") -> Said:
    shown = Rows("Checks", certificate.to_frame(), tuple(map(Column, certificate.to_frame().columns)))
    points = [
        {"point": each.name, "shape": each.shape, "meaning": each.meaning, "absent": each.absent,
         "refused": certificate.refused.get(each.name)}
        for each in model.points.values()
    ]  # fmt: skip
    notes = (certificate.left_out,) if certificate.left_out else ()
    return Said(repr(model), certificate.verdict, shown, (), notes, more={"ok": certificate.ok, "points": points})


def print_certificate(console: Console, model: "HookedModel", certificate: "Certificate") -> None:
    console.print(plain(repr(model)), soft_wrap=True, highlight=False)
    for stack in model.stacks.values():
        console.print(plain(f"built as {stack.architecture}"), soft_wrap=True, highlight=False, style="dim")
    table = Table(
        title=f"every layer checked; edits tried in layers {', '.join(map(str, certificate.edited))}",
        title_justify="left",
    )
    for column in ("check", "", "statement", "evidence"):
        table.add_column(column, overflow="fold")
    for item in certificate.checks:
        style = {"holds": "green", "differs": "yellow", "FAILS": "bold red"}.get(item.status, "dim")
        table.add_row(item.name, f"[{style}]{item.status}[/{style}]", plain(item.statement), plain(item.evidence))
    console.print(table)
    if certificate.left_out:
        console.print(plain(certificate.left_out), highlight=False)
    differing = [hook for hook in certificate.lens if hook.verdict == "differs"]
    if differing:
        console.print(
            "TransformerLens hooks that mean something else on this model (attnmech gives the right value): "
            + ", ".join(f"{hook.hook} ≠ {hook.point}" for hook in differing),
            highlight=False,
        )
    points = Table(title="points", title_justify="left")
    for column in ("point", "shape", "meaning"):
        points.add_column(column, overflow="fold")
    for point in model.points.values():
        refused = certificate.refused.get(point.name)
        about_point = point.meaning if point.absent is None else f"absent: {point.absent}"
        points.add_row(point.name, plain(point.shape), plain(about_point if refused is None else f"REFUSED: {refused}"))
    console.print(points)
    console.print(plain(certificate.verdict), style="green" if certificate.ok else "bold red", highlight=False)
