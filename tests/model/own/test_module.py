"""Modules of the user's own: points hold torch's values, edits change the output, and the user's module stays
unchanged."""

import copy
import re
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from comparing import refuses
from own import (
    HEADS,
    LENGTH,
    TEXTS,
    Block,
    Classifier,
    D,
    Pooling,
    PostBlock,
    ReadsWeights,
    Recurring,
    TwoAttentions,
    WithFurtherKeys,
    layer,
    noise,
    randomised,
)
from torch import Tensor, nn

import attnmech as am
from attnmech.errors import CertificateError, InputError, UnsupportedModelError
from attnmech.model.files.load import UnprovenWarning

PADDING = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [LENGTH - 3], [LENGTH - 1]])


def masks(kind: str, texts: int, heads: int, queries: int, keys: int) -> dict[str, Tensor]:
    """Masks of all kinds that torch accepts; the first key is never hidden."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.rand(texts * heads, queries, keys, generator=generator) < 0.3
    hidden[..., 0] = False
    added = torch.randn(texts * heads, queries, keys, generator=generator).masked_fill(hidden, -torch.inf)
    padding = torch.zeros(texts, keys, dtype=torch.bool)
    padding[1, -2:] = True
    return {
        "none": {},
        "bool": {"attn_mask": hidden[0]},
        "float": {"attn_mask": added[0]},
        "bool by head": {"attn_mask": hidden},
        "float by head": {"attn_mask": added},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": torch.where(padding, -torch.inf, 0.5)},
        "both": {"attn_mask": hidden[0], "key_padding_mask": padding},
    }[kind]


MASKS = ("none", "bool", "float", "bool by head", "float by head", "padding", "float padding", "both")
FURTHER: tuple[dict[str, bool], ...] = (
    {}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "further", "batch_first"),
    [*zip(MASKS, FURTHER * 2, [True, False] * 2 + [False, True] * 2, strict=True), ("float by head", FURTHER[3], True)],
)
def test_self_attention_is_torch_s(kind: str, further: dict[str, bool], batch_first: bool) -> None:
    module = randomised(TwoAttentions(batch_first=batch_first, **further))
    x = noise(3, 7, 20) if batch_first else noise(7, 3, 20)
    given = {"x": x, **masks(kind, 3, 5, 7, 7)}
    model = am.load(module, example=given)
    ran = model.run(given, points=["pattern", "attn_raw", "logits"])
    with torch.no_grad():
        output, _, _ = module(**given)
        options = {key: value for key, value in given.items() if key != "x"} | {"average_attn_weights": False}
        first, weights = module.one(x, x, x, **options)
        second = module.two(x + first, x + first, x + first, **options)[1]
    assert model.certificate.ok
    assert (ran.logits - (output if batch_first else output.transpose(0, 1))).abs().max() < 1e-5
    assert (ran["attn_raw", 0] - (first if batch_first else first.transpose(0, 1))).abs().max() < 1e-5
    assert (ran["pattern", 0] - weights).abs().max() < 1e-6
    assert (ran["pattern", 1] - second).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("kind", "batch_first", "sizes"),
    [*zip(MASKS, [False, True] * 4, [(None, None), (None, None), (11, 13), (11, 13)] * 2, strict=True)],
)
def test_cross_attention_is_torch_s(kind: str, batch_first: bool, sizes: tuple[int | None, int | None]) -> None:
    module = nn.MultiheadAttention(20, 4, kdim=sizes[0], vdim=sizes[1], batch_first=batch_first, add_bias_kv=True)
    randomised(module)
    q, k, v = noise(3, 7, 20), noise(3, 5, sizes[0] or 20, seed=2), noise(3, 5, sizes[1] or 20, seed=3)
    if not batch_first:
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    given = {"query": q, "key": k, "value": v, **masks(kind, 3, 4, 7, 5)}
    model = am.load(module, example=given)
    ran = model.run(given, points=["cross.pattern", "logits"])
    with torch.no_grad():
        output, weights = module(**given, average_attn_weights=False)
    assert model.certificate.ok
    assert (ran.logits - (output if batch_first else output.transpose(0, 1))).abs().max() < 1e-5
    assert (ran["cross.pattern", 0] - weights).abs().max() < 1e-6
    assert ran.batch.keys("cross").tokens[0] == ("0", "1", "2", "3", "4", "bias_kv")
    assert ran.batch.queries("cross").tokens[0] == tuple("0123456")


def of_layers(**options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(layer(), 2, **options)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
X = noise(TEXTS, LENGTH, D)

MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "post-norm layer": (layer, X),
    "pre-norm layer": (lambda: layer(norm_first=True, activation="gelu"), X),
    "positions first": (lambda: nn.TransformerEncoder(layer(batch_first=False), 2, enable_nested_tensor=False), X),
    "padding, nested inside": (of_layers, {"src": X, "src_key_padding_mask": PADDING}),
    "padding, then a norm": (lambda: of_layers(norm=nn.LayerNorm(D)), {"src": X, "src_key_padding_mask": PADDING}),
    "padding on the left": (of_layers, {"src": X, "src_key_padding_mask": PADDING.flip(1)}),
    "causal": (of_layers, {"src": X, "mask": CAUSAL, "is_causal": True}),
    "nested": (of_layers, torch.nested.nested_tensor([noise(5, D), noise(9, D)])),
    "one sequence alone": (of_layers, X[0]),
    "one attention": (lambda: nn.MultiheadAttention(D, HEADS, batch_first=True), (X, X, X)),
    "nn.Transformer": (lambda: nn.Transformer(D, HEADS, 2, 3, 30, batch_first=True), (X, noise(TEXTS, 6, D))),
    "pre-norm nn.Transformer": (
        lambda: nn.Transformer(D, HEADS, 1, 2, 30, norm_first=True),
        {"src": noise(LENGTH, TEXTS, D), "tgt": noise(6, TEXTS, D), "tgt_mask": CAUSAL[:6, :6],
         "memory_key_padding_mask": PADDING, "src_key_padding_mask": PADDING},
    ),
    "a layer used three times": (Recurring, X),
    "images": (Classifier, noise(5, 1, 6, 8)),
    "images, post-norm": (lambda: Classifier(PostBlock), noise(5, 1, 6, 8)),
    "images that are black": (Classifier, torch.zeros(5, 1, 6, 8)),
    "queries that pool": (Pooling, X),
    "weights that are read": (ReadsWeights, X),
    "further keys": (WithFurtherKeys, {"x": noise(TEXTS, LENGTH, 3), "padding": PADDING}),
}  # fmt: skip


def own_output(module: nn.Module, example: Any) -> Tensor:
    args = example if isinstance(example, tuple) else () if isinstance(example, dict) else (example,)
    with torch.no_grad():
        found = module(*args, **(example if isinstance(example, dict) else {}))
    found = next(iter(found.values())) if isinstance(found, dict) else found
    found = found[0] if isinstance(found, tuple) else found
    return found.to_padded_tensor(0.0) if found.is_nested else found


@pytest.mark.parametrize(
    ("name", "fast"),
    [*zip(MODULES, cycle((False, True))), ("padding, nested inside", False), ("padding on the left", False)],
)
def test_the_output_is_the_module_s(name: str, fast: bool) -> None:
    make, example = MODULES[name]
    module = randomised(make())
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(fast)
        wanted = own_output(module, example)
        model = am.load(module, example=example)
        found = model.run(example).logits
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    if found.ndim > wanted.ndim:
        found = found[0]
    found = found.transpose(0, 1) if name in ("pre-norm nn.Transformer", "positions first") else found
    assert model.certificate.ok
    assert (found - wanted).abs().max() < 2e-6
    ran = model.run(example, points=[point for point in model.points if model.points[point].absent is None])
    assert ran.unchecked == ()


@pytest.mark.parametrize("name", MODULES)
def test_the_module_stays_as_it_is(name: str) -> None:
    make, example = MODULES[name]
    module = randomised(make()).train()
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())
    kinds, before = [type(part) for part in module.modules()], copy.deepcopy(module.state_dict())
    flags = [each.requires_grad for each in module.parameters()]
    model = am.load(module, example=example)
    stack = next(iter(model.stacks.values()))

    def interrupt(value: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), model.hooks({stack.point("pattern"): interrupt}):
        model.run(example)
    assert model.edited == ()
    assert module.training and all(part.training for part in module.modules())
    assert [type(part) for part in module.modules()] == kinds
    assert hooks == sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())
    assert [each.requires_grad for each in module.parameters()] == flags
    assert all(torch.equal(value, module.state_dict()[key]) for key, value in before.items())
    shared = {id(each) for each in module.parameters()}
    assert {id(each) for _, each in model.named_parameters()} == shared


def test_ctrl_c_while_loading_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module, (_, example) = randomised(Classifier()), MODULES["images"]
    wanted = own_output(module, example)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnmech.model.files.load.prove", interrupt)
    with pytest.raises(KeyboardInterrupt):
        am.load(module, example=example)
    assert torch.equal(own_output(module, example), wanted)
    assert torch.backends.mha.get_fastpath_enabled()


def test_z_and_results_by_hand() -> None:
    """z against `scaled_dot_product_attention` and the raw weights."""
    module, (_, images) = randomised(Classifier()), MODULES["images"]
    model = am.load(module, example=images)
    ran = model.run(images, points=["attn_in", "q", "k", "v", "scores", "z", "result", "attn_raw", "resid_mid"])
    attention = module.blocks[1].attn
    q, k, v = nn.functional.linear(ran["attn_in", 1], attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1)
    q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (q, k, v))
    z = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(ran["z", 1], z, atol=2e-6, rtol=0)
    torch.testing.assert_close(ran["scores", 1], q @ k.mT / 6**0.5, atol=2e-6, rtol=0)
    W_O = attention.out_proj.weight.T.unflatten(0, (HEADS, -1))
    torch.testing.assert_close(ran["result", 1], torch.einsum("bphd,hdm->bphm", z, W_O), atol=2e-6, rtol=0)
    total = ran["result", 1].sum(dim=2) + attention.out_proj.bias
    torch.testing.assert_close(ran["attn_raw", 1], total, atol=2e-6, rtol=0)
    middle: list[Tensor] = []
    module.blocks[1].ln2.register_forward_pre_hook(lambda _, args: middle.append(args[0]))
    own_output(module, images)
    torch.testing.assert_close(ran["resid_mid", 1], middle[0], atol=2e-6, rtol=0)


class Crossing(Block):
    """A pre-norm decoder block with cross-attention between self-attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.ln3, self.cross = nn.LayerNorm(D), nn.MultiheadAttention(D, HEADS, batch_first=True)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:  # type: ignore[override]
        y = self.ln1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        x = x + self.cross(self.ln3(x), source, source, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


def test_a_decoder_s_block_has_its_stream() -> None:
    """The stream on both sides of cross-attention, against what the module's own norms read."""
    module, example = randomised(Crossing()), (X, noise(TEXTS, 6, D))
    model = am.load(module, example=example)
    points = ["decoder.resid_mid", "cross.attn_out", "decoder.mlp_out", "decoder.resid_post"]
    ran = model.run(example, points=points)
    read: list[Tensor] = []
    for norm in (module.ln3, module.ln2):
        norm.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    output = own_output(module, example)
    middle, crossed, mlp_out, post = (ran[point, 0] for point in points)
    assert model.certificate.ok
    torch.testing.assert_close(middle, read[0], atol=2e-6, rtol=0)
    torch.testing.assert_close(middle + crossed, read[1], atol=2e-6, rtol=0)
    torch.testing.assert_close(middle + crossed + mlp_out, output, atol=2e-6, rtol=0)
    torch.testing.assert_close(post, output, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", ["images", "queries that pool", "further keys", "a layer used three times"])
def test_an_edit_of_the_pattern_reaches_z_and_the_output(name: str) -> None:
    make, example = MODULES[name]
    model = am.load(randomised(make()), example=example)
    stack = list(model.stacks.values())[-1]
    last = stack.layers[-1]
    points = [stack.point("pattern"), stack.point("z"), "logits"]
    plain = model.run(example, points=points)
    with model.hooks({(points[0], last): lambda pattern: pattern.roll(1, dims=-1)}):
        edited = model.run(example, points=points)
    assert torch.equal(edited[points[0], last], plain[points[0], last].roll(1, dims=-1))
    assert not torch.allclose(edited[points[1], last], plain[points[1], last])
    assert not torch.allclose(edited.logits, plain.logits)


def test_a_module_that_reads_the_weights_gets_the_edited_ones() -> None:
    model = am.load(randomised(ReadsWeights()), example=X)
    with model.hooks({("pattern", 0): lambda pattern: torch.full_like(pattern, 1 / LENGTH)}):
        found = model.run(X).logits
    torch.testing.assert_close(found, X.mean(dim=1, keepdim=True).expand_as(X), atol=1e-6, rtol=0)


def test_gradients_reach_the_points() -> None:
    images = MODULES["images"][1]
    model = am.load(randomised(Classifier()), example=images)
    acts = model.run(images, points=[("z", 2)], gradients_of=lambda output: output[:, 3])
    assert acts.gradients is not None
    assert acts.gradients["z", 2].shape == (5, 13, HEADS, D // HEADS)
    # The head reads only the class token's row.
    assert acts.gradients["z", 2][:, 1:].abs().max() == 0 < acts.gradients["z", 2][:, 0].abs().max()


def test_each_use_of_a_layer_is_a_layer() -> None:
    module = randomised(Recurring())
    model = am.load(module, example=X)
    assert model.n_layers == 3
    ran = model.run(X, points=["resid_pre", "pattern"])
    once = module.layer(X)
    torch.testing.assert_close(ran["resid_pre", 1], once, atol=2e-6, rtol=0)
    weights = module.layer.self_attn(once, once, once, average_attn_weights=False)[1]
    torch.testing.assert_close(ran["pattern", 1], weights, atol=1e-6, rtol=0)
    model.base.module.times = 2
    with pytest.raises(UnsupportedModelError, match="'layer' was called 3 times in `example`, each a layer, and now 2"):
        model.run(X)


def test_labels_name_positions_and_further_keys_come_after_them() -> None:
    (_, given) = MODULES["further keys"]
    names = [f"hour {number}" for number in range(LENGTH)]
    model = am.load(randomised(WithFurtherKeys()), example=given, labels=names)
    batch = model.encode(given)
    assert batch.tokens[0] == tuple(names)
    assert batch.keys().tokens[0] == (*names, "bias_kv", "zero")
    assert batch.keys().begins.tolist() == [0, 0, 0]
    assert torch.equal(batch.mask, ~PADDING)
    with pytest.raises(InputError, match="`labels` must name all 9 positions of the source; got 2"):
        am.load(randomised(WithFurtherKeys()), example=given, labels=["a", "b"])
    grid = am.architecture.PatchGrid(1, (6, 8), (2, 2))
    model = am.load(randomised(Classifier()), example=MODULES["images"][1], labels=grid)
    assert model.encode(MODULES["images"][1]).tokens[0][:3] == ("[CLS]", "0,0", "0,1")


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.MultiheadAttention(D, heads, batch_first=True) for heads in (4, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x, x, x)[0]
        return self.two(x, x, x)[0]


class Folding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, 3, D)).reshape(x.shape)


@pytest.mark.parametrize(
    ("make", "example", "message"),
    [
        (lambda: nn.Linear(3, 3), noise(2, 3), "Linear is a module without attention: it holds no"),
        (lambda: torch.jit.script(nn.Linear(3, 3)), noise(2, 3), "is scripted or traced by torch.jit"),
        (layer, noise(2, 3), "does not run on `example`: AssertionError: was expecting embedding dimension of 24"),
        (lambda: nn.MultiheadAttention(D, 4), X, "missing 2 required positional arguments: 'key' and 'value'"),
        (layer, (X, CAUSAL[:2, :2]), "does not run on `example`: attn_mask must be [9, 9] (queries, keys) or [12, 9,"),
        (layer, "a text", "`example` must hold what the module is called with"),
        (Twice, X, "one has 4 of 24 dimensions, two 6 of 24"),
        (Folding, X, "its attention runs on 9 sequences, and no axis of that length can be repeated"),
    ],
)  # fmt: skip
def test_what_is_refused(make: Callable[[], nn.Module], example: Any, message: str) -> None:
    with pytest.raises((InputError, UnsupportedModelError), match=re.escape(message)):
        am.load(make().eval(), example=example)


def test_inputs_must_be_those_of_the_example() -> None:
    images = MODULES["images"][1]
    model = am.load(randomised(Classifier()), example=images)
    refuses("takes tensors, as in its example; got 'a text'", model.run, "a text")
    refuses("the module does not run on these inputs: RuntimeError", model.run, noise(5, 2, 6, 8))
    refuses(re.escape("this module is called with argument 0; got 'images'"), model.run, {"images": images})
    refuses("TransformerLens has no bridge for Classifier", lambda: model.bridge)
    refuses("needs the tokens of a language model, and this model has none", am.residual_drift, model, images)
    refuses("needs an example of its inputs", am.load, layer(), error=UnsupportedModelError)


def test_a_wrong_reading_is_refused() -> None:
    """A module that uses its attention in a way that no point describes fails its certificate."""

    class Scaled(nn.Module):
        """A module that also reads the weights of attention's projection, after a hook has changed its output."""

        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(D, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            # A value that differs between torch's module and its replacement.
            kind = 2.0 if type(self.attention) is nn.MultiheadAttention else 1.0
            return kind * self.attention(x, x, x)[0]

    with pytest.warns(UnprovenWarning, match="NOT certified"):
        model = am.load(randomised(Scaled()), example=X)
    refuses("output of the module itself does not hold", model.run, X, points=["pattern"], error=CertificateError)


class Mixing(nn.Module):
    """A layer of attention whose output depends on the batch, or on the number of earlier passes."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(D, HEADS, 20, batch_first=True)
        self.norm = nn.BatchNorm1d(D, track_running_stats=by != "batch")
        self.passes, self.by = 0, by

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        normed = self.norm(self.attention(x).transpose(1, 2)).transpose(1, 2)
        return normed * (1 + 0.01 * self.passes) if self.by == "passes" else normed


@pytest.mark.parametrize("by", ["text", "batch", "passes"])
def test_a_module_that_mixes_texts_or_passes_is_refused(by: str) -> None:
    torch.manual_seed(0)
    module = Mixing(by)
    if by == "text":
        assert am.load(module, example=X).certificate.ok
        return
    with pytest.warns(UnprovenWarning, match="first 'texts'"):
        model = am.load(module, example=X)
    refuses("neither other texts of a batch nor earlier passes", model.run, X, error=CertificateError)
