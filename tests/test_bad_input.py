"""Every invalid argument of every call raises one of attnmech's errors, in one line.

Each case has a call, the class of its error, and words of its message. Annotations are not checked here: these calls
see what a user sees who runs without such checks.
"""

import inspect
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import docstring_examples
import models
import numpy as np
import pytest
import torch
from pandas.testing import assert_frame_equal
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import attnmech as am
from attnmech import draw
from attnmech.errors import (
    InputError,
    MissingPointError,
    ModelNotFoundError,
    OutputError,
    UnsupportedModelError,
    WeightsError,
)
from attnmech.model.stack import points as model_points
from attnmech.results.result import Result

pytestmark = pytest.mark.usefixtures("unchecked")

NAN, INF = float("nan"), float("inf")
TEXT: Final = "Anna sang of shells."
OTHER: Final = "Tom sang of shells."
TEXTS: Final = (TEXT, "Tom lost his old anchor.")
LONG: Final = "/tmp/" + "x" * 5000
Case = tuple[Callable[[], Any], type[am.AttnmechError], str]

demo: Any = None
acts: Any = None
ids = torch.tensor([[5, 7, 9]])
tokens = ["Anna", " sang", " of", " shells"]
pattern = np.full((4, 8, 4, 4), 0.25, dtype=np.float32)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """The inputs of the calls below, loaded here so that collecting the tests does not load them."""
    model = am.load()
    globals().update(demo=model, acts=model.run(TEXT, points=["pattern", "logits"]))


