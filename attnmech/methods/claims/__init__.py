"""Tests a claim about heads against control sets of heads."""
