"""Counts the model types that attnmech loads: tries each one in transformers' auto classes, small and random.

`python examples/architectures.py --census` writes `census.md`. Each certified model is then compared with plain
transformers by checks that do not use the certificate; it is called WRONG if a check fails.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any, Final, Literal, TypeAlias

import tiny
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers.pytorch_utils import Conv1D

import attnmech as am
from attnmech.model.run import bridge
from attnmech.model.stack.stack import Stack
from attnmech.model.structure.families import ARCHITECTURES
from attnmech.model.structure.refused import REFUSED
from attnmech.model.structure.signals import signal_of

Result: TypeAlias = Literal["certified", "refused", "failed", "WRONG", "not built"]

LOADED: Final = (am.load, am.decompose_scores, am.Intervention, bridge.build_bridge)
"""Imported before processes fork, so that every process has them."""
AT_ONCE: Final = 2
SECONDS: Final = 150
"""The time limit for one model."""
LARGEST: Final = 150_000_000
"""A type with more parameters counts as not built: the recipe failed to make it small."""
LENGTH: Final = 13
SAME: Final = 1e-3
"""Logits of two implementations may differ by this much, relative to the largest logit of the row."""
MOVED: Final = 1e-4
"""An edit must change some logit by this much, in the same units."""
LEDGER: Final = 1e-5
IMAGE: Final = 64
"""Height and width of images, for models whose config does not give them."""

HEADER: Final = ("model type", "class", "how", "result", "ledger, or reason")
ABOUT: Final = """# Census

Every model type in transformers {version}'s auto classes for causal, masked and sequence-to-sequence language models,
built small with random weights and loaded; those for images and sound are counted separately. Made by
`python examples/architectures.py --census`.

**{summary}**

- **Class**: the class with encoder and decoder, if the type has one; else the causal, else the masked one.
- **How**: by attnmech's table of architectures, or read from a traced pass.
- **certified**: no check of the certificate fails; the number is the ledger's residual in float32, max |Σ terms −
  score| relative to the largest score. The model was then compared with plain transformers, independently of that:
  logits (also with padding on the right), one head zeroed against its columns of W_O zeroed, and a pattern edit must
  move the logits. **WRONG** would be a certified model that fails one of these.
