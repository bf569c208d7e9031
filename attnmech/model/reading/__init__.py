"""What is read from a finished stream: logits, writers, other layers."""
