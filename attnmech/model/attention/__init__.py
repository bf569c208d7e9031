"""The one softmax, what acts on it, and how a model's modules reach it."""
