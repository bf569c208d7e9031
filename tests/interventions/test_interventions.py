"""Interventions as values: their sentences, their equality, and their files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparing import refuses
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from attnmech.errors import OutputError
from attnmech.interventions import Intervention, Values
from attnmech.interventions.edits import EDITS, Cut, Replace, Scale, Zero, ZeroValues

MASK = torch.tensor([[True, False, False], [True, True, False]])


def values(*layers: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {layer: torch.randn(1, 3, 4, 2, generator=generator).to(dtype) for layer in layers}


MADE: list[tuple[Intervention, str]] = [
    (Intervention.zero([(3, 5)]), "z of L3H5 becomes 0"),
    (Intervention.zero("all"), "z of all heads becomes 0"),
    (Intervention.zero([(1, 2), (0, 3)], positions=[4, 2]), "z of L0H3, L1H2 becomes 0 at positions 2, 4"),
    (Intervention.zero([(0, 1)], stack="cross"), "z of cross L0H1 becomes 0"),
    (Intervention.replace([(1, 2)], values(1)), "z of L1H2 becomes given values"),
    (Intervention.replace([(1, 2)], Values(values(1), "mean over 12 texts")), "z of L1H2 becomes mean over 12 texts"),
    (Intervention.replace([(0, 2)], values(0), point="pattern"), "pattern of L0H2 becomes given values"),
    (Intervention.replace([(0, 2)], values(0), point="q"), "q of L0H2 becomes given values"),
    (Intervention.replace([(0, 2)], values(0), point="k"), "k of kv head L0H2 becomes given values"),
    (Intervention.replace([(0, 2), (0, 1)], values(0), point="v"), "v of kv heads L0H1, L0H2 becomes given values"),
    (Intervention.replace("all", values(0), point="k"), "k of all kv heads becomes given values"),
    (Intervention.zero("all", positions="last"), "z of all heads becomes 0 at the last position"),
    (Intervention.zero("all", positions=[-1, 2, -3]), "z of all heads becomes 0 at positions 2, -3, -1"),
    (Intervention.attend([(0, 2)], "uniform"), "pattern of L0H2 becomes uniform"),
    (Intervention.attend([(0, 2)], "self"), "attention of L0H2 goes to the token itself"),
    (Intervention.attend("all", "first", positions=[0]),
     "attention of all heads goes to the first token at positions 0"),
    (Intervention.reweight([(0, 2)], [3, 1], 2.5), "attention of L0H2 to keys 1, 3 is multiplied by 2.5"),
    (Intervention.reweight("all", "first", 0.1), "attention of all heads to the first token is multiplied by 0.1"),
    (Intervention.remove_keys([(0, 2)], "first"), "the first token removed from the pattern of L0H2"),
    (Intervention.remove_keys([(0, 2)], "special"), "special tokens removed from the pattern of L0H2"),
    (Intervention.remove_keys([(0, 2)], [4, 0, 4], positions=[5]),
     "keys 0, 4 removed from the pattern of L0H2 at positions 5"),
    (Intervention.remove_keys([(0, 2)], MASK), "a mask of 3 keys in 2 texts removed from the pattern of L0H2"),
    (Intervention.cut((6, 9), (0, 1)), "attention of tokens 6 to 8 to token 0 cut in all heads"),
    (Intervention.cut([6, 9], [0, 2], [(0, 2)]), "attention of tokens 6 to 8 to tokens 0 to 1 cut in L0H2"),
    (Intervention.stream_only([(0, 2)], last=8),
     "keys between the first 4 and the last 8 removed from the pattern of L0H2"),
    (Intervention.scale("position"), "position in the scores of all heads is dropped"),
    (Intervention.scale("key_bias", 0.5, [(2, 1)]), "key_bias in the scores of L2H1 is multiplied by 0.5"),
    (Intervention.zero_values([(2, 1)], "first"), "v at the first token of L2H1 becomes 0"),
    (Intervention.zero_values([(2, 1)], [1, 3]), "v at keys 1, 3 of L2H1 becomes 0"),
    (Intervention.replace_values([(2, 1)], MASK, values(2)),
     "v at a mask of 3 keys in 2 texts of L2H1 becomes given values"),
    (Intervention.stream("resid_pre", [2], {2: torch.zeros(1, 1, 8)}), "resid_pre of L2 becomes given values"),
    (Intervention.stream("resid_mid", [2], {2: torch.zeros(1, 1, 8)}), "resid_mid of L2 becomes given values"),
    (Intervention.stream("resid_post", [2], {2: torch.zeros(1, 1, 8)}, positions="last"),
     "resid_post of L2 becomes given values at the last position"),
    (Intervention.stream("attn_out", [2, 1]), "attn_out of L1, L2 becomes 0"),
    (Intervention.stream("mlp_out", [0], stack="encoder"), "mlp_out of encoder L0 becomes 0"),
    (Intervention(Zero("mlp_out"), ()), "mlp_out of all layers becomes 0"),
    (Intervention.stream("attn_out", [1], {1: torch.ones(1, 1, 8)}), "attn_out of L1 becomes given values"),
    (Intervention.stream("mlp_out", [1], {1: torch.ones(1, 1, 8)}), "mlp_out of L1 becomes given values"),
    (Intervention.add("z", values(1), heads=[(1, 2)]), "given values added to z of L1H2"),
    (Intervention.add("v", values(0), heads=[(0, 2)], factor=-0.5), "-0.5 × given values added to v of kv head L0H2"),
    (Intervention.add("q", values(0), heads="all", positions="last"),
     "given values added to q of all heads at the last position"),
    (Intervention.add("k", values(0), heads="all"), "given values added to k of all kv heads"),
    *(
        (Intervention.add(point, {2: torch.ones(1, 1, 8)}, layers=[2]), f"given values added to {point} of L2")
        for point in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("intervention", "said"), MADE)
def test_what_it_says(intervention: Intervention, said: str) -> None:
    assert str(intervention) == said


def test_every_edit_is_among_them() -> None:
    made = {(type(each.edit).__name__, each.point) for each, _ in MADE}
    assert made == {(name, point) for name, edit in EDITS.items() for point in edit.POINTS}


def test_each_equals_itself_alone() -> None:
    made = [each for each, _ in MADE]
    for number, one in enumerate(made):
        for other_number, other in enumerate(made):
            assert (one == other) is (number == other_number), (one, other)
            assert (one.digest == other.digest) is (number == other_number)
    assert len(set(made)) == len(made)


def test_equal_where_they_change_the_same() -> None:
    assert Intervention.zero([(1, 2), (0, 1), (1, 2)]) == Intervention.zero([(0, 1), (1, 2)])
    assert Intervention.zero("all", positions=[3, 1, 3]) == Intervention.zero("all", positions=(1, 3))
    assert Intervention.zero("all", positions="last") == Intervention.zero("all", positions=[-1])
    assert Intervention.zero("all", positions=[-1, 2]) == Intervention.zero("all", positions=(2, -1))
    assert Intervention.zero([(0, 1)], stack="self") == Intervention.zero([(0, 1)])
    one, same, other = (Intervention.replace([(1, 2)], values(1, seed=seed)) for seed in (0, 0, 1))
    assert one == same and hash(one) == hash(same) and one.digest == same.digest
    assert one != other and one.digest != other.digest
    assert one != Intervention.replace([(1, 2)], values(1, dtype=torch.float64))
    assert one != Intervention.replace([(1, 2)], Values(values(1), "something else"))
    assert one != "z of L1H2 becomes given values"
    assert Intervention.remove_keys("all", MASK) == Intervention.remove_keys("all", MASK.clone())
    moved = Intervention.remove_keys("all", MASK.flip(1))
    assert Intervention.remove_keys("all", MASK) != moved
    assert Intervention.remove_keys("all", MASK).digest != moved.digest
    assert str(Intervention.remove_keys("all", MASK)) == str(moved)
    assert len({one, same, other}) == 2


def test_values_of_one_shape_in_another_are_others() -> None:
    x = torch.arange(24.0)
    made = [Values({0: x.reshape(1, 3, 4, 2)}), Values({0: x.reshape(1, 4, 3, 2)}), Values({1: x.reshape(1, 3, 4, 2)})]
    assert len(set(made)) == 3
    assert Values({0: x, 1: -x}) == Values({1: -x, 0: x})
    assert Values({0: x.reshape(4, 6).T}) == Values({0: x.reshape(4, 6).T.contiguous()})
    assert repr(Values({0: x}, "mean over 12 texts")) == "mean over 12 texts"


def test_what_it_touches() -> None:
    assert Intervention.zero([(3, 0), (1, 1), (3, 2)]).touches == (1, 3)
    assert Intervention.zero("all").touches is None
    assert Intervention.stream("mlp_out", [2, 0]).touches == (0, 2)
    assert Intervention(Zero("mlp_out"), ()).touches is None


MEAN, STACKED = torch.randn(1, 3, 4, 2), torch.randn(2, 5)[:, None].expand(2, 3, 5)
SHARED = ({0: MEAN, 1: MEAN}, {0: MEAN, 1: MEAN[:, 1:]}, {0: STACKED, 1: STACKED.transpose(1, 2)})
KEPT = [*SHARED, *(values(1, 2, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64))]
"""Tensors that share memory, and tensors of other precisions."""


@pytest.mark.parametrize(
    "intervention", [*(each for each, _ in MADE), *(Intervention.replace([(1, 0)], each) for each in KEPT)]
)
def test_saved_and_loaded(intervention: Intervention, tmp_path: Path) -> None:
    path = tmp_path / "change.safetensors"
    assert intervention.save(path) == path
    again = Intervention.load(path)
    assert again == intervention
    assert hash(again) == hash(intervention)
    assert again.digest == intervention.digest
    assert str(again) == str(intervention)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    refuses("there is no file", Intervention.load, tmp_path / "none")
    with pytest.raises(OutputError, match="there is no folder"):
        Intervention.zero("all").save(tmp_path / "none" / "change.safetensors")
    text = tmp_path / "text"
    text.write_text("z of L3H5 becomes 0", encoding="utf-8")
    foreign = tmp_path / "foreign"
    save_file({"x": torch.zeros(2)}, foreign)
    other = tmp_path / "other"
    save_file({"x": torch.zeros(2)}, other, metadata={"attnmech": json.dumps({"kind": "HeadEffects"})})
    with safe_open(Intervention.zero("all").save(tmp_path / "whole.safetensors"), framework="pt") as file:
        whole = json.loads(file.metadata()["attnmech"])
    broken = tmp_path / "broken"
    for number, wrong in enumerate(({"edit": "Double"}, {"facts": {"colour": "red"}}, {"facts": {"point": "v"}})):
        save_file({}, broken.with_suffix(f".{number}"), metadata={"attnmech": json.dumps(whole | wrong)})
    for path in (text, foreign, other, *(broken.with_suffix(f".{number}") for number in range(3))):
        refuses(f"{path.name} does not hold an intervention", Intervention.load, path)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: Intervention.zero("every"), r'`heads` must be "all" or a list of .*; got .every.'),
    (lambda: Intervention.zero((3, 5)), r"a list of \(layer, head\); got \(3, 5\)"),
    (lambda: Intervention.zero([(3, 5, 1)]), r"a list of \(layer, head\); got \[\(3, 5, 1\)\]"),
    (lambda: Intervention.zero([(True, 1)]), r"a list of \(layer, head\)"),
    (lambda: Intervention.zero([]), "at least one head; got an empty list"),
    (lambda: Intervention.zero("all", positions="first"),
     """`positions` must be "last" or a list of whole numbers, .*; got 'first'"""),
    (lambda: Intervention.zero("all", positions=3),
     '`positions` must be "last" or a list of whole numbers, negative ones from the end of each text; got 3'),
    (lambda: Intervention.zero("all", positions=[]), r"`positions` must be .*; got \[\]"),
    (lambda: Intervention.stream("mlp_out", 1), "`layers` must be a list of whole numbers, 0 or more; got 1"),
    (lambda: Intervention.remove_keys("all", "last"), r'`keys` must be "first", "special", .*; got .last.'),
    (lambda: Intervention.remove_keys("all", []),
     r"`keys` must be a list of whole numbers, negative ones from the end of each text; got \[\]"),
    (lambda: Intervention.zero_values("all", torch.zeros(2, 3)), r"a mask \[batch key\]; got torch.float32 \[2, 3\]"),
    (lambda: Intervention.zero_values("all", MASK[0]), r"a mask \[batch key\]; got torch.bool \[3\]"),
    (lambda: Intervention.scale("alibi"), "`term` must be one of query_key, key_bias, .*, position, .*; got 'alibi'"),
    (lambda: Intervention.scale("position", float("inf")), "`factor` must be a finite number; got inf"),
    (lambda: Intervention.reweight("all", [2], -1.0), "`factor` multiplies weights, so it must be 0 or more; got -1"),
    *((lambda spans=spans: Intervention.cut(*spans), "0 ≤ start < end")
      for spans in (((0, 0), (1, 2)), ((3, 1), (0, 1)), ((-1, 1), (0, 1)))),
    (lambda: Intervention.attend("all", "last"), "`to` must be one of uniform, self, first; got 'last'"),
    (lambda: Intervention("zero"), r"`edit` must be an edit, as am.Intervention.zero\(...\) makes it; got 'z"),
    (lambda: Intervention(Cut((0, 1), (0, 1)), positions=(1,)), "Cut acts on all rows, so it takes no `positions`"),
    (lambda: Intervention.replace([(0, 1)], values(0), point="attn_out"),
     "heads can be selected at z, pattern, scores, v, q, k"),
    (lambda: Intervention.stream("z", [0]), "whole layers elsewhere; got heads"),
    (lambda: Intervention.stream("resid_pre", [0]), "`point` must be one of z, attn_out, mlp_out; got 'resid_pre'"),
    (lambda: Intervention.replace([(0, 1)], {}), r"tensors by layer, such as {3: acts\['z', 3\]}; got {}"),
    (lambda: Intervention.replace([(0, 1)], {0: 1.5}), "tensors by layer, .*; got {0: float}"),
    (lambda: Values({("z", 3): torch.zeros(2)}), r"tensors by layer, .*; got {\('z', 3\): Tensor}"),
    (lambda: Intervention.zero(np.array([[True, False]])), '`heads` must be "all" or a list'),
    (lambda: Intervention.zero(np.zeros((0, 2), int)), "at least one head"),
    (lambda: Intervention.zero(torch.zeros(1, 2, dtype=int, device="meta")), '`heads` must be "all"'),
    (lambda: Intervention(Zero(), 5), '`heads` must be "all"'),
    (lambda: Intervention.zero([(0, 1)], stack=[1]), r"`stack` must be a string; got \[1\]\."),
    (lambda: Zero(["z"]), r"`point` must be one of z, attn_out, mlp_out; got \['z'\]\."),
    (lambda: ZeroValues(5), "`keys` must be"),
    (lambda: Replace(5), r"values must be tensors by layer, such as {3: acts\['z', 3\]}; got int\."),
    (lambda: Scale("position", "x"), "`factor` must be a fin"),
    (lambda: Intervention.scale(["position"]), "`term` must be one of query_key"),
    (lambda: Intervention.scale("position", np.bool_(True)), "`factor` must be a finite number"),
    (lambda: Intervention.remove_keys([(0, 1)], torch.ones(1, 6).bool().to_sparse()), "sparse"),
    (lambda: Intervention.remove_keys([(0, 1)], torch.ones(1, 6).bool().to("meta")), "meta"),
    (lambda: Values({1: torch.zeros(1, 2, device="meta")}), "the values of layer 1 must hold numbers"),
    (lambda: Values({1: torch.zeros(1, 2).to_sparse()}), "the values of layer 1 must be a dense tensor; got a sparse"),
    (lambda: Values({1: torch.tensor([torch.nan])}), "with NaN or infinity in it"),
    (lambda: Values({1: torch.zeros(1, dtype=torch.cfloat)}), "must be finite real numbers"),
    (lambda: Values({1: torch.zeros(1, 0, 8, 24)}), "must not be empty"),
    (lambda: Values({True: torch.zeros(1)}), "values must be tensors by layer"),
    (lambda: Values({-1: torch.zeros(1)}), "values must be tensors by layer"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("make", "said"), WRONG)
def test_what_is_refused(make: Callable[[], Any], said: str) -> None:
    refuses(said, make)


def test_values_do_not_change_when_the_mapping_does() -> None:
    given = values(1)
    intervention = Intervention.replace([(1, 2)], given)
    given[2] = torch.zeros(1)
    assert isinstance(intervention.edit, Replace)
    assert set(intervention.edit.values.by_layer) == {1}
