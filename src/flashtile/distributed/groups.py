"""Groups of ranks by name, and the channel of each: process groups, or ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashtile.distributed.channel import Channel
from flashtile.errors import DTypeError, ShapeError

LOCAL: dict[str, Callable[[str], Any]] = {}  # of groups that are threads: a channel for a method


def process_group(group: Any) -> Any:
    """The process group of a DeviceMesh of one axis, or the group itself."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ShapeError(f"group: expected a DeviceMesh of one axis, such as mesh['cp'], got {group.ndim} axes")
        return group.get_group()
    if not hasattr(group, "group_name"):
        raise DTypeError(f"group: expected a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
    return group


def channel_of(name: str, method: str) -> Any:
    """A channel for one call."""
    if name in LOCAL:
        return LOCAL[name](method)
    return Channel(dist.distributed_c10d._resolve_process_group(name), method)
