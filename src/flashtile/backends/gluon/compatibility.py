"""Names that differ between Triton releases, and an instruction that Gluon of 3.6 does not expose."""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# A barrier of all threads of a warp-specialized role.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # since 3.7, and until 3.6
# Asynchronous copies of a tile from and to global memory.
fetch_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # since 3.8
send_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@builtin
def add_tile(desc: Any, at: Any, tile: Any, _semantic: Any = None) -> None:
    """Asynchronously add a tile of shared memory to one in global memory."""
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, tile.handle)


@builtin
def reinterpreted(tile: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """The same shared memory as a tile of another dtype, shape or layout."""
    reinterpret = tile.reinterpret if hasattr(tile, "reinterpret") else tile._reinterpret  # since 3.9
    return reinterpret(dtype, shape, layout, _semantic=_semantic)
