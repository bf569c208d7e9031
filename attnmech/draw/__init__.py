"""Views and figures of arrays with their tokens; nothing here knows a model.

>>> import numpy as np
>>> from attnmech.draw import sentence_view
>>> sentence_view(np.array([[[[1.0, 0.0], [0.25, 0.75]]]]), ["Hi", " there"], layers=[3])
View('Sentence view', 0.00 MB; shows itself in a notebook, or .write_html(path))
"""

from ..basics.lazy_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
