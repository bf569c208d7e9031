"""Reads a finished stream: logits, writers, layers without attention."""
