"""What to change in a run: interventions as plain values."""

from .intervention import HEAD_POINTS as HEAD_POINTS
from .intervention import Head as Head
from .intervention import Heads as Heads
from .intervention import Intervention as Intervention
from .intervention import Positions as Positions
from .intervention import Values as Values
from .intervention import checked_heads as checked_heads
