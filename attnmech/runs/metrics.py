"""Computes metrics: one number per text, from the logits of a run."""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ..basics.arguments import dense, shown
from ..batch import Batch, bytes_of
from ..errors import InputError
from ..maths.copies import copies_of
from ..maths.float64 import as_float64, float64_device
from ..maths.metrics import accuracy, cross_entropy, divergence, logit_difference
from ..model.parts.pieces import Tokenized
from ..model.run.hooked import HookedModel
from ..model.run.loss import GROUPS
from .answers import Answers, answer_ids, answer_tokens

MetricLike: TypeAlias = str | Callable[[Tensor, Batch], Tensor]
"""A name of `METRICS`, or `(logits [batch position vocab], batch) -> [batch]`."""

METRICS: Final = {  # the metrics that have a name, with their definitions
    "loss": "mean cross-entropy of the next token (in a masked language model, of masked tokens), in nats",
    "kl": "mean KL divergence from the clean output, in nats",
    "logit_difference": "logit of the answer minus that of the token it is compared with, at the last token",
    "log_probability": "ln p of the answer with which the text ends, summed over the answer's tokens, in nats",
    "accuracy": "whether the answer's logit is above that of the token it is compared with (or all), at the last token",
}

HIGHER_IS_BETTER: Final = {  # whether a higher value of each metric means that the model does better
    "loss": False,
    "kl": False,
    "logit_difference": True,
    "log_probability": True,
    "accuracy": True,
    "cross_entropy": False,
    "mse": False,
}

OUTPUT_METRICS: Final = {
    "accuracy": "share of places where the largest output is that of the class in `answers`",
    "cross_entropy": "mean cross-entropy of the class in `answers`, in nats",
    "mse": "mean squared difference of the output and `answers`",
}
"""The metrics of models whose output is not over a vocabulary: classifiers and a user's own modules."""

SAME_METRIC: Final = 1e-5  # relative differences below this can be rounding: the two runs' metrics count as equal

IGNORED: Final = -100  # the class in `answers` that marks ignored positions, as in transformers


