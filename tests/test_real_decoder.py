"""A real decoder read from GGUF: statistics against transformers' eager attention, and known heads.

SmolLM2-135M-Instruct; its stream holds numbers up to 28,000, which float16 barely holds. The reference computes in
float32, with the weights rounded to the precision under test.
"""

import importlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import packaged
import pytest
import torch
from eager import Raw
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import attnmech as am
from attnmech.demo.text import documents
from attnmech.model.files.gguf import dequantised

TEXTS = [
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the "
    "engineer Gustave Eiffel, whose company designed and built the tower from 1887 to 1889.",
    "The keys to the old wooden cabinet in the kitchen are still on the table.",
]
HEADS = [(0, 4), (16, 0), (20, 7), (29, 8)]
"""Heads from the first layer to the last; together they use all three kv heads."""

D_HEAD, GROUP = 64, 3
"""d_head, and the number of heads that share keys and values."""


@dataclass(frozen=True)
class Decoder:
    """The model as attnmech loads it in one precision, and transformers' reference for that."""

    hooked: am.HookedModel
    plain: Any

    @cached_property
    def raw(self) -> list[Raw]:
        return [Raw(self.plain, self.hooked.tokenizer(text, return_tensors="pt").input_ids) for text in TEXTS]

    def within(self, float32: float, bfloat16: float, float16: float) -> float:
        """The tolerance of this precision: two to four times what was measured."""
        return {torch.float32: float32, torch.bfloat16: bfloat16, torch.float16: float16}[self.hooked.dtype]


@pytest.fixture(scope="session")
def file() -> Path:
    return packaged.smollm2()


# The slowest first; each in one process, where processes are given groups (`--dist loadgroup`).
PRECISIONS = {
    name: pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("float16", "float32", "bfloat16")
}


def in_precision(*names: str) -> pytest.MarkDecorator:
    """A test in some of the precisions; the other tests of its statistic cover the others."""
    return pytest.mark.parametrize("decoder", [PRECISIONS[name] for name in names], indirect=True)


@pytest.fixture(scope="session", params=PRECISIONS.values())
def decoder(request: pytest.FixtureRequest, file: Path) -> Decoder:
    hooked = am.load(file, dtype=request.param)
    folder = dequantised(file).folder
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.to(hooked.dtype))
    return Decoder(hooked, plain)


