"""An emulator of a Hopper GPU on a CPU: it runs the Hopper kernels as Python, a block of numbers at a time.

Roles of a program take turns in a seeded order. Asynchronous copies and products are done as late, or as soon, as that
order decides; until then their result holds NaN. So a missing wait always gives a wrong result for some seed. The
emulator raises an error if no role can continue, if more threads arrive at a barrier than it counts, if one thread acts
for others that it has not synchronized with, if an address is outside of its tensor, and if a copy or a product reads
data without a fence.

It cannot check warps of one role against each other, because they run as one, nor layouts of registers, which
test_targets.py compiles.
"""
