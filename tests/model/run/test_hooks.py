"""Edits at every point against the same edit made by hand on plain transformers; edits leave no trace."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import models
import pytest
import reference
import torch
from comparing import require_gradient
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError
from attnmech.points import POINTS

F32, F64 = torch.float32, torch.float64
Change = Callable[[Tensor], Tensor]
PLACES = {
    "bloom": {"attention": "self_attention", "norm": "input_layernorm", "qkv": ("query_key_value",),
              "out": "self_attention.dense", "mlp": "mlp.dense_4h_to_h"},
    "gpt2": {"attention": "attn", "norm": "ln_1", "qkv": ("c_attn",), "out": "attn.c_proj", "mlp": "mlp"},
    "llama": {"attention": "self_attn", "norm": "input_layernorm", "qkv": ("q_proj", "k_proj", "v_proj"),
              "out": "self_attn.o_proj", "mlp": "mlp"},
    "bert": {"attention": "attention.self", "norm": None, "qkv": ("query", "key", "value"),
             "out": "attention.output.dense", "mlp": "output.dense"},
}  # fmt: skip
EDITABLE = [
    (name, point)
    for name in models.FAMILIES
    for point in POINTS
    if not (point.endswith("_rot") and "llama" not in name) and point not in ("gate", "latent", "mixer_out")
]


def change_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 3) -> Change:
    """An edit that scales and shifts each cell by different numbers."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return lambda x: 0.7 * x + noise


def on_output(change: Change) -> Any:
    def hook(module: Any, args: Any, output: Any) -> Any:
        return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])

    return hook


def on_input(change: Change) -> Any:
    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    return hook


def by_head(change: Change, heads: int) -> Change:
    """The change of `[batch position head d]`, applied to concatenated features."""
    return lambda x: change(x.unflatten(-1, (heads, -1))).flatten(2)


def turned_back(change: Change, turns: list[Tensor]) -> Change:
    """The change of rotated queries or keys, applied before rotation."""
    turn = torch.stack(turns)[None, :, None]
    return lambda x: (change((x[..., None, :] @ turn)[..., 0, :])[..., None, :] @ turn.transpose(-1, -2))[..., 0, :]


def in_fused(change: Change, kind: str, part: int, heads: int) -> Change:
    """The change of q, k or v, applied to the output of one projection for all three."""

    def fused(x: Tensor) -> Tensor:
        x = x.clone()
        if kind == "bloom":
            view = x.unflatten(-1, (heads, 3, -1))
            view[..., part, :] = change(view[..., part, :])
        else:
            view = x.unflatten(-1, (3, heads, -1))
            view[:, :, part] = change(view[:, :, part])
        return x

    return fused


