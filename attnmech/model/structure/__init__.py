"""How is an architecture built? The table of families, and what its modules say."""
