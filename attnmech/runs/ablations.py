"""Ablates heads: replaces their z, or applies an intervention to each."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self, cast

from ..basics.arguments import option, shown, whole_number
from ..errors import InputError
from ..interventions import HEAD_POINTS, Head, Intervention, Values
from ..model.inputs.encoder import Inputs
from ..model.run.hooked import HookedModel, require_model
from .reference import mean_z, resampled_z

METHODS: Final = ("zero", "mean", "resample")  # the values that can replace z


@dataclass(frozen=True)
class Ablations:
    """One way to ablate heads, as interventions."""

    method: str
    values: Sequence[Mapping[int, Values]]  # the values that replace z in each layer, draw by draw; empty for zero
    stack: str
    template: Intervention | None = None  # the intervention that is applied to each head, if there is one

    @classmethod
    def of(
        cls,
        model: HookedModel,
        inputs: Inputs | Iterable[Inputs],
        heads: Iterable[Head],
        method: str | Intervention,
        *,
        reference: Values | Inputs | Iterable[Inputs] | None = None,
        draws: int = 1,
        seed: int = 0,
        bos: bool | None = None,
    ) -> Self:
        """Computes the values that the method needs, in the layers of the heads.

        The values come from `reference`; without a reference, method="resample" takes them from the inputs.

        Raises `InputError` for an unknown method, for a missing reference, and for a reference that the method does not
        use.
        """
        require_model(model)
        seed = checked_seed(seed)
        if isinstance(method, Intervention):
            check_template(model, method)
            check_reference("an intervention", reference)
            if draws != 1:
                raise InputError(f'`draws` needs method="resample"; got {shown(draws)} with an intervention.')
            return cls(each_head(method), [], model.output_stack.label, method)
        option("method", method, METHODS)
        check_reference(method, reference)
        label, layers = model.output_stack.label, sorted({layer for layer, _ in heads})
        if draws != 1 and method != "resample":
            raise InputError(f'`draws` needs method="resample"; got {shown(draws)} with method={method!r}.')
        values: list[Values] = []
        if method == "mean" and reference is not None:
            values = [mean_of(model, reference, layers, bos=bos)]
        if method == "resample":
            if isinstance(reference, Values):
                raise InputError(
                    'with method="resample", `reference` must be texts, from which z is taken; got values of '
                    f"layers {sorted(reference.by_layer)}."
                )
            values = resampled_z(
                model, inputs, layers=layers, reference=reference, stack=label or None, draws=draws, seed=seed, bos=bos
            )
        return cls(method, [one_by_one(layers_values) for layers_values in values], label)

    def of_head(self, head: Head, draw: int = 0) -> Intervention:
        (intervention,) = self.of_set([head], draw)
        return intervention

    def of_set(self, heads: Sequence[Head], draw: int = 0) -> tuple[Intervention, ...]:
        chosen = tuple(sorted(set(heads)))
        if self.template is not None:
            return (replace(self.template, heads=chosen),)
        if not self.values:
            return (Intervention.zero(chosen, stack=self.stack),)
        return tuple(
            Intervention.replace(
                [head for head in chosen if head[0] == layer], self.values[draw][layer], stack=self.stack
            )
            for layer in sorted({layer for layer, _ in chosen})
        )

    @property
    def options(self) -> dict[str, Any]:
        """The entries that describe the ablations in a result's provenance."""
        description = next(iter(self.values[0].values())).description if self.values else None
        drawn = {"draws": len(self.values)} if len(self.values) > 1 else {}
        return {"method": self.method, "values": description, **drawn}


def check_template(model: HookedModel, template: Intervention) -> None:
    """Raises `InputError` for an intervention that cannot be applied head by head."""
    if not template.by_head or template.heads != "all":
        raise InputError(
            "an intervention given as `method` is a template that is applied to each head in turn, so it must act in "
            f'heads="all" at {", ".join(HEAD_POINTS)}; got {template}.'
        )
    stack, output = model.stack(template.stack or None), model.output_stack
    beside = stack.label == "cross" and (stack.layers, stack.n_heads) == (output.layers, output.n_heads)
    if stack is not output and not beside:
        raise InputError(
            f"an intervention given as `method` must act in the stack {output.label or 'self'!r}, where heads are "
            f"ablated, or in its cross-attention; got {template}."
        )


def each_head(template: Intervention) -> str:
    """The name of a method for a template: its sentence about each head."""
    return str(template).replace("all heads", "each head", 1)


def checked_seed(seed: object) -> int:
    """A seed that torch's generators accept."""
    return whole_number("seed", seed, most=2**63 - 1)


def check_reference(method: str, reference: object) -> None:
    """Raises `InputError` if reference texts are missing, or are given to a method that does not use them."""
    if method == "mean" and reference is None:
        raise InputError('method="mean" needs `reference`: the texts of each head\'s mean, such as reference=texts.')
    if reference is not None and method not in ("mean", "resample"):
        raise InputError(f'`reference` needs method="mean" or "resample"; got method={method!r}.')


def mean_of(
    model: HookedModel, reference: Values | Inputs | Iterable[Inputs], layers: Sequence[int], *, bos: bool | None
) -> Values:
    """The mean of z over reference texts, in some layers; `reference` itself if it already holds values (`mean_z`)."""
    if not isinstance(reference, Values):
        return mean_z(model, reference, layers=layers, stack=model.output_stack.label or None, bos=bos)
    missing = [layer for layer in layers if layer not in reference.by_layer]
    if missing:
        held = sorted(reference.by_layer)
        raise InputError(f"`reference` holds means for layers {held}, but not for layer {missing[0]}.")
    return reference


def one_by_one(values: Values) -> dict[int, Values]:
    """Separate values for each layer, so that interventions in the same layer share a digest."""
    return {layer: replace(values, by_layer={layer: value}) for layer, value in values.by_layer.items()}


def reread(inputs: Inputs | Iterable[Inputs]) -> Inputs | Iterable[Inputs]:
    """The inputs in a form that can be read several times: an iterator becomes a list."""
    return cast(Sequence[Inputs], list(inputs)) if isinstance(inputs, Iterator) else inputs
