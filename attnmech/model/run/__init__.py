"""A model to run: passes, gradients, generation."""
