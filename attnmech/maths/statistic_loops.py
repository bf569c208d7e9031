"""The compiled loops of `focus.py` and `update_statistics.py`; imported where numba is installed.

Statistics stand in the order of `STATISTICS` there. Slices are of heads and texts: a number is head · texts + text.
"""

import math

from numba import njit

from .loop_parts import taken
from .row_loops import compiled


@njit(nogil=True, cache=True)
def shared_focus_rows(edges, tickets, arguments, _):
    """`focus_rows` of slices that nobody has taken yet."""
    part = taken(tickets)
    while part < len(edges) - 1:
        focus_rows(edges[part], edges[part + 1], *arguments)
        part = taken(tickets)


@njit(nogil=True, cache=True)
def shared_update_rows(edges, tickets, arguments, _):
    """`update_rows` of such slices."""
    part = taken(tickets)
    while part < len(edges) - 1:
        update_rows(edges[part], edges[part + 1], *arguments)
        part = taken(tickets)


@njit(nogil=True, cache=True)
def focus_rows(
    start, stop, key, first, second, entropy, distance, masses, begins, scale, valid, classes, values, sums
):  # fmt: skip
    """The statistics of all rows of some heads of some texts, and their sums by class of row."""
    texts, kinds = classes.shape[:2]
    for each in range(start, stop):
        head, text = each // texts, each % texts
        highest, best, next_best = key[text, head], first[text, head], second[text, head]
        # One by one: of a slice over several, rows would not be known to be contiguous.
        tops = (values[0, head, text], values[1, head, text], values[2, head, text], values[3, head, text],
                values[4, head, text])  # fmt: skip
        where = valid[0, text], valid[1, text], valid[2, text], valid[3, text], valid[4, text]
        _tops(highest, best, next_best, begins[text], where, tops)
        # `RowMeasures.masses` begin with the first token's.
        for place, mass in enumerate((1, 0, 2, 3)):
            _where(masses[mass, text, head], valid[5 + place, text], values[5 + place, head, text])
        _concentration(best, next_best, valid[9, text], values[9, head, text])
        _where(entropy[text, head], valid[10, text], values[10, head, text])
        _scaled(entropy[text, head], scale[text], valid[11, text], values[11, head, text])
        _where(distance[text, head], valid[12, text], values[12, head, text])
        for kind in range(kinds):
            members = classes[text, kind]
            begin, end = _ends(members)
            for statistic in range(len(values)):
                row = values[statistic, head, text]
                sums[statistic, kind, head, text] = _sum(row[begin:end], members[begin:end])


@compiled
def _tops(key, first, second, begin, defined, found):
    """Whether the highest key is the row's own, the first, the one before, another, or one of several."""
    none, one = first.dtype.type(0), first.dtype.type(1)
    has_own, has_first, has_previous, has_others, has_choice = defined
    own, at_first, previous, elsewhere, ties = found
    for row in range(len(key)):
        tied = first[row] == second[row]
        itself, start, before = key[row] == row, key[row] == begin, key[row] == row - 1
        own[row] = one if has_own[row] and itself and not tied else none
        at_first[row] = one if has_first[row] and start and not tied else none
        previous[row] = one if has_previous[row] and before and not tied else none
        elsewhere[row] = one if has_others[row] and not (itself or start or before or tied) else none
        ties[row] = one if has_choice[row] and tied else none


@compiled
def _where(given, defined, found):
    none = given.dtype.type(0)
    for row in range(len(given)):
        found[row] = given[row] if defined[row] else none


@compiled
def _concentration(first, second, defined, found):
    none = first.dtype.type(0)
    for row in range(len(first)):
        found[row] = first[row] - second[row] if defined[row] else none


@compiled
def _scaled(given, scale, defined, found):
    none = given.dtype.type(0)
    for row in range(len(given)):
        found[row] = given[row] * scale[row] if defined[row] else none


@compiled
def _ends(members):
    """The first member of a class, and the row after its last; (0, 0) without members."""
    begin, end = len(members), 0
    for row in range(len(members)):
        if members[row]:
            begin, end = min(begin, row), row + 1
    return min(begin, end), end


@compiled
def _sum(values, members):
    total = 0.0
    for row in range(len(values)):
        total += values[row] if members[row] else 0.0
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def update_rows(
    start, stop, aligned, key, real, begins, by_token,
    norm, product, stream, of_read, product_of_read, stream_of_read, values, valid,
):  # fmt: skip
    """The statistics of all rows of some heads of some texts, and where they are defined."""
    (texts, rows), tokens = real.shape, stream_of_read.shape[1]
    number = norm.dtype.type
    none, one = number(0), number(1)
    for each in range(start, stop):
        head, text = each // texts, each % texts
        for row in range(rows):
            factor, x, top = by_token[text, row], stream[text, row], key[text, head, row]
            is_real = real[text, row] and x > none
            size = norm[text, head, row] * factor
            magnitude = size / x
            orientation = _cosine(product[text, head, row] * factor, size, x)
            seen = is_real and top >= 0
            at_self = aligned and top == row
            at_first = top == begins[text] and not at_self
            _put(values, valid, 0, head, text, row, magnitude, is_real)
            _put(values, valid, 1, head, text, row, orientation, is_real and size > none)
            _put(values, valid, 2, head, text, row, magnitude * orientation, is_real)
            aside = number(math.sqrt(max(one - orientation * orientation, none)))
            _put(values, valid, 3, head, text, row, magnitude * aside, is_real)
            at = min(max(top, 0), tokens - 1)
            y, of_target = stream_of_read[text, at], of_read[text, head, at]
            there = seen and top < tokens and y > none
            _put(values, valid, 4, head, text, row, of_target / y * factor, there)
            towards = _cosine(product_of_read[text, head, at], of_target, y)
            _put(values, valid, 5, head, text, row, towards, there and of_target > none)
            _put(values, valid, 6, head, text, row, magnitude, seen and at_self)
            _put(values, valid, 7, head, text, row, magnitude, seen and at_first)
            _put(values, valid, 8, head, text, row, magnitude, seen and not at_self and not at_first)


@njit(nogil=True, cache=True, inline="always")
def _put(values, valid, statistic, head, text, row, value, defined):
    valid[statistic, head, text, row] = defined
    values[statistic, head, text, row] = value if defined else values.dtype.type(0)


@njit(nogil=True, cache=True, error_model="numpy")
def _cosine(product, one, other):
    """As `updates.cosine`."""
    norms = one * other
    if not norms > 0:
        return 0.0
    return min(max(product / norms, -1.0), 1.0)
