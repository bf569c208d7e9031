"""Results of a training run's checkpoints, side by side."""
