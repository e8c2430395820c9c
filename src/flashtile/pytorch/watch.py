"""Whether anything stands between a call and its kernel; if not, the dispatcher's walk can be saved."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_PLAIN = 0  # the dispatch keys that come with any tensor on a CPU or GPU
for _key in (
    *("CPU", "AutogradCPU", "AutocastCPU", "CUDA", "AutogradCUDA", "AutocastCUDA"),
    *("ADInplaceOrView", "BackendSelect"),
):
    _PLAIN |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key)).raw_repr()


def unwatched(tensors: Iterable[Tensor]) -> bool:
    """vmap, fake tensors, subclasses, modes and tracers all show as dispatch keys of the tensors or of the thread.

    Autograd and autocast are the caller's business.
    """
    keys: int = torch._C._dispatch_tls_local_include_set().raw_repr()
    for x in tensors:
        keys |= torch._C._dispatch_keys(x).raw_repr()
    return not keys & ~_PLAIN and not torch.overrides.has_torch_function(tensors)