@dataclass(frozen=True)
class Metric:
    """A metric, with the answers to each text and the rows of the output that it needs."""

    name: str
    compute: Callable[[Tensor, Batch], Tensor] | None = None  # of the output: a user's own, or one of `OUTPUT_METRICS`
    answers: Shaped[Tensor, "*output"] | None = None
    against: Int[Tensor, " text"] | None = None
    has_name: bool = True  # whether the metric was given as a name, not as a function
    endings: Int[Tensor, "text longest"] | None = None
    """The ids of the answers for "log_probability", each at the end of its row, preceded by -1."""
    mask_id: int | None = None  # of the mask token, in a masked language model: the loss is on copies (`JudgedTexts`)
    hidden: Int[Tensor, "copy longest"] | None = None  # the masked tokens' original ids in these copies; -1 at others
    of_output: bool = False  # whether the output is a classifier's or a user's own module's, and not over a vocabulary
    tried: bool = True  # whether a function is tried on these texts (`require_own_texts`): on those with the first text

    @classmethod
    def of(
        cls,
        model: HookedModel,
        metric: MetricLike,
        answers: Answers,
        against: Answers,
        texts: int,
        prompts: Sequence[Tokenized] | None = None,
    ) -> "Metric":
        """A metric for these texts; raises `InputError` if it is meaningless for the texts or the model.

        `prompts` holds the tokens of the texts, after which answers are tokenized.
        """
        if model.points["logits"].absent is not None:
            raise InputError(f"a metric needs logits, but {model.points['logits'].absent}.")
        if model.predicts == "output":
            return cls._of_output(model, metric, answers, against, texts)
        if isinstance(metric, str) and metric == "log_probability":
            return cls._of_endings(model, answers, against, texts, prompts)
        right = None if answers is None else answer_ids(model, "answers", answers, texts, prompts)
        wrong = None if against is None else answer_ids(model, "against", against, texts, prompts)
        if wrong is not None and right is None:
            raise InputError("`against` needs `answers`, the tokens to compare with it.")
        if callable(metric):
            return cls(_name_of(metric), metric, right, wrong, has_name=False)
        if not isinstance(metric, str) or metric not in METRICS:
            raise InputError(
                f"`metric` must be one of {_listed(METRICS)}, or a function (logits, batch) -> [batch]; got "
                f"{shown(metric)}."
            )
        if model.predicts == "other" and model.unembedding is None:
            raise InputError(
                f"metric={metric!r} needs logits over a vocabulary, and this model has none; give a function (logits, "
                "batch) -> [batch]."
            )
        if model.predicts == "other" and metric == "loss":
            raise InputError(
                "a loss is that of the next token or of masked tokens; this model sees the next token, and does not "
                "predict masked ones. "
                'Use metric="kl", or answers with metric="logit_difference".'
            )
        if metric in ("logit_difference", "accuracy") and right is None:
            raise InputError(f'metric="{metric}" needs `answers`: one token per text, such as [" Tom"].')
        if metric == "logit_difference" and wrong is None:
            raise InputError('metric="logit_difference" needs `against`: the token that each answer is compared with.')
        masks = metric == "loss" and model.predicts == "masked token"
        return cls(metric, None, right, wrong, mask_id=model.mask_id if masks else None)

    @classmethod
    def _of_output(cls, model: HookedModel, metric: MetricLike, answers: Any, against: Any, texts: int) -> "Metric":
        """A metric of the output of a classifier or a user's own module, in any shape."""
        owner = "a module of your own" if model.is_own else "a classifier"
        if against is not None:
            raise InputError(f"`against` is a token, and {owner} does not predict tokens; leave it out.")
        right = None if answers is None else _targets(answers, texts)
        if callable(metric):
            return cls(_name_of(metric), metric, right, has_name=False, of_output=True)
        if isinstance(metric, str) and metric == "kl" and not model.is_own:
            return cls(metric, answers=right, of_output=True)
        if not isinstance(metric, str) or metric not in OUTPUT_METRICS:
            also = "" if model.is_own else f"; {_listed({'kl': METRICS['kl']})}"
            raise InputError(
                f"`metric` of {owner} must be one of {_listed(OUTPUT_METRICS)}, each with `answers`{also}, or a "
                f"function (output, batch) -> [batch]; got {shown(metric)}."
            )
        if right is None:
            raise InputError(f"metric={metric!r} needs `answers`: a tensor with the right output for each text.")
        return cls(metric, _OF_OUTPUT[metric], right, of_output=True)

    @classmethod
    def _of_endings(
        cls, model: HookedModel, answers: Answers, against: Answers, texts: int, prompts: Sequence[Tokenized] | None
    ) -> "Metric":
        if answers is None or against is not None:
            raise InputError(
                'metric="log_probability" needs `answers`, with which the texts end, and takes no `against`; to '
                "compare answers, subtract the results of two calls."
            )
        if not model.causal or not model.writes_tokens:
            raise InputError(
                'metric="log_probability" is for models that predict the next token; this model can see it.'
            )
        return cls("log_probability", endings=answer_tokens(model, answers, texts, prompts))

    def copies(self, contents: Sequence[Hashable]) -> tuple[int, ...]:
        """Which texts are copies (`copies_of`): texts with the same content and the same answers."""
        answers = [
            map(bytes_of, tokens.cpu()) for tokens in (self.answers, self.against, self.endings) if tokens is not None
        ]
        return copies_of(zip(contents, *answers, strict=True))

    @property
    def needs_clean(self) -> bool:
        """Whether the metric compares with the clean output."""
        return self.name == "kl" and self.has_name

    @property
    def noted(self) -> dict[str, str]:
        """The entries that a result's provenance records in addition to the metric's name."""
        return {} if self.mask_id is None else {"masked": f"each ordinary token once, in {GROUPS} groups"}

    def require_gradient(self) -> None:
        """Raises `InputError` for a metric whose gradient is 0 or undefined at the clean output."""
        if not self.has_name:
            return
        instead = '"cross_entropy" with `answers`' if self.of_output else '"loss", or "logit_difference" with `answers`'
        if self.name == "accuracy":
            raise InputError(f'metric="accuracy" is a step function and has no gradient; use {instead}.')
        if self.name == "kl":
            raise InputError(
                'metric="kl" has its minimum where nothing is changed, so its gradient there is 0 and cannot rank '
                f"heads; use {instead}."
            )

    def require_graph(self, values: Float[Tensor, " text"]) -> None:
        """Raises `InputError` if the values that a function returned have no gradient."""
        if not values.requires_grad:
            raise InputError(
                f"{_called(self.name)} has no gradient: its numbers must be computed from the logits by differentiable "
                "steps, without argmax, comparisons, .detach() or .item(). am.ablate_heads needs no gradient."
            )

    def at(self, documents: Int[Tensor, " batch"]) -> "Metric":
        by_text = {name: getattr(self, name) for name in ("answers", "against", "endings", "hidden")}
        some = {name: of[documents.to(of.device)] for name, of in by_text.items() if of is not None}
        return replace(self, **some, tried=self.tried and bool((documents == 0).any()))

    def rows(self, batch: Batch) -> Bool[Tensor, "batch position"]:
        """True at the tokens whose logits the metric needs."""
        mask = batch.mask
        if self.name == "kl":
            return mask
        if self.hidden is not None:
            return self.hidden[:, : mask.shape[1]] >= 0
        if self.endings is not None:
            return self._before_endings(batch, self.endings)
        return batch.at([-1]) if self.name != "loss" else batch.has_next

    def _before_endings(self, batch: Batch, endings: Int[Tensor, "batch longest"]) -> Bool[Tensor, "batch position"]:
        """True at the tokens before the answer's; raises `InputError` if a text does not end with its answer."""
        before = torch.zeros_like(batch.mask)
        for row, (ending, real) in enumerate(zip(endings, batch.mask, strict=True)):
            answer, places = ending[ending >= 0], real.nonzero()[:, 0]
            ids = batch.ids[row, places]
            if len(ids) <= len(answer) or not torch.equal(ids[-len(answer) :], answer):
                end = [batch.tokens[row][place] for place in places[-len(answer) :].tolist()]
                raise InputError(
                    f'with metric="log_probability" each text must end with its answer, after one token or more; the '
                    f"answer's ids are {answer.tolist()}, and a text of {len(ids)} tokens ends with "
                    f"{ids[-len(answer) :].tolist()}, {end}."
                )
            before[row, places[-len(answer) - 1 : -1]] = True
        return before

    def of_rows(
        self, logits: Float[Tensor, "row vocab"], clean: Tensor | None, batch: Batch, rows: Int[Tensor, "row 2"]
    ) -> Float[Tensor, " row"]:
        """One number for each row; `rows` gives the rows as (text, position) in the batch."""
        text, position = rows.unbind(dim=1)
        if self.hidden is not None:
            return cross_entropy(logits, self.hidden[text, position])
        if self.name == "loss":
            return cross_entropy(logits, batch.ids[text, position + 1])
        if self.name == "kl":
            assert clean is not None
            return divergence(logits, clean)
        if self.endings is not None:
            # The rows of a text are averaged later, so multiplying by their number gives the sum.
            count = (self.endings[text] >= 0).sum(dim=1)
            return -count * cross_entropy(logits, batch.ids[text, position + 1])
        assert self.answers is not None
        against = None if self.against is None else self.against[text]
        if self.name == "accuracy":
            return accuracy(logits, self.answers[text], against)
        assert against is not None
        return logit_difference(logits, self.answers[text], against)

    def of_whole(
        self, output: Float[Tensor, "*output"], batch: Batch, clean: Float[Tensor, "*output"] | None = None
    ) -> Float[Tensor, " batch"]:
        """The metric of the full output, checked; a metric that compares with the clean output needs `clean`."""
        if clean is not None:
            # The mean over the places of a text.
            values = as_float64(divergence(output.flatten(0, -2), clean.flatten(0, -2))).reshape(output.shape[:-1])
            return _mean_of_places(values, _real(values, batch))
        return as_float64(self._returned(output, batch))

    def _returned(self, output: Float[Tensor, "*output"], batch: Batch) -> Float[Tensor, " batch"]:
        assert self.compute is not None
        values = self.compute(output, replace(batch, answers=self.answers, against=self.against))
        texts = len(batch.ids)
        if not isinstance(values, torch.Tensor) or values.shape != (texts,) or values.is_complex():
            raise InputError(
                f"{_called(self.name)} must return one number for each of the {texts} texts, a tensor [{texts}]; got "
                f"{shown(values)}."
            )
        return dense(f"what {_called(self.name)} returns", values)

    def require_own_texts(self, output: Float[Tensor, "*output"], batch: Batch) -> None:
        """Raises `InputError` for a user's function whose number for a text changes with padding or with other texts.

        It is tried on copies of an existing output, which it may change in place: on two texts, each alone, both in
        each order, and each beside another output of the other; a function that takes only all texts, on texts beside
        others with another output. A single text is tried beside itself with another output.
        """
        self._require_no_padding(output, batch)
        texts = len(batch.ids)
        # A module of the user's own may have the texts on another axis.
        if self.compute is None or self.has_name or not self.tried or output.shape[:1] != (texts,):
            return
        with torch.no_grad():
            same = self._same_beside_others(output.detach(), batch)
        if not same:
            raise InputError(
                f"{_called(self.name)} mixes texts: its number for a text changes with the other texts of the batch or "
                "with their order. Compute each number from the logits of its own text, without means or ranks over "
                "the batch; give targets as `answers`, which batch.answers holds."
            )

    def _same_beside_others(self, output: Float[Tensor, "*output"], batch: Batch) -> bool:
        """Whether texts have the same numbers beside other texts."""
        # Numbers of copies could hide what mixes them, so the other is the last text that differs from the first.
        one, other = 0, max((batch.digests != batch.digests[0]).nonzero().flatten().tolist(), default=0)
        two = torch.stack((output[one], output[other] if other else _another(output[one])))
        two = two.double() if float64_device(two.device) == two.device else two

        def numbers(places: Sequence[int], changed: Sequence[int] = ()) -> Float[Tensor, " text"]:
            chosen = torch.tensor([(one, other)[place] for place in places])
            outputs = [_another(two[place]) if place in changed else two[place] for place in places]
            return self.at(chosen)._returned(torch.stack(outputs), batch.texts(chosen))

        try:
            pair, beside = numbers([0, 1]), torch.cat((numbers([0, 1], [1])[:1], numbers([0, 1], [0])[1:]))
            alone = as_float64(torch.cat((numbers([0]), numbers([1]))))
            pairs = as_float64(pair), as_float64(numbers([1, 0]).flip(0))
        except Exception:  # it may hold a tensor with an entry for each text
            texts = len(batch.ids)
            if texts == 1:
                return True
            half = torch.arange(texts, device=output.device) < (texts + 1) // 2
            half = half.reshape(-1, *[1] * (output.ndim - 1))
            first, second = (
                self.of_whole(torch.where(kept, output, _another(output)), batch) for kept in (half, ~half)
            )
            whole, half = self.of_whole(output.clone(), batch), half.flatten().to(first.device)
            return bool(torch.where(half, first, second).isclose(whole, rtol=1e-6, atol=0.0, equal_nan=True).all())
        # Batches of one shape are computed alike, so only what all texts share, such as their largest logit, can round
        # differently; batches of other shapes may round differently everywhere.
        largest = float(two[two.isfinite()].abs().max())
        eps = min(torch.finfo(dtype).eps for dtype in (torch.float32, pair.dtype) if dtype.is_floating_point)
        exact = as_float64(beside).isclose(pairs[0], rtol=4 * eps, atol=4 * eps * largest, equal_nan=True).all()
        rounding = 1e-5 * float(alone[alone.isfinite()].abs().sum()) + 1e-7 * largest
        return bool(exact) and all(x.isclose(alone, rtol=1e-5, atol=rounding, equal_nan=True).all() for x in pairs)

    def _require_no_padding(self, output: Float[Tensor, "*output"], batch: Batch) -> None:
        """Raises `InputError` for a user's function whose number for a text changes with the output at padding."""
        if self.compute is None or self.has_name or output.shape[:2] != batch.mask.shape or not batch.padded:
            return
        real = batch.mask.to(output.device).reshape(*batch.mask.shape, *[1] * (output.ndim - 2))
        with torch.no_grad():
            values = self.of_whole(output.clone(), batch)
            others = self.of_whole(torch.where(real, output, -output), batch)
        reading = (~values.isclose(others, rtol=1e-6, atol=0.0, equal_nan=True)).nonzero()
        if len(reading):
            raise InputError(
                f"{_called(self.name)} reads padding: its number for a text of {int(batch.lengths[reading[0]])} tokens "
                f"changes with the output at the other {int((~batch.mask[reading[0]]).sum())} positions of the batch. "
                "Take the last token with logits[batch.at([-1])], and average over batch.mask."
            )

    def of_logits(self, logits: Float[Tensor, "*output"], batch: Batch) -> Float[Tensor, " batch"]:
        """The metric of the full logits, differentiable; for metrics that do not compare with the clean output."""
        if self.compute is not None:
            self.require_own_texts(logits, batch)
            return self.of_whole(logits, batch)
        rows = self.rows(batch).nonzero()
        values = as_float64(self.of_rows(logits[rows[:, 0], rows[:, 1]], None, batch, rows))
        text = rows[:, 0].to(values.device)
        sums = values.new_zeros(len(batch.ids)).index_add(0, text, values)
        return sums / torch.bincount(text, minlength=len(batch.ids))


