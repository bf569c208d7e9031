"""Results of the checkpoints of a training run, side by side."""
