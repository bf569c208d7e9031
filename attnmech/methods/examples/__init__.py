"""Example rows of every head: the strongest, some at random, and some of each fifth of its rows."""
