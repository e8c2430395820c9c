"""Unusual objects in place of a tensor: each must give a result or an error with a message, not a crash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Maker = Callable[[Tensor], Any]


def freed(x: Tensor) -> Tensor:
    """As FSDP frees parameters: the shape stays, the storage is freed."""
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def cut_short(x: Tensor) -> Tensor:
    """Half of the storage is freed."""
    x = x.clone()
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)
    return x


class RejectingSubclass(Tensor):
    """A subclass whose __torch_function__ rejects every call."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} is not for this tensor")


class PlainSubclass(Tensor):
    """A subclass without any behaviour of its own."""


class LooksLikeTensor:
    """Has a tensor's dtype and shape, and nothing else."""

    dtype = torch.float32
    shape = (2, 4, 6, 8)


def _quantized(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)


UNUSUAL: dict[str, Maker] = {
    "strided nested": lambda x: torch.nested.nested_tensor([*x.unbind()]),
    "jagged nested": lambda x: torch.nested.nested_tensor([*x.unbind()], layout=torch.jagged),
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.flatten(0, -2).to_sparse_csr(),
    "freed": freed,
    "cut short": cut_short,
    "on no device": lambda x: x.to("meta"),
    "quantized": _quantized,
    "rejecting subclass": lambda x: x.as_subclass(RejectingSubclass),
    "plain subclass": lambda x: x.as_subclass(PlainSubclass),
    "parameter": lambda x: torch.nn.Parameter(x) if x.is_floating_point() else x,
    "complex": lambda x: x.to(torch.complex64),
    "conjugate": lambda x: torch.complex(x.float(), x.float()).conj(),
    "negative view": lambda x: torch._neg_view(x.float()),
    "integers": lambda x: x.to(torch.int64),
    "booleans": lambda x: x > 0,
    "eight bits": lambda x: x.to(torch.float8_e5m2),
    "no axes": lambda x: x.sum(),
    "five axes": lambda x: x[None],
    "no elements": lambda x: x[..., :0],
    "no heads": lambda x: x[:, :0],
    "expanded": lambda x: x[..., :1].expand(x.shape),
    "overlapping": lambda x: x.flatten().as_strided(x.shape, (1,) * x.ndim),
    "inference": lambda x: _in_inference(x),
    "functional": lambda x: torch._to_functional_tensor(x),
    "array": lambda x: x.detach().numpy(),
    "masked array": lambda x: np.ma.masked_array(x.detach().numpy()),
    "matrix": lambda x: np.matrix(x.detach().numpy().reshape(-1, x.shape[-1])),
    "objects": lambda x: x.detach().numpy().astype(object),
    "other byte order": lambda x: x.detach().numpy().astype(">f4"),
    "misaligned": lambda x: np.frombuffer(b"\0" + x.detach().numpy().tobytes(), np.float32, offset=1).reshape(x.shape),
    "list": lambda x: x.tolist(),
    "memory view": lambda x: memoryview(x.detach().numpy()),
    "dtype": lambda x: torch.float32,
    "none": lambda x: None,
    "string": lambda x: "tensor",
    "looks like a tensor": lambda x: LooksLikeTensor(),
    "NaN": lambda x: torch.full_like(x.float(), torch.nan),
}


def _in_inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()
