"""Describes changes to a run as plain values: interventions."""

from .intervention import HEAD_POINTS as HEAD_POINTS
from .intervention import Intervention as Intervention
from .selection import Head as Head
from .selection import Heads as Heads
from .selection import Positions as Positions
from .selection import checked_heads as checked_heads
from .values import Values as Values
