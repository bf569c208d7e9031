"""Public calls raise `InputError` for wrong arguments; an argument has the same meaning and position in all of them."""

import inspect
import pydoc
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import combinations
from typing import Any, Final

import models
import pytest
import transformers
from test_docstrings import CALLS, FUNCTIONS

import attnmech as am
from attnmech.basics.lazy_names import readable
from attnmech.basics.messages import warn_user
from attnmech.basics.public import public
from attnmech.errors import InputError


def written_by_users() -> dict[str, Callable[..., Any]]:
    """Every public function, constructor and method, by its name."""
    calls: dict[str, Callable[..., Any]] = {}
    for module in (am, am.draw, am.results, am.architecture):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isfunction(thing):
                calls[name] = thing
            if not inspect.isclass(thing) or thing in (am.AttnmechError, am.Reducer):
                continue
            if module is not am.results:
                calls[name] = thing.__init__
            fields = getattr(thing, "__dataclass_fields__", {})
            for method in [method for method in dir(thing) if not method.startswith("_") and method not in fields]:
                member = inspect.getattr_static(thing, method)
                function = getattr(member, "__func__", member)
                handed_on = method == "of" or (method == "save_figure" and thing is not am.draw.View)
                if inspect.isfunction(function) and not handed_on and function.__module__.startswith("attnmech."):
                    calls[f"{name}.{method}"] = function
    return calls


def names_of(function: Callable[..., Any]) -> list[str]:
    names = []
    for parameter in inspect.signature(inspect.unwrap(function)).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            if parameter.annotation is Any:
                return []
            names += parameter.annotation.__args__[0].__annotations__
        elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.name not in ("self", "cls"):
            names.append(parameter.name)
    return names


PUBLIC: Final = written_by_users()
HANDED_ON: Final = {"compare", "HookedModel.generate", "ScoreDecomposition.show"}
"""Calls whose further arguments another call checks."""


@pytest.mark.parametrize("name", PUBLIC)
def test_an_unknown_argument_is_an_input_error_that_names_the_nearest(name: str) -> None:
    function, names = PUBLIC[name], names_of(PUBLIC[name])
    if name in HANDED_ON:
        pytest.skip("another call checks its further arguments")
    longest = max(names, key=len, default="")
    with pytest.raises(InputError) as caught:
        function(**{f"{longest}_": 1})
    listed = f"Its arguments are {', '.join(names)}." if names else "It takes none."
    nearest = f"; try `{longest}`" if names else ""
    assert str(caught.value) == f"`{name.rpartition('.')[2]}` has no argument `{longest}_`{nearest}. {listed}"


def test_all_of_the_package_is_covered() -> None:
    assert len(PUBLIC) > 400
    assert {"ablate_heads", "HookedModel.run", "Task.of_demo", "heatmap", "Report.write_html",
            "AttentionFocus.plot", "Intervention", "Columns"} <= PUBLIC.keys()  # fmt: skip


@public
def scaled(value: float, by: float, *, shift: float = 0.0, name: str) -> tuple[float, str]:
    return value * by + shift, name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scaled(2.0), "`scaled` needs `by` and `name`."),
        (lambda: scaled(2.0, 3.0), "`scaled` needs `name`."),
        (lambda: scaled(2.0, 3.0, by=4.0, name=""), "`scaled` got `by` twice, by position and as a keyword."),
        (
            lambda: scaled(2.0, 3.0, 4.0),
            "`scaled` takes at most 2 arguments by position (value, by); got 3. Pass the others as keywords: shift, "
            "name.",
        ),
        (lambda: am.Case("a", "b", "c", "d", "e"), "`Case` takes at most 4 arguments by position (prompt, answer, "
         "against, group); got 5."),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value) == message


def test_a_call_with_fitting_arguments_is_the_call() -> None:
    assert scaled(2.0, by=3.0, shift=1.0, name="x") == (7.0, "x")
    assert scaled.__name__ == "scaled" and str(inspect.signature(scaled)).startswith("(value: float, by: float, *, sh")


