"""attention() on tensors: autocast, then autograd or the operator, then the answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.checks import check_dense, check_descale
from flashtile.problem import describe
from flashtile.pytorch import autocast, call, eight_bits, kernel, ops
from flashtile.pytorch.autograd import record, reject_forward_mode, reject_gradients
from flashtile.pytorch.call import Settings
from flashtile.pytorch.watch import unwatched


def attention(q: Tensor, k: Tensor, v: Tensor, backend: str, return_lse: bool, options: dict[str, Any]) -> Any:
    """The torch side of flashtile.attention() and flashtile.attention_packed(). The options become its own."""
    if options.get("deterministic", False) is False and torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True
    if options.get("descale") is not None:
        options["descale"] = eight_bits.side_by_side(check_descale(options["descale"], q), q.device)
    if autocast.enabled(q):
        options = autocast.cast(q.device.type, {"q": q, "k": k, "v": v, **options})
        q, k, v = options.pop("q"), options.pop("k"), options.pop("v")
    tensors, names = [q, k, v], [name for name, x in options.items() if x is not None and name in call.TENSORS]
    if names:
        tensors += [options[name] for name in names]
    if torch.compiler.is_compiling():  # call.of() checks the numbers, the operator's fake the tensors
        out, lse = ops.ATTENTION(*call.of(q, k, v, backend, **options))
    elif not unwatched(tensors):
        check_dense(dict(zip(("q", "k", "v", *names), tensors, strict=True)))
        describe(q, k, v, **options)  # a wrong call should meet our words before torch's
        out, lse = ops.ATTENTION(*call.of(q, k, v, backend, **options))
    else:
        reject_forward_mode(tensors)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)):
            return (kernel.forward if return_lse else kernel.output)(q, k, v, backend, options)
        if names or q.dtype is eight_bits.DTYPE:  # before anything is computed
            reject_gradients(q, "alibi" in names and options["alibi"].requires_grad)
        out, lse = record(Settings(backend, options, names), *tensors)
    return (out, lse) if return_lse else out
