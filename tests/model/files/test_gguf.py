"""GGUF files: their weights, the cached copy, and unusable files.

The tests write the files as llama.cpp does, so that their contents are known.
"""

import itertools
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import gguf
import models
import numpy as np
import pytest
import torch
from comparing import message_of
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import attnmech as am
from attnmech.errors import InputError, ModelNotFoundError, OutputError, UnsupportedModelError, WeightsError
from attnmech.model.structure.families import ARCHITECTURES

HEADS, KV_HEADS, D_HEAD = 4, 2, 16
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
WORDS = ["<unk>", "<s>", "</s>", "t", "h", "e", "k", "y", "Ġ", "th", "the", "ey", "key", "<|endoftext|>"]
MERGES = ["t h", "th e", "e y", "k ey"]


def llama() -> Any:
    """A Llama in which every row of a weight is a whole number of quantised blocks of 32."""
    model = models.llama(heads=HEADS, kv_heads=KV_HEADS, d_head=D_HEAD, hidden=64)
    model.config.intermediate_size, model.config.vocab_size = 96, len(WORDS)
    return models.randomised(type(model)(model.config))


def rotated(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix in llama.cpp's order: dimensions that rotate together are adjacent."""
    halves = weight.reshape(heads, 2, D_HEAD // 2, -1)
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)


def tensors(model: Any) -> dict[str, np.ndarray]:
    held = {}
    for name, value in model.state_dict().items():
        weight = value.numpy()
        if "q_proj" in name or "k_proj" in name:
            weight = rotated(weight, HEADS if "q_proj" in name else KV_HEADS)
        parts = name.split(".")
        if name.startswith("model.layers."):
            held[f"blk.{parts[2]}.{NAMES['.'.join(parts[3:-1])]}.weight"] = weight
        else:
            outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            held[f"{outside[name.removesuffix('.weight')]}.weight"] = weight
    return held


def write(
    path: Path,
    held: Mapping[str, np.ndarray],
    *,
    quantised: bool = False,
    architecture: str = "llama",
    vocabulary: bool = True,
) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(D_HEAD)
    writer.add_rope_dimension_count(D_HEAD)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(WORDS))
    if vocabulary:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(WORDS)
        writer.add_token_merges(MERGES)
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    for name, weight in held.items():
        if quantised and weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0 if "ffn" in name else gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "attnmech" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", tensors(llama()))


def made(copies: Path) -> list[Path]:
    """The cached copies, and any other files beside them."""
    return [path for path in copies.iterdir() if path.name != "lock"] if copies.exists() else []


def logits(model: Any) -> Tensor:
    ids = torch.tensor([[3, 9, 12, 5, 7, 10]])
    return model.run(ids).logits if isinstance(model, am.HookedModel) else model(ids).logits.detach()


# -- what is read ------------------------------------------------------------------------------------------------


def test_a_file_of_floats_is_the_model_that_was_written(file: Path, copies: Path) -> None:
    hooked, original = am.load(file), llama()
    assert hooked.certificate.ok, repr(hooked.certificate)
    assert torch.allclose(logits(hooked), logits(original), atol=1e-5)
    (copy,) = made(copies)
    held, wanted = load_file(copy / "model.safetensors"), original.state_dict()
    assert held.keys() == wanted.keys()
    assert all(torch.equal(held[name], wanted[name]) for name in held)
    assert hooked.name == str(file)
    assert hooked.source == f"am.load({str(file)!r})"
    assert hooked.encode("the key").ids.tolist() == [[10, 8, 12]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantised_weights_are_those_that_the_file_stands_for(tmp_path: Path, dtype: torch.dtype) -> None:
    original = llama()
    for name, weight in original.state_dict().items():
        if weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0 if "mlp" in name else gguf.GGMLQuantizationType.Q4_1
            weight.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind)))
    file = write(tmp_path / "tiny.gguf", tensors(llama()), quantised=True)
    hooked = am.load(str(file), dtype=dtype)
    assert hooked.name == f"{file} (dequantised from Q4_1, Q8_0)"
    assert hooked.name in repr(hooked) and "dequantised" in am.attention_focus(hooked, "the key").provenance.model
    assert hooked.dtype == dtype
    assert torch.equal(logits(hooked), logits(am.load(original, dtype=dtype)))
    parameters = dict(original.to(dtype).named_parameters())
    for layer, name in itertools.product(range(2), ("q", "k", "v", "o")):
        found = getattr(hooked.weights(layer), f"W_{name.upper()}").unique()
        assert torch.equal(found, parameters[f"model.layers.{layer}.self_attn.{name}_proj.weight"].unique())


