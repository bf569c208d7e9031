"""What each section of the page says beside its figure: how to read it, and what it does not show.

The sentence that the numbers support is computed, for the chosen head, by page.js.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from string import Template
from typing import Final

from attnmech.draw.scripts import package_text
from attnmech.draw.text import html_text


@dataclass(frozen=True)
class PageSection:
    """One section: a heading, a finding, a figure, how to read it, its caveat, and the call that makes it again."""

    name: str
    """The id of the section's anchor, and the prefix of its finding's."""
    contents: str
    """What the contents at the side call it."""
    heading: str
    reading: str
    caveat: str
    figures: tuple[str, ...]
    """The ids of its figures, side by side."""
    result: str = ""
    """Which of the page's calls makes it again, and under what name the result draws it."""
    figure: str = ""
    finding: str = ""
    """The sentence, where it does not depend on the chosen head."""
    call: str = ""
    """The call, where it does not depend on the choice."""


def section_html(section: PageSection) -> str:
    """The section as HTML, with places for what page.js puts in."""
    call = f"<pre><code>{html_text(section.call)}</code></pre>" if section.call else ""
    if section.result:
        which = f'data-result="{html_text(section.result)}" data-call="{html_text(section.figure)}"'
        call = f"<pre><code {which}></code></pre>"
    figures = "".join(f'<div class="figure" id="{name}"></div>' for name in section.figures)
    return Template(package_text("page_section.html")).substitute(
        name=section.name,
        heading=html_text(section.heading),
        finding=html_text(section.finding),
        figures=f'<div class="pair">{figures}</div>' if len(section.figures) > 1 else figures,
        reading=html_text(section.reading),
        caveat=html_text(section.caveat),
        call=call,
    )


def contents_html(sections: Sequence[tuple[str, str]]) -> str:
    """The contents at the side, of pairs of an anchor and its words."""
    return "".join(
        f'<li><a href="#{name}" data-section="{name}">{html_text(words)}</a></li>' for name, words in sections
    )


_RANKS_JOINED: Final = (
    "A line joins heads of one rank: the highest of each layer, the second highest, and so on. It does not follow one "
    "head from layer to layer; the hover box says which head a point is."
)

SCORES: Final = (
    PageSection(
        name="all-heads",
        contents="All heads",
        heading="All heads at a glance",
        reading="One small map a head, a row a layer: queries down, keys across, the deeper the more attention. Click "
        "one to choose the head that the rest of the page shows, or go there with the arrow keys and press Enter.",
        caveat="Shades follow the square root of a probability, so that small ones stay visible: a map looks fuller "
        "than its attention is.",
        figures=("model-view",),
    ),
    PageSection(
        name="attention-map",
        contents="1 Attention map",
        heading="Figure 1. Attention map",
        reading="One row a query token; each cell is the score before softmax of a key token. The mark is the highest "
        "score of its row; the frame is the chosen query: click a row to choose another.",
        caveat="A row with one visible key (row 0 of a causal model) has no choice: it is left unmarked and uncounted. "
        "Hidden keys are blank. A high score says where the head looks, not that the model's output depends on it: "
        "attention is not explanation.",
        figures=("attention-map",),
        result="scores",
        figure="attention_map",
    ),
    PageSection(
        name="row-ledger",
        contents="One row as a sum",
        heading="One row as a sum",
        reading="The keys that the chosen query attends most. Left: the terms of each score, stacked from 0, and their "
        "sum, the score, as a ring. Right: the attention that the key gets.",
        caveat="The terms are as the model computes them; one that is the same at every key of the row changes no "
        "probability, however long its bar.",
        figures=("row-ledger",),
        result="ledger",
        figure="row_ledger",
    ),
    PageSection(
        name="sentence",
        contents="Lines between tokens",
        heading="Lines between tokens",
        reading="Queries on the left, keys on the right; the stronger a line, the more attention. Point at a token for "
        "its lines alone, click to keep them. Hiding a token takes the softmax again without it.",
        caveat="What remains when a token is hidden may be a small part of the head's attention: the sentence above "
        "the lines says how much the hidden one had.",
        figures=("sentence-view",),
        result="view",
        figure="sentence",
    ),
    PageSection(
        name="token-graph",
        contents="Token graph",
        heading="Token graph",
        reading="An arrow goes from a query to each key that it gives more than the threshold; width is weight.",
        caveat="A threshold hides as much as it shows: many small weights can carry more than one large one.",
        figures=("token-graph",),
        result="view",
        figure="token_graph",
    ),
    PageSection(
        name="score-shares",
        contents="2 What scores are made of",
        heading="Figure 2. What the scores are made of",
        reading="For each query, the key whose score has the chosen rank (0 is the highest), and the share that each "
        "term has in that score.",
        caveat="Each term is first shifted by its smallest value in the row, since a constant along a row changes "
        "nothing after the softmax; these lowest values may stand at different keys, so that a share is of what lifts "
        "the key above each term's own lowest value, not above any one key. Rows with one "
        "key, or with fewer keys than the rank asks for, are left out. The triangle shows three terms relative to "
        "their sum; a corner marked “not in this model” stays empty.",
        figures=("share-triangle", "share-bars"),
        result="scores",
        figure="score_shares",
    ),
    PageSection(
        name="key-terms",
        contents="3 Terms of the key alone",
        heading="Figure 3. The terms that depend on the key alone",
        reading="What each key gains or loses from these terms, the same for every query.",
        caveat="Each line is shown minus its mean over the keys: adding a constant to all keys changes nothing after "
        "the softmax, so only the trend matters.",
        figures=("key-terms",),
        result="scores",
        figure="key_terms",
    ),
)
"""The sections about the scores of the chosen head."""


