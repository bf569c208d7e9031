"""Measures how information flows through attention from token to token."""
