"""`python -m attnmech.engines.vllm MODEL`, in vLLM's environment: can the numbers be trusted on this machine?"""

import argparse
import sys
import time
from typing import Any

import torch
from vllm import LLM, SamplingParams

from .client import Seen, watching


def main() -> int:
    """Runs random prompts with and without watching, and prints one line; returns the exit status."""
    parser = argparse.ArgumentParser("python -m attnmech.engines.vllm", description=__doc__)
    parser.add_argument("model", help="hub name or folder")
    parser.add_argument("--dtype", default="auto", help="as in vLLM")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="as in vLLM")
    options = parser.parse_args()
    llm = LLM(
        options.model,
        dtype=options.dtype,
        tensor_parallel_size=options.tensor_parallel_size,
        worker_extension_cls="attnmech.engines.vllm.Heads",
        compilation_config={"cudagraph_mode": "PIECEWISE"},
        enable_prefix_caching=False,
    )
    generator, size = torch.Generator().manual_seed(0), llm.llm_engine.model_config.get_vocab_size()
    prompts: list[Any] = [
        {"prompt_token_ids": torch.randint(size, (length,), generator=generator).tolist()}
        for length in (1, 7, 33, 64, 130, 200, 17, 90)
    ]
    asked = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, detokenize=False)
    llm.generate(prompts, asked, use_tqdm=False)  # compiles
    began = time.perf_counter()
    plain = llm.generate(prompts, asked, use_tqdm=False)
    alone = time.perf_counter() - began
    began = time.perf_counter()
    try:
        with watching(llm) as seen:
            watched = llm.generate(prompts, asked, use_tqdm=False)
    except Exception as error:
        print(f"The numbers cannot be trusted here: {error}")
        return 1
    same = [one.outputs[0].token_ids for one in plain] == [one.outputs[0].token_ids for one in watched]
    if not same:
        print("The numbers cannot be trusted here: watching changed the tokens that the engine writes.")
        return 1
    print(f"The numbers can be trusted here: {_facts(seen)}; {(time.perf_counter() - began) / alone:.2f} × the time of "
          "serving alone.")  # fmt: skip
    return 0


def _facts(seen: Seen) -> str:
    options = seen.header["options"]
    worst = max(options["proof"]["largest error by layer"])
    return (
        f"{options['engine']}, {len(seen.header['layers'])} layers, "
        f"{options['proof']['rows']} rows, {options['proof']['rows proved']} of them proved: pattern times values "
        f"differs from the kernel's output by at most {worst:.0e} of its largest entry"
    )


if __name__ == "__main__":
    sys.exit(main())
