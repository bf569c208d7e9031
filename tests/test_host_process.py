"""attnmech leaves its host process alone, and uses no private names of other libraries."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import models
import pytest
import torch

import attnmech as am

PACKAGE: Final = Path(am.__file__).parent

PRIVATE: Final = {
    "_C": "torch's guide to tensor subclasses names torch._C.DisableTorchFunctionSubclass; there is no other name",
    "_attn_implementation": "a config in transformers has no public setter; set_attn_implementation wants a model",
    "_bridge_builder": "TransformerLens's public way to a bridge asks the hub; this one takes a model as it is",
    "_buffers": "a copy of a module that shares parameters needs buffers of its own",
    "_exit": "os._exit is Python's documented end of a process; the command calls it at Ctrl-C during imports",
    "_forward_hooks": "PyTorch lists a module's hooks nowhere else",
    "_forward_pre_hooks": "PyTorch lists a module's hooks nowhere else",
    "_from_config": "AutoModel.from_config makes no class that a user has written",
    "_hf_peft_config_loaded": "transformers calls a model with merged adapters one with adapters, unless this is reset",
    "_modules": "a module that is numbered to see where its rows go must not change the user's",
    "_nested_tensor_from_mask": "what torch's encoder itself makes of padded texts",
    "_nested_tensor_from_mask_left_aligned": "what torch's encoder asks before it does so",
    "_parameters": "a view of a module with other parameters; register_parameter would change the user's",
    "_pytree": "torch has no public function that goes through nested arguments",
    "_qkv_same_embed_dim": "nn.MultiheadAttention's choice between one matrix and three",
    "_remove_final_layer_norm": "an option of OPT's config that has no other name",
    "_version": "how often a tensor was changed in place; autograd's guide names it",
}
"""The private names of other libraries that the package uses, each with the reason."""

SETS_THE_PROCESS: Final = (
    r"mallopt|ctypes|GOMP|_storage\b|mkldnn\._|/proc\b|set_num_threads|threadpool_limits|set_default_d"
    r"|environ(\[|\.setdefault|\.update|\.pop)|putenv|signal\.signal|atexit\.register|set_verbosity"
)
"""Code that would change the process, or inspect it."""

ALLOWED: Final = {
    "methods/joint_embedding/sums.py": "measures heads side by side, and restores the number of threads",
    "cli/stages.py": "the command's own process; the handler of Ctrl-C is restored after the imports",
    "distributed/worker.py": "a worker of Ray is a process of attnmech's own",
    "distributed/cluster.py": "am.Ray says how Ray reports, where the user has not; it stays so",
    "distributed/engine.py": "am.Ray ends its workers with the process",
    "model/files/load.py": "transformers' logging is silent while a folder is read, and restored",
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: list[ast.Module]) -> Iterator[str]:
    """The names that the package defines: functions, classes, variables, attributes."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def used_names(tree: ast.Module) -> Iterator[str]:
    """The names that a file reads or sets: attributes, also in strings, and imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield from (*module.split("."), *(each.name for each in names))
            case ast.Import(names=names):
                yield from (part for each in names for part in each.name.split("."))
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                yield name


def test_private_names_of_other_libraries() -> None:
    trees = [ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")]
    used = {name for tree in trees for name in used_names(tree) if private(name)} - set(own_names(trees))
    assert used == set(PRIVATE)


def test_nothing_sets_the_process() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    assert {name for name, code in found.items() if re.search(SETS_THE_PROCESS, code)} == set(ALLOWED)


@pytest.mark.parametrize(
    ("name", "blocks", "norm"),
    [("gpt2", "transformer.h", "ln_2"), ("llama", "model.layers", "post_attention_layernorm")],
)
def test_an_mlp_is_the_user_s_to_the_bit(name: str, blocks: str, norm: str) -> None:
    raw, ids = models.fresh(name), models.token_ids(name)
    acts = am.load(raw).run(ids, points=["resid_mid", "mlp_out"])
    for layer, block in enumerate(raw.get_submodule(blocks)):
        with torch.no_grad():
            expected = block.mlp(block.get_submodule(norm)(acts["resid_mid", layer]))
        assert torch.equal(acts["mlp_out", layer], expected)


SETTINGS: Final = """
import os, torch, random, threading, warnings, numpy as np
def settings():
    generator = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    names = "get_num_threads get_default_dtype get_float32_matmul_precision are_deterministic_algorithms_enabled"
    of_torch = [getattr(torch, name)() for name in (*names.split(), "is_grad_enabled", "is_inference_mode_enabled")]
    return of_torch, generator, dict(os.environ), threading.active_count(), list(warnings.filters)
import attnmech as am
model = am.load()
am.attention_focus(model, "A first call.")  # imports rich, which draws a number
before = settings()
am.stream(model, "Anna sang of shells.", [am.results.AttentionFocus.reducer(), am.results.ResidualUpdates.reducer()])
am.ablate_heads(model, "Anna sang of shells.", layers=[0])
am.decompose_scores(model, "Anna sang of shells.")
with model.intervene(am.Intervention.zero([(0, 1)])):
    model.run("Anna sang of shells.")
after = settings()
for one, other in zip(before, after):
    assert one == other, (one, other)
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_settings_are_the_same_before_and_after() -> None:
    run(SETTINGS)


THREADS: Final = """
import torch
from concurrent.futures import ThreadPoolExecutor
import attnmech as am
torch.set_num_threads(1)
model, text = am.load(dtype="float64"), "Anna sang of shells."
here = am.attention_focus(model, text).entropy
torch.set_num_threads(2)
torch.testing.assert_close(am.attention_focus(model, text).entropy, here)
with ThreadPoolExecutor(8) as pool:
    for found in pool.map(lambda _: am.attention_focus(model, text).entropy, range(16)):
        torch.testing.assert_close(found, here)
"""


def test_other_threads_get_the_same_numbers() -> None:
    run(THREADS)
