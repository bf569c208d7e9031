"""The page that answers: it reads what a user types, and switches off the heads that he selects."""
