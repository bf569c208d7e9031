"""Patching shows which heads, positions and paths carry the difference between two prompts."""
