"""One processor: its shared memory, barriers, copy engine and matrix unit, as the roles of a program use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from tests.backends.gluon.emulator.registers import TORCH, TRITON, Block, MisuseError
from tests.backends.gluon.emulator.turns import Turns
from tests.support.eight_bits import LOST_PER_STEP, PRODUCTS

LANES = 32
_SHADOWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
MBARRIER = object()  # a layout
NAMED = 16  # barriers of a program
WRITTEN, WAITED = "written", "waited"  # see Role
KEPT = -int(LOST_PER_STEP * 2**23)  # mask of the float32 bits that a sum of 8-bit products keeps


class Program:
    """A program. copies: those that it has requested, from shared to global memory."""

    def __init__(self, number: int, launch: Any) -> None:
        self.number, self.launch, self.name = number, launch, f"{launch.name} {number}"
        self.barriers: dict[int, NamedBarrier] = {}
        self.copies: list[Copy] = []
        self.made = 0  # arrays of barriers

    def end(self) -> None:
        if not all(copy.awaited for copy in self.copies):
            raise MisuseError(f"{self.name} ends while its memory may still be read")


class Role:
    """Some warps of a program. unfenced: what they wrote, and copies and products cannot see yet.

    apart: why its threads have to synchronize before one of them may act for all: "written", each has written its part
    of a tile, or "waited", one has waited for copies and the others have not.
    """

    def __init__(self, program: Program, warps: int) -> None:
        self.program, self.threads = program, warps * LANES
        self.products: list[Later] = []
        self.copies: list[Copy] = []
        self.unfenced: list[torch.Tensor] = []
        self.apart: str | None = None

    def pause(self, until: Callable[[], bool] | None = None, where: str = "") -> None:
        """Let other roles run, and products proceed."""
        for product in self.products:
            if not turns().chance():
                break
            product.make()
        turns().pause(until, where)

    def meet(self) -> None:
        """Synchronize all its threads."""
        self.apart = None

    def not_after(self, what: str) -> None:
        if self.apart == what:
            raise MisuseError(f"one thread goes on where all have to meet: {what}")

    def end(self) -> None:
        if self.products:
            raise MisuseError("a role ends before its products")

    def meanwhile(self, thing: Callable[[], None]) -> None:
        """Do this at any time from now on."""
        turns().may_happen.append(thing)
        self.pause()

    def fence(self) -> None:
        for shadow in self.unfenced:
            shadow.zero_()
        self.unfenced.clear()


_now: list[Turns] = []


@contextmanager
def running(all_turns: Turns) -> Iterator[None]:
    """Make me() return the current role of these turns."""
    _now.append(all_turns)
    try:
        yield
    finally:
        _now.pop()


def turns() -> Turns:
    return _now[-1]


def me() -> Role:
    """The role that is running."""
    role: Role = turns().current.about
    return role


# ---- shared memory ----


class Shared:
    """Elements in shared memory. shadow: a number for each, not 0 if the element needs a fence.

    places: the index of each element, in a layout that is not row by row. Swizzles are left out: all accesses to the
    same bytes use the same one, even if keep_weights() of the forward kernel writes words and a product reads bytes.
    """

    def __init__(self, x: torch.Tensor, shadow: torch.Tensor, places: torch.Tensor | None = None) -> None:
        self.x, self.shadow, self._places = x, shadow, places

    @classmethod
    def allocate(cls, dtype: Any, shape: list[int], layout: Any) -> Shared:
        """Its initial contents are NaN, or -1."""
        x = torch.empty(shape, dtype=TORCH[dtype])
        spoil(x)
        found = cls(x, torch.zeros(shape, dtype=_SHADOWS[x.element_size()]))
        return found.reinterpret(dtype, shape, layout)

    @property
    def dtype(self) -> Any:
        return TRITON[self.x.dtype]

    @property
    def shape(self) -> list[int]:
        return list((self.x if self._places is None else self._places).shape)

    def _viewed(self, view: Callable[[torch.Tensor], torch.Tensor]) -> Shared:
        assert self._places is None
        return Shared(view(self.x), view(self.shadow))

    def index(self, n: int) -> Shared:
        if not 0 <= n < len(self.x):
            raise MisuseError(f"buffer {n} of {len(self.x)}")
        return self._viewed(lambda x: x[int(n)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return self._viewed(lambda x: x.narrow(dim, int(start), length))

    def reshape(self, shape: list[int]) -> Shared:
        return self._viewed(lambda x: x.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self._viewed(lambda x: x.permute(order))

    def reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        x = self.x.reshape(-1).view(TORCH[dtype])
        shadow = self.shadow.reshape(-1).view(_SHADOWS[x.element_size()])
        bases = getattr(layout, "offset_bases", None)
        if bases:
            return Shared(x, shadow, _places(tuple(map(tuple, bases)), tuple(shape)))
        return Shared(x.view(shape), shadow.view(shape))

    def load(self, layout: Any = None) -> Block:
        return Block(self.x.clone() if self._places is None else self.x[self._places])

    def store(self, block: Block) -> None:
        if list(block.x.shape) != self.shape:
            raise MisuseError(f"a block {block.shape} stored as {self.shape}")
        if block.x.dtype != self.x.dtype:
            raise MisuseError(f"a block of {block.x.dtype} stored as {self.x.dtype}")
        if self._places is None:
            self.x.copy_(block.x)
        else:
            self.x[self._places] = block.x
        self.shadow.fill_(1)
        role = me()
        role.not_after(WAITED)
        role.unfenced.append(self.shadow)
        role.apart = WRITTEN

    def seen(self) -> Shared:
        """This memory for copies and products, if it is fenced."""
        if self.shadow.any():
            raise MisuseError("a copy or a product reads what no fence has made visible to it")
        return self


@cache
def _places(bases: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> torch.Tensor:
    """The index of each element of a linear layout: bit n of an index moves an element by bases[n]."""
    places = torch.arange(torch.Size(shape).numel())
    at = [sum((places >> bit & 1) * base[dim] for bit, base in enumerate(bases)) for dim in range(len(shape))]
    found = torch.full(shape, -1)
    found[tuple(at)] = places
    assert (found >= 0).all()
    return found


def spoil(x: torch.Tensor) -> None:
    """NaN, or -1."""
    x.view(-1).view(torch.uint8).fill_(0xFF)


# ---- barriers ----


class Barrier:
    """An mbarrier: a phase ends when all threads have arrived, and all bytes too."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._count = self._awaited = self._bytes = self.phase = 0

    def init(self, count: int) -> None:
        self._count = self._awaited = count

    def arrive(self, count: int) -> None:
        self._awaited -= count
        if self._awaited < 0 or not self._count:
            raise MisuseError("a barrier that was not made, or counts less than arrive")
        self._settle()

    def expect(self, count: int) -> None:
        self._bytes += count
        self.arrive(1)

    def receive(self, count: int) -> None:
        self._bytes -= count
        self._settle()

    def _settle(self) -> None:
        if self._awaited == self._bytes == 0:
            self.phase ^= 1
            self._awaited = self._count


