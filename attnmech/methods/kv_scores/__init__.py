"""Scores of kv heads: what they need of their cache."""
