"""Joint embeddings: queries and keys as points in one space."""
