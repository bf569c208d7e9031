"""Attention between groups of words, compared with attention to matched words."""