def _another(output: Float[Tensor, "*output"]) -> Float[Tensor, "*output"]:
    """An output of the same size for which few functions have the same number."""
    return output.roll(1, dims=-1) / -2


def require_finite(name: str, values: Float[Tensor, " text"], documents: Sequence[int], what: str) -> None:
    """Raises `InputError`, naming the first text, if a metric is NaN or infinite."""
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        place = int(bad[0])
        came = "NaN" if bool(values[place].isnan()) else str(float(values[place]))
        raise InputError(
            f"{_called(name)} is {came} for text {documents[place]} ({what}). A loss needs texts of at least two "
            f"tokens; a function must return a finite number for every text."
        )


def _targets(answers: Any, texts: int) -> Shaped[Tensor, "*output"]:
    try:
        targets = torch.as_tensor(answers)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"`answers` must be a tensor with a row for each text; got {shown(answers)}.") from error
    if targets.ndim == 0 or len(targets) != texts:
        raise InputError(f"`answers` must be a tensor with a row for each of the {texts} texts; got {shown(answers)}.")
    return dense("`answers`", targets)


def _accuracy(output: Float[Tensor, "*output classes"], batch: Batch) -> Float[Tensor, " text"]:
    right, counted = _classes(output, batch)
    return _mean_of_places(as_float64(output.argmax(dim=-1) == right), counted)


