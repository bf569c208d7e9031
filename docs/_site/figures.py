"""The figures of each kind of result, drawn from the demo model when the site is built."""

from functools import cache
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from docutils import nodes
from docutils.parsers.rst import Directive

import attnmech as am
from attnmech.demo.text import documents, labelled
from attnmech.draw import scripts
from attnmech.draw.embed import plotly_view

TEXT: Final = "When Anna and Tom came to the harbour, Tom gave an old anchor to"

CALLS: Final[dict[str, str]] = {
    "ScoreDecomposition": "am.decompose_scores(model, text)",
    "SourceDecomposition": "am.decompose_by_source(model, text, layers=[2])",
    "VarianceShares": 'am.variance_shares(model, texts, centre="mean")',
    "QKDirections": "am.qk_directions(model, texts)",
    "Composition": "am.composition(model)",
    "AttentionFocus": "am.attention_focus(model, texts)",
    "HeadTypes": "am.head_types(model)",
    "Relations": "am.relations(model, labelled(30))",
    "SegmentAttention": 'am.segment_attention(model, "Anna sang. Tom lost an old anchor. He gave it to Anna.")',
    "GroupAttention": 'am.group_attention(model, texts, {"verbs": ["is", "are"], "articles": ["the", "a"]})',
    "AttentionFlow": 'am.attention_flow(model, text, "norm_residual")',
    "JointEmbedding": 'am.joint_embedding(model, texts, projection="pca")',
    "Redundancy": "am.redundancy(model, texts)",
    "OddHeads": "am.odd_heads(model, texts)",
    "ResidualUpdates": "am.residual_updates(model, text)",
    "BlockUpdates": "am.residual_updates(model, text).blocks",
    "ResidualDrift": "am.residual_drift(model, text)",
    "OVTokens": "am.ov_tokens(model, texts)",
    "HeadEffects": "am.ablate_heads(model, texts)",
    "SweepEffects": 'am.sweep(model, texts, {"no position": am.Intervention.scale("position"), '
    '"no first key": am.Intervention.remove_keys("all", "first")})',
    "PairEffects": "am.ablate_pairs(model, texts, [((1, 4), (2, 6)), ((0, 0), (1, 0))])",
    "PruningCurve": "am.prune_heads(model, texts[:6], steps=4)",
    "HeadImportance": "am.head_importance(model, texts)",
    "PatchEffects": 'am.patch(model, clean, corrupted, answers=" Anna", against=" Tom")',
    "PositionEffects": 'am.patch(model, clean, corrupted, at="resid_pre", answers=" Anna", against=" Tom")',
    "Attribution": 'am.attribute(model, clean, corrupted, confirm=6, answers=" Anna", against=" Tom")',
    "Confirmation": 'am.attribute(model, clean, corrupted, confirm=6, answers=" Anna", against=" Tom").confirmation',
    "EdgeAttribution": 'am.attribute(model, clean, corrupted, nodes="heads+mlps", edges=True, confirm=6, '
    'answers=" Anna", against=" Tom")',
    "Faithfulness": 'am.faithfulness(model, am.attribute(model, clean, corrupted, nodes="heads+mlps", edges=True, '
    'answers=" Anna", against=" Tom").circuits(), clean, corrupted, answers=" Anna", against=" Tom")',
    "PathEffects": 'am.path_patch(model, clean, corrupted, [(3, 1)], "v", answers=" Anna", against=" Tom")',
    "MeanDifference": "am.mean_difference(model, texts[:5], texts[5:])",
    "Steering": "am.steer(model, am.mean_difference(model, texts[:5], texts[5:]), texts, layers=[2], "
    "side_inputs=[text])",
    "FunctionHeads": 'am.function_heads(model, [("hot", "cold"), ("big", "small"), ("up", "down"), ("wet", "dry"), '
    '("old", "new"), ("far", "near")], shots=2, prompts=6)',
    "NullAttention": "am.null_attention(model, texts)",
    "SegmentEffects": 'am.segment_effects(model, "Anna sang. Tom lost an old anchor. He gave it to Anna.")',
    "HeadClaim": 'am.confirm_heads(model, [(0, 0), (1, 0)], am.Task.of_demo("copying", per_template=2))',
    "Trajectory": 'am.trajectory([("step 0", am.untrained(model)), ("step 4000", model)], am.head_types)',
    "Comparison": "am.compare(am.untrained(model), model, texts, am.attention_focus)",
}
"""The call that makes the result."""

