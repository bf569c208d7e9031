"""Statistics from a real vLLM equal those of plain passes over the same tokens; wrong kernels and engines are refused.

The environment variable ATTNMECH_VLLM names the Python of an environment with vLLM (CONTRIBUTING.md).
"""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
import transformers
from models import randomised
from safetensors.torch import load_file

import attnmech as am
from attnmech.engines import http
from attnmech.errors import InputError

ENGINE = os.environ.get("ATTNMECH_VLLM", "")
pytestmark = pytest.mark.skipif(not ENGINE, reason="ATTNMECH_VLLM names no Python with vLLM")

SIZES = {
    "vocab_size": 256, "hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 128,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 32}
WINDOW = {**GROUPED, "num_hidden_layers": 4, "sliding_window": 16}
KINDS = ["sliding_attention", "full_attention"] * 2
GPT2 = {"vocab_size": 256, "n_embd": 192, "n_layer": 3, "n_head": 6, "n_positions": 512, "bos_token_id": 1}

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED),
    "gpt2": lambda: transformers.GPT2Config(**GPT2, eos_token_id=2),
    "gemma2": lambda: transformers.Gemma2Config(**WINDOW, attn_logit_softcapping=5.0, query_pre_attn_scalar=32),
    "gemma3": lambda: transformers.Gemma3TextConfig(**WINDOW, layer_types=KINDS, query_pre_attn_scalar=32),
    "gptoss": lambda: transformers.GptOssConfig(**WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "bloom": lambda: transformers.BloomConfig(vocab_size=256, hidden_size=192, n_layer=3, n_head=6, bos_token_id=1),
}
WRONG = {
    "llama": {"scale"}, "qwen3": {"scale"}, "gpt2": {"scale"}, "bloom": {"scale", "slopes"},
    "gemma2": {"scale", "window", "no window", "cap"}, "gemma3": {"scale", "window", "no window"},
    "gptoss": {"scale", "window", "no window", "sink"},
}  # fmt: skip
"""The changes of the kernel that each model's engine must refuse."""

BOUNDS = {"distance": 5e-3, "entropy": 1e-3}


def model_of(name: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    return randomised(model, seed=3)


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the engine measured on each model; `in_engine.py` fills it."""
    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("measured")
    for name in CONFIGS:
        model_of(name).save_pretrained(models / name)
    in_engine(models, out)
    return out


def environment(**more: str) -> dict[str, str]:
    return os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": str(Path(am.__file__).parents[1]), **more,
    }  # fmt: skip


def in_engine(*arguments: Any) -> None:
    """Runs the engine's program; fails with the end of what it wrote."""
    program = [ENGINE, str(Path(__file__).with_name("in_engine.py")), *map(str, arguments)]
    ended = subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=1800, check=False)
    assert not ended.returncode, ended.stderr[-3000:]


def requests_of(path: Path) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = json.loads(path.read_text())
    return facts


def hooked(name: str) -> am.HookedModel:
    model = model_of(name)
    if name == "bloom":  # vLLM computes BLOOM with the exact GELU
        for block in model.transformer.h:
            block.mlp.gelu_impl = torch.nn.GELU()
    return am.load(model)


def plain(model: am.HookedModel, requests: list[dict[str, Any]]) -> Iterator[tuple[Any, Any]]:
    """Statistics of each request alone, over the rows that the engine computed, and the mask of these rows."""
    for request in requests:
        ids = torch.tensor([request["ids"][:-1]])  # the last token is never a query
        rows = torch.ones(ids.shape, dtype=torch.bool)
        rows[:, : request["cached"]] = False
        yield am.attention_focus(model, ids).where(first_row=True, rows=rows), rows


@pytest.mark.parametrize("mode", ["plain", "prefix", "chunk"])
@pytest.mark.parametrize("name", CONFIGS)
def test_statistics_are_those_of_plain_passes(measured: Path, name: str, mode: str) -> None:
    focus = am.engine_statistics(measured / name / f"{mode}.safetensors").where(first_row=True)
    requests = requests_of(measured / name / f"{mode}.json")
    proof = focus.provenance.options["proof"]
    assert max(proof["largest error by layer"]) < 1e-5
    assert proof["rows left out (prefix cache)"] == sum(request["cached"] for request in requests)
    assert (proof["rows left out (prefix cache)"] > 0) == (mode == "prefix")
    assert (proof["rows computed again (preemption)"] > 0) == (mode == "chunk")
    expected = list(plain(hooked(name), requests))
    assert proof["rows"] == sum(int(rows.sum()) for _, rows in expected) > proof["rows proved"] > 0.6 * proof["rows"]
    sums, counts = (sum(one.state[entry].sum(dim=(1, -1)) for one, _ in expected) for entry in ("sums", "counts"))
    state = focus.state
    assert torch.equal(state["counts"].sum(dim=(1, -1)), counts)
    means = state["sums"].sum(dim=(1, -1)) / counts
    for place, statistic in enumerate(focus.quantities):
        bound = BOUNDS.get(statistic, 1e-4)
        torch.testing.assert_close(means[place], (sums / counts)[place], rtol=0, atol=bound, equal_nan=True)
    assert focus.documents == len(requests)
    assert len(state["groups"]) == len({tuple(request["ids"]) for request in requests})


