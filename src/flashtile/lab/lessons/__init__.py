"""The lessons: short programs that print what they do, and measure it. Start with online_softmax.py."""

from flashtile.lab.lessons.lesson import Lesson

LESSONS = (
    Lesson(
        "online-softmax",
        "Online softmax",
        "One row of scores, seen tile by tile: only a maximum and a sum have to be kept.",
    ),
    Lesson(
        "tiled-attention",
        "Tiled and standard attention",
        "The whole algorithm in forty lines of NumPy: the same result, and no N x N matrix.",
    ),
    Lesson(
        "launches",
        "Three launches and one",
        "Trips through memory, counted; and why a Python loop of array calls is not flash attention.",
    ),
    Lesson(
        "vector-add",
        "Adding two vectors on a GPU",
        "A block, a bounds mask, and the length from which a vector is worth a launch.",
        needs=("triton",),
        kernel="vector_add.py",
    ),
    Lesson(
        "tiled-matmul",
        "A tiled matrix product",
        "A block is loaded once and used many times: with small numbers, counted, then in Triton.",
        needs=("triton",),
        kernel="tiled_matmul.py",
    ),
    Lesson(
        "fused-attention",
        "Flash attention in Triton",
        "The tiled loop as one GPU kernel written in Python, with a causal mask.",
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
        "Columns of tiles or rows of tiles: scattered writes, or one write per block.",
    ),
)
