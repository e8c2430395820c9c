"""Scratch memory: its parts do not overlap, and are where their Argument says."""

from __future__ import annotations

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flashtile.backends.gpu.scratch import UNIT, Scratch, tail  # noqa: E402


def test_parts() -> None:
    scratch = Scratch(3, torch.device("cpu"))
    wanted = [((5,), torch.int32), ((2, 3, 70), torch.float32), ((0,), torch.int32), ((1, 9), torch.float64)]
    parts = [scratch.part(*each) for each in wanted]
    memory = scratch.maker()()
    found = [part.of(memory) for part in parts]
    for (shape, dtype), part, x in zip(wanted, parts, found, strict=True):
        assert x.shape == shape and x.dtype == dtype and x.is_contiguous()
        assert part.position == 3 and part.offset % UNIT == 0
        if x.numel():
            assert x.data_ptr() == memory.data_ptr() + part.offset
    places = [(part.offset, part.offset + x.nbytes) for part, x in zip(parts, found, strict=True)]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places)) and places[-1][1] <= memory.nbytes


def test_the_tail_of_a_part() -> None:
    scratch = Scratch(0, torch.device("cpu"))
    scratch.part((3,), torch.float32)
    flags = scratch.part((7,), torch.int32)
    rest, memory = tail(flags, 5), scratch.maker()()
    assert rest.of(memory).shape == (2,) and rest.of(memory).data_ptr() == memory.data_ptr() + rest.offset
    assert rest.of(memory).data_ptr() == flags.of(memory)[5:].data_ptr()
