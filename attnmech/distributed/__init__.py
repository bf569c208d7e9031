"""Runs batches in Ray's worker processes, with the states and the code of a local run."""
