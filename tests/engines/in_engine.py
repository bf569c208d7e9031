"""Runs requests through vLLM and writes what was measured; a program of the engine's environment.

`python in_engine.py MODELS OUT`: each folder in MODELS is a model. The engine is imported once; every model runs in a
process of its own. `python in_engine.py MODEL OUT apart`: one model compiled, and divided among two workers.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

APART = sys.argv[-1] == "apart"
if not APART:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # models share the imports
BLOCKED = ("pandas", "transformer_lens", "plotly", "sklearn", "scipy", "circuitsvis")

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import CUDAGraphMode  # noqa: E402

for name in BLOCKED:
    sys.modules.setdefault(name, None)  # type: ignore[arg-type] # what attnmech must not import there

from attnmech.engines.vllm import repeated_sequences, scaling, watching, worker  # noqa: E402
from attnmech.engines.vllm.worker import Hooks, Watch  # noqa: E402

LENGTHS = (5, 40, 1, 17, 130, 64, 33)
NEW = 12
SPANS = [0, 7, 20, 40], [0, 3, 50, 90, 132], [0, 30]
"""Starts of spans in three requests; an answer may begin one."""


def engine(model: Path, **options: Any) -> LLM:
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=32,
        worker_extension_cls="attnmech.engines.vllm.Heads",
        disable_log_stats=True,
        **{"enforce_eager": True, **options},
    )


def prompts(lengths: tuple[int, ...], shared: int = 0, seed: int = 0) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(3, 256, (shared,), generator=generator).tolist()
    made = [[1, *torch.randint(3, 256, (n - 1,), generator=generator).tolist()] for n in lengths]
    return [{"prompt_token_ids": start + ids} for ids in made]


def run(llm: LLM, asked: list[dict[str, list[int]]], **options: Any) -> list[Any]:
    options = {"max_tokens": NEW, **options}
    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, logprobs=0, **options)
    return llm.generate(asked, params, use_tqdm=False)


def written(outputs: list[Any], path: Path) -> None:
    """The tokens of each request, how many rows its prefix gave it, and the log-probabilities of new tokens."""
    facts = [
        {
            "ids": [*output.prompt_token_ids, *output.outputs[0].token_ids],
            "cached": output.num_cached_tokens or 0,
            "logprobs": [next(iter(step.values())).logprob for step in output.outputs[0].logprobs],
        }
        for output in outputs
    ]
    path.write_text(json.dumps(facts))


def watched(llm: LLM, asked: list[dict[str, list[int]]], path: Path, **options: Any) -> list[Any]:
    with watching(llm) as seen:
        outputs = run(llm, asked, **options)
    seen.save(path.with_suffix(".safetensors"))
    written(outputs, path.with_suffix(".json"))
    return outputs


def tokens_of(outputs: list[Any]) -> list[Any]:
    return [output.outputs[0].token_ids for output in outputs]


def measure(model: Path, out: Path) -> None:
    asked = prompts(LENGTHS)
    llm = engine(model, max_model_len=256, max_num_batched_tokens=512, enable_prefix_caching=True)
    plain = run(llm, asked, skip_reading_prefix_cache=True)
    again = watched(llm, asked, out / "plain", skip_reading_prefix_cache=True)
    assert tokens_of(plain) == tokens_of(again), "watching changed the tokens"
    watched(llm, prompts((9, 30, 2, 41), shared=64, seed=1), out / "prefix_first")
    watched(llm, prompts((9, 30, 2, 41), shared=64, seed=1), out / "prefix")
    with scaling(llm, {(1, 2): 0.0, (0, 5): 0.5}):
        written(run(llm, asked), out / "scaled.json")
    assert tokens_of(run(llm, asked)) == tokens_of(plain), "scaling was not undone"
    with watching(llm) as seen:
        llm.generate(*repeated_sequences(llm, 8), use_tqdm=False)
    seen.save(out / "types.safetensors")
    params = [
        SamplingParams(
            max_tokens=4, temperature=0, skip_reading_prefix_cache=True, extra_args={"attnmech_spans": spans}
        )
        for spans in SPANS
    ]
    with watching(llm) as seen:
        llm.generate(prompts((40, 130, 64)), params, use_tqdm=False)
    seen.save(out / "segments.safetensors")
    (out / "wrong.json").write_text(json.dumps(wrong(llm, asked[:2])))
    if model.name == "llama":
        (out / "refused.json").write_text(json.dumps(refused(llm, asked[:2])))
    del llm
    few = {"num_gpu_blocks_override": BLOCKS.get(model.name, 8), "max_num_batched_tokens": 48, "max_num_seqs": 8}
    watched(engine(model, max_model_len=160, enable_prefix_caching=False, **few), asked, out / "chunk", max_tokens=28)


BLOCKS = {"gemma2": 12, "gemma3": 12, "gptoss": 12}
"""Blocks of the cache with which requests are preempted; models with windows have two groups of layers."""


def wrong(llm: LLM, asked: list[dict[str, list[int]]]) -> dict[str, str]:
    """The refusals if attnmech computed with another window, scale, sink or cap than the kernel."""
    right = worker._kernel_of
    changes = {
        "scale": lambda kernel: replace(kernel, scale=kernel.scale * 1.001),
        "window": lambda kernel: replace(kernel, window=kernel.window and kernel.window + 1),
        "no window": lambda kernel: replace(kernel, window=None),
        "sink": lambda kernel: replace(kernel, sink=None),
        "cap": lambda kernel: replace(kernel, softcap=0.0),
        "slopes": lambda kernel: replace(kernel, slopes=None),
    }
    said = {}
    for name, change in changes.items():
        differs = []

        def changed(layer: Any, change: Any = change, differs: list[bool] = differs) -> Any:
            kernel = right(layer)
            other = change(kernel)
            same = (
                value is vars(other)[name] or value == vars(other)[name] == 0.0 for name, value in vars(kernel).items()
            )
            differs.append(not all(same))
            return other

        worker._kernel_of = changed
        message = message_of(llm, asked)
        if any(differs):
            said[name] = message
    worker._kernel_of = right
    return said


def refused(llm: LLM, asked: list[dict[str, list[int]]]) -> dict[str, str]:
    """What is said of engines that this one is made to resemble, by one attribute each of its own config and layers."""
    [engine_worker] = llm.collective_rpc(lambda worker: worker.worker)
    config = engine_worker.vllm_config
    layer = next(iter(config.compilation_config.static_forward_context.values()))
    update, parallel = layer.impl.do_kv_cache_update, config.parallel_config

    def coarse(layer: Any, key: Any, value: Any, *others: Any) -> None:
        update(layer, (key / 8).round() * 8, value, *others)

    changes = [
        ("graphs", config.compilation_config, "cudagraph_mode", CUDAGraphMode.FULL),
        ("speculative", config, "speculative_config", "draft"),
        ("pipeline", parallel, "pipeline_parallel_size", 2),
        ("context", parallel, "decode_context_parallel_size", 2),
        ("cross", layer, "attn_type", "encoder_decoder"),
        ("writes", layer.attn_backend, "forward_includes_kv_cache_update", True),
        ("roots", layer, "use_alibi_sqrt", True),
        ("images", layer, "use_mm_prefix", True),
        ("shared", layer.impl, "kv_sharing_target_layer_name", "layers.0"),
        ("quantised", layer.impl, "do_kv_cache_update", coarse),
        ("latent", engine_worker, "attnmech", Hooks(engine_worker, {})),
        ("unseen", Watch, "see", lambda *given: None),
    ]
    said = {}
    for name, owner, attribute, value in changes:
        with patch.object(owner, attribute, value):
            said[name] = message_of(llm, asked)
    return said


def message_of(llm: LLM, asked: list[dict[str, list[int]]]) -> str:
    """The error of a watched run, in words; "" if there is none."""
    try:
        with watching(llm):
            run(llm, asked, skip_reading_prefix_cache=True)
    except Exception as error:
        return str(error)
    return ""


def measure_apart(model: Path, out: Path) -> None:
    asked = prompts(LENGTHS)
    for name, options in (("compiled", {"enforce_eager": False}), ("parallel", {"tensor_parallel_size": 2})):
        llm = engine(model, max_model_len=256, **options)
        watched(llm, asked, out / name, skip_reading_prefix_cache=True)
        with scaling(llm, {(1, 2): 0.0, (0, 5): 0.5}):
            written(run(llm, asked), out / f"{name}_scaled.json")
        try:
            with scaling(llm, {(1, 6): 0.0}):
                message = ""
        except Exception as error:
            message = str(error)
        (out / f"{name}_refused.txt").write_text(message)
        del llm


if __name__ == "__main__":
    models, results = Path(sys.argv[1]), Path(sys.argv[2])
    if APART:
        measure_apart(models, results)
        sys.exit()
    for model in sorted(models.iterdir()):
        target = results / model.name
        target.mkdir(parents=True)
        child = os.fork()
        if child == 0:
            try:
                measure(model, target)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{model.name} failed")
