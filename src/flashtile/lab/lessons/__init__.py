"""The lessons: short files that run, print what they do, and measure it. Begin with online_softmax.py."""

from flashtile.lab.lessons.lesson import Lesson

LESSONS = (
    Lesson(
        "online-softmax",
        "Online softmax",
        "One row of scores, seen tile by tile: a maximum and a sum are all there is to keep.",
    ),
    Lesson(
        "tiled-attention",
        "Tiled attention beside standard attention",
        "The whole algorithm in forty lines of NumPy: the same answer, and no N x N matrix.",
    ),
    Lesson(
        "launches",
        "Three launches against one",
        "Trips through memory, counted; and why a Python loop over array calls is not flash attention.",
    ),
    Lesson(
        "vector-add",
        "The GPU's way to add two vectors",
        "A block, a bounds mask, and how long a vector must be before a launch is worth its price.",
        needs=("triton",),
        kernel="vector_add.py",
    ),
    Lesson(
        "tiled-matmul",
        "Matrix product by tiles",
        "A block is loaded once and used many times: with small numbers, counted, then in Triton.",
        needs=("triton",),
        kernel="tiled_matmul.py",
    ),
    Lesson(
        "fused-attention",
        "Flash attention in Triton",
        "The tiled loop as one GPU kernel written in Python, causal included.",
        needs=("triton",),
        kernel="fused_attention.py",
    ),
    Lesson(
        "cuda-attention",
        "Flash attention in CUDA C",
        "The same loop by hand: tiles in shared memory, statistics in registers, a single write.",
        needs=("gpu",),
        kernel="cuda_attention.cu",
    ),
    Lesson(
        "fa1-vs-fa2",
        "FlashAttention 1 and 2",
        "Columns of tiles against rows of tiles: scattered writes against one write a block.",
    ),
)