@pytest.mark.parametrize("name", ["llama", "gemma3", "gptoss"])
def test_received_attention_and_intervals_are_those_of_a_corpus(measured: Path, name: str) -> None:
    focus = am.engine_statistics(measured / name / "plain.safetensors")
    texts = [torch.tensor([request["ids"][:-1]]) for request in requests_of(measured / name / "plain.json")]
    expected = am.attention_focus(hooked(name), iter(texts))
    width = focus.received.shape[-1]
    for one, other in (
        (focus.received, expected.received[..., :width]),
        (focus.sink_rate, expected.sink_rate[..., :width]),
        (focus.bos_mass, expected.bos_mass),
        *zip(focus["first_mass"].interval(), expected["first_mass"].interval(), strict=True),
    ):
        torch.testing.assert_close(one, other.to(one), rtol=0, atol=1e-4, equal_nan=True)
    assert focus.sink_share() == expected.sink_share()
    assert focus.collapse == expected.collapse


@pytest.mark.parametrize("name", CONFIGS)
def test_head_types_are_those_of_plain_passes(measured: Path, name: str) -> None:
    file = measured / name / "types.safetensors"
    types, tensors = am.engine_statistics(file, "head_types"), load_file(file)
    expected = am.head_types(hooked(name), iter(tensors[f"ids {number}"][None] for number in range(8)))
    for one, other in (
        (types.scores, expected.scores),
        (types.baselines, expected.baselines),
        (types.tops, expected.tops),
    ):
        for kind in types.tops:
            torch.testing.assert_close(one[kind], other[kind], rtol=0, atol=1e-4, equal_nan=True)
    assert torch.equal(types.claimed, expected.claimed)
    assert types.lead.endswith("(8 repeated sequences of random tokens).")


@pytest.mark.parametrize("name", CONFIGS)
def test_segments_are_those_of_plain_passes(measured: Path, name: str) -> None:
    file = measured / name / "segments.safetensors"
    segments, tensors, model = am.engine_statistics(file, "segments"), load_file(file), hooked(name)
    for text in range(3):
        ids, starts = (tensors[f"{entry} {text}"].tolist() for entry in ("ids", "starts"))
        spans = list(zip(starts, [*starts[1:], len(ids)], strict=True))
        expected = am.segment_attention(model, torch.tensor([ids]), spans)
        for one, other in (
            (segments.mass(text), expected.mass()),
            (segments.expected(text), expected.expected()),
            (segments.receivers(text), expected.receivers()),
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4, equal_nan=True)
    with pytest.raises(InputError, match="no request named spans"):
        am.engine_statistics(measured / name / "plain.safetensors", "segments")
    with pytest.raises(InputError, match="head types need repeated sequences"):
        am.engine_statistics(file, "head_types")


