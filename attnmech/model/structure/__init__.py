"""The structure of an architecture: from the table of families, or read from its modules."""
