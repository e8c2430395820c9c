"""Support for torch tensors: operators, autograd, fake tensors, vmap, autocast."""

import torch
from torch.utils._pytree import GetAttrKey, register_pytree_node

from flashtile.errors import UnsupportedError
from flashtile.host import machine

if _reason := machine.too_old("torch", torch.__version__):  # before imports that fail with an old torch
    raise UnsupportedError(_reason)

from flashtile.pytorch import flops, vmap
from flashtile.pytorch.backward import attention_backward
from flashtile.pytorch.entry import attention
from flashtile.pytorch.merge import merge
from flashtile.pytorch.operators import ATTENTION
from flashtile.spans import Spans

flops.add_to_counters()

# So that torch.export and torch.func take Spans among their arguments.
register_pytree_node(
    Spans,
    lambda spans: ([spans.limits], None),
    lambda limits, _: Spans.of(*limits),
    serialized_type_name="flashtile.Spans",
    flatten_with_keys_fn=lambda spans: ([(GetAttrKey("limits"), spans.limits)], None),
)

# What a policy of torch.utils.checkpoint may save: create_selective_checkpoint_contexts() takes such a list.
OPERATORS = [ATTENTION]

__all__ = ["OPERATORS", "attention", "attention_backward", "merge", "vmap"]
