"""The live page in a notebook's cell, as an anywidget."""

from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

import anywidget
import traitlets

from ..draw.text import html_text
from ..errors import AttnmechError, InputError
from ..interventions import Intervention
from .edits import Edits, address_of
from .session import Session

_HEAD: Final = traitlets.Tuple(traitlets.Int(), traitlets.Int())
_EDIT: Final = traitlets.Tuple(traitlets.Int(), traitlets.Int(), traitlets.Unicode())


class Explorer(anywidget.AnyWidget):
    """The page on a text, which Python can read, set and observe.

    >>> view = am.explore(model, "The keys to the cabinet")                             # doctest: +SKIP
    >>> view.selected, view.edit                                                        # doctest: +SKIP
    ([(2, 6)], [])
    >>> view.edit = [(2, 6, "zero")]                                                    # doctest: +SKIP
    """

    _esm = files(__package__).joinpath("widget.js").read_text("utf-8")
    _page = traitlets.Unicode().tag(sync=True)
    _address = traitlets.Unicode().tag(sync=True)
    text = traitlets.Unicode()
    """The text that the page is about."""
    selected = traitlets.List(_HEAD, maxlen=1).tag(sync=True)
    """The head shown, as [(layer, head)]."""
    query = traitlets.Int(None, allow_none=True).tag(sync=True)
    """The row shown."""
    edit = traitlets.List(_EDIT).tag(sync=True)
    """The edited heads: (layer, head, way), with "zero", "mean", "first" or "patch" as the way."""

    def __init__(self, session: Session) -> None:
        self._session = session
        super().__init__()
        self.text = session.first
        self.on_msg(lambda _, content, __: self._asked(content))

    @property
    def interventions(self) -> list[Intervention]:
        """The edit as interventions, for `model.intervene(*view.interventions)`."""
        shown = dict(parse_qsl(self._address))
        asked = {"heads": self.edit, "prompt": shown.get("prompt", ""), "position": shown.get("at")}
        return Edits.of(asked).interventions(self._session.model, self.text) if self.edit else []

    @traitlets.validate("text")
    def _read(self, proposal: Any) -> str:
        self._page = self._session.page(proposal["value"], "notebook", self._start)
        self.query = None
        return str(proposal["value"])

    @traitlets.validate("edit")
    def _checked(self, proposal: Any) -> Any:
        if proposal["value"]:
            Edits.of({"heads": proposal["value"]})
        return proposal["value"]

    @property
    def _start(self) -> str:
        """The choices with which another page opens; not its row."""
        chosen = {**dict(parse_qsl(self._address)), "edit": address_of(self.edit)}
        if self.selected:
            chosen["layer"], chosen["head"] = map(str, self.selected[0])
        return urlencode({name: value for name, value in chosen.items() if value and name not in ("query", "at")})

    def _asked(self, question: Any) -> None:
        """Answers a question of the page."""
        try:
            content = self._answer(question["kind"], question["body"])
        except AttnmechError as error:
            content = {"error": str(error)}
        self.send({"number": question.get("number"), "content": content})

    def _answer(self, kind: str, body: Any) -> dict[str, Any]:
        if kind == "text":
            self.text = body["text"]
        elif kind == "edit":
            return self._session.compare(self.text, Edits.of(body))
        elif kind == "save":
            edits = Edits.of(body["edit"]) if body.get("edit") else None
            return {"html": self._session.saved(self.text, str(body.get("start", "")), edits)}
        elif kind == "whole":
            self._session.measure(self.text)
            self._page = self._session.page(self.text, "notebook", self._start)
        else:
            raise InputError(f"the page asks for text, edit, save or whole; got {kind!r}.")
        return {}

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Beside the widget, the page as it is now, for where no kernel answers."""
        page = html_text(self._session.saved(self.text, self._address, None))
        still = f'<iframe srcdoc="{page}" title="attnmech report" style="width:100%;height:85vh;border:0"></iframe>'
        data, metadata = super()._repr_mimebundle_(**options) or ({}, {})
        return {**data, "text/html": still}, metadata
