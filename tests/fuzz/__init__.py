"""Fuzzing of the public functions: random problems, similar calls, unusual tensors. python -m tests.fuzz MINUTES"""
