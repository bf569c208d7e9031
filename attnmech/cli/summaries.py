"""Summarises what a command found, for the terminal or as JSON."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table as Printed
from rich.text import Text

from ..basics.messages import capitalised
from ..basics.nouns import counted
from .terminal import Column, Rows, Summary, columns_of

if TYPE_CHECKING:
    import pandas as pd

    from ..methods.claims.result import HeadClaim
    from ..methods.drift.result import ResidualDrift
    from ..methods.examples.result import HeadExamples
    from ..methods.focus.attention_focus import AttentionFocus
    from ..methods.head_types.head_types import HeadTypes
    from ..methods.joint_embedding.result import JointEmbedding
    from ..methods.kv_scores.result import KVScores
    from ..methods.null_attention.result import NullAttention
    from ..methods.scores.decompose_scores import ScoreDecomposition
    from ..model.run.hooked import HookedModel
    from ..pages.atlas.result import Atlas
    from ..pages.result import Report
    from ..results.result import PagedResult
    from ..results.table import Table
    from ..runs.effects import Effects
    from .outputs import Outputs

LAYER, HEAD = Column("layer"), Column("head")


def summary_of(
    command: str, model: "HookedModel", result: "PagedResult", outputs: "Outputs", shown: Rows, *further: str
) -> Summary:
    """A result's finding, its table, what was cut, and the files."""
    cut, texts = getattr(result, "truncated", 0), getattr(result, "documents", 0)  # a sweep cuts no text
    count = texts if isinstance(texts, int) else len(texts)
    notes = [f"{cut} of {counted(count, noun='text')} were cut to the model's length."] if cut else []
    intervals = str(shown.frame.attrs.get("intervals", ""))
    return Summary(command, model, (result.lead, *further), shown, notes + [intervals] * bool(intervals), outputs.names)


def certificate_summary(model: "HookedModel", files: Sequence[str] = ()) -> Summary:
    """Every check of a model's certificate, and every activation point; the verdict is last."""
    certificate = model.certificate
    frame = certificate.to_frame()
    points = [
        {"point": point.name, "shape": point.shape, "meaning": point.meaning, "absent": point.absent,
         "refused": certificate.refused.get(point.name)}
        for point in model.points.values()
    ]  # fmt: skip
    edited = ", ".join(map(str, certificate.edited))
    checks = _folded(f"every layer checked; edits tried in layers {edited}", "check", "", "statement", "evidence")
    for check in certificate.checks:
        style = {"holds": "green", "differs": "yellow", "FAILS": "bold red"}.get(check.status, "dim")
        checks.add_row(check.name, Text(check.status, style), check.statement, check.evidence)
    meanings = _folded("points", "point", "shape", "meaning")
    for point in model.points.values():
        refused = certificate.refused.get(point.name)
        meaning = point.meaning if point.absent is None else f"absent: {point.absent}"
        meanings.add_row(point.name, point.shape, meaning if refused is None else f"REFUSED: {refused}")
    built = [Text(f"built as {stack.architecture}", "dim") for stack in model.stacks.values()]
    differing = [f"{hook.hook} ≠ {hook.point}" for hook in certificate.lens if hook.verdict == "differs"]
    hooks = "TransformerLens hooks that mean something else on this model (attnmech's own points have the right values)"
    return Summary(
        "check",
        model,
        [f"{capitalised(certificate.verdict)}."],
        Rows("Checks", frame, [Column(str(name)) for name in frame.columns]),
        notes=[certificate.left_out] if certificate.left_out else [],
        files=files,
        more={"ok": certificate.ok, "points": points},
        shown=[*built, checks, *([f"{hooks}: {', '.join(differing)}"] if differing else []), meanings],
    )