def test_errors_within_a_call_stay_as_they_are() -> None:
    @public
    def fails(value: int) -> None:
        raise TypeError("within")

    with pytest.raises(TypeError, match=r"^within$"):
        fails(3)


def test_compare_checks_the_options_of_its_method() -> None:
    model = am.load()
    with pytest.raises(InputError, match=r"^`attention_focus` has no argument `lst`; try `last`\. "):
        am.compare(model, model, ["Anna sang."], am.attention_focus, lst=3)
    with pytest.raises(InputError, match=r"^`<lambda>` has no argument `lst`\. Its arguments are model, inputs\.$"):
        am.compare(model, model, ["Anna sang."], lambda model, inputs: None, lst=3)


SIGNATURES: Final = {name: inspect.signature(function) for name, function in (FUNCTIONS | CALLS).items()}

DIFFER: Final = {
    "inputs": "one text where a call decomposes it; labelled pairs, and texts in which words are searched",
    "heads": "also several sets of heads, or a rule that chooses heads",
    "method": "also an intervention that is applied to each head; a function where results are compared",
    "reference": "null_attention takes a mean of values, so it does not take means of z",
    "centre": "a report also chooses it; an intervention takes fixed means only",
    "interventions": "a sweep gives them names",
    "point": "every edit has its own points",
    "first": "a number of keys; whether the first token counts, where segments attend",
}
"""Arguments that have several types besides None, each with the reason."""


def test_an_argument_has_one_type_everywhere() -> None:
    types: dict[str, set[str]] = defaultdict(set)
    for signature in SIGNATURES.values():
        for parameter in signature.parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD:
                types[parameter.name].add(str(parameter).partition(": ")[2].partition(" = ")[0].removesuffix(" | None"))
    assert {name for name, kinds in types.items() if len(kinds) > 1} == DIFFER.keys()


def test_shards_are_taken_exactly_where_results_can_be_merged() -> None:
    results = {name: str(SIGNATURES[name]).rpartition(" -> ")[2] for name in FUNCTIONS.keys() - {"stream"}}
    mergeable = {name for name, kind in results.items() if hasattr(getattr(am.results, kind, None), "merged")}
    assert len(mergeable) > 8
    assert mergeable == {name for name in results if "shard" in names_of(FUNCTIONS[name])}


ORDER: Final = (
    "model", "inputs", "heads", "method", "metric", "layers", "reference", "centre", "answers", "against", "later",
    "stack", "rows", "seed", "bos", "memory", "truncate", "shard", "journal", "engine", "progress",
)  # fmt: skip


@pytest.mark.parametrize("kind", [inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY])
def test_arguments_have_one_order_everywhere(kind: Any) -> None:
    first: dict[tuple[str, str], str] = {}
    for call, signature in SIGNATURES.items():
        names = [parameter.name for parameter in signature.parameters.values() if parameter.kind is kind]
        known = [name for name in names if name in ORDER]
        assert known == sorted(known, key=ORDER.index), call
        for one, other in combinations(names, 2):
            assert (other, one) not in first, (call, first[other, one], one, other)
            first[one, other] = call


def test_signatures_spell_types_as_the_source_does() -> None:
    functions = [getattr(am, name) for name in am.__all__]
    methods = [vars(getattr(am.results, name)).values() for name in am.results.__all__]
    read = 0
    for function in filter(inspect.isfunction, [*functions, *(member for members in methods for member in members)]):
        if not function.__name__.startswith("_") and function.__module__.startswith("attnmech."):
            text = str(inspect.signature(function))
            assert "collections.abc" not in text and "Unpack" not in text, function
            read += 1
    assert read > 100
    printed = pydoc.render_doc(am.ablate_heads, renderer=pydoc.plaintext).splitlines()[2]
    start, end = (
        "ablate_heads(model: HookedModel, inputs: Inputs | Iterable[Inputs], heads",
        "SweepOptions) -> HeadEffects",
    )
    assert printed.startswith(start) and printed.endswith(end)
    bound = str(inspect.signature(am.Intervention.attend))
    assert bound.startswith("(heads: Heads, to: Literal['uniform', 'self', 'first'], *,")
    before = inspect.signature(inspect.unwrap(am.ablate_heads)).parameters
    assert {name: one.default for name, one in inspect.signature(am.ablate_heads).parameters.items()} == {
        name: one.default for name, one in before.items()
    }


