"""Tests whether attention to a sink, such as the first token, has an effect on the model's output."""
