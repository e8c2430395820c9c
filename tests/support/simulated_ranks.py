"""Ranks that are threads of this process, as groups that flashtile.distributed.attention() takes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from flashtile.distributed import groups
from flashtile.distributed.local_channel import LocalChannel, Mailboxes

_numbers = itertools.count()


@dataclass
class Group:
    """What attention() asks of a process group, for one thread."""

    group_name: str
    of_rank: int
    mailboxes: Mailboxes
    channels: list[LocalChannel] = field(default_factory=list)

    def rank(self) -> int:
        return self.of_rank

    def size(self) -> int:
        return self.mailboxes.size

    def channel(self, method: str) -> LocalChannel:
        self.channels.append(LocalChannel(self.mailboxes, self.of_rank, method))
        return self.channels[-1]

    @property
    def bytes_sent(self) -> int:
        return sum(x.bytes_sent for x in self.channels)


def simulate(size: int, job: Callable[[Group], Any], timeout: float = 60) -> list[Any]:
    """The results of job(group) on each of some ranks; the first error of any."""
    mailboxes, number = Mailboxes(size, timeout), next(_numbers)
    found: list[Any] = [None] * size

    def run(group: Group) -> None:
        try:
            found[group.of_rank] = job(group)
        except BaseException as error:
            mailboxes.fail(group.of_rank, error)

    every = [Group(f"simulated {number}, rank {rank}", rank, mailboxes) for rank in range(size)]
    groups.LOCAL.update({x.group_name: x.channel for x in every})
    threads = [threading.Thread(target=run, args=(x,)) for x in every]
    used = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(used)
        for x in every:
            del groups.LOCAL[x.group_name]
    if mailboxes.failure is not None:
        raise mailboxes.failure[1]
    return found
