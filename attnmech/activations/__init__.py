"""What comes out of a run."""
