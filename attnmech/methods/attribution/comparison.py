"""The pairs of prompts whose runs are compared, and the metric that compares them."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import finite_number, flag, option, whole_number
from ...batch import every_bos
from ...errors import InputError
from ...interventions import Values
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel
from ...runs.ablations import reread
from ...runs.corpus import CorpusBatch
from ...runs.gradients import tokens_at_once
from ...runs.metrics import Metric, MetricLike
from ...runs.progress import steps as progress_bar
from ...runs.prompt_pairs import PromptPairs
from ...runs.sweep import batches_of, judge_of
from .formulas import METHODS
from .relevance import relevance_rules
from .sums import Estimator


@dataclass(frozen=True)
class Comparison:
    """Clean and corrupted runs, the metric of the corrupted prompts, and the way in which estimates are made."""

    model: HookedModel
    pairs: PromptPairs
    judge: Metric
    method: str
    steps: int
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        model: HookedModel,
        clean: Inputs | Iterable[Inputs],
        corrupted: Inputs | Iterable[Inputs],
        method: str,
        steps: int,
        metric: MetricLike,
        options: Mapping[str, Any],
    ) -> Self:
        """Checks that prompts pair up and differ, and that the metric has a gradient."""
        option("method", method, METHODS)
        steps = whole_number("steps", steps, least=1)
        flag("progress", options.get("progress", False))
        finite_number("memory", options.get("memory", 1.0), above=0.0, below=1e9)
        if method == "integrated" and len(model.stacks) > 1:
            raise InputError(
                'method="integrated" moves the input of one stack, and this model has several; use method="gradient".'
            )
        pairs = PromptPairs.of(model, reread(clean), reread(corrupted), options.get("bos"))
        judge = judge_of(model, pairs.clean, metric, options.get("answers"), options.get("against"))
        judge.require_gradient()
        if judge.mask_id is not None:
            raise InputError(
                "the loss of a masked language model is measured on masked copies, and the clean run sees the masked "
                'tokens; use metric="logit_difference" with `answers` and `against`.'
            )
        return cls(model, pairs, judge, method, steps, options)

    @property
    def count(self) -> int:
        """The number of pairs."""
        return len(self.pairs.lengths)

    @property
    def noted(self) -> dict[str, Any]:
        """What the provenance of estimates notes."""
        steps = {"steps": self.steps} if self.method == "integrated" else {}
        begin = every_bos(part.batch.bos for part in self.pairs.clean)
        return {
            "bos": begin, "metric": self.judge.name, "method": self.method, **steps,
            "clean inputs": self.pairs.clean[-1].digest,
        }  # fmt: skip

    def clean(self, points: Iterable[str], layers: Sequence[int], *, entering: bool) -> dict[str, dict[int, Values]]:
        """The values of the clean run at some points; `entering` adds the stream that enters the first layer."""
        first = {"resid_pre": self.model.output_stack.layers[:1]} if entering else {}
        return self.pairs.values_at(self.model, dict.fromkeys(points, layers) | first)

    def parts(self, per_token: int = 0) -> list[CorpusBatch]:
        """The corrupted prompts in batches that fit into memory; `per_token` is in bytes, beside the gradients."""
        memory = float(self.options.get("memory", 1.0))
        at_once = tokens_at_once(self.model, memory)
        if per_token:
            at_once = max(1, min(at_once, int(memory * 1e9 / per_token)))
        return batches_of(self.model, self.pairs.prompts[1], at_once, self.options.get("bos"))

    def estimated(
        self, estimator: Estimator, parts: Sequence[CorpusBatch], shape: Sequence[int]
    ) -> tuple[Float[Tensor, " pair"], Float[Tensor, "*place pair"]]:
        """The metric of each corrupted prompt, and the estimates."""
        before = torch.empty(self.count, dtype=torch.float64)
        estimates = torch.empty(*shape, self.count, dtype=torch.float64)
        rules = relevance_rules(self.model, parts[0].batch) if self.method == "relp" else nullcontext()
        with rules, progress_bar("pairs", self.count, show=self.options.get("progress", False)) as bar:
            for part in parts:
                before[part.documents], estimates[..., part.documents] = estimator.of_part(part)
                bar.advance(len(part.documents))
        return before, estimates
