"""Computes attention in one place, applies edits there, and connects the modules of every model to it."""
