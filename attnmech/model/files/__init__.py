"""Loads models from hub names, folders, GGUF files, adapters and bridges."""