FIGURES: Final[dict[str, tuple[str, ...]]] = {
    "ScoreDecomposition": (*("attention_map", "score_shares", "key_terms", "row_ledger", "dimensions"),),
    "AttentionFocus": ("self_focus", "first_focus", "concentration"),
    "ResidualUpdates": ("magnitude", "orientation", "orientation_by_magnitude", "magnitude_by_position"),
    "OVTokens": ("copied", "suppressed", "own_rank"),
    "ResidualDrift": ("cosine", "rank", "churn", "nearest"),
    "SegmentAttention": ("earlier_excess", "mass", "excess", "per_token", "receivers"),
    "Redundancy": ("map", "within"),
    "JointEmbedding": ("points", "criterion"),
    "VarianceShares": ("position", "query_key"),
    "Composition": ("q", "k", "v"),
    "Relations": ("recipient",),
    "SegmentEffects": ("kl", "loss"),
    "PatchEffects": ("effect", "recovered"),
    "PositionEffects": ("effect", "recovered"),
    "GroupAttention": ("verbs → articles",),
    "Trajectory": ("induction",),
}
"""The figures by name; those of other results have one."""

OPTIONS: Final[dict[str, str]] = {
    "ScoreDecomposition": "layer=2, head=6",
    "SourceDecomposition": "layer=2, head=6",
}


@cache
def names() -> dict[str, Any]:
    """The names that calls may use."""
    return {
        "am": am,
        "model": am.load(),
        "text": TEXT,
        "texts": documents(10),
        "labelled": labelled,
        "clean": "When Anna and Tom came to the harbour, Tom gave a shell to",
        "corrupted": "When Anna and Tom came to the harbour, Anna gave a shell to",
    }


class Figures(Directive):
    """`{figures} HeadEffects`: each of its figures, under the call that draws it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        kind = self.arguments[0]
        if kind not in CALLS:
            return []
        result = eval(CALLS[kind], names())
        shown: list[nodes.Node] = [nodes.rubric(text="Figures")]
        shown.append(nodes.literal_block(text=f"result = {CALLS[kind]}", language="python"))
        for figure in FIGURES.get(kind, ("",)):
            arguments = ", ".join(filter(None, (f'"{figure}"' if figure else "", OPTIONS.get(kind, ""))))
            code = f"result.plot({arguments})"
            drawn = eval(code, {"result": result})
            shown.append(nodes.literal_block(text=code, language="python"))
            shown.append(nodes.raw("", element(drawn, f"{kind}-{figure or 'figure'}"), format="html"))
        return shown


def element(figure: Any, name: str) -> str:
    """A figure's element in a page, and the line that draws it; the scripts are in `_static/views.js`."""
    view = plotly_view(figure)
    _needed.update({script.name: script for script in view.scripts})
    start = f"<script>addEventListener('DOMContentLoaded', () => {{ {view.start(name)} }});</script>"
    return f'<div class="output">{view.element(name)}{start}</div>'


_needed: Final[dict[str, scripts.Script]] = {}


def write_scripts(app: Any, error: Exception | None) -> None:
    """The scripts that figures need, once for all pages."""
    if error is None and _needed:
        carriers = scripts.carriers(_needed.values())
        text = f"document.head.insertAdjacentHTML('beforeend', {carriers!r});\n{scripts.boot()}"
        (Path(app.outdir) / "_static" / "views.js").write_text(text, "utf-8")


def add_scripts(app: Any, page: str, _: str, __: Any, tree: Any) -> None:
    if tree is not None and any("attnmech.show(" in node.astext() for node in tree.findall(nodes.raw)):
        app.add_js_file("views.js")


def setup(app: Any) -> dict[str, int]:
    app.add_directive("figures", Figures)
    app.connect("html-page-context", add_scripts)
    app.connect("build-finished", write_scripts)
    # Pages that were read with another version of this file are read again.
    version = crc32(Path(__file__).read_bytes())
    return {"env_version": version, "parallel_read_safe": False, "parallel_write_safe": False}