def focus_sections(rows: str) -> tuple[PageSection, ...]:
    """Figures 4 to 6; `rows` says which rows count, and whether there are intervals."""
    return (
        PageSection(
            name="self-focus",
            contents="4 Looks at itself",
            heading="Figure 4. How often heads look at the token itself",
            reading="Every head of every layer at the fraction of rows whose highest score is at the query token "
            "itself. Click a point to choose its head.",
            caveat=f"{_RANKS_JOINED} {rows}",
            figures=("self-focus",),
            result="focus",
            figure="self_focus",
        ),
        PageSection(
            name="first-focus",
            contents="5 Looks at the first token",
            heading="Figure 5. How often heads look at the first token",
            reading="The same for rows whose highest score is at position 0.",
            caveat="Lines join heads as in figure 4. The fractions of figures 4 and 5 are not parts of one whole: in "
            f"row 1 the first token is also the previous one. {rows}",
            figures=("first-focus",),
            result="focus",
            figure="first_focus",
        ),
        PageSection(
            name="concentration",
            contents="6 Concentration",
            heading="Figure 6. How concentrated attention is",
            reading="The mean over rows of p(1) − p(2), the highest probability after softmax minus the second "
            "highest: near 1, a head looks at one token at a time; near 0, at several.",
            caveat=f"Lines join heads as in figure 4. Rows with few visible keys weigh as much as long ones. {rows}",
            figures=("concentration",),
            result="focus",
            figure="concentration",
        ),
    )


UPDATES: Final = (
    PageSection(
        name="magnitude",
        contents="7 Update magnitude",
        heading="Figure 7. How much each head changes the stream",
        reading="One histogram over the text's tokens for each head of the chosen layer: update magnitude ‖u‖ / ‖x‖ "
        "on a logarithmic axis.",
        caveat="Each histogram is scaled to its own fullest bin; the hover box counts tokens. Click one to choose its "
        "head. The axis spans all layers shown. An update of exactly 0 has no place on it and is left out. A large "
        "update need not matter for the output.",
        figures=("magnitude",),
        result="updates",
        figure="magnitude",
    ),
    PageSection(
        name="orientation",
        contents="8 Update orientation",
        heading="Figure 8. Which way each head moves the stream",
        reading="One histogram a head of update orientation cos(u, x): at 1 an update lengthens what is there, at 0 "
        "it is orthogonal to it, below 0 it cancels part of it.",
        caveat="Scaled as in figure 7. In many dimensions two unrelated directions are nearly orthogonal, so values "
        "near 0 are what chance would give.",
        figures=("orientation",),
        result="updates",
        figure="orientation",
    ),
    PageSection(
        name="orientation-by-magnitude",
        contents="9 Orientation by magnitude",
        heading="Figure 9. Orientation against magnitude",
        reading="One point for each token and head of the chosen layer, marked by where the head attends most at that "
        "token.",
        caveat="Where a row has one visible key there is no choice, and no mark. Click a point to choose its head.",
        figures=("orientation-by-magnitude",),
        result="updates",
        figure="orientation_by_magnitude",
    ),
    PageSection(
        name="magnitude-by-position",
        contents="10 Magnitude along the text",
        heading="Figure 10. Magnitude along the text",
        reading="The same points by the position of the query token, all heads of the layer together.",
        caveat="On the target side, a first token whose x is very long makes ‖u‖ / ‖x‖ small whatever is written: "
        "compare the query side before saying that a head which attends to it writes nothing.",
        figures=("magnitude-by-position",),
        result="updates",
        figure="magnitude_by_position",
    ),
)
"""Figures 7 to 10; page.js adds which side is shown."""

EXPECTED: Final = PageSection(
    name="expected",
    contents="What the model expects",
    heading="What the model expects",
    reading="The redder a token, the likelier it was; white below e⁻⁵ = 0.7 %. Point at one for its probability, its "
    "rank (0 the likeliest) and the ten likeliest in its place. Drawn by CircuitsVis.",
    caveat="This is the whole model's prediction, not one head's doing. The first token is not predicted by anything.",
    figures=("expected-tokens",),
    call='model.run(text).show("logits")',
)
"""The model's predictions, from CircuitsVis."""
