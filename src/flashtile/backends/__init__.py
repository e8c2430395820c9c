"""Backends: each runs a Problem forward and backward, independently of the others."""