def refused(call: Callable[[], Any], error: type[am.AttnmechError], words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    said = str(caught.value)
    assert words in said
    assert "\n" not in said
    assert len(said) < 600


def within(edits: Any) -> Any:
    with demo.hooks(edits):
        return demo.run(TEXT)


def patched(**options: Any) -> Any:
    given = {"layers": [0], "answers": [" a"], "against": [" the"]} | options
    return am.patch(demo, given.pop("clean", [TEXT]), [OTHER], **given)


def attributed(**options: Any) -> Any:
    given = {"layers": [0], "answers": [" a"], "against": [" the"]} | options
    return am.attribute(demo, [TEXT], ["Tom" + TEXT[4:]], **given)


def swept(run: Callable[..., Any] = am.ablate_heads, /, **options: Any) -> Any:
    return run(demo, list(TEXTS), **{"layers": [0]} | options)


LOAD: list[Case] = [
    (lambda: am.load(LONG), ModelNotFoundError, "File name too long"),
    (lambda: am.load("/tmp/a\0b"), ModelNotFoundError, "null byte"),
    (lambda: am.load("~nobody_of_this_name/model"), ModelNotFoundError, "there is no folder"),
    (lambda: am.load(dtype=5), InputError, "dtype must be a floating-point type"),
    (lambda: am.load(device=1.5), InputError, 'device must be a torch.device or its name, such as "cpu"; got 1.5.'),
    (lambda: am.load(bos="yes"), InputError, "`bos` must be True, False or None; got 'yes'."),
    (lambda: am.load(tokenizer=5), InputError, "`tokenizer` must be a transformers tokenizer, or left out; got 5."),
]  # fmt: skip

RUN: list[Case] = [
    (lambda: demo.run(TEXT, bos="yes"), InputError, "`bos` must be True, False or None; got 'yes'."),
    (lambda: demo.encode(TEXT, bos=np.bool_(True)), InputError, "`bos` must be"),
    (lambda: am.stream(demo, iter(TEXTS), [am.results.AttentionFocus.reducer()], bos="yes"), InputError,
     "`bos` must be"),
    (lambda: demo.run(ids.to("meta")), InputError, "token ids must hold numbers; got a tensor on the meta device"),
    (lambda: demo.run(ids.to_sparse()), InputError, "token ids must be a dense tensor; got a sparse one. Try .to_d"),
    (lambda: demo.run(torch.nested.nested_tensor([ids[0], ids[0, :2]], layout=torch.jagged)), InputError,
     "got a nested one"),
    (lambda: demo.run({"input_ids": ids, "attention_mask": ids.to("meta")}), InputError, "attention_mask must hold"),
    (lambda: demo.run({"input_ids": ids, 5: 3}), InputError, "got 5 as well"),
    (lambda: demo.run(np.array(1)), InputError, "token ids must have the shape"),
    (lambda: demo.run(TEXT, points=5), InputError, "`points` must be a name or a list of names"),
    (lambda: demo.run(TEXT, points=[("pattern", 1.5)]), InputError, "must be an int; got 1.5"),
    (lambda: demo.run(TEXT, ["q"], layers=1.5), InputError, "`layers` must be a list of ints; got 1.5."),
    (lambda: demo.run(TEXT, ["q"], layers=np.bool_(True)), InputError, "`layers` must be a list of ints"),
    (lambda: demo.run(TEXT, ["q"], layers=[10**30]), InputError, "`layer` must be from 0 to 3"),
    (lambda: demo.run(TEXT, ["q"], gradients_of=lambda: 1), InputError, "gradients_of must be a function"),
    (lambda: demo.run(TEXT, ["q"], gradients_of=lambda logits: 3), InputError, "gradients_of must return a tensor"),
    (lambda: within({("z", 1): lambda z: z.to("meta")}), InputError, "returns must hold numbers"),
    (lambda: within({("z", 1): lambda z: z.to_sparse()}), InputError, "got a sparse one"),
    (lambda: within({("pattern", 1): lambda p: p.to(torch.cfloat)}), InputError, "must return real numbers"),
    (lambda: within({("z", 1): lambda z: z.numpy()}), InputError, "must return a tensor"),
    (lambda: demo.intervene(5).__enter__(), InputError, "expected an am.Intervention"),
    (lambda: demo.weights(9), InputError, "`layer` must be from 0 to 3"),
    (lambda: demo.points["patern"], MissingPointError, "this model has no point 'patern'; its points are: "),
    (lambda: demo.generate(TEXT, 2, foo=3), InputError, "`generate` has no option `foo`. It takes stop_at_eos, "),
    (lambda: demo.generate(TEXT, 2, do_sample=True, temperature=NAN), InputError, "`temperature` must be a"),
    (lambda: demo.generate(TEXT, 2.5), InputError, "`max_new_tokens` must be a whole number, 1 or more; got 2.5."),
]  # fmt: skip

METHODS: list[Case] = [
    *(
        (lambda memory=memory: swept(memory=memory), InputError, "`memory` must be a finite number above 0")
        for memory in ("1", NAN, INF, -1, 0, 10**30, None, True, np.bool_(True), torch.tensor(1.0), [1])
    ),
    (lambda: am.ablate_pairs(demo, TEXT, [((0, 1), (1, 2))], memory="1"), InputError, "`memory` must be"),
    (lambda: patched(memory=0), InputError, "`memory` must be"),
    *(
        (
            lambda shard=shard: am.attention_focus(demo, iter(TEXTS), shard=shard),
            InputError,
            "`shard` must be two whole numbers (k, n) with k from 0 to n - 1",
        )
        for shard in ((0.5, 2), (0, 1, 2), (False, True), "01", ("0", "2"), (2, 2), (-1, 2), (0, 0), (NAN, 2), 5, None)
    ),
    (lambda: am.attention_focus(demo, iter(TEXTS), truncate="no"), InputError, "`truncate` must be True or False"),
    (lambda: am.attention_focus(demo, TEXT, last=NAN), InputError, "`last` must be a whole number, 1 or more"),
    (lambda: am.stream("gpt2", TEXT, [am.results.AttentionFocus.reducer()]), InputError,
     "the model must come from am.load"),
    (lambda: am.decompose_scores(None, TEXT), InputError, "the model must come from am.load; got None."),
    (lambda: am.certify(demo, full=1), InputError, "`full` must be True or False; got 1."),
    (lambda: am.load(certify="long"), InputError, "`certify` must be one of short, full, again; got 'long'."),
    (lambda: swept(method=["zero"]), InputError, "`method` must be one of zero, mean, resample; got ['zero']."),
    (lambda: swept(shifts="yes"), InputError, "`shifts` must be True or False; got 'yes'."),
    (lambda: swept(method="resample", seed="x"), InputError, "`seed` must be a whole number"),
    (lambda: swept(answers=5.0, metric="accuracy"), InputError, "`answers` must be one token per text"),
    (lambda: swept(answers=[(" a", " the")] * 2, metric="accuracy"), InputError, "to compare with is `against`"),
    (lambda: swept(metric=lambda logits, batch: torch.ones(2).to_sparse()), InputError, "got a sparse one"),
    (lambda: swept(metric=lambda logits, batch: torch.ones(2) * 1j), InputError, "must return one number for each"),
    (lambda: swept(am.head_importance, sweep=5), InputError, "`sweep` must be a result of am.ablate_heads"),
    (lambda: swept(am.head_importance, method="mean", reference=am.results.Values({0: torch.zeros(3)})), InputError,
     "its values must be [batch position head=8 d_head=24]; those for layer 0 are [3]"),
    (lambda: swept(am.prune_heads, random=NAN), InputError, "`random` must be a whole number, 0 or more"),
    (lambda: swept(am.prune_heads, steps=9), InputError, "`steps` must be a whole number, 1 to 8 (the heads chosen)"),
    (lambda: swept(am.prune_heads, metric=lambda x, batch: x[:, 0, 0], higher_is_better="no"), InputError,
     "`higher_is_better` must be True, False or None; got 'no'."),
    (lambda: patched(positions=5), InputError, '`positions` must be "last" or a list of positions; got 5.'),
    (lambda: am.decompose_scores(demo, TEXT, fold_norm="no"), InputError, "`fold_norm` must be True or False"),
    (lambda: am.decompose_by_source(demo, TEXT, cells=[(1.0, 1.0)]), InputError, "`cells` must be a list of"),
]  # fmt: skip

PATHS: list[Case] = [
    *(
        (lambda path=path: am.Corpus(path), InputError, words)
        for path, words in ((LONG, "too long"), (5, "must be a string or a Path; got int"), (b"x", "got bytes"))
    ),
    *(
        (lambda path=path: am.load_result(path), InputError, words)
        for path, words in ((LONG, "too long"), ("a\0b", "null byte"), (None, "got NoneType"), ("/tmp/\ud800", "used"))
    ),
    (lambda: am.Intervention.load(LONG), InputError, "too long"),
    *(
        (lambda path=path: am.Intervention.zero([(0, 1)]).save(path), OutputError, words)
        for path, words in ((LONG, "too long"), ("a\0b", "null byte"), (5, "got int"), ("", "it is a folder"))
    ),
    *(
        (lambda path=path: am.attention_focus(demo, iter(TEXTS), journal=path), InputError, "path")
        for path in (LONG, 5, "a\0b")
    ),
]  # fmt: skip

DRAWN: list[Case] = [
    *(
        (lambda values=values: draw.model_view(values, tokens, layers=range(4)), InputError, words)
        for values, words in (
            (None, "`pattern` must have the axes"),
            (5, "`pattern` must have the axes"),
            (object(), "the values to draw must be a tensor, an array or a list of equal-length rows of real numbers"),
            (pattern.astype(complex), "real numbers"),
            (torch.tensor(pattern).to_sparse(), "the values to draw must be a dense tensor; got a sparse one"),
            (torch.tensor(pattern).to("meta"), "meta device"),
            ([torch.zeros(2), 3], "the values to draw must be"),
        )
    ),
    *(
        (
            lambda view=view: view(pattern, 5, layers=range(4)),
            InputError,
            "`tokens` must be a list of strings; got 5.",
        )
        for view in (draw.model_view, draw.sentence_view, draw.token_graph)
    ),
    (lambda: draw.model_view(pattern, [1] * 4, layers=range(4)), InputError, "`tokens` must hold only strings"),
    (lambda: draw.model_view(pattern, tokens, layers=4), InputError, "`layers` must be a list of ints; got 4."),
    (lambda: draw.model_view(pattern, tokens, layers=range(4), sums_to_one="no"), InputError, "`sums_to_one` must"),
    (lambda: draw.attention_pattern(pattern[0, 0], tokens, hidden=np.ones((4, 4))), InputError, "boolean array"),
    (lambda: log_probs(ids=5), InputError, "`ids` must be a list of token ids; got 5."),
    (lambda: log_probs(text_of=lambda token: token), InputError, "`text_of` must return strings"),
    (lambda: log_probs(logits=acts.logits[0] * NAN), InputError, "`logits` must hold numbers"),
    (lambda: neurons(values=5), InputError, "`values` must be a list of arrays"),
    (lambda: draw.effect_map(5, 5, 5, layers=[0], label="x"), InputError, "must be [layer head] of 1 layers"),
    (lambda: acts.show("pattern", head=1.5), InputError, "`head` must be from 0 to 7"),
]  # fmt: skip


def log_probs(**given: Any) -> Any:
    usual = {"logits": acts.logits[0], "ids": acts.batch.ids[0].tolist(), "tokens": acts.tokens[0], "text_of": str}
    return draw.token_log_probs(**usual | given)


def neurons(**given: Any) -> Any:
    usual = {"values": [np.ones((4, 1, 1))], "tokens": [tokens], "names": ("a", "b"), "labels": (["x"], ["y"])}
    return draw.text_neuron_activations(**usual | given)


@pytest.mark.parametrize(("call", "error", "words"), [*LOAD, *RUN, *METHODS, *PATHS, *DRAWN])
def test_what_cannot_be_used_is_refused_in_one_line(
    call: Callable[[], Any], error: type[am.AttnmechError], words: str
) -> None:
    refused(call, error, words)


# -- results -------------------------------------------------------------------------------------------------


def test_options_of_results() -> None:
    focus, split = am.attention_focus(demo, list(TEXTS)), am.decompose_scores(demo, TEXT)
    effects = swept()
    why = am.decompose_by_source(demo, TEXT, layers=[1])
    cases: list[Case] = [
        *(
            (lambda level=level: effects.interval(level), InputError, "`level` must be a finite number above 0 and b")
            for level in ("1", None, NAN, 0, 1, True, [0.9])
        ),
        (lambda: focus["entropy"].interval(-1), InputError, "`level` must be a finite number"),
        (lambda: focus[5], InputError, "`statistic` must be one of"),
        (lambda: am.prune_heads(demo, TEXTS, steps=1, random=0).plot(head=1), InputError, "is not a map of heads"),
        (lambda: focus.interval("entropy"), InputError, 'those of result["entropy"]'),
        (lambda: focus.mean("entropy"), AttributeError, 'result["NAME"] is a statistic'),
        (lambda: focus.where(rows=5), InputError, "`rows` must be True or False for each of the [2, "),
        (lambda: focus.sink_share(1.5), InputError, "`position` must be from 0 to"),
        (
            lambda: am.attention_focus(demo, iter(TEXTS)).merged(5),
            InputError,
            "`merged` takes AttentionFocus results; got 5",
        ),
        (lambda: split.select([True]), InputError, "`layer` must be one of the layers decomposed"),
        (lambda: split.numbers(ranks="x"), InputError, "`ranks` must be a whole number"),
        (lambda: split.terms["foo"], MissingPointError, "these scores have no term 'foo'; they have query_key"),
        (lambda: focus.write_html(5), OutputError, "a path must be a string or a Path; got int."),
        (
            lambda: focus.write_html("page.png"),
            OutputError,
            "must end in .html; got page.png. For a figure: save_figure(path)",
        ),
        (
            lambda: focus.save("focus.nc"),
            OutputError,
            "must end in .safetensors; got focus.nc. For other files: result.",
        ),
        (lambda: focus.save("focus"), OutputError, "got focus. For other files: result.to_frame().to_csv(path)"),
        (lambda: am.Circuit(nodes=()).save("circuit"), OutputError, "end in .json; got circuit"),
        (lambda: why.matrix(1, True), InputError, "`head` must be one of those decomposed in layer 1"),
    ]
    for case in cases:
        refused(*case)


def saved(result: Any, path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(result.save(path), framework="pt") as file:
        return json.loads(file.metadata()["attnmech"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of values in nested JSON; for lists, only the first entry."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in leaves(each, (*path, key)))]


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copied = json.loads(json.dumps(value))
    owner = copied
    for key in path[:-1]:
        owner = owner[key]
    if new is DELETED:
        del owner[path[-1]]
    else:
        owner[path[-1]] = new
    return copied


DELETED: Final = object()
TRIALS: Final = 24
"""The number of changes that are tried on each file, drawn from all."""


@pytest.mark.parametrize("name", [name for name in am.__all__ if inspect.isfunction(getattr(am, name))])
def test_a_file_holds_the_whole_result_and_an_edited_one_is_refused_or_works(name: str, tmp_path: Path) -> None:
    """`load_result` reads the whole result; for any change of its file, it reports it in one line, or the result can be
    shown.

    The results are those of the example in the docstring of each call.
    """
    returned = re.findall(r"\w+", str(inspect.signature(getattr(am, name)).return_annotation))
    made = {type(one.result): one.result for one in docstring_examples.run(getattr(am, name))}
    for result in [result for kind, result in made.items() if issubclass(kind, Result) and kind.__name__ in returned]:
        path = tmp_path / "edited.safetensors"
        header, tensors = saved(result, path)
        check_whole(am.load_result(path), result)
        # Headings name a model by the last part of its path, and metrics in words.
        moved = replace(result, provenance=replace(result.provenance, model="/home/me/models/mine"))
        named = [getattr(moved, name, "") for name in ("_heading", "lead")]
        named += [moved._figure_title()] if hasattr(moved, "plot") else []
        assert not re.search("/home/me|logit_difference|log_probability|cross_entropy", "; ".join(named))
        assert list(tmp_path.iterdir()) == [path]
        said, trials = [], random.Random(name).sample(every := edited(header, tensors), min(TRIALS, len(every)))
        for about, numbers in trials:
            save_file(numbers, path, metadata={"attnmech": json.dumps(about)})
            try:
                loaded = am.load_result(path)
            except InputError as error:
                said.append(str(error))
            else:
                assert repr(loaded)
                loaded.to_frame()
        assert all(str(path) in each and "\n" not in each for each in said)
        assert len(said) > len(trials) / 4


NUMBER: Final = r"(\d+\.\d+(?:e-\d+)?)"


def check_whole(again: Any, result: Any) -> None:
    """Asserts that a loaded result is the one that was saved."""
    assert type(again) is type(result) and repr(again) == repr(result) and again.provenance == result.provenance
    assert_frame_equal(
        again.to_frame(), result.to_frame(), rtol=1e-6
    )  # in memory, what is added up may lie in another order
    if hasattr(result, "to_html"):
        one, other = (re.split(NUMBER, each.to_html()) for each in (again, result))
        assert one[::2] == other[::2]
        np.testing.assert_allclose(np.array(one[1::2], float), np.array(other[1::2], float), rtol=1e-4, atol=1e-5)
    for field in fields(result):
        one, other = getattr(result, field.name), getattr(again, field.name)
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
        elif isinstance(one, str | tuple | float | bool) and field.name != "parts":
            assert other == one


def edited(header: Any, tensors: dict[str, torch.Tensor]) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """The contents of a file with one change each."""
    texts = [put(header, at, new) for at in leaves(header) for new in (None, -1, "x", [], {}, NAN) if at != ("kind",)]
    texts += [put(header, at, DELETED) for at in leaves(header) if at]
    trials = [(text, tensors) for text in texts]
    for key, value in tensors.items():
        others = {other: each for other, each in tensors.items() if other != key}
        # A different type or shape, or missing; no label counts the last axis of some.
        for new in (torch.zeros(value.shape, dtype=torch.int16), value.reshape(-1)[:1].clone(), value[:-1].clone()):
            trials.append((header, others | {key: new}))
        trials.append((header, others))
    return trials


def test_what_damaged_results_say(tmp_path: Path) -> None:
    path = tmp_path / "edited.safetensors"
    header, tensors = saved(swept(), path)

    def said(about: Any, numbers: dict[str, torch.Tensor], words: str) -> None:
        save_file(numbers, path, metadata={"attnmech": about if isinstance(about, str) else json.dumps(about)})
        refused(lambda: am.load_result(path), InputError, words)

    said("{", tensors, "is not a result that attnmech saved")
    said([1], tensors, "is not a result that attnmech saved")
    said(header | {"kind": 5}, tensors, "is not a result that attnmech saved (`kind` must be a string; got 5.)")
    said(header | {"kind": "PairEffects"}, tensors, "does not hold a valid PairEffects: ")
    said(
        put(header, ("facts", "layers"), DELETED),
        tensors,
        "does not hold a valid HeadEffects: no 'layers'. Save the result",
    )
    said(put(header, ("facts", "layers"), [0, 9]), tensors, "does not hold a valid HeadEffects: 9 is not in range")
    said(put(header, ("facts", "tokens"), [["a"]]), tensors, "text=1; got a Tensor of torch.float64 [2]")
    said(header, {"before": tensors["before"]}, "does not hold a valid HeadEffects: no 'after'")
    said(header, tensors | {"swept": torch.zeros(3, 8)}, "`swept` must be Float[Tensor, 'layer place']")
    path.write_bytes(path.read_bytes()[:100])
    refused(lambda: am.load_result(path), InputError, "is not a result that attnmech saved")


# -- models --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gpt2")
    models.fresh("gpt2").save_pretrained(made)
    return made


@pytest.mark.parametrize(
    ("entries", "error", "words"),
    [
        ({"architectures": [5]}, UnsupportedModelError, "names the class 5, which transformers"),
        ({"architectures": 5}, UnsupportedModelError, "names the class 5"),
        ({"architectures": [["GPT2LMHeadModel"]]}, UnsupportedModelError, "names the class ['GPT2LMHeadModel']"),
        ({"n_layer": 1_000_000}, WeightsError, "asks for 1000000 layers, but its weights hold 3;"),
        ({"n_layer": 2}, WeightsError, "asks for 2 layers, but its weights hold 3;"),
        ({"n_layer": -1}, WeightsError, "asks for -1 layers, but its weights hold 3;"),
        ({"n_embd": 1_000_000}, WeightsError, "asks for 12,000,269,000,084 parameters, but its weights hold 10,264;"),
        ({"vocab_size": 10**9}, WeightsError, "parameters, but its weights hold 10,264;"),
        ({"n_head": -1}, WeightsError, "at least one head"),
        ({"n_head": 0}, WeightsError, "no GPT2LMHeadModel can be built from its config"),
        ({"n_embd": -1}, WeightsError, "no GPT2LMHeadModel can be built from its config"),
    ],
)
def test_configs_that_ask_for_something_else(
    entries: dict[str, Any], error: type[am.AttnmechError], words: str, folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text()) | entries
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    refused(lambda: am.load(tmp_path), error, words)


@pytest.mark.parametrize("kind", [torch.int8, torch.int32, torch.bool, torch.complex64])
def test_weights_that_are_stored_as_something_else(kind: torch.dtype, folder: Path, tmp_path: Path) -> None:
    """transformers would read integers as weights, and take the real part of complex numbers."""
    (tmp_path / "config.json").symlink_to(folder / "config.json")
    weights = load_file(folder / "model.safetensors")
    name = "transformer.h.1.mlp.c_fc.weight"
    save_file(weights | {name: weights[name].to(kind)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for dtype in (None, "float32"):
        refused(lambda dtype=dtype: am.load(tmp_path, dtype=dtype), WeightsError, f"but {name} is stored as ")


def test_a_headless_file_of_a_model_with_a_head_is_read(tmp_path: Path) -> None:
    """Names without the prefix, and buffers that are not weights: old GPT-2 files have both."""
    model = models.fresh("gpt2")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {name.removeprefix("transformer."): value for name, value in stored.items()}
    renamed["h.0.attn.bias"] = torch.ones(1, 1, 19, 19, dtype=torch.bool)
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(am.load(tmp_path).run(ids).logits, am.load(model).run(ids).logits)


# -- sizes ---------------------------------------------------------------------------------------------------


def test_captures_over_the_budget_are_refused_before_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    long = torch.randint(5, 3000, (1, 8192))
    # 4 layers × 8 heads × 8192² probabilities of 4 bytes.
    refused(
        lambda: demo.run(long, points=["pattern"]),
        InputError,
        "would take 8.0 GiB ('pattern' alone 8.0); the limit is 4 GiB. Choose fewer layers (layers=[0]) or a "
        "shorter text, or reduce the values during the run: am.stream(model, inputs, [reducer]).",
    )
    refused(
        lambda: demo.run(long[:, :5000], points=["pattern"], gradients_of=torch.sum),
        InputError,
        "the requested values with their gradients would take 6.0 GiB",
    )
    monkeypatch.setattr(model_points, "MAX_BYTES", 0)
    assert demo.run(ids).logits.shape == (1, 3, demo.n_vocab)


@pytest.mark.parametrize("name", ["bloom", "llama", "bert", "t5"])
def test_the_size_of_captures_is_what_is_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = models.hooked(name), models.token_ids(name)
    for point, about in model.points.items():
        if about.absent is not None or point == "logits" or point in model.refused:
            continue
        found = [value.nbytes for value in model.run(inputs, points=[point]).values.values()]
        monkeypatch.setattr(model_points, "MAX_BYTES", sum(found))
        model.run(inputs, points=[point])
        monkeypatch.setattr(model_points, "MAX_BYTES", sum(found) - 1)
        refused(lambda point=point: model.run(inputs, points=[point]), InputError, f"{point!r} alone")
        monkeypatch.undo()


# -- what works ----------------------------------------------------------------------------------------------


def test_numbers_of_numpy_and_torch_are_as_good_as_ours() -> None:
    pairs = [(0, 3), (1, 2)]
    expected = am.ablate_heads(demo, TEXT, heads=pairs)
    for heads in (np.array(pairs), torch.tensor(pairs), np.array(pairs, dtype=np.uint8), [(np.int64(0), 3), (1, 2)]):
        found = am.ablate_heads(demo, TEXT, heads=heads)
        assert torch.equal(found.effect.nan_to_num(9), expected.effect.nan_to_num(9))
        assert found.provenance.options == expected.provenance.options
        assert am.Intervention.zero(heads) == am.Intervention.zero(pairs)
        assert json.dumps(found.provenance.options)
    last = am.Intervention.zero(pairs, positions=torch.tensor([2, 0]))
    assert last == am.Intervention.zero(pairs, positions=[0, 2])
    assert am.Intervention.scale("position", 2) == am.Intervention.scale("position", 2.0)
    array = np.array(pairs)
    given = {"answers": [" a"], "against": [" the"]}
    assert am.patch(demo, [TEXT], [OTHER], heads=array, **given).swept.sum() == 2
    assert am.prune_heads(demo, TEXT, heads=array, steps=np.int64(1), random=np.int8(0)).order[0] in pairs
    assert am.null_attention(demo, TEXT, heads=array).effects["remove"].swept.sum() == 2
    assert am.decompose_by_source(demo, TEXT, heads=array, cells=np.array([[2, 1]])).layers == (0, 1)
    assert am.ablate_pairs(demo, TEXT, np.array([pairs])).pairs == (tuple(pairs),)
    assert ("q", 2) in demo.run(TEXT, points=["q"], layers=np.int64(2)).values
    assert ("q", 2) in demo.run(TEXT, points=[("q", np.int64(2))]).values
    assert am.attention_focus(demo, iter(TEXTS), shard=(np.int64(0), np.int64(2))).documents == 1
    assert am.decompose_scores(demo, TEXT).select(np.int64(2)).layers == (2,)
    assert (
        am.results.Values({np.int64(0): torch.zeros(1, 1, 8, 24)}).digest
        == am.results.Values({0: torch.zeros(1, 1, 8, 24)}).digest
    )


def test_more_last_keys_than_there_are() -> None:
    """No row sees more keys than that, so the mass on them is undefined, and no time is spent on it."""
    assert bool(am.attention_focus(demo, TEXT, last=10**30).last_mass.isnan().all())


# -- the package ---------------------------------------------------------------------------------------------


def run_python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_version_without_torch() -> None:
    code = "import sys, attnmech; print(attnmech.__version__, {'torch', 'transformers', 'numpy'} & set(sys.modules))"
    assert run_python("-c", code) == f"{am.__version__} set()"
    assert run_python("-m", "attnmech", "--version") == f"attnmech {am.__version__}"
    assert "report" in run_python("-m", "attnmech", "--help")


def test_the_report_stays_a_function_beside_its_module() -> None:
    """Every form of import, each in a new interpreter."""
    after = "assert callable(am.report) and am.report.__name__ == 'report'; from attnmech.pages.result import Report"
    anew = "import sys; [sys.modules.pop(name) for name in list(sys.modules) if name.split('.')[0] == 'attnmech']"
    orders = ("import attnmech.pages.report", "am.report; from attnmech import pages")
    run_python("-c", "\n".join(f"{anew}; import attnmech as am; {before}; {after}" for before in orders))
