"""Fuzzing by the public functions: random problems, look-alike calls, strange tensors. python -m tests.fuzz MINUTES"""
