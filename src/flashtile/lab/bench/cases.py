"""The cases of the CPU suite, and the bar of each group."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flashtile.cost.plan import Plan, plan

FORWARD, TRAINING = "forward", "forward + backward"
PROJECTIONS = ("separate projections", "fused projection")  # of q, k and v


@dataclass(frozen=True, slots=True)
class Case:
    """One shape, one dtype, one set of options."""

    n_q: int
    n_k: int
    dim: int
    heads: int = 8
    kv_heads: int = 8
    batch: int = 1
    dtype: str = "float32"
    direction: str = FORWARD
    options: dict[str, Any] = field(default_factory=dict)  # of attention(); bias=True creates one
    # The type of our inputs, if torch is installed; "packed": sequences back to back; one of PROJECTIONS: views of what
    # a layer has computed, to a result that the next one takes.
    entry: str = "torch"
    beside_torch: bool = False  # torch has just run something on all threads
    naive: bool = False  # also time standard attention in torch and NumPy: only if N x N fits easily

    @property
    def name(self) -> str:
        heads = f"H{self.heads}" if self.heads == self.kv_heads else f"H{self.heads}/{self.kv_heads}"
        length = f"N{self.n_q}" if self.n_q == self.n_k else f"N{self.n_q}x{self.n_k}"
        entry = f", {self.entry}" if self.entry in PROJECTIONS else ""
        return f"B{self.batch} {heads} {length} D{self.dim} {self.dtype}{entry}"

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of q, and of k and v."""
        return (self.batch, self.heads, self.n_q, self.dim), (self.batch, self.kv_heads, self.n_k, self.dim)

    def plan(self, device: str = "cpu") -> Plan:
        """The plan of a call, without its bias."""
        options = {name: x for name, x in self.options.items() if name != "bias"}
        return plan(*self.shapes, self.dtype, device, **options)

    def to_dict(self) -> dict[str, Any]:
        shape = {key: getattr(self, key) for key in ("batch", "heads", "kv_heads", "n_q", "n_k", "dim")}
        return {
            "case": self.name,
            "shape": shape,
            **{key: x for key, x in asdict(self).items() if key not in shape and key != "naive"},
        }


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that share a bar: on the geometric mean of time / SDPA time, and on the worst case."""

    name: str
    title: str
    cases: tuple[Case, ...]
    bar: float
    reach: float | None = None
    worst_bar: float | None = None


def square(n: int, dim: int, **more: Any) -> Case:
    return Case(n, n, dim, **more)


LENGTHS, DIMS = (512, 1024, 2048, 4096, 8192), (64, 128)
SMALL = square(128, 64)
TINY = (Case(8, 8, 64, 1, 1, batch=20_000), Case(1, 16, 64, batch=20_000))


def _grid(lengths: tuple[int, ...] = LENGTHS, **more: Any) -> tuple[Case, ...]:
    return tuple(square(n, dim, **more) for dim in DIMS for n in lengths)


def _of_16_bits(dtype: str) -> tuple[Group, Group]:
    forward = _grid((512, 2048, 4096), dtype=dtype)
    training = _grid((512, 2048), dtype=dtype, direction=TRAINING)
    return (
        Group(dtype, f"forward, {dtype}", forward, bar=0.85, reach=0.75, worst_bar=1.0),
        Group(f"{dtype}-training", f"forward + backward, {dtype}", training, bar=0.95, reach=0.85, worst_bar=1.0),
    )


CAUSAL = {"causal": True}
CPU = (
    Group(
        "full",
        "forward",
        tuple(replace(case, naive=case.n_q <= 2048) for case in _grid()),
        bar=0.85,
        reach=0.78,
        worst_bar=0.97,
    ),
    Group("causal", "forward, causal", _grid(options=CAUSAL), bar=0.66, reach=0.58, worst_bar=0.85),
    Group("training", "forward + backward", _grid(direction=TRAINING), bar=0.82, reach=0.75),
    Group(
        "training-causal",
        "forward + backward, causal",
        _grid(direction=TRAINING, options=CAUSAL),
        bar=0.64,
        reach=0.55,
    ),
    Group(
        "model",
        "forward + backward as a model calls it: from views of projections to the input of the next one",
        tuple(
            case
            for entry in PROJECTIONS
            for dtype in ("float32", "bfloat16")
            for case in _grid((2048,), dtype=dtype, direction=TRAINING, entry=entry)
        ),
        bar=0.90,
        reach=0.80,
    ),
    Group("decode", "decode, 32 heads x 8192 keys", (Case(1, 8192, 128, 32, 32),), bar=0.75, reach=0.65),
    Group("decode-gqa", "decode, 32 heads on 8 key heads", (Case(1, 8192, 128, 32, 8),), bar=0.30, reach=0.20),
    Group(
        "decode-short",
        "decode, 8 heads x 128 to 1024 keys",
        tuple(Case(1, n, 64) for n in (128, 256, 512, 1024)),
        bar=0.90,
        worst_bar=1.0,
    ),
    *_of_16_bits("bfloat16"),
    *_of_16_bits("float16"),
    Group("bias", "with a bias", _grid((1024, 2048), options={"bias": True}), bar=0.95),
    Group(
        "window",
        "with a window of 256 keys",
        _grid((2048, 4096), options={"causal": True, "window": (255, None)}),
        bar=0.30,
    ),
    Group("dropout", "with dropout 0.1", _grid((1024, 2048), options={"dropout": 0.1, "seed": 1}), bar=0.40),
    Group(
        "tiny",
        "20,000 tiny sequences, prompts and decodes, in a batch and packed",
        (*TINY, *(replace(case, entry="packed") for case in TINY)),
        bar=0.75,
        worst_bar=1.0,
    ),
    Group("small", "a small call, from torch", (SMALL,), bar=0.75, reach=0.6),
    Group("small-numpy", "a small call, from NumPy", (replace(SMALL, entry="numpy"),), bar=0.75, reach=0.6),
    Group("small-beside", "a small call, beside other torch work", (replace(SMALL, beside_torch=True),), bar=0.85),
)

MEMORY = square(16384, 64, heads=2, kv_heads=2)
SCALING = tuple(square(n << 10, 64, heads=2, kv_heads=2) for n in (1, 2, 4, 8, 16, 32))
SCALING_BAR = 0.15  # how far the slowest may be below the fastest, in GFLOP/s
GROUPS = (*(group.name for group in CPU), "memory", "scaling")


def quick(group: Group) -> Group:
    """The same group with only its short cases."""
    short = tuple(case for case in group.cases if case.n_q <= 1024 or case.n_q == group.cases[0].n_q)
    return replace(group, cases=short)