- **refused**: `am.load` raises, with this reason. **failed**: it warns, and refuses the points of the failed checks.
- **not built**: the recipe for small models (`tests/tiny.py`) does not fit this type.
"""


@dataclass(frozen=True)
class Row:
    """The outcome for one model type."""

    kind: str
    made: str
    how: str
    result: Result
    words: str

    def __str__(self) -> str:
        cells = (self.kind, self.made, self.how, self.result, self.words.replace("|", "\\|"))
        return f"| {' | '.join(cells)} |"


# -- one model -----------------------------------------------------------------------------------------------


def inputs_of(raw: Any, seed: int) -> dict[str, Tensor]:
    """Random tokens, with tokens for the decoder if there is one; or random images or recordings."""
    generator = torch.Generator().manual_seed(1000 + seed)
    try:
        if (signal := signal_of(raw)) is not None:
            return signal.noise(2, 1000 + seed, next(raw.parameters()))
    except am.errors.UnsupportedModelError:  # convolutions take any size
        if raw.main_input_name == "pixel_values":
            return {"pixel_values": torch.randn(2, 3, IMAGE, IMAGE, generator=generator)}
        raise
    vocabulary = raw.get_input_embeddings().weight.shape[0]
    ids = torch.randint(10, vocabulary, (2, LENGTH), generator=generator)
    decoded = {"decoder_input_ids": ids[:, : LENGTH - 4].flip(1)} if raw.config.is_encoder_decoder else {}
    return {"input_ids": ids, **decoded}


def logits_of(raw: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """The logits of plain transformers."""
    with torch.no_grad():
        cached = "use_cache" in raw.config.to_dict() and "input_ids" in inputs
        output = raw(**inputs, use_cache=False) if cached else raw(**inputs)
    # Models of images and sound may have no head.
    logits = output.logits if "input_ids" in inputs or "logits" in output else output.last_hidden_state
    assert isinstance(logits, torch.Tensor)
    return logits


def output_of(model: am.HookedModel, inputs: Mapping[str, Tensor]) -> Tensor:
    """The logits of attnmech's model; without a head, the final stream."""
    output = model.output(model.encode(dict(inputs)))
    logits = getattr(output, "logits", None)
    values = output.last_hidden_state if logits is None else logits
    assert isinstance(values, torch.Tensor)
    return values


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of logits, relative to the largest of its row; infinite if any logit is NaN."""
    largest = ((ours - theirs).abs() / theirs.abs().amax(dim=-1, keepdim=True)).amax()
    return float(largest.nan_to_num(torch.inf))


def without_head(raw: Any, stack: Stack, layer: int, head: int) -> Any:
    """A copy of a transformers model in which the columns of W_O that read one head are 0."""
    plan, copied = stack.architecture, copy.deepcopy(raw)
    if plan.replaced:  # XLNet: its W_O is not a module, and has an axis for heads
        with torch.no_grad():
            copied.base_model.get_submodule(f"{plan.blocks}.{layer}.{plan.replaced}").o[:, head] = 0
        return copied
    path = ".".join(filter(None, (plan.blocks, str(layer), plan.within, plan.out)))
    shared = _uses(copied, stack, layer)
    out = copied.base_model.get_submodule(path) if shared is None else shared[0]
    width = (out.weight.shape[0] if isinstance(out, Conv1D) else out.weight.shape[1]) // stack.n_heads
    out.weight = torch.nn.Parameter(out.weight.detach().clone())  # other layers may share the weight (Zamba)
    columns = slice(head * width, (head + 1) * width)
    if shared is not None:
        _zero_in_one_use(out, shared[1], columns)
        return copied
    with torch.no_grad():
        (out.weight if isinstance(out, Conv1D) else out.weight.T)[columns] = 0
    return copied


def _uses(raw: Any, stack: Stack, layer: int) -> tuple[Any, int] | None:
    """The W_O module that several layers use, and the number of its use in this layer; None if only one does."""
    weights = {other: stack.module(other, stack.architecture.out).weight for other in stack.layers}
    sharing = [other for other, weight in weights.items() if weight is weights[layer]]
    if len(sharing) == 1:
        return None
    modules = [part for part in raw.modules() if torch.equal(getattr(part, "weight", torch.ones(())), weights[layer])]
    # In Zamba, layers have separate modules with tied weights.
    return (modules[0], sharing.index(layer)) if len(modules) == 1 else None


def _zero_in_one_use(out: Any, number: int, columns: slice) -> None:
    """Makes one call of a module in each pass read zeros in some columns."""
    calls = iter(range(1000))

    def before(module: Any, args: Any) -> Any:
        if next(calls) != number:
            return None
        z = args[0].clone()
        z[..., columns] = 0
        return (z, *args[1:])

    out.register_forward_pre_hook(before)


def faults(model: am.HookedModel, raw: Any, inputs: Mapping[str, Tensor]) -> Iterator[str]:
    """The outputs in which a certified model differs from plain transformers, as sentences."""
    if any(stack.architecture.trusted == "eager" for stack in model.stacks.values()):
        raw.set_attn_implementation("eager")
    plain, ours = logits_of(raw, inputs), output_of(model, inputs)
    if (apart := difference(ours, plain)) > SAME:
        yield f"its logits differ by {apart:.0e}"
    if model.reads_tokens:
        yield from _padded_faults(model, raw, inputs)
    for stack in model.stacks.values():
        name = f" of the {stack.label} stack" if stack.label else ""
        layer, head = stack.layers[len(stack.layers) // 2], stack.n_heads // 2
        with model.intervene(am.Intervention.zero([(layer, head)], stack=stack.label)):
            zeroed = output_of(model, inputs)
        if (apart := difference(zeroed, logits_of(without_head(raw, stack, layer, head), inputs))) > SAME:
            yield f"without head L{layer}H{head}{name} its logits differ by {apart:.0e}"
        with model.intervene(am.Intervention.attend([(layer, head)], "first", stack=stack.label)):
            moved = output_of(model, inputs)
        if difference(moved, ours) < MOVED:
            yield f"a pattern edit in L{layer}H{head}{name} does not move its logits"


def _padded_faults(model: am.HookedModel, raw: Any, inputs: Mapping[str, Tensor]) -> Iterator[str]:
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, -3:] = 0
    padded = {**inputs, "attention_mask": mask}
    try:
        plain = logits_of(raw, padded)
    except Exception:  # whatever a family without support for padding raises
        return
    ours = model.run(padded).logits
    assert ours is not None
    keep = mask.bool() if plain.shape[:2] == mask.shape else torch.ones(plain.shape[:2], dtype=torch.bool)
    if (apart := difference(ours[keep], plain[keep])) > SAME:
        yield f"with padding on the right its logits differ by {apart:.0e}"


def residual_of(model: am.HookedModel, inputs: Mapping[str, Tensor]) -> float:
    """The ledger's residual in all stacks, relative to the largest score of each head."""
    residuals = []
    for label, stack in model.stacks.items():
        split = am.decompose_scores(model, dict(inputs), stack=label or None)
        relative = split.residual / split.largest.clamp_min(1e-30)
        residuals.append(relative[list(stack.layers)].max())  # a hybrid's other layers have no ledger
    return float(torch.stack(residuals).nan_to_num(torch.inf).max())


def reason_of(error: am.AttnmechError) -> str:
    """The reason in an error's message, without the advice."""
    message = " ".join(str(error).split())
    for start in ("its structure cannot be read: ", "is not supported: "):
        message = message.partition(start)[2] or message
    return message.partition(" If you know how it is built")[0].rstrip(".")


