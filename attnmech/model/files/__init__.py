"""Where models come from: hub names, folders, GGUF files, adapters, bridges."""
