"""Modules of the user's own."""
