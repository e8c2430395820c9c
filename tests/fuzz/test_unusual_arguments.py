"""Unusual tensors for every entry point, in forked children: no crash, no hang, no error without a message."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import flashtile as ft
from flashtile.compat import flash_attn, sdpa
from tests.fuzz.unusual_tensors import UNUSUAL

SECONDS = 60
# Errors with a message: flashtile's, torch's refusals, and Python's for a wrong call.
EXPECTED_ERRORS = (ft.ShapeError, ft.DTypeError, ft.UnsupportedError, RuntimeError, NotImplementedError, TypeError)

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


def entry_points() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Functions with valid arguments."""
    q, k, v = (torch.randn(2, 4, n, 8) for n in (6, 9, 9))
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    flat = [x.flatten(0, 1) for x in rows]
    cu_q, cu_k = torch.tensor([0, 6, 12]), torch.tensor([0, 9, 18])
    named = dict(zip("qkv", (q, k, v), strict=True))
    mask, bias = torch.rand(2, 4, 6, 9) > 0.3, torch.randn(2, 4, 6, 9)
    more = {"alibi": torch.rand(4), "sink": torch.rand(4), "kv_lengths": torch.tensor([9, 3])}
    return {
        "attention": (ft.attention, named | {"mask": mask, "bias": bias} | more),
        "plain attention": (ft.attention, named),
        "attention_packed": (ft.attention_packed, dict(zip("qkv", flat, strict=True)) | {"cu_q": cu_q, "cu_k": cu_k}),
        "merge": (ft.merge, {"out_a": q, "lse_a": q[..., 0], "out_b": q, "lse_b": q[..., 0]}),
        "sdpa": (
            sdpa.scaled_dot_product_attention,
            {"query": q, "key": k, "value": v, "attn_mask": bias},
        ),
        "flash_attn_func": (flash_attn.flash_attn_func, dict(zip("qkv", rows, strict=True))),
    }


def try_all(name: str, report: Callable[[str], None]) -> None:
    """Replace each argument by each unusual tensor, also after a valid call was cached."""
    call, right = entry_points()[name]
    for argument, x in right.items():
        for kind, make in UNUSUAL.items():
            try:
                unusual = make(x)
            except Exception:  # this argument has no such form
                continue
            report(f"trying {argument}: {kind}")
            for known in (False, True):
                if known:
                    call(**right)
                try:
                    call(**right | {argument: unusual})
                except EXPECTED_ERRORS as error:
                    if not str(error):
                        report(f"{argument}, {kind}: {type(error).__name__} without a message")
                except Exception as error:
                    report(f"{argument}, {kind}: {type(error).__name__}: {error}")


def in_a_child(name: str) -> str:
    """Run try_all() in a child; return its errors, and the signal if it was killed."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forking a process with threads
        child = os.fork()
    if child == 0:
        os.close(read)
        signal.alarm(SECONDS)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        try:
            try_all(name, lambda line: os.write(write, f"{line}\n".encode()))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        lines = file.read().splitlines()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    wrong = [line for line in lines if not line.startswith("trying ")]
    if status:
        wrong.append(f"{lines[-1]}: ended by {signal.Signals(-status).name}")
    assert len(lines) > 20, "too few arguments were tried"
    return "\n".join(wrong)


@forks
@pytest.mark.parametrize("name", entry_points())
def test_strange_arguments(name: str) -> None:
    assert not in_a_child(name)
