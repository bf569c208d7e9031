"""Compares two models, or two prompts, head by head."""
