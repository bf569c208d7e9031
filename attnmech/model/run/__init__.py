"""Runs a model: passes, gradients, generation."""
