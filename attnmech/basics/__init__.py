"""Helpers for every other folder: arguments, axes, fields, files, messages, signatures."""
