"""The call that opens the live page in a notebook."""

from typing import TYPE_CHECKING

from ..basics.public import public
from ..errors import InputError
from ..model.run.hooked import HookedModel, require_model
from .session import Session

if TYPE_CHECKING:
    from .widget import Explorer


@public
def explore(model: HookedModel, text: str) -> "Explorer":
    """Opens a page on a text in a notebook's cell: select heads, switch them off, read other texts.

    >>> view = am.explore(am.load(), "The keys to the cabinet are here.")               # doctest: +SKIP
    >>> view.selected, view.text                                                        # doctest: +SKIP
    ([(2, 6)], 'The keys to the cabinet are here.')

    The page is that of `am.report`, and the kernel answers it. `view.selected`, `view.query`, `view.text` and
    `view.edit` are what it shows; Python can read, set and observe them. Where no kernel answers, as in a saved
    notebook, the page stays as it was.

    Args:
        model: the model.
        text: the text that the page reads first.

    Returns:
        The widget; a cell that ends with it shows it.

    Raises:
        InputError: for a text that is empty or too long, and without anywidget.
    """
    require_model(model)
    try:
        from .widget import Explorer
    except ImportError as error:
        raise InputError('to explore in a notebook: pip install "attnmech[notebook]".') from error
    return Explorer(Session(model, text))
