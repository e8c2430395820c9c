"""Train on this GPU, write docs/training.json and draw docs/training.png: python -m tests.tools.training_curves.

To draw the record of an earlier run: python -m tests.tools.training_curves docs/training.json.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from flashtile import dispatch
from flashtile.lab.bench import records
from flashtile.lab.studies import canvas
from tests.support import training
from tests.tools.tree import ROOT

RECORD, PICTURE = ROOT / "docs" / "training.json", ROOT / "docs" / "training.png"
COLOURS = (canvas.BLUE, canvas.RED, canvas.GREEN)


def train(setups: tuple[training.Setup, ...] = training.GPU_SETUPS) -> records.Record:
    """Train every setup with every backend of its device that can run here, and with torch's kernels."""
    record = records.new("training", quick=False)
    for setup in setups:
        able = [row.name for row in dispatch.TABLE if row.device == setup.device and row.missing() is None]
        curves = {name: training.losses(setup, training.flashtile_attention(name)) for name in able}
        others = training.torch_runs(setup)
        record["measurements"].append({"setup": asdict(setup), "flashtile": curves, "torch": others})
    return record


def draw(record: records.Record, picture: Path) -> None:
    """Draw the losses and, below them, the difference of each from torch's MATH kernel."""
    setups: list[dict[str, Any]] = record["measurements"]
    figure, axes = canvas.panels(2, len(setups), width=5.0 * len(setups), height=6.0)
    for n, measured in enumerate(setups):
        above, below = axes[n], axes[n + len(setups)]
        plain = measured["torch"]["MATH"]
        above.plot(plain, color=canvas.MUTED, linewidth=3, alpha=0.4, label="torch")
        for curve in measured["torch"].values():
            below.plot(np.subtract(curve, plain), color=canvas.MUTED, linewidth=0.8)
        for (name, curve), colour in zip(measured["flashtile"].items(), COLOURS, strict=False):
            above.plot(curve, color=colour, linewidth=0.9, label=f"flashtile, {name}")
            below.plot(np.subtract(curve, plain), color=colour, linewidth=0.8)
        canvas.label(above, f"head dim {measured['setup']['head_dim']}", y="loss")
        canvas.label(below, "apart from torch's plainest kernel", x="step", y="difference of the losses")
        canvas.legend(above)
    figure.savefig(picture)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        draw(records.read(Path(sys.argv[1])), PICTURE)
    else:
        records.write(train(), RECORD)
        draw(records.read(RECORD), PICTURE)
