"""A record for tests."""

from flashtile.lab.bench import records


def example() -> records.Record:
    record = records.new("cpu", quick=False, threads=2)
    record["measurements"] = [
        {
            "group": "full",
            "case": "B1 H8 N512 D64 float32",
            "direction": "forward",
            "times": {"flashtile": {"median_s": 0.001}, "torch SDPA": {"median_s": 0.002}},
            "ratio": 0.5,
            "gflops": 123.4,
        },
        {"group": "memory", "case": "B1", "direction": "forward", "grown": {"flashtile": 1 << 20, "torch SDPA": None}},
    ]
    shared = {"title": "forward", "measure": "time / SDPA time", "bar": 0.85, "reach": 0.78, "worst_bar": 0.97}
    record["summary"] = [{"group": "full", **shared, "value": 0.5, "worst": 0.5, "holds": True}]
    return record
