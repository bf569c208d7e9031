"""The atlas: what every head of a model does over a corpus, on one page."""
