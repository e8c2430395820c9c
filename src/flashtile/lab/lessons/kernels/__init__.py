"""The kernels of the lessons: three in Triton, one in CUDA C."""
