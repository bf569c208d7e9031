"""When is the prediction made? The stream read by the unembedding, layer by layer."""
