"""Measures what changes when heads are ablated: one at a time, in sets, in pairs, and step by step."""
