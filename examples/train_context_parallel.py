"""Train a small Llama on sequences that are sharded over processes: FSDP2 x context parallel.

    torchrun --nproc-per-node 4 examples/train_context_parallel.py --context 2

Each of the 4 processes has half of the tokens of half of the sequences, and a quarter of the weights. The losses are
those of one process with the whole batch: `python examples/train_context_parallel.py` prints them.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import transformers
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from flashtile.compat import transformers as tiled
from flashtile.distributed import Shards

BATCH, TOKENS, VOCABULARY = 4, 257, 128


def build() -> Any:
    """A model of random weights, the same in every process."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tiled", dtype=torch.float64)


def train(mesh: DeviceMesh | None, steps: int, device: str = "cpu") -> list[float]:
    """Train on the axes "data" and "context" of a mesh, or in one process; return the losses."""
    if mesh is None:
        tiled.register("tiled")
        data, context, ranks, part = 1, 0, 1, 0
    else:
        tiled.register("tiled", group=mesh["context"])
        data, part = mesh["data"].size(), mesh["data"].get_local_rank()
        ranks, context = mesh["context"].size(), mesh["context"].get_local_rank()
    model = build().to(device)
    if mesh is not None:
        weights = mesh["data", "context"]._flatten("weights")
        for layer in model.model.layers:
            fully_shard(layer, mesh=weights)
        fully_shard(model, mesh=weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # Any number of tokens can be sharded. Each token's label is the next token, which may be on another rank: so
    # labels are shifted before they are sharded. The model needs each token's position in its document.
    shards = Shards.zigzag(TOKENS, ranks=ranks)
    positions = torch.from_numpy(shards.positions(context))[None].to(device)
    sharded: dict[str, Any] = {} if mesh is None else {"shards": shards}
    drawn = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        text = (torch.randint(2, (BATCH, TOKENS + 1), generator=drawn).cumsum(1) * 7) % VOCABULARY
        mine = text.chunk(data)[part].to(device)
        tokens, labels = (shards.shard(x, context, dim=1) for x in (mine[:, :-1], mine[:, 1:]))
        logits = model(tokens, position_ids=positions.expand(len(tokens), -1), use_cache=False, **sharded).logits
        # The share of these tokens in the mean. FSDP averages gradients over processes, where a sum is needed.
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (BATCH * TOKENS)
        (loss * data * ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if mesh is not None:
            distributed.all_reduce(total)
        losses.append(total.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama: FSDP2 x context parallel.")
    parser.add_argument("--context", type=int, default=1, help="processes that share a sequence")
    parser.add_argument("--steps", type=int, default=5)
    chosen = parser.parse_args()
    device, mesh = "cuda" if torch.cuda.is_available() else "cpu", None
    if "WORLD_SIZE" in os.environ:
        shape = (int(os.environ["WORLD_SIZE"]) // chosen.context, chosen.context)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "context"))
    losses = train(mesh, chosen.steps, device)
    if int(os.environ.get("RANK", "0")) == 0:
        for step, loss in enumerate(losses):
            print(f"step {step}: loss {loss:.12f}")
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
