"""Rotary embeddings of queries, and of keys that are appended to a cache."""

import torch
from torch import Tensor

from flashtile.errors import DTypeError, ShapeError
from flashtile.pytorch.interception import readable


def rotate(x: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, interleaved: bool, by_row: bool) -> Tensor:
    """Rotate pairs of the first columns of x by the angles of position lengths + row, or of lengths if not by_row."""
    rows, dim = x.shape[1], x.shape[3]
    if cos.ndim != 2 or 2 * cos.shape[1] > dim:
        raise ShapeError(f"rotary_cos: expected shape (positions, {dim // 2} or fewer), got {tuple(cos.shape)}")
    if sin.shape != cos.shape:
        raise ShapeError(f"rotary_sin: expected shape {tuple(cos.shape)} like rotary_cos, got {tuple(sin.shape)}")
    for name, angles in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not angles.is_floating_point():
            raise DTypeError(f"{name}: expected floating-point numbers, got {angles.dtype}")
    positions = lengths.long()[:, None] + torch.arange(rows, device=x.device) * int(by_row)
    if positions.numel() and readable(positions) and int(positions.max()) >= len(cos):
        raise ShapeError(f"rotary_cos: expected {int(positions.max()) + 1} positions or more, got {len(cos)}")
    real = torch.promote_types(x.dtype, torch.float32)  # round only once, after the sums
    c, s = (angles[positions][:, :, None].to(real) for angles in (cos, sin))
    width = 2 * cos.shape[1]
    pairs, rest = x[..., :width].to(real), x[..., width:]
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, -1)
    a, b = a * c - b * s, a * s + b * c
    pairs = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((pairs.to(x.dtype), rest), -1)
