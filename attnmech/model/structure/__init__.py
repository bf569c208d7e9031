"""Finds how a model is built: from the table of families, or by reading its modules."""
