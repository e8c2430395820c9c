"""From a Problem to launches: which tiles, which grid, which arguments."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from flashtile import dropout
from flashtile.backends.triton import tuning
from flashtile.backends.triton.arguments import Lengths, Pairs, Rows, Rule
from flashtile.backends.triton.backward import dbias_kernel, delta_kernel, dkdv_kernel, dq_kernel
from flashtile.backends.triton.forward import forward_kernel
from flashtile.backends.triton.merge import merge_kernel
from flashtile.backends.triton.tuning import Config
from flashtile.band import FAR
from flashtile.problem import Problem
from flashtile.results import Gradients

NEAR = 1 << 29  # "no limit" in 32 bits: sums of two still fit
INTERPRETED = bool(triton.knobs.runtime.interpret)
NO_PAIRS = Pairs(None, 0, 0, 0, 0)
MOST_SPLITS = 64


def forward(problem: Problem) -> tuple[Any, Any]:
    """Output and lse."""
    p = problem
    q, k, v = (_contiguous(x) for x in (p.q, p.k, p.v))
    real = getattr(torch, p.accumulator)
    out = _empty(p, p.out_shape(), getattr(torch, p.out_dtype))
    lse = _empty(p, p.out_shape()[:-1], real)
    if out.numel() == 0:
        return out, lse
    config = _config("forward", p)
    packed_heads = p.group if _few_rows(p, config) else 1
    if packed_heads * p.n_q <= tuning.DECODE.block_q and not p.packed:
        config = tuning.DECODE._replace(block_k=min(tuning.DECODE.block_k, config.block_k))
    tiles = _tiles(p, p.n_q * packed_heads, q.shape[2], config.block_q)
    programs = tiles * (p.heads // packed_heads) * (1 if p.packed else p.sequences)
    splits = _splits(p, programs, config, q.device)
    parts, part_lse = (out, lse), None
    if splits > 1:
        part = q.new_empty((splits, *out.shape), dtype=real)
        part_lse = q.new_empty((splits, *lse.shape), dtype=real)
        parts = (part[0], part_lse[0])
    forward_kernel[(tiles, p.heads // packed_heads, (1 if p.packed else p.sequences) * splits)](
        *(_rows(x, p) for x in (q, k, v)),
        _descriptor(k, config, config.block_k, p.dim),
        _descriptor(v, config, config.block_k, p.dim_v),
        *(_rows(x, p) for x in parts),
        None if p.sink is None else p.sink.contiguous(),
        _rule(p),
        _lengths(p),
        0 if splits == 1 else part.stride(0),
        0 if part_lse is None else part_lse.stride(0),
        PACKED_HEADS=packed_heads,
        SPLITS=splits,
        FIRST_STRETCH=0 if p.band.left < FAR else 1,
        **_constants(p, config),
    )
    if splits > 1 and part_lse is not None:
        merge_kernel[(lse.numel(),)](
            Rows(part, *part.stride()[1:4]),
            Rows(part_lse, *part_lse.stride()[1:4]),
            Rows(out, *out.stride()[:3]),
            Rows(lse, *lse.stride()),
            part.stride(0),
            part_lse.stride(0),
            out.shape[2],
            p.heads,
            SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits),
            DIM_V=p.dim_v,
            BLOCK_DV=_block(p.dim_v),
        )
    return out, lse


def backward(problem: Problem, dout: Any, out: Any, lse: Any, dlse: Any, *, bias_grad: bool = True) -> Gradients:
    """Gradients from the saved output and lse."""
    p = problem
    q, k, v, dout, out = (_contiguous(x) for x in (p.q, p.k, p.v, dout, out))
    real = getattr(torch, p.accumulator)
    delta = q.new_empty(lse.shape, dtype=real)
    dq, dk, dv = (_empty(p, x.shape, x.dtype) for x in (q, k, v))
    dbias = None if p.bias is None or not bias_grad else q.new_zeros(p.bias.shape, dtype=real)
    if q.numel():
        delta_kernel[(triton.cdiv(q.shape[2], tuning.DELTA_ROWS), p.heads, q.shape[0])](
            *(None if x is None else Rows(x, *x.stride()[:3]) for x in (dout, out, lse, dlse, delta)),
            q.shape[2],
            DIM_V=p.dim_v,
            BLOCK_DV=_block(p.dim_v),
            BLOCK=tuning.DELTA_ROWS,
        )
    inputs = tuple(_rows(x, p) for x in (q, k, v, dout))
    statistics, rest = (_rows(lse, p), _rows(delta, p)), (_rule(p), _lengths(p))
    batch = 1 if p.packed else p.sequences
    config = _config("dkdv", p)
    if k.numel():
        dkdv_kernel[(_tiles(p, p.n_k, k.shape[2], config.block_k), p.kv_heads, batch)](
            *inputs,
            _descriptor(q, config, config.block_q, p.dim),
            _descriptor(dout, config, config.block_q, p.dim_v),
            *statistics,
            _rows(dk, p),
            _rows(dv, p),
            *rest,
            **_constants(p, config),
        )
    config = _config("dq", p)
    if q.numel():
        dq_kernel[(_tiles(p, p.n_q, q.shape[2], config.block_q), p.heads, batch)](
            *inputs,
            _descriptor(k, config, config.block_k, p.dim),
            _descriptor(v, config, config.block_k, p.dim_v),
            *statistics,
            _rows(dq, p),
            *rest,
            FIRST_STRETCH=0 if p.band.left < FAR else 1,
            **_constants(p, config),
        )
    if dbias is not None and dbias.numel():
        config = tuning.DBIAS if max(p.dim, p.dim_v) <= 128 else tuning.DBIAS._replace(block_q=16, block_k=16)
        names = ("SHARE_SEQUENCES", "SHARE_HEADS", "SHARE_ROWS", "SHARE_KEYS")
        shared = dict(zip(names, (n == 1 for n in dbias.shape), strict=True))
        dbias_kernel[
            (
                triton.cdiv(dbias.shape[2], config.block_q),
                triton.cdiv(dbias.shape[3], config.block_k),
                dbias.shape[0] * dbias.shape[1],
            )
        ](*inputs, *statistics, _pairs(dbias), *rest, p.heads, *dbias.shape[2:], **shared, **_constants(p, config))
    return Gradients(dq, dk, dv, dbias, _dsink(p, lse, delta, real))


def _dsink(p: Problem, lse: Any, delta: Any, real: Any) -> Any:
    """-sum over rows of exp(sink - lse) * delta; an empty row has no part in it."""
    if p.sink is None:
        return None
    weight = torch.exp(p.sink.to(real)[:, None] - lse)
    return -torch.where(torch.isneginf(lse), torch.zeros_like(delta), weight * delta).sum((0, 2))


def _config(kernel: str, p: Problem) -> Config:
    pairs = p.mask is not None or p.bias is not None
    return tuning.choose(kernel, p.dim, p.dim_v, p.q.element_size(), _capability(p.q.device), pairs)


@cache
def _capability(device: Any) -> tuple[int, int] | None:
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return torch.cuda.get_device_capability(device) if nvidia else None


def _few_rows(p: Problem, config: Config) -> bool:
    """Whether the query heads of a group should share the rows of a tile, which they would leave half empty."""
    return p.group > 1 and not p.packed and p.n_q * 2 <= config.block_q


def _splits(p: Problem, programs: int, config: Config, device: Any) -> int:
    """Shares of the keys, where queries alone leave processors idle. By shape and device only: bits stay the same."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
    wanted = processors // max(programs, 1)
    return max(1, min(wanted, MOST_SPLITS, p.n_k // (4 * config.block_k)))


def _tiles(p: Problem, rows: int, total: int, block: int) -> int:
    """Tiles along the rows. Packed sequences may begin within a tile, so each of them may need one more."""
    return total // block + p.sequences if p.packed else int(triton.cdiv(rows, block))


def _empty(p: Problem, shape: tuple[int, ...], dtype: Any) -> Any:
    """A tensor of this shape; packed ones lie as (rows, heads, ...) in memory."""
    if not p.packed:
        return p.q.new_empty(shape, dtype=dtype)
    return p.q.new_empty((1, shape[2], shape[1], *shape[3:]), dtype=dtype).swapaxes(1, 2)


def _contiguous(x: Any) -> Any:
    """x with contiguous columns."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _rows(x: Any, p: Problem) -> Rows:
    return Rows(x, 0 if p.packed else x.stride(0), x.stride(1), x.stride(2))


def _pairs(x: Any) -> Pairs:
    if x is None:
        return NO_PAIRS
    return Pairs(x, *(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)))


def _descriptor(x: Any, config: Config, rows: int, dim: int) -> Any:
    """For the copy engine, where the table asks for it and the tensor allows it: all strides multiples of 16 bytes."""
    item = x.element_size()
    if not config.descriptors or x.data_ptr() % 16 or any(s * item % 16 or s == 0 for s in x.stride()[:3]):
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, _block(dim)])


def _rule(p: Problem) -> Rule:
    alibi: tuple[Any, int, int] = (None, 0, 0)
    if p.alibi is not None:
        alibi = (p.alibi, 0 if p.alibi.shape[0] == 1 else p.alibi.stride(0), p.alibi.stride(1))
    drop: tuple[Any, int, int, int] = (None, 0, 0, 0)
    if p.dropout:
        drop = (_signed(p.seed), dropout.threshold(p.dropout), _bits(1 / (1 - p.dropout)), p.heads)
    return Rule(
        _bits(p.scale),
        None if p.scale > 0 else 0,
        _bits(p.softcap) if p.softcap else None,
        _limit(p.band.left),
        _limit(p.band.right),
        None if p.align_end else _limit(p.band.offset),
        *_pairs(p.mask),
        *_pairs(p.bias),
        *alibi,
        *drop,
    )


def _lengths(p: Problem) -> Lengths:
    return Lengths(p.n_q, p.n_k, p.sequences, p.cu_q, p.cu_k, p.kv_lengths)


def _constants(p: Problem, config: Config) -> dict[str, Any]:
    return {
        "GROUP": p.group,
        "DIM": p.dim,
        "DIM_V": p.dim_v,
        "BLOCK_D": _block(p.dim),
        "BLOCK_DV": _block(p.dim_v),
        "BLOCK_Q": config.block_q,
        "BLOCK_K": config.block_k,
        "PRECISION": "wide" if INTERPRETED else "ieee",
        "REAL": tl.float64 if p.accumulator == "float64" else tl.float32,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def _block(dim: int) -> int:
    """A head dim in a tile: a power of two that the matrix units take."""
    return max(16, int(triton.next_power_of_2(dim)))


def _bits(x: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", x))[0]
    return bits


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >> 63 else seed


def _limit(x: int) -> int:
    return max(-NEAR, min(x, NEAR))
