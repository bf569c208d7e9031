"""The certificate: compares what attnmech reads from a model with what the model computes."""
