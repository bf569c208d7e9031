"""The arguments that several tools share, and how a call uses them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

from mcp.server.mcpserver import Context

from ..outputs import Outputs
from .arguments import Column, CorpusFile, Documents, Images, ModelName, Out, Picture, RowLimit, Texts

Tool = TypeVar("Tool", bound=Callable[..., Any])

CORPUS: Final = ("file", "column", "documents")
RESULT: Final = ("out", "picture")


@dataclass
class Asked:
    """The shared arguments of a call; those that its tool does not have are as here."""

    ctx: Context
    model: ModelName = None
    texts: Texts = None
    file: CorpusFile = None
    column: Column = None
    documents: Documents = 200
    images: Images = None
    rows: RowLimit = 20
    out: Out = None
    picture: Picture = False
    outputs: Outputs = field(init=False)
    """The files of `out`, checked."""


def shares(*names: str, **changed: dict[str, Any]) -> Callable[[Tool], Tool]:
    """Makes a method of a model, of `Asked` and of a tool's own arguments a tool with the shared arguments of these
    names; `changed` says what is different in them.

    A call checks its files, waits for other calls, and loads the model.
    """

    def shared(tool: Tool) -> Tool:
        _, _, _, *own = inspect.signature(tool).parameters.values()
        known = {option.name for option in own}
        options = [
            option.replace(**changed.get(option.name, {}))
            for option in inspect.signature(Asked).parameters.values()
            if option.name in ("ctx", "model", "rows", *names) and option.name not in known
        ]

        def called(tools: Any, **arguments: Any) -> Any:
            its_own = {option.name: arguments.pop(option.name) for option in own}
            asked = Asked(**arguments)
            asked.outputs = tools.outputs(asked.out)
            with tools.work(asked.ctx, asked.model) as hooked:
                return tool(tools, hooked, asked, **its_own)

        listed = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in (*own, *options)]
        first = inspect.Parameter("tools", inspect.Parameter.POSITIONAL_ONLY)
        returned = inspect.signature(tool).return_annotation
        called.__name__, called.__doc__ = tool.__name__, tool.__doc__
        cast(Any, called).__signature__ = inspect.Signature([first, *listed], return_annotation=returned)
        called.__annotations__ = {option.name: option.annotation for option in listed} | {"return": returned}
        return cast(Tool, called)

    return shared
