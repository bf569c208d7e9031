"""What a head writes when it reads a token: its OV circuit from the embedding to the logits."""
