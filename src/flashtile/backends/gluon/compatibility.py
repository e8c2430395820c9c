"""Words of Gluon that have other names from one release of Triton to the next, and one that 3.6 has no name for."""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# A barrier of the threads of one role.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # since 3.7, and until 3.6
# Have the copy engine bring a tile from memory, and take one there.
fetch_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # since 3.8
send_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@builtin
def add_tile(desc: Any, at: Any, tile: Any, _semantic: Any = None) -> None:
    """Have it add a tile of shared memory to one in memory."""
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, tile.handle)


@builtin
def reinterpreted(tile: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """The same shared memory as a tile of another dtype, shape or layout."""
    reinterpret = tile.reinterpret if hasattr(tile, "reinterpret") else tile._reinterpret  # since 3.9
    return reinterpret(dtype, shape, layout, _semantic=_semantic)
