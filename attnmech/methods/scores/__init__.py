"""Attention scores as exact sums of terms."""
