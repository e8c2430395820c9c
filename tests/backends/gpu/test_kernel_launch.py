"""Launches: arguments bound by name, and sequences past their first call, with a driver that only records."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterable
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flashtile.backends.gpu import kernel_launch as starting  # noqa: E402
from flashtile.backends.gpu import launcher, tensors  # noqa: E402
from flashtile.backends.gpu.arguments import Rows  # noqa: E402
from flashtile.backends.gpu.kernel_launch import Argument, KernelLaunch, LaunchSequence  # noqa: E402

ROWS = Rows("*fp32", "i32", "i64", "constexpr")
MAPPED = "tensordesc<bf16[8, 8],layout>"


class Launch(NamedTuple):
    """What the driver was given."""

    grid: list[int]
    threads: list[int]
    shared: int
    stream: int
    attributes: list[tuple[int, int]]
    function: int
    parameters: list[Any]  # a tensor map appears as the address in it


class Driver:
    """A fake CUDA driver. The last two parameters of every launch are scratch memory."""

    def __init__(self) -> None:
        self.launched: list[Launch] = []
        self.replaced: list[int] = []
        self.sizes: list[int] = []  # of the parameters, in bytes
        self.refuses = False
        self.during: Any = None
        self.stream = 5  # the current one

    def cuLaunchKernelEx(self, config: Any, function: int, parameters: Any, extra: Any) -> int:
        if self.refuses:
            return 201
        assert extra is None and len(parameters) == len(self.sizes) + 2
        told = [config.attributes[n] for n in range(config.count)]
        if self.during is not None:
            self.during()
        values = [read(at, size) for at, size in zip(parameters, [*self.sizes, 8, 8], strict=True)]
        assert values[-2:] == [0, 0]
        sizes = [*config.grid], [*config.block], config.shared
        launch = Launch(*sizes, config.stream, [(x.id, x.value) for x in told], function, values[:-2])
        self.launched.append(launch)
        return 0

    def cuTensorMapReplaceAddress(self, place: int, address: int) -> int:
        assert place % 64 == 0
        self.replaced.append(address)
        ctypes.c_int64.from_address(place).value = address
        return 0


def read(at: int, size: int) -> int:
    kind = {4: ctypes.c_int32, 8: ctypes.c_int64, launcher.MAP: ctypes.c_int64}[size]
    return kind.from_address(at).value


class CudaLauncher:
    """A class of this name tells can_launch() that the driver can be called directly."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = gsan_enabled = False

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.given.append(args)


