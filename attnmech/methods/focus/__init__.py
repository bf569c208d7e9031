"""Measures where heads attend."""