def _folded(title: str, *columns: str) -> Printed:
    table = Printed(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def report_summary(model: "HookedModel", result: "Report", outputs: "Outputs") -> Summary:
    """The findings of the page, and the terms and residuals of each layer."""
    frame: "pd.DataFrame" = result.to_frame()
    names = map(str, frame.filter(like="_share"))
    shares = [Column(name, name.removesuffix("_share"), "share") for name in names]
    shown = Rows(
        "Mean share of each term in a row's highest score; largest residual",
        frame,
        (*[Column("text")] * bool(result.further), LAYER, *shares, Column("residual", unit="of a score")),
    )
    sizes = [
        f"The page has {path.stat().st_size / 1e6:.1f} MB and opens offline."
        for path in outputs.paths
        if path.suffix.lower() == ".html"
    ]
    findings = [f"{question}. {finding}" for question, finding in result.findings.items()]
    return Summary("report", model, findings, shown, (*result.notes, *sizes), outputs.names)


def atlas_summary(model: "HookedModel", result: "Atlas", outputs: "Outputs") -> Summary:
    """The findings of an atlas, and its heads."""
    columns = (LAYER, HEAD, Column("types"), *columns_of(result.focus.STATISTICS.printed))
    shown = Rows("Types of heads, and where they attend", result.to_frame(), columns)
    findings = [f"{question}. {finding}" for question, finding in result.findings.items()]
    return Summary("atlas", model, findings, shown, result.notes, outputs.names)


def rows_of(title: str, result: "Table", by: str, *further: Column, ascending: bool = False) -> Rows:
    """The printed statistics of a result; `further` are columns before them, and `by` orders the rows."""
    frame = result.to_frame().sort_values(by, ascending=ascending)
    statistics = [result[name].statistic for name in result.quantities if result.STATISTICS[name].printed]
    return Rows(title, frame, (LAYER, HEAD, *further, *columns_of(statistics)))


def focus_rows(result: "AttentionFocus") -> Rows:
    """Where heads attend."""
    return rows_of("Heads by how often they attend most to the first token", result, "first_top")


def with_ends(column: Column) -> tuple[Column, ...]:
    """A column, and the ends of its interval."""
    return column, Column(f"{column.name}_low", "low", "95 %"), Column(f"{column.name}_high", "high", "95 %")


def type_rows(result: "HeadTypes") -> Rows:
    """The claimed types of heads."""
    return Rows(
        "Claimed types of heads, the highest score first",
        result.to_frame(),
        (
            LAYER, HEAD, Column("type"), Column("score", unit="mean p"), Column("baseline", unit="mean p"),
            Column("score_low", "low", "95 %"), Column("score_high", "high", "95 %"),
        ),
    )  # fmt: skip


def effect_rows(result: "Effects") -> Rows:
    """The effects of a sweep over heads or kv heads, or of patching them."""
    columns: list[Column] = []
    for name in result.quantities:
        columns += with_ends(*columns_of([result[name].statistic]))
        columns += [Column("clear"), Column("one_text", "one text", "> half")] if name == "effect" else []
    frame = result.strongest(max(1, len(result.to_frame())))
    title = f"{'Kv heads' if 'kv_head' in frame else 'Heads'} by the size of their effect, clear ones first"
    return Rows(title, frame, (LAYER, HEAD, Column("kv_head"), *columns))


def null_rows(result: "NullAttention") -> Rows:
    """The verdicts on heads that may rest on one token."""
    return rows_of("Heads by their attention to the target", result, "sink_mass", Column("verdict"))


def kv_rows(result: "KVScores") -> Rows:
    """What kv heads need of their cache."""
    return rows_of("Kv heads by how much they need the whole cache", result, "keep", Column("kv_head"), Column("keep"))


def drift_rows(result: "ResidualDrift") -> Rows:
    """How far tokens move, layer by layer."""
    similarity = columns_of([result.STATISTICS[result.similarity.replace(" ", "_")]])
    return rows_of("Tokens against their own embeddings, layer by layer", result, "layer", *similarity, ascending=True)


def claim_rows(result: "HeadClaim") -> Rows:
    """What each head of a claim adds to the harm."""
    from ..results.sentences import unit_of

    return Rows(
        "How much worse each head's removal makes the metric, given that of the others",
        result.by_head(),
        (LAYER, HEAD, *with_ends(Column("adds", unit=unit_of(result.metric)))),
    )


def key_rows(result: "ScoreDecomposition", head: int, query: int) -> Rows:
    """The visible keys of one row of a single layer, with the terms of their scores."""
    import pandas as pd

    numbers = result.numbers()
    row = (0, head, query)
    terms = numbers.terms_of_row(*row)
    columns = {"key": range(len(numbers.key_tokens)), "token": numbers.key_tokens, "attention": numbers.pattern[row],
               "score": numbers.scores[row], **terms}  # fmt: skip
    frame = pd.DataFrame(columns).dropna(subset="score").sort_values("attention", ascending=False)
    scores = [Column(name, unit="score") for name in ("score", *terms)]
    return Rows(
        "Keys by their attention", frame, (Column("key"), Column("token"), Column("attention", unit="p"), *scores)
    )


def example_rows(result: "HeadExamples", token: str, at: str) -> tuple[Rows, str]:
    """The strongest rows with a token as their query or as the key that they attend to most, and a sentence."""
    frame = result.to_frame()
    # The key that counts is neither the first token nor the query itself.
    places = [
        next((place for place, key in enumerate(keys) if key not in (0, position)), None)
        for keys, position in zip(frame["keys"], frame.position, strict=True)
    ]
    keys, weights = (
        [None if place is None else values[place] for place, values in zip(places, frame[column], strict=True)]
        for column in ("key_tokens", "weights")
    )
    frame["key"], frame["key_weight"] = keys, weights
    wanted = token.strip().casefold()
    words = frame[at].map(lambda word: isinstance(word, str) and word.strip().casefold() == wanted)
    matching = frame[words.astype(bool)].sort_values("value", ascending=False)
    heads = Counter(zip(matching.layer, matching["head"], strict=True))
    named = ", ".join(f"L{layer}H{head} ({count})" for (layer, head), count in heads.most_common(5))
    attend = "attend from" if at == "query" else "attend most, apart from the first token and the query itself, to"
    finding = f"{len(matching)} of the {len(frame)} strongest rows {attend} {token!r}"
    finding += f"; by head: {named}." if named else "."
    shown = Rows(
        f"Strongest rows that {attend} the token, by value",
        matching,
        (LAYER, HEAD, Column("value"), Column("query"), Column("key"), Column("key_weight", unit="p"), Column("window"),
         Column("text"), Column("position")),
    )  # fmt: skip
    return shown, finding


def embed_rows(result: "JointEmbedding") -> Rows:
    """How well distances explain scores."""
    return Rows(
        "Heads in the order of how well distances explain their scores: correlation closest to −1 first",
        result.to_frame().sort_values("correlation"),
        (LAYER, HEAD, *columns_of(result.STATISTICS.printed), Column("disparity", unit="‖k‖ / ‖q‖")),
    )
