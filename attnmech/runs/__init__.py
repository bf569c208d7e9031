"""Carries out runs: batches of a corpus, sweeps of interventions, and journals from which interrupted runs resume."""
