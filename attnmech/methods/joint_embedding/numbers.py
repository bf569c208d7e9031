"""The numbers measured on each head's queries and keys before projection."""

from dataclasses import dataclass
from typing import Final

from ...maths.statistic import POSITIVE, UNBOUNDED, Statistic, Statistics


@dataclass(frozen=True, kw_only=True)
class Number(Statistic):
    """A number measured on every head; the page shows numbers with a `label`."""

    reading: str = ""  # the meaning of the number, in the words of the page


class HeadNumbers:
    """The numbers of each embedded head."""

    scale = Number(
        meaning='c of each head; NaN with `geometry="exact"`.', short="scale c", bounds=POSITIVE, printed=True
    )
    correlation = Number(
        meaning="""The correlation of distance and dot product (for geometry="exact", of distance and score), before
        projection.

        Pearson's, over the pairs of a query and a visible key that are nearer than τ, with weights (τ − distance)²;
        τ is the 20th percentile of the distances of all pairs. −1 if distance determines the dot product of near pairs
        linearly.
        """,
        label="correlation",
        bounds=(-1.0, 1.0),
        printed=True,
    )
    plain_correlation = Number(
        meaning="Pearson's correlation over all pairs, without weights, before projection. For one query it approaches "
        "−1 as c grows, whatever the vectors are.",
        label="correlation, unweighted",
        reading="between the same distance and product, over all pairs alike",
        bounds=(-1.0, 1.0),
    )
    spearman = Number(
        meaning="The rank correlation over all pairs, before projection.",
        label="Spearman",
        bounds=(-1.0, 1.0),
        printed=True,
    )
    row_spearman = Number(
        meaning='With `geometry="exact"`: the rank correlation of distance and score furthest from −1 among all '
        "queries.",
        label="Spearman, worst query",
        reading="rank correlation of distance and score over the keys of the query furthest from −1",
        bounds=(-1.0, 1.0),
    )
    query_norm = Number(meaning="The median norm of queries, before scale and shift.", bounds=POSITIVE)
    key_norm = Number(meaning="The median norm of keys, before scale and shift.", bounds=POSITIVE)
    centroid_distance = Number(
        meaning="The distance between the means of queries and keys after scaling, before the shift: ‖c q̄ − k̄ / c‖.",
        bounds=POSITIVE,
    )
    separation = Number(
        meaning="`centroid_distance` in spreads; a spread is the root mean square distance of a point from the mean "
        "of its kind.",
        label="distance of centroids, in spreads",
        reading="between queries and keys before the shift; 1 is the root mean square distance of a point from the "
        "centroid of its kind",
        bounds=POSITIVE,
        printed=True,
    )
    shift_share = Number(
        meaning="""The share of q̄·k in what distinguishes the keys of a row; the shift removes this part from
        distances.

        Σ_rows Σ_j (t_ij − t̄_i)(s_ij − s̄_i) / Σ_rows Σ_j (s_ij − s̄_i)² of t = q̄·k and s = q·k, q̄ the mean query
        (docs/formulas.md#shares-of-variance).
        """,
        label="share lost by the shift",
        reading="the part of the score differences between keys that is due to the mean query and lost from distances",
        bounds=UNBOUNDED,
    )
    attention_change = Number(
        meaning="""The largest change of a probability when scores are computed from the points: 0 up to rounding.

        A shift adds a constant to each row of scores. With a soft cap or a sink, that does change attention.
        """,
        label="change of attention",
        reading="the largest change of a probability by scale and shift; above rounding only with a soft cap or a sink",
    )
    first_attention = Number(
        meaning="The mean attention to a text's first token, over all other rows.",
        label="attention to first token",
        reading="mean over all other rows",
    )


NUMBERS: Final = Statistics(HeadNumbers, Number)