def test_only_the_file_itself_is_read(file: Path) -> None:
    for name in (
        "config.json",
        "adapter_config.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    ):
        (file.parent / name).write_text("nonsense", encoding="utf-8")
    assert am.load(file).encode("the key").ids.tolist() == [[10, 8, 12]]


def test_a_file_without_a_vocabulary_takes_ids(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", tensors(llama()), vocabulary=False)
    hooked = am.load(file)
    assert hooked.tokenizer is None
    assert torch.allclose(logits(hooked), logits(llama()), atol=1e-5)
    assert "loaded without a tokenizer" in message_of(lambda: hooked.run("the key"), InputError)
    assert am.load(file, tokenizer=models.tokenizer()).encode("the keys").ids.tolist() == [[3, 4]]


def test_a_folder_whose_name_ends_in_gguf_is_a_folder(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "mine.gguf")
    assert torch.equal(logits(am.load(tmp_path / "mine.gguf")), logits(am.load(llama())))


# -- the copy ----------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The GGUF files that transformers reads."""
    seen: list[str] = []
    original = AutoModelForCausalLM.from_pretrained

    def counted(*arguments: Any, **options: Any) -> Any:
        seen.append(options["gguf_file"])
        return original(*arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counted)
    return seen


def test_a_file_is_read_once_wherever_it_is(file: Path, reads: list[str], copies: Path) -> None:
    first = logits(am.load(file))
    moved = file.rename(file.with_name("moved.gguf"))
    assert torch.equal(logits(am.load(moved)), first)
    assert len(reads) == 1
    (copy,) = made(copies)
    assert not [path for path in copy.iterdir() if path.suffix not in (".json", ".safetensors", ".jinja")]
    write(moved, {name: weight * 1.5 for name, weight in tensors(llama()).items()})
    assert not torch.allclose(logits(am.load(moved)), first)
    assert len(reads) == 2


@pytest.mark.parametrize("damage", ["one byte", "cut", "missing", "added", "no contents"])
def test_a_damaged_copy_is_made_again(file: Path, reads: list[str], copies: Path, damage: str) -> None:
    first = logits(am.load(file))
    (copy,) = made(copies)
    weights = copy / "model.safetensors"
    held = weights.read_bytes()
    if damage == "one byte":
        weights.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
    elif damage == "cut":
        weights.write_bytes(held[:-100])
    elif damage == "missing":
        (copy / "config.json").unlink()
    elif damage == "added":
        (copy / "adapter_config.json").write_text("{}", encoding="utf-8")
    else:
        (copy / "contents.json").write_text("{", encoding="utf-8")
    assert torch.equal(logits(am.load(file)), first)
    assert len(reads) == 2
    assert made(copies) == [copy]
    am.load(file)
    assert len(reads) == 2


def test_two_at_once_make_one_copy(file: Path, reads: list[str], copies: Path) -> None:
    together = Barrier(2)

    def load(_: int) -> Tensor:
        together.wait()
        return logits(am.load(file))

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(load, range(2))
    assert torch.equal(one, other)
    assert len(reads) == 1
    assert len(made(copies)) == 1


def test_an_interrupted_copy_leaves_nothing(file: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Any, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}", encoding="utf-8")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedModel, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            am.load(file)
    assert made(copies) == []
    (copies / "killed.part").mkdir()
    assert am.load(file).certificate.ok
    assert len(made(copies)) == 1


def test_a_cache_that_cannot_be_written(file: Path, monkeypatch: pytest.MonkeyPatch, copies: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    said = message_of(lambda: am.load(file), OutputError)
    assert "cannot write the dequantised weights" in said and "XDG_CACHE_HOME" in said
    monkeypatch.setenv("XDG_CACHE_HOME", str(copies.parent.parent))

    def full(self: Any, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    assert "No space left on device" in message_of(lambda: am.load(file), OutputError)
    assert made(copies) == []


# -- files that cannot be used -----------------------------------------------------------------------------------


def test_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", str(tmp_path / "none.gguf"), "none.gguf", "someone/none.gguf"):
        assert message_of(lambda path=path: am.load(path), ModelNotFoundError) == f"there is no file {path}."


def test_without_the_package(file: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert message_of(lambda: am.load(file), InputError) == f"to read {file}: pip install 'attnmech[gguf]'."
    assert made(copies) == []


def patched(file: Path, key: str, number: int, *, after: int = 4, size: int = 4) -> Path:
    """The file with a changed number in its metadata, at an offset from a key, after the four bytes of its type."""
    data = bytearray(file.read_bytes())
    place = data.index(key.encode()) + len(key) + after
    data[place : place + size] = number.to_bytes(size, "little")
    file.write_bytes(data)
    return file


def cut(file: Path, left: int) -> Path:
    file.write_bytes(file.read_bytes()[:left])
    return file


def as_page(file: Path) -> Path:
    file.write_text("<!DOCTYPE html>" * 100, encoding="utf-8")
    return file


def rewritten(file: Path, *, without: str = "", more: str = "") -> Path:
    held = {name: weight for name, weight in tensors(llama()).items() if name != without}
    return write(file, held | ({more: np.ones(8, dtype=np.float32)} if more else {}))


DAMAGED: dict[str, tuple[Callable[[Path], Path], str]] = {
    **{
        f"cut off at {left}": (lambda file, left=left: cut(file, left), "damaged or incomplete")
        for left in (0, 3, 20, 600, -5000, -40)
    },
    "a million layers": (
        lambda file: patched(file, "llama.block_count", 10**6),
        "its config asks for 1000000 layers, but its weights hold 2; the two do not belong together."),
    "far larger weights": (
        lambda file: patched(file, "llama.feed_forward_length", 10**8),
        r"its config asks for 38,4.* do not belong together"),
    "more tokens than it holds": (
        lambda file: patched(file, "tokenizer.ggml.tokens", 10**8, after=8, size=8),
        r"says that 100,000,000 values follow, 800,000,000 bytes; the file has only .*damaged"),
    "a longer name than it holds": (
        lambda file: patched(file, "general.name", 10**8, size=8),
        "says that a text follow, 100,000,000 bytes; the file has only"),
    "more tensors than it holds": (
        lambda file: patched(file, "GGUF", 10**8, size=8),
        "says that 100,000,000 tensors follow, 2,400,000,000 bytes; the file has only"),
    "something else": (as_page, "cannot be read as GGUF"),
    "a missing weight": (
        lambda file: rewritten(file, without="blk.1.attn_k.weight"),
        r"lacks 1 of the weights of LlamaForCausalLM, including model\.layers\.1\.self_attn\.k_proj\.weight"),
    **{
        f"{name}, which transformers leaves out": (
            lambda file, name=name: rewritten(file, more=name),
            r"holds [\d,]+ numbers, but transformers .* puts only [\d,]+ into")
        for name in ("rope_freqs.weight", "blk.0.attn_q.bias")
    },
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_and_not_kept(file: Path, copies: Path, damage: str) -> None:
    change, expected = DAMAGED[damage]
    said = message_of(lambda: am.load(change(file)), WeightsError)
    assert str(file) in said and re.search(expected, said), said
    assert made(copies) == []


def test_an_array_far_longer_than_any_vocabulary(tmp_path: Path, copies: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "long.gguf"), "llama")
    writer.add_block_count(2)
    writer.add_array("llama.more", [1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    file = patched(tmp_path / "long.gguf", "llama.more", 10**8, after=8, size=8)
    with file.open("r+b") as data:
        data.truncate(5 * 10**8)
    said = message_of(lambda: am.load(file), WeightsError)
    assert "its header has arrays of 100,000,000 values; at most 16,777,216 are read" in said
    assert made(copies) == []


@pytest.mark.parametrize("architecture", ["clip", "rwkv7", "t5"])
def test_an_architecture_that_is_not_read(tmp_path: Path, copies: Path, architecture: str) -> None:
    file = write(tmp_path / "other.gguf", tensors(llama()), architecture=architecture)
    said = message_of(lambda: am.load(file), UnsupportedModelError)
    assert "does not read from GGUF" in said and "Load the original weights" in said
    assert architecture in said.lower()
    assert made(copies) == []


def test_a_model_that_attnmech_refuses_is_not_kept(file: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: object) -> None:
        raise UnsupportedModelError("LlamaForCausalLM is refused.")

    monkeypatch.setitem(ARCHITECTURES, "llama", refuse)
    assert "LlamaForCausalLM" in message_of(lambda: am.load(file), UnsupportedModelError)
    assert made(copies) == []


def test_a_tied_head_that_is_stored_twice(tmp_path: Path) -> None:
    held = tensors(llama())
    del held["output.weight"]
    model = am.load(write(tmp_path / "tied.gguf", held))
    assert model.config.tie_word_embeddings
    assert model.certificate.ok
