"""Whether anything stands between a call and its kernel; if not, the dispatcher's walk can be saved."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_keys_of = torch._C._dispatch_keys
_keys_of_thread = torch._C._dispatch_tls_local_include_set
_overridden = torch.overrides.has_torch_function
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
    keys: int = _keys_of_thread().raw_repr()
    for x in tensors:
        keys |= _keys_of(x).raw_repr()
    return not keys & ~_PLAIN and not _overridden(tensors)
