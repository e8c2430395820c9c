"""8-bit calls: inputs, their values, the oracle's results, and the allowed error of a kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flashtile as ft
from flashtile.pytorch.eight_bits import DTYPE

LOST_PER_STEP = 2.0**-13  # at most, of the largest sum so far, each time Hopper adds 32 products of 8-bit numbers
PRODUCTS = 32


@dataclass(frozen=True)
class EightBitCall:
    """q, k and v in 8 bits, with options of attention() on the CPU."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(cls, q: tuple[int, ...], k: tuple[int, ...], dim_v: int | None = None, **options: Any) -> EightBitCall:
        source = torch.Generator().manual_seed(sum(q) + sum(k))
        shapes = q, k, (*k[:-1], dim_v or k[-1])
        return cls(*(torch.randn(shape, generator=source).to(DTYPE) for shape in shapes), options)

    def run(self, device: str = "cpu", **more: Any) -> tuple[Tensor, Tensor]:
        def there(x: Any) -> Any:
            return tuple(map(there, x)) if isinstance(x, tuple) else x.to(device) if isinstance(x, Tensor) else x

        options = {name: there(x) for name, x in self.options.items()}
        out, lse = ft.attention(*map(there, (self.q, self.k, self.v)), return_lse=True, **options, **more)
        return out.cpu(), lse.cpu()

    def values(self) -> list[Any]:
        """The values of q, k and v with their descale factors, in float64."""
        group = self.q.shape[1] // self.k.shape[1]
        found = []
        for n, x in enumerate((self.q, self.k, self.v)):
            factor = torch.as_tensor(self.options.get("descale", (1, 1, 1))[n], dtype=torch.float64)
            if factor.ndim:
                factor = factor.repeat_interleave(group if n == 0 else 1, 1)[:, :, None, None]
            found.append((x.double() * factor).numpy())
        return found

    def oracle_options(self) -> dict[str, Any]:
        """The options other than those for 8 bits, as NumPy arrays."""
        kept = {name: x for name, x in self.options.items() if name not in ("descale", "out_dtype")}
        return {name: x.double().numpy() if _floats(x) else _numpy(x) for name, x in kept.items()}

    def exact(self) -> tuple[Any, Any]:
        out, lse = ft.standard_attention(*self.values(), return_lse=True, **self.oracle_options())
        return out, lse

    def bounds(self) -> tuple[float, float]:
        """The allowed errors of a kernel's output and lse.

        Twice the error of standard attention with weights, at most 1, rounded to 8 bits, and what the matrix unit may
        lose, since it accumulates with few bits.
        """
        q, k, v = self.values()
        group = q.shape[1] // k.shape[1]
        v, wide_k = (np.repeat(x, group, 1) for x in (v, k))
        P = ft.probabilities(q, k, rows=np.arange(q.shape[2]), **self.oracle_options())
        top = np.maximum(P.max(-1, keepdims=True), 1e-300)
        rounded = torch.from_numpy(P / top).to(DTYPE).double().numpy() * top
        out = torch.from_numpy(rounded @ v).to(self.options.get("out_dtype", torch.bfloat16)).double().numpy()
        steps = -(-P.shape[-1] // PRODUCTS)
        accumulation = steps * LOST_PER_STEP * (P @ np.abs(v)).max()
        scale = self.options.get("scale", q.shape[-1] ** -0.5)
        scores = (np.abs(q) @ np.abs(wide_k).swapaxes(-1, -2)).max() * scale
        return 2 * np.abs(out - P @ v).max() + accumulation, (q.shape[-1] / PRODUCTS + 1) * LOST_PER_STEP * scores

    def check(self, device: str = "cpu", **more: Any) -> None:
        out, lse = self.run(device, **more)
        assert out.dtype == self.options.get("out_dtype", torch.bfloat16) and lse.dtype == torch.float32
        exact, exact_lse = self.exact()
        of_out, of_lse = self.bounds()
        assert np.abs(out.double().numpy() - exact).max() <= of_out
        seen = np.isfinite(exact_lse)
        assert (np.isfinite(lse.numpy()) == seen).all()
        rounding = 4 * np.finfo(np.float32).eps * np.abs(exact_lse[seen]).max(initial=1)
        assert np.abs(lse.numpy()[seen] - exact_lse[seen]).max(initial=0) <= of_lse + rounding


def _floats(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _numpy(x: Any) -> Any:
    return x.numpy() if isinstance(x, Tensor) else x
