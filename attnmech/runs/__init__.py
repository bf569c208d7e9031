"""How work is carried out: corpora read as batches, and journals of runs that may be cut off."""
