"""Options of attention() from arguments that several libraries have."""

from typing import Any

import torch
from torch import Tensor

from flashtile.errors import DTypeError
from flashtile.pytorch.interception import readable


def dropout_options(probability: Any, q: Tensor) -> dict[str, Any]:
    """Dropout with a seed from torch's generator; without dropout no options, and no number is drawn."""
    if probability == 0:
        return {}
    if torch.compiler.is_compiling() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        # A graph draws a new seed each time it runs, and the host does not wait for it.
        return {"dropout": probability, "seed": torch.randint(2**63 - 1, (), device=q.device)}
    drawn = torch.randint(2**63 - 1, (), device="cpu")
    return {"dropout": probability, "seed": int(drawn) if readable(drawn) else drawn}


def mask_options(name: str, mask: Tensor) -> dict[str, Any]:
    """A mask, True where a query may attend, or a bias, numbers added to scores."""
    if mask.dtype == torch.bool:
        return {"mask": mask}
    if not mask.is_floating_point():
        raise DTypeError(f"{name}: expected booleans, or numbers to be added to scores, got {mask.dtype}")
    return {"bias": mask}
