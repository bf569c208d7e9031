"""Statistics of heads from a model in service: sums that a serving engine's own worker takes, proved by its output."""