def _cross_entropy(output: Float[Tensor, "*output classes"], batch: Batch) -> Float[Tensor, " text"]:
    right, counted = _classes(output, batch)
    values = as_float64(cross_entropy(output.flatten(0, -2), right.masked_fill(~counted, 0).flatten()))
    return _mean_of_places(values.reshape(right.shape), counted)


def _classes(
    output: Float[Tensor, "*output classes"], batch: Batch
) -> tuple[Int[Tensor, "*output"], Bool[Tensor, "*output"]]:
    right, places = batch.answers, output.shape[:-1]
    assert right is not None
    if batch.texts_of is not None and right.ndim == 2 and places == batch.mask.shape:
        # Answers per token are padded to the longest text of all batches.
        right = right[:, : places[1]]
    if right.shape != places or right.is_floating_point() or right.is_complex() or right.dtype == torch.bool:
        raise InputError(
            f"`answers` must hold class numbers {list(places)} for an output {list(output.shape)}; got {shown(right)}."
        )
    right = right.to(output.device).long()
    wrong = right[(right != IGNORED) & ((right < 0) | (right >= output.shape[-1]))]
    if len(wrong):
        raise InputError(
            f"`answers` must be classes from 0 to {output.shape[-1] - 1}, or {IGNORED} for ignored positions; got "
            f"{int(wrong[0])}."
        )
    return right, (right != IGNORED) & _real(right, batch)


