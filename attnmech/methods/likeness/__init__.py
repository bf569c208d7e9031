"""Finds heads that attend alike, and heads unlike all others."""
