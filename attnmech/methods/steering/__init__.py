"""What changes when a direction is added to the stream."""
