"""Train a small mixture of experts whose experts are spread over processes.

    torchrun --standalone --nproc-per-node 2 docs/examples/expert_parallel.py

Each process takes a GPU where there are enough, and the CPU otherwise.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from multigemm.moe import ExpertParallelFeedForward, MoEConfig


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    enough = gpus >= int(os.environ["LOCAL_WORLD_SIZE"])
    kind = torch.accelerator.current_accelerator().type if enough else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if enough else torch.device("cpu")
    if enough:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group()  # NCCL for GPUs, gloo for the CPU
    mesh = init_device_mesh(kind, (world,), mesh_dim_names=("expert",))

    config = MoEConfig(
        hidden_size=32, intermediate_size=48, num_experts=8, top_k=2, shared_intermediate_size=32
    )
    torch.manual_seed(rank)  # experts of its own ...
    layer = ExpertParallelFeedForward(config, mesh["expert"], chunks=2, device=device)
    for parameter in layer.replicated_parameters():
        dist.broadcast(parameter.data, src=0)  # ... and the one router and shared expert
    print(f"process {rank} of {world} on {device}: experts {layer.experts.start} to {layer.experts.stop - 1}")

    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(100 + rank)  # tokens of its own
    for step in range(60):
        x = torch.randn(128, 32, generator=generator).to(device)
        loss = (layer(x) - x.roll(1, dims=-1)).square().mean() / world  # a mean over all processes' tokens
        optimizer.zero_grad()
        loss.backward()
        layer.reduce_replicated_gradients()  # those of the experts are complete already
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {total.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