def test_a_function_without_source_keeps_its_signature() -> None:
    made: dict[str, Any] = {}
    exec("def made(value, *, key=1): ...", made)
    assert str(inspect.signature(readable(made["made"]))) == "(value, *, key=1)"


def test_a_warning_points_at_the_line_outside_the_package() -> None:
    within: dict[str, Any] = {"__name__": "attnmech.runs.deep", "warn": warn_user.__wrapped__}  # type: ignore[attr-defined]
    exec("def inner(): warn('Mind the gap.', FutureWarning)\ndef call(): inner()", within)
    with pytest.warns(FutureWarning, match="Mind the gap") as record:
        within["call"]()
    assert record[0].filename == __file__


def test_one_thing_is_singular() -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=32, vocab_size=40)
    model, ids = (
        am.load(transformers.GPT2LMHeadModel(config)),
        models.token_ids("gpt2", batch=1, length=7).clamp(max=39),
    )
    results = (
        am.attention_focus(model, ids), am.residual_updates(model, ids), am.null_attention(model, ids),
        am.ablate_heads(model, ids), am.head_importance(model, ids), am.examples(model, ids), am.head_types(model, ids),
        am.odd_heads(model, ids), am.prune_heads(model, ids), am.joint_embedding(model, ids),
        am.trajectory([model, model], lambda model: am.attention_focus(model, ids)),
        am.compare(model, model, ids, am.attention_focus),
    )  # fmt: skip
    sentences = [repr(model), *map(repr, results), *(result.lead for result in results)]
    assert [text for text in sentences if re.search(r"\b1 (heads|layers|texts|tokens|measurements)\b", text)] == []


MOVED = [
    (module, name)
    for module in ("results", "errors", "reducers", "architecture")
    for name in dir(getattr(am, module))
    if name[0].isupper() and not name.isupper() and name not in am.__all__
]


def test_the_top_level_has_few_names() -> None:
    assert len(am.__all__) <= 65 and dir(am) == am.__all__
    assert all(hasattr(am, name) for name in am.__all__)


def test_an_import_from_the_top_says_where_a_name_is() -> None:
    """For results, errors and parts of reducers.

    In a separate process: checked annotations put a frame between the import and the package.
    """
    assert len(MOVED) > 70
    tries = [
        f"try:\n    from attnmech import {name}\nexcept ImportError as error:\n    print(error)" for _, name in MOVED
    ]
    script = [sys.executable, "-c", "\n".join(tries)]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [f"attnmech.{name} is now am.{module}.{name}" for module, name in MOVED]


@pytest.mark.parametrize("module", ["", ".results", ".reducers", ".architecture", ".demo.text"])
def test_an_import_does_not_load_torch(module: str) -> None:
    code = f"import sys, attnmech{module} as module; dir(module); print(hasattr(module, 'nonsense'))"
    script = [sys.executable, "-c", f"{code}; print({{'torch', 'transformers'}} & {{*sys.modules}})"]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "set()"]


def test_an_unknown_name_of_a_module() -> None:
    with pytest.raises(AttributeError, match=r"^module 'attnmech\.results' has no attribute 'HeadEffect'$"):
        am.results.HeadEffect
    with pytest.raises(ImportError, match=r"cannot import name 'HeadEffect' from 'attnmech\.results'"):
        exec("from attnmech.results import HeadEffect", {})