@pytest.mark.parametrize("name", CONFIGS)
def test_scaled_heads_change_logits_as_in_transformers(measured: Path, name: str) -> None:
    model = hooked(name)
    factors = torch.ones(2, 6, 1)
    factors[1, 2], factors[0, 5] = 0.0, 0.5
    hooks = {("z", layer): lambda z, layer=layer: z * factors[layer] for layer in (0, 1)}
    for request in requests_of(measured / name / "scaled.json")[:3]:
        ids, new = torch.tensor([request["ids"]]), len(request["logprobs"])
        with model.hooks(hooks):
            logits = model.run(ids).logits
        logprobs = logits[0].log_softmax(dim=-1)[-new - 1 : -1]
        own = logprobs.gather(1, ids[0, -new:, None])[:, 0]
        torch.testing.assert_close(own, torch.tensor(request["logprobs"]), rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_kernels_are_refused(measured: Path, name: str) -> None:
    refused = json.loads((measured / name / "wrong.json").read_text())
    assert refused.keys() == WRONG[name]
    for message in refused.values():
        assert "could not be proved, so there are no sums: in layer" in message


REFUSED = {
    "graphs": "CUDA graphs of whole steps hide it", "speculative": "speculative decoding computes rows",
    "pipeline": "pipeline and data parallel engines", "context": "context parallel engines",
    "cross": "layer 0 is not the self-attention of a decoder", "writes": "writes its cache inside its kernel",
    "roots": "ALiBi with square roots", "images": "images in prompts", "shared": "the cache of another layer",
    "quantised": "does not give back the numbers", "latent": "latent attention is not supported",
    "unseen": "rows in 3 layers, and attnmech saw 0 in 0",
}  # fmt: skip


def test_engines_that_cannot_be_read_are_refused(measured: Path) -> None:
    said = json.loads((measured / "llama" / "refused.json").read_text())
    assert said.keys() == REFUSED.keys()
    assert [name for name, words in REFUSED.items() if words not in said[name]] == []


@pytest.fixture(scope="session")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a compiled engine, and one of two workers, measured."""
    folder = tmp_path_factory.mktemp("apart")
    model_of("llama").save_pretrained(folder / "llama")
    in_engine(folder / "llama", folder, "apart")
    return folder


@pytest.mark.parametrize("engine", ["compiled", "parallel"])
def test_engines_of_other_kinds_give_the_same(measured: Path, apart: Path, engine: str) -> None:
    one = am.engine_statistics(measured / "llama" / "plain.safetensors")
    other = am.engine_statistics(apart / f"{engine}.safetensors")
    for name, value in one.state.items():
        torch.testing.assert_close(other.state[name], value, rtol=1e-4, atol=1e-4, equal_nan=True)
    scaled, alike = requests_of(measured / "llama" / "scaled.json"), requests_of(apart / f"{engine}_scaled.json")
    for request, same in zip(scaled, alike, strict=True):
        assert request["ids"] == same["ids"]
        assert request["logprobs"] == pytest.approx(same["logprobs"], abs=1e-4)
    assert "got L1H6" in (apart / f"{engine}_refused.txt").read_text()


def test_a_server_is_measured_over_http(tmp_path: Path) -> None:
    """A server refuses wrong keys, gives what its requests showed, and leaves no file if it is killed."""
    model_of("llama").save_pretrained(tmp_path / "llama")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", (tmp_path / "log.txt").open("w")
    program = [
        ENGINE, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "llama"), "--dtype", "float32",
        "--skip-tokenizer-init", "--enforce-eager", "--block-size", "32", "--max-model-len", "512", "--port", str(port),
        "--host", "127.0.0.1", "--worker-extension-cls", "attnmech.engines.vllm.Heads", "--api-key", "key",
    ]  # fmt: skip
    server = subprocess.Popen(
        program, env=environment(VLLM_PLUGINS="attnmech"), stdout=log, stderr=log, start_new_session=True
    )

    def complete(tokens: int) -> dict[str, Any]:
        asked = {"model": str(tmp_path / "llama"), "prompt": [1, 5, 9, 8, 7, 6], "max_tokens": tokens, "temperature": 0}
        headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}
        body = json.dumps(asked | {"return_token_ids": True, "ignore_eos": True}).encode()
        with urlopen(Request(f"{url}/v1/completions", body, headers)) as answer:
            return json.load(answer)["choices"][0]  # type: ignore[no-any-return]

    try:
        for _ in range(600):
            try:
                urlopen(f"{url}/health").close()
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
                time.sleep(1)
        with pytest.raises(InputError, match="refused: Unauthorized"):
            http.post(url, "start", key="another")
        with pytest.raises(InputError, match="this engine is not watched; start first"):
            http.take(url, tmp_path / "none.safetensors", key="key")
        http.post(url, "start", key="key")
        answers = [complete(tokens) for tokens in (4, 1, 9)]  # whose prefixes are too short for the cache
        file = http.take(url, tmp_path / "seen.safetensors", key="key")
        focus = am.engine_statistics(file)
        assert focus.documents == 3
        assert focus.provenance.options["proof"]["rows"] == 9 + 6 + 14
        longest = {"ids": [1, 5, 9, 8, 7, 6, *answers[2]["token_ids"]], "cached": 0}
        ((expected, _),) = plain(hooked("llama"), [longest])
        place = int((focus.state["counts"][0].sum(dim=(0, 1, 2))).argmax())
        torch.testing.assert_close(
            focus.state["sums"][..., place].sum(dim=1), expected.state["sums"][..., 0].sum(dim=1), rtol=1e-4, atol=1e-3
        )
        http.post(url, "stop", key="key")
        killing = threading.Timer(0.5, os.killpg, (server.pid, signal.SIGKILL))
        killing.start()
        with pytest.raises((OSError, HTTPException)):
            complete(500)
        with pytest.raises(InputError, match="no server answers at"):
            http.take(url, tmp_path / "none.safetensors", key="key")
        assert not (tmp_path / "none.safetensors").exists()
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
