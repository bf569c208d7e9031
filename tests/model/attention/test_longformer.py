"""Longformer: windows that differ by layer, and global tokens with separate projections, against transformers."""

from functools import cache
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from caching import cached
from comparing import refuses
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError
from attnmech.model.attention import attend as attention
from attnmech.model.attention import local_global
from attnmech.model.attention.observed import RowBlock
from attnmech.model.files.load import UnprovenWarning
from attnmech.model.parts.mask import MaskRule
from attnmech.runs.reducer import Run

F32, F64 = torch.float32, torch.float64
WINDOWS = (4, 8, 4)
LENGTH = 29
"""Not a multiple of a window."""


def inputs(*, chosen: bool = True) -> dict[str, Tensor]:
    """Three texts of 29, 23 and 26 tokens, the last padded on the left, with two, three and no global tokens."""
    generator = torch.Generator().manual_seed(3)
    real = torch.ones(3, LENGTH, dtype=torch.long)
    real[1, 23:] = 0
    real[2, :3] = 0
    is_global = torch.zeros_like(real)
    is_global[0, [0, 17]] = 1
    is_global[1, [5, 6, 27]] = 1  # the last is padding
    given = {"input_ids": torch.randint(3, 59, (3, LENGTH), generator=generator), "attention_mask": real}
    return given | ({"global_attention_mask": is_global} if chosen else {})


@cache
def plain_output(dtype: torch.dtype, chosen: bool) -> Any:
    with torch.no_grad():
        return models.plain("longformer", dtype)(
            **inputs(chosen=chosen), output_attentions=True, output_hidden_states=True
        )


@cached
def acts(dtype: torch.dtype = F32, chosen: bool = True) -> am.results.Activations:
    model = models.hooked("longformer", dtype)
    return model.run(inputs(chosen=chosen), [name for name, about in model.points.items() if about.absent is None])


def real() -> Tensor:
    return inputs()["attention_mask"].bool()


def is_global() -> Tensor:
    return inputs()["global_attention_mask"].bool() & real()


def visible(window: int, chosen: bool = True) -> Tensor:
    """The keys that each row sees, cell by cell."""
    found = torch.zeros(3, LENGTH, LENGTH, dtype=torch.bool)
    for text in range(3):
        for i in range(LENGTH):
            for j in range(LENGTH):
                near = abs(i - j) <= window // 2
                either = chosen and bool(is_global()[text, i] or is_global()[text, j])
                found[text, i, j] = (near or either) and bool(real()[text, j])
    return found


