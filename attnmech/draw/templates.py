"""Renders the HTML of pages and notebook outputs from this package's templates; strings are escaped."""

from typing import Any, Final

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from .scripts import package_text
from .terms import explained
from .text import printable

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
