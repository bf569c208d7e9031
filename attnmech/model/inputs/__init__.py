"""Makes a model's inputs: tokens, images, recordings."""