def test_weights_and_tokens_are_those_in_the_file(file: Path) -> None:
    reader, copy = gguf.GGUFReader(file), dequantised(file)
    assert copy.types == ("Q4_1", "Q8_0")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    with safe_open(copy.folder / "model.safetensors", framework="pt") as held:
        for ours, theirs, heads in (
            ("model.embed_tokens", "token_embd", 0),
            ("model.norm", "output_norm", 0),
            ("model.layers.0.self_attn.q_proj", "blk.0.attn_q", 9),
            ("model.layers.18.self_attn.k_proj", "blk.18.attn_k", 3),
            ("model.layers.18.self_attn.v_proj", "blk.18.attn_v", 0),
            ("model.layers.29.mlp.down_proj", "blk.29.ffn_down", 0),
        ):
            tensor = stored[f"{theirs}.weight"]
            weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            if heads:  # llama.cpp stores dimensions that rotate together side by side
                weight = weight.reshape(heads, D_HEAD // 2, 2, -1).transpose(1, 2).reshape(weight.shape)
            assert torch.equal(held.get_tensor(f"{ours}.weight"), weight), ours
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    tokenizer = AutoTokenizer.from_pretrained(copy.folder)
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    assert [tokens[number] for number in tokenizer("The old keys").input_ids] == ["The", "Ġold", "Ġkeys"]


def test_the_certificate_holds(decoder: Decoder) -> None:
    assert decoder.hooked.certificate.ok, repr(decoder.hooked.certificate)
    assert decoder.hooked.name.endswith("(dequantised from Q4_1, Q8_0)")


def test_logits_are_as_exact_as_transformers_own(decoder: Decoder) -> None:
    own = deepcopy(decoder.plain).to(decoder.hooked.dtype)
    ours, theirs = [], []
    for text, raw in zip(TEXTS, decoder.raw, strict=True):
        ours.append(decoder.hooked.run(text).logits[0].float() - raw.logits)
        with torch.no_grad():
            theirs.append(own(raw.ids).logits[0].float() - raw.logits)
    error, allowed = (float(torch.cat(each).square().mean().sqrt()) for each in (ours, theirs))
    spread = float(torch.cat([raw.logits for raw in decoder.raw]).std())
    assert error <= 2 * allowed + 1e-5 * spread
    assert error <= decoder.within(1e-5, 0.06, 0.006) * spread


def test_the_terms_of_scores_add_up_to_transformers_attention(decoder: Decoder) -> None:
    for text, raw in zip(TEXTS, decoder.raw, strict=True):
        split = am.decompose_scores(decoder.hooked, text)
        assert float((split.residual / split.largest).max()) <= decoder.within(1e-6, 3e-2, 4e-3)
        scores = sum(split.terms[name].float() for name in split.terms)[0]
        # A row's probabilities determine its scores up to a constant.
        seen = (raw.pattern > 1e-20) & (raw.pattern[..., :1] > 1e-20)
        expected = raw.pattern.log() - raw.pattern[..., :1].log()
        apart = ((scores - scores[..., :1]) - expected)[seen].abs()
        assert float(apart.mean()) <= decoder.within(5e-6, 6e-2, 1e-2)


def test_focus(decoder: Decoder) -> None:
    focus = am.attention_focus(decoder.hooked, TEXTS)
    of_rows: dict[str, Callable[[Tensor], Tensor]] = {
        "first_mass": lambda pattern: pattern[..., 1:, 0],
        "previous_mass": lambda pattern: pattern.diagonal(-1, -2, -1),
        "self_mass": lambda pattern: pattern.diagonal(0, -2, -1)[..., 1:],
        "entropy": lambda pattern: torch.special.entr(pattern).sum(dim=-1)[..., 1:],
    }
    for name, rows in of_rows.items():
        expected = torch.cat([rows(raw.pattern) for raw in decoder.raw], dim=-1).mean(dim=-1)
        apart = float((getattr(focus, name) - expected).abs().max())
        assert apart <= decoder.within(1e-6, 2e-2, 3e-3) * (3 if name == "entropy" else 1), name
    assert int(focus.previous_mass.argmax()) == 16 * 9 + 0
    assert float(focus.previous_mass[16, 0]) == pytest.approx(0.735, abs=5e-3)
    by_layer = focus.first_mass.mean(dim=1)
    assert by_layer[[0, 20, 24]].tolist() == pytest.approx([0.103, 0.861, 0.879], abs=5e-3)


@in_precision("float16", "bfloat16")
def test_updates(decoder: Decoder) -> None:
    updates = am.residual_updates(decoder.hooked, TEXTS)
    for layer, head in HEADS:
        W_O = decoder.plain.model.layers[layer].self_attn.o_proj.weight.detach()[:, head * D_HEAD :][:, :D_HEAD]
        written = torch.cat([raw.z(layer, head)[1:] @ W_O.T for raw in decoder.raw])
        stream = torch.cat([raw.streams[layer][1:] for raw in decoder.raw])
        magnitude = float((written.norm(dim=-1) / stream.norm(dim=-1)).mean())
        orientation = float(torch.cosine_similarity(written, stream, dim=-1).mean())
        assert float(updates.magnitude[layer, head]) == pytest.approx(magnitude, rel=decoder.within(1e-5, 3e-2, 3e-3))
        assert float(updates.orientation[layer, head]) == pytest.approx(
            orientation, abs=decoder.within(1e-6, 2e-3, 3e-4)
        )


@in_precision("float16")
def test_ablations(decoder: Decoder) -> None:
    found = am.ablate_heads(decoder.hooked, TEXTS, HEADS)
    close = decoder.within(2e-5, 6e-2, 5e-3)
    assert found.before.tolist() == pytest.approx([raw.loss for raw in decoder.raw], abs=close)
    for layer, head in HEADS:
        expected = [raw.effect(layer, head, torch.zeros(1)) for raw in decoder.raw]
        assert found.per_text[layer, head].tolist() == pytest.approx(expected, abs=close)


@in_precision("float32")
def test_null_attention(decoder: Decoder) -> None:
    heads = HEADS[1::2]
    found = am.null_attention(decoder.hooked, TEXTS, heads=heads)
    for layer, head in heads:
        mass, removed, without_value = [], [], []
        for raw in decoder.raw:
            pattern, value = raw.pattern[layer, head], raw.value(layer, head)
            mass.append(float(pattern[1:, 0].mean()))
            others = raw.z(layer, head) - pattern[:, :1] * value[:1]
            without_value.append(raw.effect(layer, head, others))
            renormalised = others[1:] / (1 - pattern[1:, :1])
            removed.append(raw.effect(layer, head, torch.cat([0 * others[:1], renormalised])))
        assert float(found.sink_mass[layer, head]) == pytest.approx(
            sum(mass) / len(mass), abs=decoder.within(1e-6, 2e-2, 3e-3)
        )
        for name, expected in (("remove", removed), ("zero_value", without_value)):
            effects = found.effects[name].per_text[layer, head].tolist()
            assert effects == pytest.approx(expected, abs=decoder.within(2e-5, 6e-2, 5e-3)), name


@in_precision("bfloat16")
def test_the_report(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Anna lost the keys."
    module = importlib.import_module("attnmech.pages.limits")
    monkeypatch.setattr(module, "MAX_REASONS", 0)  # 40 s with all annotations checked
    report = am.report(decoder.hooked, text)
    raw = Raw(decoder.plain, decoder.hooked.tokenizer(text, return_tensors="pt").input_ids)
    assert float((report.pattern.float() - raw.pattern).abs().max()) <= decoder.within(1e-5, 0.15, 0.02)
    assert len(report.measured) == 2
    page = report.to_html()
    assert "(dequantised from Q4_1, Q8_0)" in page
    assert 500_000 < len(page) < 8_000_000


@in_precision("float32")
def test_a_head_attends_to_ends_of_sentences(decoder: Decoder) -> None:
    types = am.head_types(decoder.hooked, documents(12))
    above = types.excess["sentence end"]
    assert divmod(int(above.nan_to_num(-1).argmax()), above.shape[1]) == (1, 1)
    assert float(types.scores["sentence end"][1, 1]) > 0.4 > 3 * float(types.baselines["sentence end"][1, 1])


@pytest.fixture(scope="module")
def repeated() -> Tensor:
    """Four texts: <|endoftext|>, then 40 random tokens twice."""
    half = torch.randint(1000, 40_000, (4, 40), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.zeros(4, 1, dtype=torch.long), half, half], dim=1)


@in_precision("float16", "bfloat16")
def test_induction_heads_on_repeated_random_tokens(decoder: Decoder, repeated: Tensor) -> None:
    """The numbers equal those from transformers' attention."""
    acts = decoder.hooked.run(repeated, points=["pattern", "logits"])
    # From each token of the second half to the one after its first occurrence.
    induction = torch.stack(
        [acts["pattern", layer].float().diagonal(-39, -2, -1)[..., 2:].mean(dim=(0, 2)) for layer in range(30)]
    )
    close = decoder.within(1e-3, 1e-2, 2e-3)
    found = [float(induction[layer, head]) for layer, head in ((18, 6), (17, 4), (17, 3))]
    assert found == pytest.approx([0.926, 0.795, 0.772], abs=close)
    assert int(induction.argmax()) == 18 * 9 + 6
    assert int((induction > 0.3).sum()) == 12
    surprisal = torch.nn.functional.cross_entropy(
        acts.logits[:, :-1].float().transpose(1, 2), repeated[:, 1:], reduction="none"
    )
    halves = [float(surprisal[:, :40].mean()), float(surprisal[:, 40:].mean())]
    assert halves == pytest.approx([13.93, 2.13], abs=decoder.within(5e-3, 6e-2, 1e-2))


def centred_by_hand(plain: Any, ids: Tensor, layer: int, head: int) -> dict[str, Tensor]:
    """The four terms of one head, from transformers' projections and rotation."""
    attention, tables = plain.model.layers[layer].self_attn, []
    made: dict[str, Tensor] = {}
    hooks = [
        getattr(attention, name).register_forward_hook(lambda _, __, out, name=name: made.update({name: out.double()}))
        for name in ("q_proj", "k_proj")
    ]
    hooks.append(plain.model.rotary_emb.register_forward_hook(lambda _, __, out: tables.extend(out)))
    with torch.no_grad():
        plain(ids)
    for hook in hooks:
        hook.remove()
    cos, sin = (table.double() for table in tables)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    split = []
    for name, at in (("q_proj", head), ("k_proj", head // GROUP)):
        x = made[name][..., at * D_HEAD : (at + 1) * D_HEAD]
        mean = x[:, 1:].mean(dim=1, keepdim=True)
        split.append((turned(mean.expand_as(x)), turned(x - mean)))
    (q_mean, q), (k_mean, k) = split
    pairs = {"position": (q_mean, k_mean), "key_bias": (q_mean, k), "query_bias": (q, k_mean), "query_key": (q, k)}
    return {name: one @ other.mT / D_HEAD**0.5 for name, (one, other) in pairs.items()}


@in_precision("float32")
def test_what_known_heads_score_by(decoder: Decoder, repeated: Tensor) -> None:
    """A previous-token head scores by position, induction heads by content: with each text's own means."""
    found = am.variance_shares(decoder.hooked, repeated, first_key=False, layers=[16, 17, 18])
    close = decoder.within(3e-3, 1e-2, 3e-3)
    known = {
        (16, 0): {"position": 0.974, "key_bias": 0.005, "query_key": 0.003, "query_bias": 0.019},
        (18, 6): {"position": 0.012, "key_bias": 0.246, "query_key": 0.738, "query_bias": 0.004},
        (17, 4): {"position": -0.018, "key_bias": 0.336, "query_key": 0.676, "query_bias": 0.005},
        (17, 3): {"position": 0.009, "key_bias": 0.318, "query_key": 0.670, "query_bias": 0.003},
    }
    for (layer, head), shares in known.items():
        terms = centred_by_hand(decoder.plain, repeated, layer, head)
        score = torch.stack(list(terms.values())).sum(dim=0)
        above, whole = dict.fromkeys(terms, 0.0), 0.0
        for row in range(2, 81):
            s = score[:, row, 1 : row + 1]
            whole += float(((s - s.mean(dim=1, keepdim=True)) ** 2).sum())
            for name, term in terms.items():
                t = term[:, row, 1 : row + 1]
                above[name] += float(((t - t.mean(dim=1, keepdim=True)) * (s - s.mean(dim=1, keepdim=True))).sum())
        for name, share in shares.items():
            assert float(found.mean(name)[layer, head]) == pytest.approx(above[name] / whole, abs=close)
            assert float(found.mean(name)[layer, head]) == pytest.approx(share, abs=close)


@in_precision("bfloat16")
def test_the_previous_token_head_looks_there_because_of_its_position(decoder: Decoder, repeated: Tensor) -> None:
    means = am.mean_qk(decoder.hooked, repeated, layers=[16])

    def previous() -> float:
        pattern = decoder.hooked.run(repeated, points=["pattern"], layers=[16])["pattern", 16][:, 0].float()
        return float(pattern.diagonal(-1, -2, -1)[:, 1:].mean())

    found = {"": previous()}
    for term in ("position", "query_key"):
        with decoder.hooked.intervene(am.Intervention.scale(term, 0.0, [(16, 0)], centre=means)):
            found[term] = previous()
    expected = {"": 0.915, "position": 0.0024, "query_key": 0.905}
    assert found == pytest.approx(expected, abs=decoder.within(2e-3, 8e-3, 2e-3))


@in_precision("float32")
def test_the_known_heads_are_named(decoder: Decoder) -> None:
    types = am.head_types(decoder.hooked)
    assert all("induction" in types.types_of(*head) for head in ((18, 6), (17, 4), (17, 3)))
    claims = types.to_frame().set_index(["layer", "head", "type"])
    assert bool(claims.by_position_alone[16, 0, "previous"])
    assert 10 <= int((claims.index.get_level_values("type") == "induction").sum()) <= 13
    example = types.example_of(18, 6)
    assert example is not None and example.before[-1] == example.around[example.key_at - 1]
    # The direct path misses these heads, which act through later layers; layer 23 writes the answer.
    assert int(types.writes["induction"].argmax()) == 23 * 9 + 2
