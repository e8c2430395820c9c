"""The device interface of the suites: clock, graphs, memory; all CUDA-specific code is here."""

from typing import Any, Protocol

from flashtile.lab.bench.timing import Call

HEAD_START = 1 << 22  # cycles, about 2 ms, that the device waits before it is timed, so that the host gets ahead


class Device(Protocol):
    """What a suite needs of a GPU; tests provide fakes."""

    name: str  # for torch
    cache: int  # bytes of the last level

    def describe(self) -> dict[str, Any]: ...

    def seconds(self, call: Call) -> float:
        """Device time of the work that a call enqueues, without the host's time to enqueue it."""

    def synchronize(self) -> None: ...

    def captured(self, call: Call) -> Call:
        """Capture the work that a call enqueues as one launch, which costs the host almost nothing."""

    def growth(self, call: Call) -> int:
        """Peak memory of a call beyond the memory in use before and its results."""


class Cuda:
    """The current CUDA device, through torch."""

    name = "cuda"

    def __init__(self) -> None:
        import torch

        self.torch: Any = torch
        self.cuda: Any = torch.cuda
        self.about = self.cuda.get_device_properties()
        self.cache = int(self.about.L2_cache_size)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.about.name,
            "capability": list(self.cuda.get_device_capability()),
            "processors": self.about.multi_processor_count,
            "memory": self.about.total_memory,
            "cache": self.cache,
            "cuda": self.torch.version.cuda,
            "cudnn": self.torch.backends.cudnn.version(),
        }

    def seconds(self, call: Call) -> float:
        start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        self.cuda._sleep(HEAD_START)
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def captured(self, call: Call) -> Call:
        aside = self.cuda.Stream()
        aside.wait_stream(self.cuda.current_stream())
        with self.cuda.stream(aside):  # one-time initialisation must not happen while capturing
            call()
        self.cuda.current_stream().wait_stream(aside)
        self.synchronize()
        graph = self.cuda.CUDAGraph()
        with self.cuda.graph(graph):
            call()
        replay: Call = graph.replay
        return replay

    def growth(self, call: Call) -> int:
        self.synchronize()
        before = self.cuda.memory_allocated()
        self.cuda.reset_peak_memory_stats()
        result = call()
        self.synchronize()
        return int(self.cuda.max_memory_allocated() - before - returned(result))


def returned(result: Any) -> int:
    """Bytes of the tensors that a call returned; shared memory counts once."""
    given = result if isinstance(result, tuple) else (result,)
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in given}.values())


def missing() -> str | None:
    """Why nothing can be measured on a GPU here; None if it can."""
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed; run: pip install 'flashtile[gpu]'"
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"
