"""A column of layers: its points, blocks and ledger."""
