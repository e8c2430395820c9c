"""Groups of ranks by name, and the channel of each: process groups, or ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from flashtile.distributed import channel

_resolve: Any = dist.distributed_c10d.__dict__["_resolve_process_group"]
LOCAL: dict[str, Callable[[str], Any]] = {}  # of groups that are threads: a channel for a method


def process_group(group: Any) -> Any:
    """The process group of a DeviceMesh of one axis, or the group itself; of None, all ranks."""
    if group is None:
        group = dist.group.WORLD
    return group if getattr(group, "group_name", None) in LOCAL else channel.process_group(group)


def channel_of(name: str, method: str) -> Any:
    """A channel for one call."""
    if name in LOCAL:
        return LOCAL[name](method)
    return channel.Channel(_resolve(name), method)
