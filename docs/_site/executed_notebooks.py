"""Notebooks as pages: run (or taken from ATTNMECH_EXECUTED, if the tests have run them) and written as Markdown."""

from pathlib import Path
from typing import Any, Final

from files import write_if_new
from notebooks import executed

SHOWN: Final = ("quickstart", "head_types", "ablation")


def page_of(notebook: Any, name: str) -> str:
    """The notebook's text, code and outputs as MyST Markdown, without the cell that installs attnmech in Colab."""
    parts = []
    for cell in notebook.cells:
        if cell.id == "install":
            continue
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"````python\n{cell.source}\n````")
        parts += [_output(output) for output in cell.outputs]
    above = f"*The notebook `examples/{name}.ipynb`, run when this page was built.*"
    title, _, rest = parts[0].partition("\n")
    return "\n\n".join([title, above, rest.strip(), *parts[1:]]) + "\n"


def _output(output: Any) -> str:
    if output.output_type == "stream":
        return f"````{{code-block}} none\n:class: output\n\n{output.text.rstrip()}\n````"
    html = output.data.get("text/html")
    if html is None:
        return f"````{{code-block}} none\n:class: output\n\n{output.data['text/plain']}\n````"
    return f'````{{raw}} html\n<div class="output">\n{html}\n</div>\n````'


def write_pages(app: Any) -> None:
    for name in SHOWN:
        write_if_new(Path(app.srcdir) / "made" / f"{name}.md", page_of(executed(name), name))


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