def verdict(raw: Any, seed: int) -> tuple[Result, str]:
    """Loads a model and, if it is certified, compares it with plain transformers."""
    inputs = inputs_of(raw, seed)
    try:
        model = am.load(raw)
    except am.AttnmechError as error:
        return "refused", reason_of(error)
    except Exception as error:
        return "failed", f"am.load raises {_summary_of(error)}"
    if not model.certificate.ok:
        return "failed", "; ".join(f"{check.name}: {check.detail}" for check in model.certificate.failed)
    differences = list(faults(model, copy.deepcopy(raw), inputs))
    residual = residual_of(model, inputs)
    if residual > LEDGER:
        differences.append(f"its ledger leaves {residual:.0e}")
    return ("WRONG", "; ".join(differences)) if differences else ("certified", f"{residual:.0e}")


# -- all of them ---------------------------------------------------------------------------------------------


def _summary_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def work(kind: str, sizes: Mapping[str, int], seed: int, answer: Connection) -> None:
    """Builds a model of one type; sends None once it is built and runs, then the verdict."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        count = tiny.parameters_of(kind, sizes)
        if count > LARGEST:
            answer.send(("not built", f"{count / 1e6:.0f} million parameters"))
            return
        raw = tiny.model_of(kind, sizes, seed=seed)
        logits_of(raw, inputs_of(raw, seed))
    except Exception as error:
        answer.send(("not built", _summary_of(error)))
        return
    answer.send(None)
    try:
        answer.send(verdict(raw, seed))
    except Exception as error:
        answer.send(("WRONG", _summary_of(error)))


class _Running:
    """A separate process for one type, so that its memory and its failures end with it."""

    def __init__(self, kind: str, sizes: Mapping[str, int], seed: int) -> None:
        context = get_context("fork")
        self.kind, self.built, self._until = kind, False, monotonic() + SECONDS
        self.answers, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=work, args=(kind, sizes, seed, theirs))
        self._process.start()
        theirs.close()

    def result(self) -> tuple[Result, str] | None:
        """The verdict, which may be that the process ended or timed out; None while it is running."""
        while self.answers.poll():
            try:
                answer: tuple[Result, str] | None = self.answers.recv()
            except EOFError:
                return self._broken("its process ended")
            if answer is not None:
                return answer
            self.built = True
        return self._broken(f"no answer within {SECONDS} s") if monotonic() > self._until else None

    def _broken(self, why: str) -> tuple[Result, str]:
        return "failed" if self.built else "not built", why

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()


def rows(kinds: Sequence[str], sizes: Mapping[str, int], seed: int) -> Iterator[Row]:
    """A row for each type, in the order in which they finish."""
    waiting, running = list(reversed(kinds)), list[_Running]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(_Running(waiting.pop(), sizes, seed))
        wait([process.answers for process in running], timeout=1)
        for process in tuple(running):
            if (result := process.result()) is not None:
                process.end()
                running.remove(process)
                known = process.kind in ARCHITECTURES or process.kind in REFUSED
                how = "–" if result[0] == "not built" else "table" if known else "read"
                yield Row(process.kind, tiny.class_of(process.kind), how, *result)


def summary(outcomes: Sequence[Row], what: str = "model types") -> str:
    """The counts in one sentence."""
    count = Counter(row.result for row in outcomes)
    read = sum(row.result == "certified" and row.how == "read" for row in outcomes)
    wrong = f", {count['WRONG']} WRONG" if count["WRONG"] else ", none of the certified is wrong"
    return (
        f"{len(outcomes)} {what}: {len(outcomes) - count['not built']} built; {count['certified']} certified ({read} "
        f"of them read), {count['refused']} refused, {count['failed']} failed a check{wrong}; {count['not built']} "
        "could not be built small."
    )


def page(outcomes: Sequence[Row]) -> str:
    """The whole page."""
    senses = tiny.senses()
    about = ABOUT.format(version=transformers.__version__, summary=summaries(outcomes).replace("\n", "**\n\n**"))
    lines = _table([row for row in outcomes if row.kind not in senses])
    for sense in tiny.SENSES:
        if of_sense := [row for row in outcomes if row.kind in senses and senses[row.kind][0] == sense]:
            lines += ["", f"## {sense.capitalize()}", "", *_table(of_sense)]
    return "\n".join([about, *lines, ""])


def summaries(outcomes: Sequence[Row]) -> str:
    """A sentence of counts for the types of text, one for images, and one for sound."""
    senses = tiny.senses()
    lines = [summary(some)] if (some := [row for row in outcomes if row.kind not in senses]) else []
    for sense in tiny.SENSES:
        if of_sense := [row for row in outcomes if row.kind in senses and senses[row.kind][0] == sense]:
            lines.append(summary(of_sense, f"types of {sense}"))
    return "\n".join(lines)


def _table(outcomes: Sequence[Row]) -> list[str]:
    return [
        f"| {' | '.join(HEADER)} |",
        f"|{' --- |' * len(HEADER)}",
        *map(str, sorted(outcomes, key=lambda row: row.kind)),
    ]


def taken(kinds: Sequence[str], sizes: Mapping[str, int], seed: int) -> list[Row]:
    """All rows, with a bar on stderr."""
    transformers.logging.set_verbosity_error()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("model types", total=len(kinds))
        outcomes = []
        for row in rows(kinds, sizes, seed):
            outcomes.append(row)
            bar.update(task, advance=1, description=row.kind[:24])
    return outcomes
