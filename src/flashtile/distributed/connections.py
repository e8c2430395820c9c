"""Connections of a process group: its timeout, gloo connections beside it, and closing connections to end all waits."""

from __future__ import annotations

import contextlib
import os
import stat
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

from flashtile.errors import PeerError

NEVER = 0x7FFF  # a tag that nobody sends

_not_for_children: set[tuple[int, int]] = set()  # sockets: descriptor and inode


def timeout_of(group: dist.ProcessGroup) -> float:
    """The timeout of a group, in seconds."""
    timeout: timedelta = group._get_backend(device_of(group)).options._timeout
    return timeout.total_seconds()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device of a group's collectives: a GPU if it has a backend for one."""
    devices = [d for d in group._device_types if d.type == "cpu" or torch.get_device_module(d).is_available()]
    return next((d for d in devices if d.type != "cpu"), devices[0])


def connect(group: dist.ProcessGroup, rank: int, size: int, timeout: float) -> Any:
    """A gloo backend of its own for the ranks of a group; every rank has to call this."""
    store = PrefixStore("flashtile", _get_process_group_store(group))
    before = sockets()
    try:
        store.set(f"arrived/{rank}", "")
        connections = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
    except RuntimeError as error:
        absent = tuple(r for r in range(size) if not arrived(store, r))
        raise PeerError(
            f"on rank {rank}: the ranks of the group did not connect within {timeout:g} s, when their first "
            f"distributed call began; missing: {', '.join(str(r) for r in absent) or 'none, but a connection broke'}",
            absent,
        ) from error
    _not_for_children.update(sockets() - before)
    return connections


def sockets() -> set[tuple[int, int]]:
    """The sockets of this process, where the system lists them."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return found


def close_inherited() -> None:
    """Close a forked child's copies of our sockets: they would keep the connections open when this process dies."""
    for descriptor, inode in _not_for_children:
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                os.close(descriptor)


os.register_at_fork(after_in_child=close_inherited)


def arrived(store: PrefixStore, rank: int) -> bool:
    """Whether a rank has come to connect(); False if the store is gone as well."""
    try:
        return bool(store.check([f"arrived/{rank}"]))
    except RuntimeError:
        return False


def disconnect(backend: Any) -> None:
    """Close all connections of a gloo backend, here and for its peers, and so end every wait on them.

    gloo does that if a wait times out; its abort() and shutdown() do nothing.
    """
    with contextlib.suppress(RuntimeError):
        backend.recv_anysource([torch.empty(1, dtype=torch.uint8, device="cpu")], NEVER).wait(timedelta(milliseconds=1))


def abort(group: dist.ProcessGroup) -> None:
    """End every wait in a group, on all its backends; the group cannot be used afterwards."""
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(device)
            if isinstance(backend, dist.ProcessGroupGloo):
                disconnect(backend)
            else:
                backend.abort()
