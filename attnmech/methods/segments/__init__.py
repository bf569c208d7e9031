"""Attention between the parts of a text (sentences, lines, spans), and what each part contributes."""
