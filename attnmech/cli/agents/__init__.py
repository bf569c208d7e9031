"""Serves the questions of the command line to agents, over the Model Context Protocol."""
