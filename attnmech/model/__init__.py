"""Models: the one folder that knows transformers and TransformerLens."""
