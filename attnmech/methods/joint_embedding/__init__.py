"""Queries and keys as points of one space, and what groups them."""
