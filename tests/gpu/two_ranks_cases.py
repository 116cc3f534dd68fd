"""Cases for two processes with a GPU each: data parallel training, and whose device is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu import two_kit
from gpu.two_kit import MODULES, Way, make

CASES: dict[str, Callable[[torch.device], None]] = {}


def distributed(way: Way) -> Callable[[torch.device], None]:
    def case(device: torch.device) -> None:
        """Uneven shares of the batch: twice DDP's mean of the weights' gradients are those of the whole."""
        rank = dist.get_rank()
        work = make(way, device)
        assert work.module is not None
        ids: list[Any] | None = None if device.type == "cpu" else [device]
        model = torch.nn.parallel.DistributedDataParallel(work.module, ids)
        rows = work.late[0].shape[0]
        mine = slice(0, rows // 3) if rank == 0 else slice(rows // 3, rows)
        late = [t.detach()[mine].clone() for t in work.late]
        late[0].requires_grad_()
        y = model(*late)
        y.backward(work.gy[mine])
        value, (gx, *gradients) = two_kit.expected(way)
        torch.testing.assert_close(y.detach().cpu(), value[mine], rtol=1e-9, atol=1e-9)
        assert late[0].grad is not None and late[0].grad.device == device
        torch.testing.assert_close(late[0].grad.cpu(), gx[mine], rtol=1e-9, atol=1e-9)
        parameters = [p for p in work.module.parameters() if p.requires_grad]
        for parameter, whole in zip(parameters, gradients, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(2 * parameter.grad.cpu(), whole, rtol=1e-9, atol=1e-9)

    return case


for _way in MODULES:
    if _way.pin is None:
        CASES[f"DistributedDataParallel, {_way}"] = distributed(_way)


def nobody_touches_anothers_device(device: torch.device) -> None:
    """After all the others; as the driver tells."""
    if device.type == "cpu":
        return
    found: dict[str, Any] = {}
    exec(two_kit.CONTEXTS, found)
    expected = [int(index == device.index) for index in range(torch.cuda.device_count())]
    assert found["contexts"]() == expected


CASES["nobody touches another's device"] = nobody_touches_anothers_device
