"""Answers: what a model writes with and without an edit."""
