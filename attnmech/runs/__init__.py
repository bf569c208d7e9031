"""How runs are carried out: corpora in batches, sweeps of interventions, journals of runs that may be interrupted."""
