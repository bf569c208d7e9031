"""The page about one text: several results behind one shell."""
