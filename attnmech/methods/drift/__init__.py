"""Measures how far tokens move from their embeddings, layer by layer."""
