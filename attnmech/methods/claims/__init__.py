"""Tests a claim about heads against controls that are drawn for it."""