def _real(values: Shaped[Tensor, "*output"], batch: Batch) -> Bool[Tensor, "*output"]:
    """True at the places of an output that count: all, except padding if there is a place for each token."""
    everywhere = torch.ones_like(values, dtype=torch.bool)
    return batch.mask.to(values.device) if values.shape == batch.mask.shape else everywhere


def _mean_of_places(values: Float[Tensor, "*output"], counted: Bool[Tensor, "*output"]) -> Float[Tensor, " text"]:
    counted = counted.to(values.device)
    kept = values.masked_fill(~counted, 0.0)
    return kept.reshape(len(kept), -1).sum(dim=1) / counted.reshape(len(kept), -1).sum(dim=1)


def _mse(output: Float[Tensor, "*output"], batch: Batch) -> Float[Tensor, " text"]:
    """The mean squared difference between a text's output and its answer."""
    right = batch.answers
    assert right is not None
    if right.shape != output.shape:
        raise InputError(f"`answers` must have the shape of the output, {list(output.shape)}; got {shown(right)}.")
    return (as_float64(output) - as_float64(right.to(output.device))).square().reshape(len(output), -1).mean(dim=1)


_OF_OUTPUT: Final = {"accuracy": _accuracy, "cross_entropy": _cross_entropy, "mse": _mse}


def _listed(metrics: Mapping[str, str]) -> str:
    return "; ".join(f"{name!r} ({meaning})" for name, meaning in metrics.items())


def _called(name: str) -> str:
    return "the metric" if name == _NAMELESS else f"the metric {name}"


_NAMELESS: Final = "metric"  # the name of a lambda


def _name_of(metric: Any) -> str:
    name = getattr(metric, "__name__", type(metric).__name__)
    if name == "<lambda>":
        name = _NAMELESS
    try:
        inspect.signature(metric).bind(None, None)
    except TypeError as error:
        raise InputError(f"{_called(name)} must take (logits, batch); {error}.") from error
    except ValueError:  # builtins may have no signature
        pass
    return str(name)
