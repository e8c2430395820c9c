"""Two network namespaces as two hosts, with a slow link between them that delays and loses packets, and can be cut."""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from dataclasses import dataclass

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """A network namespace, its address, and its device."""

    namespace: str
    address: str
    device: str

    def enter(self) -> None:
        """Move this process there; it must have one thread, and its sockets stay where they are."""
        with open(f"/run/netns/{self.namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ["GLOO_SOCKET_IFNAME"] = self.device


class Link:
    """The hosts and a thread that passes packets between their TUN devices; OSError where that is not permitted.

    The kernel's own emulator, tc netem, is a module that many kernels lack.
    """

    def __init__(self, seconds: float, bytes_per_second: float, loss: float) -> None:
        self.seconds, self.bytes_per_second, self.loss = seconds, bytes_per_second, loss
        self.passed = self.lost = 0
        self.hosts = [Host(f"flashtile_{os.getpid()}_{i}", f"10.77.0.{i + 1}", f"ft{os.getpid()}_{i}") for i in (0, 1)]
        self._cut = self._end = False
        self._descriptors: list[int] = []
        try:
            for host in self.hosts:
                self._descriptors.append(self._open(host))
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._pass_packets, name="link")
        self._thread.start()

    def cut(self) -> None:
        """Lose every packet from now on."""
        self._cut = True

    def close(self) -> None:
        self._end = True
        if hasattr(self, "_thread"):
            self._thread.join()
        for descriptor in self._descriptors:
            os.close(descriptor)
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)

    def _open(self, host: Host) -> int:
        self._ip("netns", "add", host.namespace)
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", host.device.encode(), IFF_TUN | IFF_NO_PI))
        self._ip("link", "set", host.device, "netns", host.namespace)
        self._ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.device)
        for device in (host.device, "lo"):
            self._ip("-n", host.namespace, "link", "set", device, "up")
        return descriptor

    def _ip(self, *command: str) -> None:
        done = subprocess.run(["ip", *command], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"ip {' '.join(command)}: {done.stderr.strip()}")

    def _pass_packets(self) -> None:
        chance = random.Random(0)
        free = [0.0, 0.0]  # when each direction has sent what it was given
        under_way: list[tuple[float, int, int, bytes]] = []  # arrival, number, where to, packet
        while not self._end:
            now = time.monotonic()
            while under_way and under_way[0][0] <= now:
                _, _, to, packet = heapq.heappop(under_way)
                os.write(self._descriptors[to], packet)
            patience = min(0.05, under_way[0][0] - now) if under_way else 0.05
            for descriptor in select.select(self._descriptors, [], [], patience)[0]:
                packet, to = os.read(descriptor, 65536), 1 - self._descriptors.index(descriptor)
                if self._cut or chance.random() < self.loss:
                    self.lost += 1
                    continue
                self.passed += 1
                free[to] = max(free[to], time.monotonic()) + len(packet) / self.bytes_per_second
                heapq.heappush(under_way, (free[to] + self.seconds, self.passed, to, packet))
