"""Classifies each head by the known types of heads."""
