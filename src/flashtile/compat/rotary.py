"""Rotations by position, of queries and of keys that go into a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.errors import DTypeError, ShapeError
from flashtile.pytorch.interception import readable


def rotated(x: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, interleaved: bool, moving: bool) -> Tensor:
    """The first columns of x, turned in pairs by the angles of position lengths + row; of lengths, if not moving."""
    rows, dim = x.shape[1], x.shape[3]
    if cos.ndim != 2 or 2 * cos.shape[1] > dim:
        raise ShapeError(f"rotary_cos: expected shape (positions, {dim // 2} or fewer), got {tuple(cos.shape)}")
    if sin.shape != cos.shape:
        raise ShapeError(f"rotary_sin: expected shape {tuple(cos.shape)} like rotary_cos, got {tuple(sin.shape)}")
    for name, angles in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not angles.is_floating_point():
            raise DTypeError(f"{name}: expected floating-point numbers, got {angles.dtype}")
    places = lengths.long()[:, None] + torch.arange(rows, device=x.device) * int(moving)
    if places.numel() and readable(places) and int(places.max()) >= len(cos):
        raise ShapeError(f"rotary_cos: expected {int(places.max()) + 1} positions or more, got {len(cos)}")
    real = torch.promote_types(x.dtype, torch.float32)  # rounded once, after the sums
    c, s = (angles[places][:, :, None].to(real) for angles in (cos, sin))
    width = 2 * cos.shape[1]
    turned, rest = x[..., :width].to(real), x[..., width:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    a, b = a * c - b * s, a * s + b * c
    turned = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)
