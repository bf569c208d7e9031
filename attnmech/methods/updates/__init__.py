"""What heads write into the residual stream."""
