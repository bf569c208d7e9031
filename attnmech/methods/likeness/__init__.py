"""Heads that attend alike, and heads unlike all others."""
