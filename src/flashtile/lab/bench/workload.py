"""Workload: the arrays of a CPU case, and its contenders as plain calls: flashtile, torch, and standard attention."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

import flashtile
from flashtile.host import machine, threads
from flashtile.lab.bench.cases import PROJECTIONS, TRAINING, Case
from flashtile.lab.bench.timing import Call
from flashtile.numerics.dtypes import Array, narrow

OURS, SDPA, NAIVE_TORCH, NAIVE_NUMPY = "flashtile", "torch SDPA", "naive torch", "naive NumPy"


def absent() -> dict[str, str]:
    """The peers that are not installed, and why."""
    return {} if machine.has("torch") else dict.fromkeys((SDPA, NAIVE_TORCH), "torch is not installed")


@dataclass(frozen=True)
class Workload:
    """The arrays of one case, in NumPy and in torch; on the CPU they share memory."""

    case: Case
    threads: int
    device: str = "cpu"  # of the tensors

    @cached_property
    def arrays(self) -> dict[str, Array]:
        c, rng = self.case, np.random.default_rng(42)
        queries, keys = c.shapes
        shapes = {"q": queries, "k": keys, "v": keys, "dout": queries}
        if c.options.get("bias"):
            shapes["bias"] = (1, c.heads, c.n_q, c.n_k)
        return {name: narrow(rng.standard_normal(s, np.float32), c.dtype) for name, s in shapes.items()}

    @cached_property
    def tensors(self) -> dict[str, Any]:
        import torch

        dtype = getattr(torch, self.case.dtype)

        def tensor(x: Array) -> Any:
            given = torch.from_numpy(x.view(np.int16)).view(dtype) if dtype is torch.bfloat16 else torch.from_numpy(x)
            return given.to(self.device)

        tensors = {name: tensor(x) for name, x in self.arrays.items()}
        if self.training:
            for name in ("q", "k", "v"):
                tensors[name].requires_grad_()
        return tensors

    @cached_property
    def leaves(self) -> tuple[Any, ...]:
        """The tensors that gradients are computed for: q, k and v, or the results of projections, (batch, n, width)."""
        import torch

        found = tuple(self.tensors[name] for name in ("q", "k", "v"))
        if self.case.entry not in PROJECTIONS:
            return found
        rows = [x.detach().transpose(1, 2).flatten(2) for x in found]
        if self.case.entry == PROJECTIONS[1]:
            rows = [torch.cat(rows, 2)]
        return tuple(x.contiguous().requires_grad_(self.training) for x in rows)

    def call(self, attend: Callable[..., Any]) -> Call:
        """What runs attend(q, k, v), as a model does if the case has projections."""
        if self.case.entry not in PROJECTIONS:
            q, k, v = self.leaves
            return lambda: attend(q, k, v)
        c, leaves = self.case, self.leaves
        shape = c.batch, c.n_q, c.heads, c.dim  # of q, and of k and v

        def as_a_model() -> Any:
            parts = leaves[0].unflatten(2, (3, -1)).unbind(2) if len(leaves) == 1 else leaves
            q, k, v = (x.view(shape).transpose(1, 2) for x in parts)
            return attend(q, k, v).transpose(1, 2).reshape(c.batch, c.n_q, -1)

        return as_a_model

    @cached_property
    def dout(self) -> Any:
        """The gradient of the result of call()."""
        dout = self.tensors["dout"]
        return dout.transpose(1, 2).flatten(2) if self.case.entry in PROJECTIONS else dout

    @cached_property
    def visible(self) -> Array:
        """The mask for a library without windows."""
        c = self.case
        left, right = c.options["window"]
        band = flashtile.window(left, 0 if c.options.get("causal") else right).shifted(c.n_k - c.n_q)
        seen: Array = band.keep(np.arange(c.n_q)[:, None], np.arange(c.n_k)[None, :])
        return seen

    @property
    def training(self) -> bool:
        return self.case.direction == TRAINING

    def options(self, source: dict[str, Any]) -> dict[str, Any]:
        """The options of the case for attention()."""
        options = {**self.case.options, "threads": self.threads}
        return options | ({"bias": source["bias"]} if "bias" in source else {})


def contenders(work: Workload, *, ours_alone: bool = False) -> dict[str, Call]:
    """The calls to time for a case, ours first, without absent peers."""
    with_torch = machine.has("torch")
    c = work.case
    calls = {OURS: ours_numpy(work) if c.entry == "numpy" or not with_torch else step(work, ours(work))}
    if ours_alone:
        return calls
    if with_torch:
        calls[SDPA] = step(work, sdpa(work))
    if with_torch and c.naive:
        calls[NAIVE_TORCH] = step(work, naive_torch(work))
    if c.naive and not work.training:
        calls[NAIVE_NUMPY] = naive_numpy(work)
    return calls


def step(work: Workload, forward: Call) -> Call:
    """A forward pass in torch, followed by its backward pass if the case is training."""
    return (lambda: gradients(work, forward())) if work.training else forward


def gradients(work: Workload, out: Any) -> Any:
    import torch

    return torch.autograd.grad(out, work.leaves, work.dout)


def ours(work: Workload, attention: Any = flashtile.attention) -> Call:
    """attention: that of another version of the package."""
    options = work.options(work.tensors)
    if work.case.entry == "packed":
        return packed(work, options)
    return work.call(partial(attention, **options))


def packed(work: Workload, options: dict[str, Any]) -> Call:
    """The same sequences packed, as (rows, heads, dim)."""
    import torch

    c = work.case
    q, k, v = (work.tensors[name].transpose(1, 2).flatten(0, 1) for name in ("q", "k", "v"))
    cu_q, cu_k = (torch.arange(c.batch + 1) * n for n in (c.n_q, c.n_k))
    return lambda: flashtile.attention_packed(q, k, v, cu_q, cu_k, **options)


def ours_numpy(work: Workload) -> Call:
    a = work.arrays
    options = work.options(a)
    q, k, v = a["q"], a["k"], a["v"]
    if not work.training:
        return lambda: flashtile.attention(q, k, v, **options)

    def both() -> Any:
        out, lse = flashtile.attention(q, k, v, return_lse=True, **options)
        return flashtile.attention_backward(a["dout"], q, k, v, out, lse, **options)

    return both


def sdpa(work: Workload) -> Call:
    import torch

    t, options = work.tensors, work.case.options
    mask = torch.from_numpy(work.visible) if "window" in options else t.get("bias")
    causal = bool(options.get("causal")) and mask is None
    more: dict[str, Any] = {"attn_mask": mask, "is_causal": causal, "dropout_p": options.get("dropout", 0.0)}
    if work.case.heads != work.case.kv_heads:
        more["enable_gqa"] = True
    return work.call(partial(torch.nn.functional.scaled_dot_product_attention, **more))


def naive_torch(work: Workload) -> Call:
    """Standard attention: three operations, with N x N in between."""
    import torch

    t = work.tensors
    scale = work.case.dim**-0.5
    return lambda: torch.softmax(t["q"] @ t["k"].mT * scale, dim=-1) @ t["v"]


IN_TORCH = {OURS: ours, SDPA: sdpa, NAIVE_TORCH: naive_torch}


def naive_numpy(work: Workload) -> Call:
    a = work.arrays
    scale = np.float32(work.case.dim**-0.5)

    def attention() -> Array:
        S = a["q"] @ a["k"].swapaxes(-1, -2) * scale
        P = np.exp(S - S.max(axis=-1, keepdims=True))
        out: Array = P / P.sum(axis=-1, keepdims=True) @ a["v"]
        return out

    return attention


def torch_work() -> Call:
    """A call that briefly keeps all of torch's threads busy."""
    import torch

    x = torch.randn(256, 256)
    return lambda: torch.relu(x @ x)


def set_threads(threads: int) -> None:
    """Set torch's number of threads; flashtile takes its number with each call."""
    if machine.has("torch"):
        import torch

        torch.set_num_threads(threads)


def default_threads() -> int:
    if machine.has("torch"):
        import torch

        return torch.get_num_threads()
    return threads.cores()
