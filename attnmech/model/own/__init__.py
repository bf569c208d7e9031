"""Reads and runs a user's own modules."""
