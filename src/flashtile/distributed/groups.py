"""Groups of ranks by name, and the channel of each: process groups, or ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashtile.distributed import channel
from flashtile.errors import DTypeError

_resolve: Any = dist.distributed_c10d.__dict__["_resolve_process_group"]
LOCAL: dict[str, Callable[[str], Any]] = {}  # of groups that are threads: a channel for a method


def process_group(group: Any) -> Any:
    """The process group of a DeviceMesh of one axis, or the group itself; of None, all ranks."""
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise DTypeError("group: expected a ProcessGroup or a DeviceMesh, got None without a group of all ranks")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise DTypeError("group: expected a ProcessGroup that this rank is in, got what new_group() gives to others")
    if not isinstance(group, DeviceMesh) and getattr(group, "group_name", None) in LOCAL:
        return group
    return channel.process_group(group)


def rank_of(name: str) -> int:
    """This rank within a group."""
    return int(LOCAL[name]("").rank if name in LOCAL else _resolve(name).rank())


def channel_of(name: str, method: str) -> Any:
    """A channel for one call."""
    if name in LOCAL:
        return LOCAL[name](method)
    return channel.Channel(_resolve(name), method)
