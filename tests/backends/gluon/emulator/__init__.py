"""A GPU of Hopper's kind on a CPU: it runs the Hopper kernels as they are written, a block of numbers at a time.

Roles of a program take turns in an order drawn from a seed. What a GPU does meanwhile, copies and products, is done as
late, or as soon, as that order has it; until then there is NaN where the result will be. So what a kernel does not wait
for is wrong here, and not only on some days. It stops where nobody can go on, where more threads come to a barrier than
it counts, where one thread speaks for others that it has not met, where an address lies outside of its tensor, and
where a copy or a product reads what no fence has made visible to it.

What it cannot see: warps of one role run as one, and layouts of registers, which test_targets.py has compiled, are
taken for granted.
"""
