"""What do compiled loops need that numba has not? A ticket that one thread alone gets, and memory at an address.

Imported where numba is installed.
"""

from typing import Any, Final

from numba import int64, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array


def _take(_: Any, tickets: Any) -> Any:
    """Takes a ticket: adds one to the first number of an array, at once for all threads, and returns it."""

    def take(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        array = make_array(tickets)(context, builder, arguments[0])  # type: ignore[no-untyped-call]
        return builder.atomic_rmw("add", array.data, context.get_constant(int64, 1), "monotonic")

    return int64(tickets), take


def _point(_: Any, address: Any) -> Any:
    """A pointer to the 64-bit words at an address."""
    pointer = types.CPointer(types.uint64)  # type: ignore[no-untyped-call]

    def point(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(address), point


taken: Final[Any] = intrinsic(_take)
words_at: Final[Any] = intrinsic(_point)