def edited_by_hand(name: str, dtype: torch.dtype, ids: Tensor, point: str, layer: int, change: Change) -> Tensor:
    """The logits of plain transformers with one edit made by forward hooks."""
    model = models.plain(name, dtype)
    kind, block = reference.family(model), models.blocks_of(model)[layer]
    place, w = PLACES[kind], reference.layer_weights(model, layer)
    with torch.no_grad():
        clean = model(ids, output_hidden_states=True, output_attentions=True)
    if point == "logits":
        return change(clean.logits)
    stream = clean.hidden_states[layer]
    x = reference.attention_input(model, layer, stream)
    v, pattern = reference.project(x, w.W_V, w.b_V), clean.attentions[layer]
    group, heads = len(w.W_Q) // len(w.W_K), len(w.W_Q)

    def mixed(pattern: Tensor) -> Tensor:
        return torch.stack([pattern[:, h] @ v[:, :, h // group] for h in range(heads)], dim=2)

    def summed(result: Tensor) -> Tensor:
        return result.sum(2) + (0 if w.b_O is None else w.b_O)

    attention, out = block.get_submodule(place["attention"]), block.get_submodule(place["out"])
    if point == "embed":
        handle = model.get_input_embeddings().register_forward_hook(on_output(change))
    elif point == "resid_pre":
        handle = block.register_forward_pre_hook(on_input(change), with_kwargs=True)
    elif point == "attn_in" and place["norm"] is None:
        handle = attention.register_forward_pre_hook(on_input(change), with_kwargs=True)
    elif point == "attn_in":
        handle = block.get_submodule(place["norm"]).register_forward_hook(on_output(change))
    elif point in ("q", "k", "v", "q_rot", "k_rot"):
        part = "qkv".index(point[0])
        count = (heads, len(w.W_K), len(w.W_V))[part]
        if len(place["qkv"]) == 1:
            hook = in_fused(change, kind, part, heads)
        elif point.endswith("_rot"):
            turns = [reference.rotation(p, w.d_head, 10000.0, dtype) for p in range(ids.shape[1])]
            hook = by_head(turned_back(change, turns), count)
        else:
            hook = by_head(change, count)
        path = place["qkv"][part if len(place["qkv"]) == 3 else 0]
        handle = attention.get_submodule(path).register_forward_hook(on_output(hook))
    elif point in ("scores", "pattern", "z"):
        if point == "scores":
            terms = reference.terms(model, layer, x, torch.ones_like(ids))
            seen = reference.visible(model, torch.ones_like(ids))
            scores = sum(value for term, value in terms.items() if term != "mask")
            z = mixed(torch.softmax(change(scores).masked_fill(~seen, -torch.inf), dim=-1))
        else:
            z = mixed(change(pattern)) if point == "pattern" else change(mixed(pattern))
        handle = out.register_forward_pre_hook(lambda module, args: (z.flatten(2),))
    elif point == "result":
        z = mixed(pattern)
        result = torch.stack([z[:, :, h] @ w.W_O[h] for h in range(heads)], dim=2)
        handle = out.register_forward_hook(on_output(lambda raw: summed(change(result))))
    elif point in ("attn_raw", "attn_out"):
        handle = out.register_forward_hook(on_output(change))
    elif point == "resid_mid":
        handle = out.register_forward_hook(on_output(lambda raw: change(stream + raw) - stream))
    elif point == "mlp_out":
        handle = block.get_submodule(place["mlp"]).register_forward_hook(on_output(change))
    else:
        assert point == "resid_post"
        handle = block.register_forward_hook(on_output(change))
    with handle, torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize(("name", "point"), EDITABLE)
def test_an_edit_is_what_it_would_be_by_hand(name: str, point: str) -> None:
    layer = 1
    hooked, ids = models.hooked(name), models.token_ids(name)
    (value,) = hooked.run(ids, points=[point], layers=[0]).values.values()
    change = change_of(value.shape, F32)
    key: Any = (point, layer) if POINTS[point].per_layer else point
    clean = hooked.run(ids).logits
    with hooked.hooks({key: change}):
        edited = hooked.run(ids).logits
    expected = edited_by_hand(name, F32, ids, point, layer, change)
    torch.testing.assert_close(edited, expected, rtol=1e-4, atol=1e-4)
    assert float((edited - clean).abs().max()) > 0.05
    assert torch.equal(hooked.run(ids).logits, clean)


@pytest.mark.parametrize("name", models.FAMILIES)
def test_edited_values_are_what_the_run_returns(name: str) -> None:
    hooked, ids = models.hooked(name), models.token_ids(name)
    for point, about in hooked.points.items():
        if about.absent is None:
            key: Any = (point, 1) if POINTS[point].per_layer else point
            with hooked.hooks({key: lambda x: torch.full_like(x, 0.25)}):
                assert bool((hooked.run(ids, points=[key])[key] == 0.25).all())


@pytest.mark.parametrize(
    ("name", "identity"), [*zip(models.FAMILIES, cycle((lambda x: x, lambda x: None, lambda x: x.clone())))]
)
def test_edits_that_change_nothing_change_no_bit(name: str, identity: Change) -> None:
    hooked, ids = models.hooked(name), models.token_ids(name)
    clean = hooked.run(ids).logits
    everything = [point for point, about in hooked.points.items() if about.absent is None]
    assert torch.equal(hooked.run(ids, points=everything).logits, clean)
    for point, about in hooked.points.items():
        if about.absent is None and point != "result":
            with hooked.hooks({point: identity}):
                assert torch.equal(hooked.run(ids).logits, clean), point
    with hooked.hooks({"result": identity}):
        # The heads are then summed one by one, in a different order from one matrix product.
        torch.testing.assert_close(hooked.run(ids).logits, clean, rtol=1e-5, atol=1e-5)


def test_a_change_in_place_counts_and_stays_at_its_point() -> None:
    for name in models.FAMILIES:
        hooked, ids = models.hooked(name), models.token_ids(name)

        def double(x: Tensor) -> None:
            x.mul_(2)

        for point in ("q", "v", "attn_in", "resid_pre", "pattern", "scores", "z", "resid_mid", "attn_out"):
            with hooked.hooks({(point, 1): double}):
                once = hooked.run(ids, points=[(point, 1), ("resid_post", 0), "logits"])
            with hooked.hooks({(point, 1): lambda x: x * 2}):
                twice = hooked.run(ids, points=[(point, 1), "logits"])
            assert torch.equal(once.logits, twice.logits)
            assert torch.equal(once[point, 1], twice[point, 1])
            assert torch.equal(once["resid_post", 0], hooked.run(ids, points=[("resid_post", 0)])["resid_post", 0])


def test_captured_values_do_not_change_under_the_models_own_in_place_steps() -> None:
    for name in models.FAMILIES:
        hooked, ids = models.hooked(name), models.token_ids(name)
        with hooked.hooks({("resid_mid", 1): lambda x: x + 5}):
            acts = hooked.run(ids, points=["resid_pre", "attn_out", "attn_raw", "resid_mid"])
        assert torch.equal(acts["attn_out", 1], hooked.run(ids, points=["attn_out"])["attn_out", 1])
        torch.testing.assert_close(acts["resid_mid", 1], acts["resid_pre", 1] + acts["attn_out", 1] + 5)


def test_edits_of_one_point_apply_in_order_and_blocks_nest() -> None:
    hooked, ids = models.hooked("bloom"), models.token_ids("bloom")
    with hooked.hooks({"z": lambda x: x + 1}):
        with hooked.hooks({("z", 1): lambda x: x * 3}) as same:
            assert same is hooked
            inner = hooked.run(ids, points=["z"])
        outer = hooked.run(ids, points=["z"])
    torch.testing.assert_close(outer["z", 0], hooked.run(ids, points=["z"])["z", 0] + 1)
    assert torch.equal(inner["z", 1], outer["z", 1] * 3)
    assert torch.equal(inner["z", 0], outer["z", 0])


def test_a_name_without_a_layer_edits_every_layer_and_lens_names_work() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    with hooked.hooks({"pattern": torch.zeros_like}):
        acts = hooked.run(ids, points=["pattern", "logits"])
    assert not bool(acts["pattern"].any())
    with hooked.hooks({f"blocks.{layer}.attn.hook_pattern": torch.zeros_like for layer in range(3)}):
        assert torch.equal(hooked.run(ids).logits, acts.logits)


@pytest.mark.usefixtures("unchecked")
def test_hooks_of_a_wrong_kind() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    clean = hooked.run(ids).logits
    bad: list[tuple[Any, str]] = [
        ({("q", 1): lambda x: x[:1]}, r"the hook at \('q', 1\) must keep the shape \(3, 7, 5, 4\); it returned \(1, 7"),
        ({("q", 1): lambda x: x.sum()}, r"must keep the shape \(3, 7, 5, 4\); it returned \(\)"),
        ({("q", 1): lambda x: 0.0}, "must return a tensor, or None"),
        ({"q": 3}, "must be a function of the value; got 3"),
        ({("q", 3): lambda x: x}, "from 0 to 2"),
    ]
    for hooks, message in bad:
        with pytest.raises(InputError, match=message), hooked.hooks(hooks):
            hooked.run(ids)
        assert torch.equal(hooked.run(ids).logits, clean)


# -- no trace ------------------------------------------------------------------------------------------------


def everything_of(model: Any) -> dict[str, Any]:
    """The visible state of a caller's model: weights, buffers, config, hooks, flags, attributes, identities."""
    seen: dict[str, Any] = {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "generation": model.generation_config.to_dict() if getattr(model, "generation_config", None) else None,
    }
    for path, module in model.named_modules():
        seen[f"{path}:class"] = (id(module), type(module), id(type(module).forward))
        seen[f"{path}:training"] = module.training
        seen[f"{path}:attributes"] = sorted(module.__dict__)
        for kind in vars(module):
            if "hook" in kind and hasattr(vars(module)[kind], "items"):
                seen[f"{path}:{kind}"] = [(key, id(value)) for key, value in vars(module)[kind].items()]
    for path, parameter in model.named_parameters():
        seen[f"{path}:parameter"] = (
            id(parameter), parameter.data_ptr(), parameter._version, parameter.requires_grad, parameter.dtype,
            parameter.device, parameter.grad is None, len(parameter._backward_hooks or ()),
        )  # fmt: skip
        seen[f"{path}:bytes"] = parameter.detach().numpy().tobytes()
    for path, buffer in model.named_buffers():
        seen[f"{path}:buffer"] = (id(buffer), buffer.data_ptr(), buffer.dtype, buffer.numpy().tobytes())
    return seen


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    before = everything_of(model)
    yield
    after = everything_of(model)
    assert set(before) == set(after)
    assert [name for name in before if before[name] != after[name]] == []


def interrupted(x: Tensor) -> Tensor:
    raise KeyboardInterrupt


def failing(x: Tensor) -> Tensor:
    raise RuntimeError("a fault of the user's own")


@pytest.mark.parametrize(("name", "training"), [*zip(models.FAMILIES, cycle((False, True)))])
def test_the_callers_model_is_bit_identical_afterwards(name: str, training: bool) -> None:
    model = models.fresh(name)
    model.train(training)
    next(model.parameters()).requires_grad_(False)
    blocks = models.blocks_of(model)
    blocks[1].train(not training)
    blocks[0].register_forward_hook(lambda module, args, output: None)
    ids = models.token_ids(name)
    rng = torch.get_rng_state()
    with untouched(model):
        hooked = am.load(model)
        clean = hooked.run(ids, points=["q", "pattern", "logits"]).logits
        am.certify(hooked)
        am.decompose_scores(hooked, ids)
        hooked.run(ids, points=["z", "embed"], gradients_of=lambda logits: logits.sum())
        assert hooked.bridge is not None
        with hooked.hooks({"resid_mid": lambda x: x * 2, "embed": lambda x: x.mul_(3)}):
            hooked.run(ids)
        for hook, error in ((interrupted, KeyboardInterrupt), (failing, RuntimeError)):
            for point in ("embed", "attn_in", "q", "pattern", "result", "resid_mid", "resid_post", "logits"):
                for options in ({}, {"gradients_of": lambda logits: logits.sum()}):
                    with pytest.raises(error), hooked.hooks({"resid_post": lambda x: x + 1, point: hook}):
                        hooked.run(ids, points=["scores"], **options)
                    assert torch.equal(hooked.run(ids).logits, clean)
            with pytest.raises(error), hooked.hooks({"q": lambda x: x + 1}):
                hook(clean)
            assert torch.equal(hooked.run(ids).logits, clean) and not hooked.in_force.running
    assert torch.equal(torch.get_rng_state(), rng)
    for ours, theirs in zip(hooked._model.parameters(), model.parameters(), strict=True):
        assert ours.data_ptr() == theirs.data_ptr()


def test_an_interrupt_in_a_users_own_forward_hook() -> None:
    for name in models.FAMILIES:
        model, ids, press = models.fresh(name), models.token_ids(name), []

        def hook(module: Any, args: Any, output: Any, press: list[int] = press) -> None:
            if press:
                raise KeyboardInterrupt

        models.blocks_of(model)[1].register_forward_hook(hook)
        with untouched(model):
            hooked = am.load(model)
            clean = hooked.run(ids).logits
            press.append(1)
            with pytest.raises(KeyboardInterrupt):
                hooked.run(ids, points=["pattern"])
            with pytest.raises(KeyboardInterrupt):
                am.certify(hooked)
            press.clear()
            assert torch.equal(hooked.run(ids).logits, clean)


def test_nothing_is_kept_after_a_run() -> None:
    hooked, ids = am.load(models.fresh("gpt2")), models.token_ids("gpt2")
    kept = hooked.run(ids, points=["pattern"])
    gc.collect()
    before = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    for _ in range(3):
        hooked.run(ids, points=["pattern", "scores", "q", "resid_pre"])
        hooked.run(ids, points=["pattern"], gradients_of=lambda logits: logits.sum())
        am.decompose_scores(hooked, ids)
    gc.collect()
    assert sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()) <= before
    assert kept["pattern", 2].shape == (3, 5, 7, 7)


def test_a_model_that_was_loaded_twice() -> None:
    model, ids = models.fresh("bloom"), models.token_ids("bloom")
    with untouched(model):
        one, other = am.load(model), am.load(model)
        with one.hooks({"z": torch.zeros_like}):
            assert torch.equal(other.run(ids).logits, models.hooked("bloom").run(ids).logits)
        assert torch.equal(am.load(copy.deepcopy(model)).run(ids).logits, one.run(ids).logits)


# -- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "frozen"), [*zip(models.FAMILIES, cycle((False, True)))])
def test_gradients_against_finite_differences(name: str, frozen: bool) -> None:
    model, ids = models.fresh(name, F64), models.token_ids(name, 2, 5)
    model.requires_grad_(not frozen)
    hooked = am.load(model)
    weight = torch.randn(hooked.run(ids).logits.shape, generator=torch.Generator().manual_seed(5), dtype=F64)

    def measure(logits: Tensor) -> Tensor:
        return (torch.tanh(logits / 3) * weight).sum(dim=(1, 2))

    # Llama computes norms in float32, whose rounding shows in a small step.
    step, tolerance = (1e-3, 2e-3) if "llama" in name else (1e-6, 1e-6)
    points = [point for point, about in hooked.points.items() if about.absent is None]
    with untouched(model):
        acts = hooked.run(ids, points=points, gradients_of=measure)
    assert acts.gradients is not None
    assert set(acts.gradients.values) == set(acts.values)
    for key, gradient in acts.gradients.values.items():
        assert gradient.shape == acts.values[key].shape and not acts.values[key].requires_grad
        point: Any = key if key[1] is not None else key[0]
        require_gradient(hooked, ids, point, measure, step=step, relative=tolerance)
    for key, value in hooked.run(ids, points=points).values.items():
        torch.testing.assert_close(acts.values[key], value, rtol=0, atol=1e-9)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in hooked._model.parameters())


def test_a_gradient_of_nothing_is_refused() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    bad: list[Any] = [lambda logits: logits.detach().sum(), lambda logits: logits, lambda logits: torch.tensor(1.0)]
    for measure in bad:
        with pytest.raises(InputError, match="gradients_of must return a tensor computed from the logits"):
            hooked.run(ids, points=["q"], gradients_of=measure)
    with pytest.raises(InputError, match="without a head on top"):
        models.hooked("bert_headless").run(ids, points=["q"], gradients_of=lambda x: x.sum())


def test_a_hook_cannot_run_its_own_model() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")

    def again(value: Tensor) -> Tensor:
        hooked.run(ids)
        return value

    with hooked.hooks({("z", 0): again}), pytest.raises(InputError, match="cannot run its own model"):
        hooked.run(ids)
    assert hooked.edited == ()


def test_gradients_of_functions_of_any_signature() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")

    def scaled(logits: Tensor, scale: float = 2.0) -> Tensor:
        return scale * logits[:, -1, 3]

    def with_batch(logits: Tensor, batch: am.reducers.Batch) -> Tensor:
        return logits[torch.arange(len(batch.ids)), batch.lengths - 1, 3]

    twice = hooked.run(ids, points=[("z", 0)], gradients_of=scaled).gradients
    once = hooked.run(ids, points=[("z", 0)], gradients_of=with_batch).gradients
    assert twice is not None and once is not None
    torch.testing.assert_close(twice["z", 0], 2 * once["z", 0])
    assert hooked.run(ids, points=[("z", 0)], gradients_of=torch.sum).gradients is not None


def test_hooks_that_detach_cut_gradients_there() -> None:
    hooked, ids = models.hooked("llama", torch.float64), models.token_ids("llama")
    points = ["q", "k", "v", "pattern", "attn_out"]
    last = hooked.n_layers - 1
    ordinary = hooked.run(ids, points, gradients_of=lambda x: x[:, -1, 3]).gradients
    with hooked.hooks({"pattern": Tensor.detach}):
        cut = hooked.run(ids, points, gradients_of=lambda x: x[:, -1, 3]).gradients
    with hooked.hooks({"pattern": Tensor.detach, ("attn_out", last): Tensor.detach}):
        none = hooked.run(ids, points, gradients_of=lambda x: x[:, -1, 3]).gradients
    assert ordinary is not None and cut is not None and none is not None
    for layer in range(hooked.n_layers):
        assert ordinary["q", layer].any() and not cut["q", layer].any() and not cut["k", layer].any()
        assert cut["v", layer].any() and cut["pattern", layer].any()
    torch.testing.assert_close(cut["pattern", last], ordinary["pattern", last])
    torch.testing.assert_close(cut["v", last], ordinary["v", last])
    torch.testing.assert_close(none["attn_out", last], ordinary["attn_out", last])
    assert not none["v", last].any() and not none["pattern", last].any()
