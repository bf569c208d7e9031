"""Compares two models text by text."""
