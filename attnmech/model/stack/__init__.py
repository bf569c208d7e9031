"""The layers of one stack: points, blocks and score ledger."""
