"""Methods on compiled programs with known heads and edges (benchmarks/truth)."""

import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import attnmech as am

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from truth.interchange import NAMES as TRAINED
from truth.interchange import shares
from truth.judge import Judge
from truth.model import NAMES, Head, Program, load, load_trained, module_of, stored_shares, trained_module
from truth.trained import TrainedCase

BY_HAND = {
    "induction": {
        ("embedding", "L0H0 q"), ("embedding", "L0H0 k"), ("embedding", "L0H0 v"), ("embedding", "L1H0 q"),
        ("L0H0", "L1H0 k"), ("embedding", "L1H0 v"), ("L1H0", "logits"),
    },
    "prefix_sums": {
        ("embedding", "L0H0 q"), ("embedding", "L0H0 k"), ("embedding", "L0H1 q"), ("embedding", "L0H1 k"),
        ("L0H0", "L0 MLP"), ("L0H1", "L0 MLP"), ("L0 MLP", "L1 MLP"), ("L1 MLP", "logits"),
    },
    "reverse": {
        ("embedding", "L0H0 q"), ("embedding", "L0H0 k"), ("L0H0", "L0 MLP"), ("L0 MLP", "L1 MLP"),
        ("embedding", "L1 MLP"), ("L1 MLP", "L2 MLP"), ("L2 MLP", "L3H0 q"), ("embedding", "L3H0 k"),
        ("embedding", "L3H0 v"), ("L3H0", "logits"),
    },
}  # fmt: skip
"""The edges that follow from the text of a program, written down without the compiler."""


@cache
def case(name: str) -> tuple[am.HookedModel, Program, Judge]:
    model, program = load(name)
    return model, program, Judge.of(model, *(program.tensors[key].long() for key in ("clean", "corrupted")))


@pytest.mark.parametrize("name", NAMES)
def test_a_module_computes_what_tracr_computed(name: str) -> None:
    program = Program.read(name)
    module, tensors = module_of(program), program.tensors
    compared = 0
    for number, row in enumerate(tensors["inputs"].long()):
        ids = row[row >= 0][None]
        with torch.no_grad():
            logits = module(ids).logits[0]
        decoded = tensors["decoded"][number, : ids.shape[1]]
        defined = decoded != -1
        came = logits.argmax(dim=-1) if program.categorical else logits[:, 0]
        torch.testing.assert_close(came[defined], decoded[defined].to(came), rtol=0, atol=1e-5)
        compared += int(defined.sum())
        if number < len(tensors["logits"]):
            torch.testing.assert_close(logits, tensors["logits"][number, : ids.shape[1]], rtol=0, atol=2e-5)
    assert len(tensors["inputs"]) == 200 and compared > 200


@pytest.mark.parametrize("name", BY_HAND)
def test_the_truth_is_that_of_the_program(name: str) -> None:
    assert {(edge["writer"], edge["reader"]) for edge in Program.read(name).edges} == BY_HAND[name]


@pytest.mark.parametrize("name", NAMES)
def test_ablation_finds_exactly_the_heads_of_a_program(name: str) -> None:
    """All others have an effect of exactly 0."""
    model, program, judge = case(name)
    assert model.certificate.ok, repr(model.certificate)
    effect = am.ablate_heads(model, judge.inputs, metric=judge.error).effect
    assert {tuple(place) for place in effect.nonzero().tolist()} == set(program.circuit)
    assert float(effect[tuple(zip(*program.circuit, strict=True))].min()) > 1e-3
    assert len(program.unused) == effect.numel() - len(program.circuit)


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("shift", {(0, 0): "previous"}),
        ("two_back", {(0, 0): "previous", (1, 0): "previous"}),
        ("induction", {(0, 0): "previous", (1, 0): "induction"}),
        ("after_comma", {(0, 1): "previous"}),
        ("histogram", {(0, 0): "duplicate"}),
    ],
)
def test_types_are_those_of_the_selectors(name: str, types: dict[Head, str]) -> None:
    model, program, _ = case(name)
    types_found = am.head_types(model)
    shifts = {(head["layer"], head["head"]) for head in program.heads if head["queries"] == head["keys"] == "indices"}
    for head in program.circuit:
        of_head = types_found.types_of(*head)
        assert head not in types or types[head] in of_head
        assert ("previous" in of_head) == (head in shifts)


@pytest.mark.parametrize("name", ["shift", "induction", "agrees", "reverse", "histogram"])
def test_a_true_set_is_confirmed_and_decoys_are_not(name: str) -> None:
    model, program, judge = case(name)
    cases = [am.Case(tuple(ids), group=str(number)) for number, ids in enumerate(judge.inputs.tolist())]
    task = am.Task(name, cases, metric=judge.error, higher_is_better=False)
    true = sorted(program.circuit)
    decoys = [(layer, program.n_heads - 1 - head) for layer, head in true]
    assert set(decoys) <= set(map(tuple, program.decoys))
    assert am.confirm_heads(model, true, task).verdict == "confirmed"
    assert am.confirm_heads(model, decoys, task).verdict == "not confirmed"