class Barriers:
    """Several mbarriers, or one."""

    def __init__(self, every: list[Barrier]) -> None:
        self._every = every

    @classmethod
    def allocate(cls, count: int) -> Barriers:
        program = me().program
        program.made += 1
        return cls([Barrier(f"{program.made}[{n}]") for n in range(count)])

    def index(self, n: int) -> Barriers:
        if not 0 <= n < len(self._every):
            raise MisuseError(f"barrier {n} of {len(self._every)}")
        return Barriers([self._every[n]])

    @property
    def only(self) -> Barrier:
        (found,) = self._every
        return found


class NamedBarrier:
    """A named barrier of a program. It counts the threads of roles, each of which arrives once per use."""

    def __init__(self, number: int) -> None:
        self._number, self._threads, self._counts, self._roles, self.times = number, 0, 0, set[Role](), 0
        if not 0 <= number < NAMED:
            raise MisuseError(f"there is no barrier {number}")

    def arrive(self, role: Role, threads: int) -> None:
        if role in self._roles:
            raise MisuseError(f"a role comes to barrier {self._number} twice")
        if self._roles and threads != self._counts:
            raise MisuseError(f"barrier {self._number} counts {self._counts} threads, and {threads}")
        self._roles.add(role)
        self._counts = threads
        self._threads += role.threads
        if self._threads > threads:
            raise MisuseError(f"{self._threads} threads at barrier {self._number}, which counts {threads}")
        if self._threads == threads:
            self._threads, self.times = 0, self.times + 1
            self._roles.clear()


def come_to(number: int, threads: int, stay: bool) -> None:
    """Arrive at a named barrier of this program; stay: wait until all have arrived."""
    role = me()
    barrier = role.program.barriers.setdefault(int(number), NamedBarrier(int(number)))
    before = barrier.times
    role.meet()
    barrier.arrive(role, threads)
    role.pause((lambda: barrier.times > before) if stay else None, f"named barrier {number}")


def await_phase(barrier: Barriers, phase: int) -> None:
    """Wait until the phase of this parity has ended."""
    one, parity = barrier.only, int(phase)
    if parity not in (0, 1):
        raise MisuseError(f"a phase is 0 or 1, not {parity}")
    me().pause(lambda: one.phase != parity, f"barrier {one.name}, phase {parity}")


# ---- the copy engine ----


