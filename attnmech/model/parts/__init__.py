"""The parts of a layer: weights, positions, norms, masks."""
