"""The page about one text, which joins several results."""
