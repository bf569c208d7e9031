"""Whether a circuit alone does what the model does."""