@pytest.mark.parametrize("name", ["induction", "prefix_sums", "two_back"])
def test_exact_effects_are_those_of_edges_that_carry_tokens(name: str) -> None:
    model, program, judge = case(name)
    options = {"metric": judge.restored, "nodes": "heads+mlps", "edges": True}
    count = len(am.attribute(model, judge.clean, judge.corrupted, **options).edges)
    frame = am.attribute(model, judge.clean, judge.corrupted, **options, confirm=count, controls=0).to_frame()
    named = frame[frame.exact.abs() > 1e-4]
    true = {(edge["writer"], edge["reader"]) for edge in program.edges if edge["varies"]}
    assert set(zip(named.sender, named.receiver, strict=True)) == true


@pytest.mark.parametrize("name", NAMES)
def test_only_edges_of_the_program_are_stable(name: str) -> None:
    model, program, judge = case(name)
    options = {"metric": judge.restored, "nodes": "heads+mlps", "edges": True, "method": "integrated"}
    true = {(edge["writer"], edge["reader"]) for edge in program.edges if edge["varies"]}
    stability = am.attribute(model, judge.clean, judge.corrupted, **options).stability(3 * len(true), draws=10)
    assert stability.pairs == 24 and set() < set(stability.circuit.edges) <= true


@pytest.mark.parametrize(("name", "through"), [("induction", "k"), ("two_back", "v")])
def test_path_patching_finds_the_input_of_a_head(name: str, through: str) -> None:
    model, _, judge = case(name)
    for point in "qkv":
        effects = am.path_patch(model, judge.clean, judge.corrupted, [(1, 0)], point, metric=judge.restored).effect[0]
        assert (effects[0] < -0.3) == (point == through)
        assert bool((effects[1:] == 0).all()) and (point == through or abs(effects[0]) < 1e-6)


def test_gradients_vanish_where_attention_is_saturated() -> None:
    model, _, judge = case("induction")
    patched, gradient, integrated, relp = (
        call(model, judge.clean, judge.corrupted, metric=judge.restored, **options).effect[0, 0]
        for call, options in (
            (am.patch, {}), (am.attribute, {}), (am.attribute, {"method": "integrated"}),
            (am.attribute, {"method": "relp"}),
        )
    )  # fmt: skip
    assert patched > 0.3 and 0 < abs(gradient) < 1e-3 and relp == 0
    assert abs(integrated) > 100 * abs(gradient)


def test_patching_does_not_see_a_head_that_carries_a_constant() -> None:
    """All inputs have one length, so the head that computes it writes the same in all."""
    model, program, judge = case("reverse")
    (constant,) = ((head["layer"], head["head"]) for head in program.heads if not head["varies"])
    assert constant == (0, 0)
    assert abs(am.patch(model, judge.clean, judge.corrupted, metric=judge.restored).effect[constant]) < 1e-6
    assert am.ablate_heads(model, judge.inputs, metric=judge.error).effect[constant] > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_scores_come_from_the_writers_of_queries_and_keys(name: str) -> None:
    model, program, judge = case(name)
    split = am.decompose_by_source(model, judge.clean[:4])
    assert float(split.residual.nan_to_num().max()) <= 1e-4
    read = {(edge["reader"], edge["writer"]) for edge in program.edges}
    for head in program.heads:
        layer, number = head["layer"], head["head"]
        matrix = split.matrix(layer, number).abs()
        for point, sizes in (("q", matrix.sum(dim=1)), ("k", matrix.sum(dim=0))):
            for source, size in zip(split.labels_of(layer), sizes.tolist(), strict=True):
                # The embedding also holds the BOS token and a constant, which every head reads.
                allowed = source.endswith("embedding") or (f"L{layer}H{number} {point}", source) in read
                assert allowed or size == 0, (head, source)


@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_model_computes_its_program_head_by_head(name: str) -> None:
    model, program = load_trained(name)
    measured = shares(program, trained_module(program))
    assert min(measured.values()) > 0.97
    assert measured == pytest.approx(stored_shares(name), abs=2e-3)
    assert model.certificate.ok


@pytest.mark.parametrize("name", TRAINED)
def test_ablation_finds_the_heads_of_a_trained_model(name: str) -> None:
    case = TrainedCase(*load_trained(name))
    effects = case.ablated("mean")
    # A constant number of commas changes no answer of `after_comma`; another input's number does.
    needed = case.program.circuit - ({(0, 0)} if name == "after_comma" else set())
    used = torch.stack([effects[head] for head in sorted(needed)])
    unused = torch.stack([effects[head] for head in sorted(case.program.unused)])
    assert float(used.min()) > 0.5 > 1000 * float(unused.abs().max())
