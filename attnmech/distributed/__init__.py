"""Beyond one process: Ray's workers carry out the batches of a run, with the states and the code of a local one."""
