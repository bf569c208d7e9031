"""What goes into a model: tokens, images, recordings."""
