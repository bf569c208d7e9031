from .batch import Batch as Batch
from .maths.intervals import TextMeans as TextMeans
from .model.attention.observed import LayerEnd as LayerEnd
from .model.attention.observed import RowBlock as RowBlock
from .runs.reducer import Run as Run
from .runs.reducer import Source as Source
