"""Benchmarks: cases, timing, peers, and the records they leave."""