class Kernel:
    """A kernel that needs no compiling, with parameters a0, a1, ...; it records its launches through Triton.

    constant: the last parameter is C, a constant.
    """

    def __init__(self, *kinds: Any, constant: bool = False) -> None:
        self.given: list[tuple[Any, ...]] = []
        names = [f"a{n}" for n in range(len(kinds) - constant)] + ["C"] * constant
        parameters = [
            Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation="tl.constexpr" if name == "C" else Any)
            for name in names
        ]

        def a_kernel() -> None:
            """The Python function of the kernel."""

        self.fn: Any = a_kernel
        self.fn.__signature__ = Signature(parameters)
        self.compiled = SimpleNamespace(
            run=CudaLauncher(),
            packed_metadata=(4, 1, 1000),
            function=77,
            metadata=SimpleNamespace(tensordesc_meta=[{}] * kinds.count(MAPPED)),
            src=SimpleNamespace(signature=dict(enumerate(kinds))),
        )

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **constants: Any) -> Any:
            self.given.append(args)
            return self.compiled

        return run


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Replaces the interpreter and the GPU."""
    found = Driver()
    active = SimpleNamespace(
        get_current_device=lambda: 1, get_current_stream=lambda device: 100 * device + found.stream
    )
    monkeypatch.setattr(starting, "INTERPRETED", False)
    monkeypatch.setattr(starting, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launcher, "_library", lambda: found)
    return found


class Map:
    """An object that ends with the bytes of a tensor map, as Triton's does."""

    __slots__ = tuple(f"word{n}" for n in range(launcher.MAP // 8))


def alone(*args: Any, **more: Any) -> Any:
    """A sequence of one launch, whose arguments are all values of the call."""
    launch, found = KernelLaunch(*args, **more), []

    def run(*values: Any) -> None:
        if not found:
            bound = launch.bind(**{name: Argument(n) for n, name in enumerate(launch.parameters)})
            found.append(LaunchSequence(bound))
        found[0](*values)

    return run


def zeros(count: int) -> Iterable[Any]:
    return (torch.zeros(4) for _ in range(count))


def test_tensors_become_addresses_and_all_else_stays(driver: Driver) -> None:
    kernel = Kernel(ROWS, "*i32", "constexpr", "constexpr", "i32", "i64", "constexpr", constant=True)
    driver.sizes = [8, 4, 8, 8, 4, 8]
    start = alone(kernel, 9, strides={"a0": (-2, 1 << 40, 1)}, descriptors={"a2": None}, C="constant")
    first, second, flags, others = zeros(4)
    start(first, flags, first, None, -8, 3 << 50)
    assert kernel.given == [(Rows(first, -2, 1 << 40, 1), flags, None, None, -8, 3 << 50)]
    start(second, others, second, None, -8, 3 << 50)
    start(first, others, first, None, -8, 3 << 50)
    rest = [-2, 1 << 40, others.data_ptr(), -8, 3 << 50]
    assert driver.launched[0] == Launch([9, 1, 1], [128, 1, 1], 1000, 105, [], 77, [second.data_ptr(), *rest])
    assert driver.launched[1].parameters == [first.data_ptr(), *rest]


def test_tuples_are_written_if_they_differ(driver: Driver) -> None:
    kernel = Kernel(("i64", "constexpr", "*fp32"), ("i32", "i32"))
    driver.sizes = [8, 8, 4, 4]
    start = alone(kernel, 1)
    x, y = zeros(2)
    plain = (1, 2)
    calls = [((7, None, x), plain), ((8, None, y), plain), ((8, None, x), (3, 4)), ((9, None, y), plain)]
    start(*calls[0])
    for call in calls:
        start(*call)
    wanted = [[a, tensor.data_ptr(), *pair] for (a, _, tensor), pair in calls]
    assert [launched.parameters for launched in driver.launched] == wanted


def test_no_tensor_is_kept(driver: Driver) -> None:
    kernel = Kernel("*fp32", ("i32", "*fp32"), ROWS)
    driver.sizes = [8, 4, 8, 8, 4, 8]
    start = alone(kernel, 1, strides={"a2": (1, 2, 1)})
    for _ in range(3):
        x, y, z = zeros(3)
        start(x, (1, y), z)
    gone = [weakref.ref(tensor) for tensor in (x, y, z)]
    kernel.given.clear()
    del x, y, z
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_pdl_is_a_launch_attribute(driver: Driver) -> None:
    driver.sizes = [4]
    for follows in (False, True):
        kernel = Kernel("i32")
        kernel.compiled.run.launch_pdl = follows
        start = alone(kernel, 1)
        start(1)
        start(1)
        assert driver.launched[-1].attributes == ([(6, 1)] if follows else [])


def test_each_launch_uses_the_current_stream(driver: Driver) -> None:
    driver.sizes = [4]
    start = alone(Kernel("i32"), 1)
    for stream in (5, 6, 7):
        driver.stream = stream
        start(1)
    assert [launched.stream for launched in driver.launched] == [106, 107]


def test_a_launch_within_a_launch_has_memory_of_its_own(driver: Driver) -> None:
    """As when threads launch the same kernel at once."""
    driver.sizes = [8]
    start = alone(Kernel("*fp32"), 1)
    outer, inner = zeros(2)
    start(outer)

    def once() -> None:
        driver.during = None
        start(inner)

    for _ in range(2):
        driver.during = once
        start(outer)
    assert [launched.parameters for launched in driver.launched] == 2 * [[inner.data_ptr()], [outer.data_ptr()]]


@pytest.mark.parametrize("later", [False, True], ids=["Triton 3.6", "Triton 3.8"])
def test_the_address_in_a_map_is_replaced_if_it_differs(
    later: bool, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    encoded: list[Any] = []

    def encode(descriptor: Any, metadata: Any) -> list[Any]:
        encoded.append(descriptor)
        return [Map(), *descriptor.shape]

    def encode_later(descriptor: Any, metadata: Any, others: Any) -> list[Any]:
        return encode(descriptor, metadata)

    monkeypatch.setattr(nvidia, "make_tensordesc_arg", encode_later if later else encode)
    kernel = Kernel(MAPPED, ROWS, MAPPED, "i32")
    driver.sizes = [launcher.MAP, 4, 8, 4, 8, launcher.MAP, 4, 4]
    like = tensors.maker_like(SimpleNamespace(base=None, shape=[6]))
    start = alone(kernel, 1, strides={"a1": (1, 2, 1)}, descriptors={"a2": like, "a0": like})
    x, y, z = zeros(3)
    start(x, y, y, 5)
    for first in (x, x, z, x):
        start(first, y, y, 5)
        at, other = first.data_ptr(), y.data_ptr()
        assert driver.launched[-1].parameters == [at, 6, other, 1, 2, other, 6, 5]
    assert len(encoded) == 2
    assert driver.replaced == [x.data_ptr(), y.data_ptr(), z.data_ptr(), x.data_ptr()]


def test_a_launch_that_the_driver_refuses_goes_to_triton(driver: Driver) -> None:
    driver.sizes = [8]
    kernel = Kernel("*fp32", "constexpr", constant=True)
    start = alone(kernel, 3, C="constant")
    x, y = zeros(2)
    start(x)
    driver.refuses = True
    start(y)
    assert kernel.compiled.run.given == [(3, 1, 1, 105, 77, (4, 1, 1000), None, None, None, y, "constant")]
    driver.refuses = False
    start(x)
    assert driver.launched[-1].parameters == [x.data_ptr()] and len(kernel.compiled.run.given) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
        {"launch_cooperative_grid": True},
        {"gsan_enabled": True},
        {"packed_metadata": (4, 2, 0)},
        {"kind": "fp32"},
        {"kind": ("i32", "fp32")},
        {"kind": ("i32", ("i32", "i32"))},
        {"library": None},
        {"meta": [{}]},
    ],
    ids=str,
)
def test_kernels_that_need_more_go_to_triton(
    change: dict[str, Any], driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.sizes = [4]
    kernel = Kernel(change.get("kind", "i32"))
    compiled = kernel.compiled
    if "library" in change:
        monkeypatch.setattr(launcher, "_library", lambda: None)
    compiled.metadata.tensordesc_meta = change.get("meta", [])
    compiled.packed_metadata = change.get("packed_metadata", compiled.packed_metadata)
    for name in vars(CudaLauncher).keys() & change.keys():
        setattr(compiled.run, name, change[name])
    start = alone(kernel, 1)
    start(1)
    start(1)
    assert not driver.launched and len(compiled.run.given) == 1


def test_kernels_in_a_row_share_values(driver: Driver) -> None:
    """A value that two kernels take, a part of its memory, a tuple, a fixed number, and None."""
    driver.sizes = [8, 8, 4, 8]  # of each kernel
    first, second = Kernel("*fp32", "*fp32", "i32", "*fp32"), Kernel("*fp32", ("i64",), "i32", "*fp32", "constexpr")
    later = Argument(0, 8, lambda x: x[2:])
    row = LaunchSequence(
        KernelLaunch(first, 2).bind(a0=Argument(0), a1=later, a2=5, a3=Argument(1)),
        KernelLaunch(second, 3).bind(a4=Argument(3), a0=later, a1=Argument(2), a2=6, a3=Argument(1)),
    )
    x, y, u, w = zeros(4)
    row(x, y, (7,), None)
    assert [len(kernel.given) for kernel in (first, second)] == [1, 1]
    assert torch.equal(first.given[0][1], x[2:]) and second.given[0][4] is None
    for a, b, number in ((x, y, 7), (u, w, 8), (w, u, 8)):
        row(a, b, (number,), None)
        launches = [launched.parameters for launched in driver.launched[-2:]]
        assert launches[0] == [a.data_ptr(), a.data_ptr() + 8, 5, b.data_ptr()]
        assert launches[1] == [a.data_ptr() + 8, number, 6, b.data_ptr()]
    assert [launched.grid[0] for launched in driver.launched] == 3 * [2, 3]


def test_triton_continues_a_sequence_where_the_driver_refuses(driver: Driver) -> None:
    driver.sizes = [8]
    kernels = [Kernel("*fp32") for _ in range(3)]
    row = LaunchSequence(*(KernelLaunch(kernel, 1).bind(a0=Argument(0)) for kernel in kernels))
    x, y = zeros(2)
    row(x)

    def refuse() -> None:
        driver.refuses = len(driver.launched) == 0

    driver.during = refuse
    row(y)
    assert len(driver.launched) == 1 and [len(kernel.compiled.run.given) for kernel in kernels] == [0, 1, 1]
    assert kernels[2].compiled.run.given[0][-1] is y


def test_nothing_to_launch(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the backward pass of no sequences, with a driver that is not CUDA's."""
    monkeypatch.setattr(launcher, "_library", lambda: None)
    row = LaunchSequence()
    row(torch.zeros(0))
    row(torch.zeros(0))
    assert not driver.launched


def test_a_profilers_hooks_are_called(driver: Driver) -> None:
    import triton

    driver.sizes = [8]
    kernel = Kernel("*fp32")
    start = alone(kernel, 1)
    x, y, z = zeros(3)
    start(x)
    hook = triton.knobs.runtime.launch_enter_hook
    listener: Any = lambda metadata: None  # noqa: E731
    hook.add(listener)
    try:
        start(y)
    finally:
        hook.remove(listener)
    start(z)
    assert kernel.given == [(x,), (y,)]
    assert [launched.parameters for launched in driver.launched] == [[z.data_ptr()]]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"a0": 1}, "missing arguments a1"),
        ({"a0": 1, "a1": 2, "a2": 3}, "unknown arguments a2"),
        ({"a0": 1, "A1": 2}, "missing arguments a1; unknown arguments A1"),
        ({"a0": 1, "a1": 2, "C": 3}, "unknown arguments C"),
    ],
    ids=str,
)
def test_arguments_are_checked_by_their_names(arguments: dict[str, Any], fault: str) -> None:
    launch = KernelLaunch(Kernel("i32", "i32", "constexpr", constant=True), 1, C=16)
    assert launch.bind(a1=2, a0=1).args == (1, 2)
    with pytest.raises(TypeError, match=f"^a_kernel: {fault}$"):
        launch.bind(**arguments)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({}, "missing constants C"),
        ({"C": 1, "D": 2}, "unknown constants D"),
        ({"C": 1, "strides": {"a0": None, "b": (1, 1, 1)}}, "unknown parameters b"),
        ({"C": 1, "descriptors": {"a1": None, "C": None}}, "unknown parameters C"),
    ],
    ids=str,
)
def test_constants_strides_and_descriptors_are_checked_by_their_names(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(TypeError, match=f"^a_kernel: {fault}$"):
        KernelLaunch(Kernel("i32", "i32", "constexpr", constant=True), 1, **options)


def test_constants_are_in_the_order_of_the_kernel() -> None:
    """Triton's launcher takes them by position."""
    kernel = Kernel("i32")
    names = ("a0", "B", "C")
    kinds = (Any, "tl.constexpr", "gl.constexpr")
    kernel.fn.__signature__ = Signature(
        [
            Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in zip(names, kinds, strict=True)
        ]
    )
    assert list(KernelLaunch(kernel, 1, C=1, B=2).constants.items()) == [("B", 2), ("C", 1)]
