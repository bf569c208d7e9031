"""Renders the HTML of pages and notebook outputs from this package's templates; strings are escaped."""

import re
from typing import Any, Final

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from .scripts import package_text
from .text import printable

TERMS: Final = {
    "Type": "What a head attends to, if this is clear beyond chance among all heads.",
    "Clearest example": "The row of the texts of the type in which its targets receive most attention.",
    "Furthest from the median head": "The statistics in which the head differs most from the other heads of the model.",
    "Heads that attend alike": "The overlap of the attention of two heads, from 0 to 1 (Bhattacharyya).",
    "Without it": "How the loss changes if the head's output is set to zero.",
    "random repeated text": "Random tokens, and the same tokens again.",
    "interval": "The mean over many such texts lies in it with this probability.",
    "corrected": "Wider than an interval of one head, so that all of the model's hold at once.",
    "loss": "The mean surprise at the next token, −log p; lower is better.",
    "nats": "Natural logarithms: a loss higher by 0.69 nats halves the probability.",
}
"""What the terms of headlines and cards mean."""

_TERM: Final = re.compile("|".join(rf"\b{re.escape(term)}\b" for term in TERMS))


def explained(sentence: str) -> Markup:
    """A sentence as HTML; the first mention of each term has its meaning.

    >>> str(explained("<3 nats"))[:31], str(explained("a word"))
    ('&lt;3 <dfn tabindex="0" data-me', 'a word')
    """
    parts, end, seen = [Markup()], 0, set[str]()
    for mention in _TERM.finditer(sentence):
        term = mention[0]
        if term not in seen:
            marked = Markup('<dfn tabindex="0" data-means="{}">{}</dfn>').format(TERMS[term], term)
            parts += [Markup.escape(sentence[end : mention.start()]), marked]
            seen, end = seen | {term}, mention.end()
    return Markup().join([*parts, Markup.escape(sentence[end:])])


_ENVIRONMENT: Final = Environment(
    autoescape=True,
    loader=FunctionLoader(package_text),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=lambda value: printable(value) if type(value) is str else value,
)
_ENVIRONMENT.filters["explained"] = lambda sentence: explained(printable(sentence))


def rendered(template: str, /, **values: Any) -> Markup:
    """The template with these values; strings are escaped, `Markup` is not."""
    return Markup(_ENVIRONMENT.get_template(template).render(**values))