class Descriptor:
    """A tensor in memory from which boxes are copied; out of bounds they read 0 and write nothing."""

    def __init__(self, of: Any) -> None:
        self._whole = of.base.as_strided(of.shape, of.strides)
        self.block_shape, self.layout = list(of.block_shape), of.layout
        self.dtype = TRITON[of.base.dtype]
        self.nbytes = torch.Size(self.block_shape).numel() * of.base.element_size()
        if of.base.data_ptr() % 16 or any(s * of.base.element_size() % 16 for s in of.strides[:-1]):
            raise MisuseError("the copy engine needs multiples of 16 bytes")

    @property
    def block_type(self) -> Descriptor:
        return self

    def check(self, tile: Shared) -> None:
        if tile.shape != self.block_shape:
            raise MisuseError(f"a tile {tile.shape} for a box {self.block_shape}")

    def inside(self, at: list[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """The part of the tensor in a box, and its place in the box."""
        found, box = self._whole, []
        for dim, (first, width) in enumerate(zip(map(int, at), self.block_shape, strict=True)):
            begin, end = max(first, 0), min(first + width, self._whole.shape[dim])
            found = found.narrow(dim, min(begin, self._whole.shape[dim]), max(end - begin, 0))
            box.append(slice(begin - first, max(end, begin) - first))
        return found, tuple(box)

    def fetch(self, at: list[int], tile: torch.Tensor) -> None:
        tile.zero_()
        found, box = self.inside(at)
        tile[box] = found

    def put(self, at: list[int], tile: torch.Tensor, add: bool) -> None:
        place, box = self.inside(at)
        if add:
            place += tile[box]
        else:
            place.copy_(tile[box])


def fetch_tile(desc: Descriptor, at: list[int], barrier: Barriers, tile: Shared) -> None:
    """Copy from global memory; from now on the tile's old contents are invalid."""
    desc.check(tile)
    spoil(tile.seen().x)
    at = [*at]

    def copy() -> None:
        desc.fetch(at, tile.x)
        barrier.only.receive(desc.nbytes)

    me().meanwhile(copy)


class Copy:
    """A tile on its way to global memory: it is read, and later written or added there."""

    def __init__(self, desc: Descriptor, at: list[int], tile: Shared, add: bool) -> None:
        desc.check(tile)
        self._desc, self._at, self._tile, self._add = desc, [*at], tile.seen(), add
        self._read: torch.Tensor | None = None
        self.awaited = self.is_there = False

    def read(self) -> None:
        if self._read is None:
            self._read = self._tile.x.clone()

    def arrive(self) -> None:
        self.read()
        if not self.is_there:
            self._desc.put(self._at, self._read, self._add)
        self.is_there = True


def send_tile(desc: Descriptor, at: list[int], tile: Shared, add: bool = False) -> None:
    role = me()
    role.not_after(WRITTEN)
    copy = Copy(desc, at, tile, add)
    role.copies.append(copy)
    role.program.copies.append(copy)
    role.meanwhile(copy.read)
    role.meanwhile(copy.arrive)


def await_reads() -> None:
    """Wait until all copies of this role have read their source."""
    _await(Copy.read)


def await_copies() -> None:
    """Wait until they are complete."""
    _await(Copy.arrive)
    me().copies.clear()


def _await(what: Callable[[Copy], None]) -> None:
    """One thread of the role waits."""
    role = me()
    for copy in role.copies:
        what(copy)
        copy.awaited = True
        role.apart = WAITED
    role.pause()


# ---- the matrix unit ----


class Later:
    """A pending product, which must not be used before its wait."""

    def __init__(self, a: Any, b: Shared, sum_: Block | None) -> None:
        self._a, self._b, self._sum = a if isinstance(a, Block) else a.seen(), b.seen(), sum_
        self.made: Block | None = None

    def __getattr__(self, name: str) -> Any:
        raise MisuseError("a product is used before its wait")

    def make(self) -> None:
        if self.made is None:
            a, b = self._a.x, self._b.x
            if b.dtype == torch.float8_e4m3fn:
                self.made = Block(_coarse_product(a.float(), b.float(), self._sum))
            else:
                product = a.float() @ b.float()
                self.made = Block(product if self._sum is None else self._sum.x + product)


def _coarse_product(a: torch.Tensor, b: torch.Tensor, sum_: Block | None) -> torch.Tensor:
    """A product of 8-bit numbers: the matrix unit keeps few bits of each intermediate sum."""
    found = torch.zeros(a.shape[0], b.shape[1]) if sum_ is None else sum_.x
    for first in range(0, a.shape[1], PRODUCTS):
        found = found + a[:, first : first + PRODUCTS] @ b[first : first + PRODUCTS]
        found = (found.view(torch.int32) & KEPT).view(torch.float32)
    return found


def begin_product(a: Any, b: Shared, sum_: Block, use_acc: bool = True, is_async: bool = False) -> Any:
    if sum_.shape != [a.shape[0], b.shape[1]]:
        raise MisuseError(f"{a.shape} by {b.shape} is not {sum_.shape}")
    later = Later(a, b, sum_ if use_acc else None)
    me().products.append(later)
    me().pause()
    return later if is_async else await_products(0, (later,))


def await_products(under_way: int, deps: tuple[Any, ...]) -> Any:
    role = me()
    done = role.products[: max(len(role.products) - under_way, 0)]
    for product in done:
        product.make()
    del role.products[: len(done)]
    role.pause()
    found = tuple(x.made if isinstance(x, Later) and x not in role.products else x for x in deps)
    return found[0] if len(found) == 1 else found
