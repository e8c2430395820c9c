"""Benchmarks: cases, timing, peers, records and their tables."""
