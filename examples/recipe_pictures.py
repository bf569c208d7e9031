"""Draws the pictures of the recipes: each by the code of its recipe, then the call in the picture's title.

python examples/recipe_pictures.py
"""

import re
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import plotly.graph_objects as go
from picture import small

import attnmech as am

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.M | re.S)
PICTURE = re.compile(r"^!\[[^]]+\]\((\S+\.png) '(.+)'\)$", flags=re.M)
WIDTH = 1200


def draw(figure: go.Figure | am.draw.View, path: Path) -> None:
    """Writes a figure or a view as a small PNG."""
    large = Path("large.png")
    if isinstance(figure, go.Figure):
        am.draw.save_figure(figure, large, size="double")
    else:
        figure.save_figure(large, size="double")
    path.write_bytes(small(large.read_bytes(), width=WIDTH))


if __name__ == "__main__":
    (start,) = BLOCK.findall((RECIPES / "index.md").read_text("utf-8"))
    shared: dict[str, object] = {}
    exec(start, shared)
    for page in sorted(RECIPES.glob("*.md")):
        for recipe in page.read_text("utf-8").split("\n## "):
            for target, call in PICTURE.findall(recipe):
                names = dict(shared)
                with TemporaryDirectory() as folder, chdir(folder):  # some recipes write files
                    exec("\n".join(BLOCK.findall(recipe)), names)
                    draw(eval(call, names), RECIPES / target)
                print(target, call)
