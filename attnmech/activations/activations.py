"""The result of a run: the captured activations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from ..basics.arguments import shown
from ..basics.files import path_ending
from ..basics.lens_names import OF_CACHE, missing_name
from ..basics.public import public
from ..batch import Batch
from ..errors import InputError, MissingPointError
from ..points import POINTS, PointKey, PointName, lens_name, parse, split_stack
from ..results.tensor_file import write_tensors

if TYPE_CHECKING:
    import pandas as pd
    from transformer_lens import ActivationCache
    from transformer_lens.model_bridge import TransformerBridge

    from ..draw.embed import View


@public
@dataclass(frozen=True)
class Activations:
    """The points captured by a run, by name and layer.

    >>> acts["pattern", 3].shape          # doctest: +SKIP
    torch.Size([1, 8, 57, 57])
    >>> acts["logits"]                    # doctest: +SKIP

    A name without its layer, `acts["pattern"]`, stacks the layers that were captured, in order, along a new
    first axis `layer`. TransformerLens's names work too: `acts["blocks.3.attn.hook_pattern"]`.
    """

    batch: Batch
    values: Mapping[PointKey, Tensor]
    gradients: "Activations | None" = None
    """The gradient at every captured point, if `gradients_of` was given."""
    unchecked: tuple[str, ...] = ()
    """The checks that this run had to skip (`attnmech.model.attention.running`), each with the reason, such as an edit
    of `result`."""
    value_norms: Mapping[PointKey, Tensor] = field(default_factory=dict, repr=False)
    """‖(x_j W_V + b_V) W_O‖ `[batch head key]`, by name and layer, for each pattern whose v was captured too."""

    model: str = field(default="", repr=False)
    """The name of the model that ran."""

    lens_points: frozenset[str] = field(default=frozenset(), repr=False)
    """The points for which TransformerLens has a hook with the same value on this model; `to_cache` takes these."""

    def __getitem__(self, name: PointName) -> Shaped[Tensor, "..."]:
        key = parse(name)
        if key in self.values:
            return self.values[key]
        layers = sorted(layer for point, layer in self.values if point == key[0] and layer is not None)
        if key[1] is None and layers:
            return torch.stack([self.values[key[0], layer] for layer in layers])
        held = ", ".join(self._summary()) or "none"
        raise MissingPointError(
            f"this run did not capture {name!r}; it holds: {held}. Capture it with model.run(..., points=[{name!r}])."
        )

    def __contains__(self, name: object) -> bool:
        try:
            self[name]  # type: ignore[index]
        except (MissingPointError, InputError):
            return False
        return True

    @property
    def tokens(self) -> tuple[tuple[str, ...], ...]:
        """Each token of each sequence as text."""
        return self.batch.tokens

    @property
    def logits(self) -> Tensor:
        """The model's output for every token, `[batch position vocab]`."""
        return self["logits"]

    def of_answer(self, name: PointName) -> list[Shaped[Tensor, "..."]]:
        """The rows of a captured point at the tokens that the model wrote, a tensor for each text.

        >>> text = model.generate("The keys to the old chest", 5)                       # doctest: +SKIP
        >>> acts = model.run(text, points=["pattern"])                                  # doctest: +SKIP
        >>> acts.of_answer(("pattern", 3))[0].shape                                     # doctest: +SKIP
        torch.Size([8, 5, 12])

        Raises `InputError` unless `model.generate` made the text and the point has a row for each of its tokens.
        """
        point, value = parse(name), self[name]
        stack, bare = split_stack(point[0])
        axes = POINTS[bare].axes
        texts = value.ndim - len(axes)  # after the axis of several layers
        axis = texts + next((axes.index(of_row) for of_row in ("query", "position") if of_row in axes), 0)
        rows, keys = self.batch.is_answer, stack == "cross" and bare in ("k", "v")
        if not bool(rows.any()) or stack == "encoder" or keys or value.shape[axis] != rows.shape[1]:
            raise InputError(f"{name!r} has no rows of an answer here; run what model.generate returned.")
        by_row = value.movedim((axis, texts), (0, 1))
        return [by_row[real, text].movedim(0, axis - 1) for text, real in enumerate(rows)]

    def show(
        self,
        name: PointName = "pattern",
        *,
        layer: int | None = None,
        head: int | None = None,
        query: int | None = None,
        text: int = 0,
        view: str | None = None,
        weighted: str | None = None,
    ) -> "View":
        """A view of a captured point, for a notebook or, with `.write_html(path)`, as a separate page.

        >>> acts.show("pattern")                                            # doctest: +SKIP
        >>> acts.show("pattern", layer=3)                                   # doctest: +SKIP
        >>> acts.show("pattern", layer=3, head=2, view="sentence")          # doctest: +SKIP
        >>> acts.show("pattern", layer=3, weighted="value")                 # doctest: +SKIP

        | point | shown as |
        |---|---|
        | `pattern` | every layer: "model"; one layer: "attention_heads"; one head: "attention_pattern" |
        | `pattern` if it is too large for CircuitsVis, or of cross-attention | "model" |
        | `pattern` with `query` | "colored_tokens_multi"; for one head "colored_tokens" |
        | `pattern` with view="picture" | one row, by default the last, on the pictures of the text |
        | `scores` of a layer | the same, with two colours for above and below zero |
        | `logits` | the text, coloured by the probability of each token |
        | any other point | the text, coloured by one activation at a time |

        Args:
            name: the point.
            layer: one layer; by default all that were captured.
            head: one head; by default all.
            query: the number of the query token whose row is shown, not counting padding.
            text: which text of the batch.
            view: another view of attention: "model", "sentence", "token_graph", "attention_heads",
                "attention_pattern", "colored_tokens" (the heads' mean without `head`), "colored_tokens_multi" or
                "picture".
            weighted: "value" shows what attention carries instead of p: p_ij ‖f(x_j)‖ / Σ_k p_ik ‖f(x_k)‖, with
                f(x) = (x W_V + b_V) W_O (Kobayashi et al. 2020), so that each row sums to 1. The run must have captured
                "v" as well as "pattern".

        Raises:
            InputError: the selection is invalid, or has more numbers than a page can hold; the message says what to
                choose.
            MissingPointError: the run did not capture the point, or another point that `weighted` needs.

        """
        from .views import show

        view_of_point = show(self, name, layer=layer, head=head, query=query, text=text, view=view, weighted=weighted)
        return view_of_point.of_model(self.model)

    def to_frame(self) -> "pd.DataFrame":
        """The points as a table, without padding: one row per number, with its point, its place on each axis (empty for
        an axis that the point lacks), and the number as `value`.

        >>> model.run(text, points=["pattern"]).to_frame().columns.to_list()            # doctest: +SKIP
        ['point', 'layer', 'batch', 'head', 'query', 'key', 'value']
        """
        import pandas as pd

        if not self.values:
            raise InputError('this run captured no point; capture one with model.run(..., points=["pattern"]).')
        table: pd.DataFrame = pd.concat([self._table_of(*key) for key in self.values], ignore_index=True)
        axes = [name for name in table if name not in ("point", "value")]
        return table.astype(dict.fromkeys(axes, "Int64"))  # which has a value for a missing place

    def _table_of(self, point: str, layer: int | None) -> "pd.DataFrame":
        import pandas as pd

        stack, name = split_stack(point)
        axes, value = POINTS[name].axes, self.values[point, layer]
        if value.ndim != len(axes):
            raise InputError(f"{point!r} has the shape {[*value.shape]} in this model, without a row for each token.")
        queries = self.batch.queries(stack) if point != "logits" else self.batch.target or self.batch
        real = {"position": queries.mask, "query": queries.mask, "key": self.batch.keys(stack).mask}
        rows = pd.MultiIndex.from_product([range(length) for length in value.shape], names=axes).to_frame(index=False)
        frame = rows.assign(value=value.detach().float().flatten().cpu().numpy())
        for axis in real.keys() & set(axes):
            frame = frame[real[axis].cpu().numpy()[frame["batch"], frame[axis]]]
        if layer is not None:
            frame.insert(0, "layer", layer)
        frame.insert(0, "point", point)
        return frame

    def save(self, path: str | Path) -> Path:
        """Writes the points to a .safetensors file, as "pattern.3" or "logits", with the tokens in its metadata.

        >>> safetensors.torch.load_file(acts.save("acts.safetensors"))["pattern.3"]            # doctest: +SKIP
        """
        tensors = {name if at is None else f"{name}.{at}": value for (name, at), value in self.values.items()}
        facts = {"kind": "Activations", "model": self.model, "tokens": self.tokens}
        return write_tensors(path_ending(path, ".safetensors"), tensors, facts)

    def to_cache(self, bridge: "TransformerBridge | None" = None) -> "ActivationCache":
        """The captured points as TransformerLens's `ActivationCache`, under TransformerLens's names.

        >>> cache = model.run(text, points=["pattern", "resid_post"]).to_cache(model.bridge)      # doctest: +SKIP
        >>> cache["pattern", 3], cache["blocks.3.attn.hook_pattern"]                              # doctest: +SKIP

        The cache holds the points whose hook has the same value on this model ("agrees" in
        `model.certificate.lens_frame()`), and `result`, whose hook a bridge leaves off by default. It omits all other
        points, and all gradients, since a bridge's may differ: at `hook_resid_mid`, for example, a bridge's gradient
        follows only the MLP's branch. Scores of masked keys are the lowest finite number; in a bridge in compatibility
        mode they are minus infinity. The cache shares its tensors with this object.

        Args:
            bridge: the bridge that the cache's own methods use (`accumulated_resid`, `logit_attrs`, …), such as
                `model.bridge`; without it, the cache can only be read.

        Returns:
            The cache, with a batch axis.

        Raises:
            InputError: no captured point has a hook with the same value, or `bridge` is not a bridge.
        """
        from transformer_lens import ActivationCache
        from transformer_lens.model_bridge import TransformerBridge

        if bridge is not None and not isinstance(bridge, TransformerBridge):
            raise InputError(
                f"`bridge` must be a TransformerBridge, such as model.bridge, or None; got {shown(bridge)}."
            )
        cached = {lens_name(key): value for key, value in self.values.items() if key[0] in self.lens_points}
        if not cached:
            raise InputError(
                f"TransformerLens has no hook with the same value for any point of this run, which holds: "
                f"{', '.join(self._summary()) or 'none'}. On this model these points have one: "
                f"{', '.join(name for name in POINTS if name in self.lens_points) or 'none'}."
            )
        return ActivationCache(cached, bridge)

    def _summary(self) -> list[str]:
        layers: dict[str, list[int]] = {}
        for point, layer in self.values:
            layers.setdefault(point, [])
            if layer is not None:
                layers[point].append(layer)
        return [point if not captured else f"{point} {_ranges(captured)}" for point, captured in layers.items()]

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            entry = f"; a point is an entry: acts[{name!r}]" if name in POINTS else ""
            raise AttributeError(missing_name("Activations", name, OF_CACHE) + entry, name=name, obj=self)

    def __repr__(self) -> str:
        batch, length = self.batch.ids.shape
        return f"Activations({batch} × {length} tokens: {'; '.join(self._summary())})"


def _ranges(numbers: list[int]) -> str:
    ordered = sorted(numbers)
    contiguous = ordered == list(range(ordered[0], ordered[-1] + 1))
    return f"{ordered[0]}-{ordered[-1]}" if contiguous and len(ordered) > 1 else ",".join(map(str, ordered))