@pytest.mark.parametrize(("dtype", "chosen"), [(F32, True), (F64, False)])
def test_logits_and_streams_are_transformers(dtype: torch.dtype, chosen: bool) -> None:
    theirs, ours = plain_output(dtype, chosen), acts(dtype, chosen)
    torch.testing.assert_close(ours["logits"][real()], theirs.logits[real()], atol=3e-5, rtol=1e-4)
    for layer, states in enumerate(theirs.hidden_states[:-1]):
        torch.testing.assert_close(ours["resid_pre", layer][real()], states[real()], atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_patterns_are_transformers_bands_and_rows(layer: int) -> None:
    """transformers' bands, cell by cell: a local row's global columns, then its window; a global token's row."""
    theirs, window = plain_output(F64, True), WINDOWS[layer]
    ours = acts(F64)["pattern", layer]
    band, rows = theirs.attentions[layer], theirs.global_attentions[layer]
    for text in range(3):
        places = is_global()[text].nonzero()[:, 0].tolist()
        for i in real()[text].nonzero()[:, 0].tolist():
            expected = torch.zeros(3, LENGTH, dtype=F64)
            if i in places:
                expected = rows[text, :, :LENGTH, places.index(i)]
            else:
                for offset in range(window + 1):
                    j = i + offset - window // 2
                    if 0 <= j < LENGTH:
                        expected[:, j] += band[text, :, i, 2 + offset]
                for column, j in enumerate(places):
                    expected[:, j] += band[text, :, i, column]
            torch.testing.assert_close(ours[text, :, i], expected, atol=1e-6, rtol=1e-5)


def test_points_have_both_halves() -> None:
    theirs = models.plain("longformer", F64).longformer.encoder.layer[1].attention.self
    x = acts(F64)["attn_in", 1]
    for name, point in (("query", "q"), ("key", "k"), ("value", "v")):
        value = acts(F64)[point, 1]
        assert value.shape == (3, LENGTH, 3, 14)
        for half, suffix in ((value[..., :7], ""), (value[..., 7:], "_global")):
            expected = getattr(theirs, name + suffix)(x).view(3, LENGTH, 3, 7)
            torch.testing.assert_close(half, expected, atol=1e-12, rtol=1e-10)


class Swapped(local_global.Halves):
    def __init__(self, first: Any, second: Any, heads: int) -> None:
        super().__init__(second, first, heads)


class Wider(local_global.WindowRule):
    by = 1

    def reaching(self, reach: int) -> local_global.WindowRule:
        return super().reaching(reach + self.by)


class Narrower(Wider):
    by = -1


class Ignoring(local_global.WindowRule):
    @classmethod
    def of(cls, ids: Tensor, mask: Tensor | None, global_mask: Tensor | None) -> local_global.WindowRule:
        return super().of(ids, mask, None)


@pytest.mark.parametrize(("name", "stack"), [("longformer", ""), ("led", "encoder ")])
@pytest.mark.parametrize("fault", [Swapped, Wider, Narrower, Ignoring])
def test_the_certificate_finds_a_wrong_reading(
    fault: type, name: str, stack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {check.name for check in models.hooked(name).certificate.checks if check.passed}
    assert models.hooked(name).certificate.ok and f"{stack}gate" in held  # the probe has global tokens
    replaced = "Halves" if fault is Swapped else "WindowRule"
    monkeypatch.setattr(local_global, replaced, fault)
    with pytest.warns(UnprovenWarning, match="NOT certified"):
        failed = {check.name for check in am.load(models.fresh(name)).certificate.failed}
    expected = {"transformers", f"{stack}streams", f"{stack}attentions"} | (
        {f"{stack}gate"} if fault is Ignoring else set()
    )
    assert expected <= failed


class Filled(am.Reducer):
    """The scores, pattern and highest key that reducers see, row by row over all keys."""

    def start(self, run: Run) -> dict[str, Tensor]:
        texts, length = run.batch.ids.shape
        self.gathered: list[Tensor] = []
        shape = run.n_layers, texts, run.n_heads, length
        return {
            "pattern": torch.zeros(*shape, length, dtype=F64),
            "scores": torch.full((*shape, length), torch.finfo(F64).min, dtype=F64),
            "visible": torch.zeros(run.n_layers, texts, 1, length, length, dtype=torch.bool),
            "top": torch.zeros(shape, dtype=torch.int64),
        }

    def add(self, state: dict[str, Tensor], block: RowBlock, run: Run) -> None:
        rows = slice(block.rows.start, block.rows.stop)
        if block.keys is not None:
            self.gathered.append(block.keys)
        for name in ("pattern", "scores", "visible"):
            values = getattr(block, name)
            state[name][block.index][:, :, rows, : values.shape[-1]] = values
        state["top"][block.index][:, :, rows] = block.top.key

    def merge(self, one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
        raise NotImplementedError


@pytest.mark.parametrize("name", ["longformer", "sliding window"])
def test_keys_that_are_left_out_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "longformer":
        model, texts = models.hooked("longformer", F64), inputs()
    else:
        model = am.load(models.randomised(models.like_llama("Mistral", sliding_window=5), dtype=F64))
        texts = {"input_ids": models.token_ids("llama", 2, 50)}
    monkeypatch.setattr(attention, "block_bytes", lambda device: 2**10)
    names = ("scores", "pattern")
    reducer = Filled()
    (seen,) = am.stream(model, texts, [reducer])
    assert any(len(keys) < 25 for keys in reducer.gathered)
    whole = model.run(texts, points=names)  # with whole rows
    real = model.encode(texts).mask
    for layer in range(model.n_layers):
        rows = real[:, None, :, None].expand_as(seen["pattern"][layer])
        for each in names:
            torch.testing.assert_close(seen[each][layer][rows], whole[each, layer][rows])
        hidden = (seen["scores"][layer] == torch.finfo(F64).min).all(dim=1, keepdim=True)
        assert torch.equal(seen["visible"][layer] | ~real[:, None, :, None], ~hidden | ~real[:, None, :, None])
        highest = whole["pattern", layer].argmax(dim=-1)
        assert torch.equal(seen["top"][layer][rows[..., 0]], highest[rows[..., 0]])
    focus = am.attention_focus(model, texts)
    monkeypatch.setattr(MaskRule, "gathered", lambda *_: None)
    monkeypatch.setattr(local_global.WindowRule, "gathered", lambda *_: None)
    for key, value in am.attention_focus(model, texts).state.items():
        torch.testing.assert_close(focus.state[key], value, equal_nan=True, msg=key)


def test_local_and_global_mass() -> None:
    """Masses against sums over transformers' bands: the first columns are global keys, the others the window."""
    mass = am.attention_focus(models.hooked("longformer", F64), inputs()).where(first_row=True)
    for layer in range(3):
        band = plain_output(F64, True).attentions[layer]
        local = real() & ~is_global() & is_global().any(dim=1, keepdim=True)
        to_global = band[..., :2].sum(dim=-1).transpose(0, 1)[:, local].mean(dim=-1)
        within = band[..., 2:].sum(dim=-1).transpose(0, 1)[:, local].mean(dim=-1)
        torch.testing.assert_close(mass.global_mass[layer].double(), to_global.double(), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(mass.window_mass[layer].double(), within.double(), atol=1e-6, rtol=1e-5)
        seen = visible(WINDOWS[layer])
        share = (seen & is_global()[:, None]).sum(-1) / seen.sum(-1).clamp_min(1)
        torch.testing.assert_close(mass.uniform_global_mass[layer, 0].double(), share[local].double().mean())
        rows = acts(F64)["pattern", layer].transpose(1, 2)[is_global()]
        texts = is_global().nonzero()[:, 0]
        expected = torch.stack([row[:, is_global()[text]].sum(-1) for row, text in zip(rows, texts, strict=True)]).mean(
            0
        )
        torch.testing.assert_close(mass.among_global[layer].double(), expected, atol=1e-9, rtol=1e-9)
    assert "attention to global tokens, averaged over heads" in mass._sections()[-1].finding


MASSES = ("global_mass", "window_mass", "uniform_global_mass", "among_global")


def test_mass_of_a_corpus_is_that_of_its_texts(tmp_path: Path) -> None:
    """One by one, in shards and from a file; without global tokens, there is nothing to measure."""
    model = models.hooked("longformer", F64)
    whole = am.attention_focus(model, inputs())
    texts = [{name: value[row : row + 1, real()[row]] for name, value in inputs().items()} for row in range(3)]
    one, two = (
        am.attention_focus(model, iter(texts), shard=(part, 2), journal=tmp_path / "journal") for part in range(2)
    )
    corpus = am.load_result(one.merged(two).save(tmp_path / "corpus.safetensors"))
    change = whole - am.attention_focus(models.hooked("longformer"), inputs())
    for name in MASSES:
        torch.testing.assert_close(corpus[name].mean, whole[name].mean, atol=1e-12, rtol=1e-12)
        assert 0 < float(change[name].mean.abs().max()) < 1e-6 or name == "uniform_global_mass"
        assert f"{name}_low" in corpus.to_frame()
    assert am.attention_focus(model, texts[2]).global_mass.isnan().all()


@pytest.mark.parametrize(("name", "stack"), [("bert", None), ("led", "decoder"), ("led", "cross")])
def test_other_models_have_no_global_mass(name: str, stack: str | None) -> None:
    focus = am.attention_focus(models.hooked(name), models.inputs_of(name), stack=stack)
    assert all(focus[mass].mean.isnan().all() and mass not in focus.quantities for mass in MASSES)
    assert all(focus.by_row(mass).isnan().all() for mass in MASSES)
    assert len(focus.state["sums"]) == len(focus.STATISTICS) - len(MASSES)
    refuses('"among_global" is not defined on any row', focus.plot, "among_global")


def test_global_tokens_by_default() -> None:
    ids = inputs()["input_ids"][:1]
    classify = am.load(models.randomised(models.longformer("ForSequenceClassification")))
    assert classify.encode(ids).extra["global_attention_mask"].nonzero().tolist() == [[0, 0]]
    assert not models.hooked("longformer").encode(ids).extra["global_attention_mask"].any()


def test_bad_inputs() -> None:
    model = models.hooked("longformer")
    ids = torch.randint(3, 59, (1, 69), generator=torch.Generator().manual_seed(0))
    refuses("68 positions; the text has 69", model.run, ids)
    with pytest.raises(InputError, match="global_attention_mask must be from 0 to 1"):
        model.run({"input_ids": ids[:, :5], "global_attention_mask": torch.full((1, 5), 2)})


def test_a_joint_embedding_needs_one_set_of_projections() -> None:
    refuses("global tokens have their own", am.joint_embedding, models.hooked("longformer"), inputs())
