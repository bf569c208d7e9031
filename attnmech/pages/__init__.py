"""The page about one text, which combines several results."""
