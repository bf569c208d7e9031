"""CPU time of serving with vLLM, watched and not; a program of vLLM's environment.

`python benchmarks/serving.py --json benchmarks/results/serving.json` makes a random model of GPT-2-small's shape and
sends 64 prompts of 128 tokens. Both runs take turns in one process. CPU time is that of the whole process: on a shared
machine, wall time varies more than the difference.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
import transformers
import vllm
from vllm import LLM, SamplingParams

from attnmech.engines.vllm import watching


def timed(llm: Any, prompts: list[Any], new: int, watched: bool) -> float:
    """CPU seconds."""
    asked = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
    began = time.process_time()
    if not watched:
        llm.generate(prompts, asked, use_tqdm=False)
        return time.process_time() - began
    with watching(llm) as seen:
        llm.generate(prompts, asked, use_tqdm=False)
    ended = time.process_time() - began
    assert seen.header["documents"] == len(prompts)
    return ended


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="the file for all figures")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(folder)
        llm = LLM(
            folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, block_size=32, max_model_len=256,
            worker_extension_cls="attnmech.engines.vllm.Heads", enable_prefix_caching=False,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        prompts = [{"prompt_token_ids": torch.randint(50000, (128,), generator=generator).tolist()} for _ in range(64)]
        rows = []
        for new in (1, 17):
            for watched in (False, True):
                timed(llm, prompts, new, watched)
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(options.repeats):
                for watched, of_kind in seconds.items():
                    of_kind.append(timed(llm, prompts, new, watched))
            plain, with_sums = (statistics.median(of_kind) for of_kind in seconds.values())
            ratios = [two / one for one, two in zip(*seconds.values(), strict=True)]
            spread = f"{min(ratios):.2f} - {max(ratios):.2f}"
            tokens = f"{new} new token{'s' if new > 1 else ''}"
            rows.append([tokens, f"{plain:.1f}", f"{with_sums:.1f}", f"{with_sums / plain:.2f}", spread])
    columns = ["64 prompts of 128 tokens", "plain, CPU s", "watched, CPU s", "ratio", "(from - to)"]
    note = (
        f"On {platform.machine()}, threads: {torch.get_num_threads()}, {options.repeats} repeats, "
        f"vLLM {vllm.__version__}, torch {torch.__version__}."
    )
    table = {"title": "", "columns": columns, "rows": rows, "caption": ""}
    for row in (columns, *rows):
        print(" | ".join(row))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"note": note, "tables": [table]}, file, indent=1)


if __name__ == "__main__":
    main()
