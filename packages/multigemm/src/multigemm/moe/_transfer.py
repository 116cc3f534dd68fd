"""Rows to the other processes of a group and back, under autograd.

The collective is ``torch.distributed.all_to_all_single`` with uneven splits. Launching it and waiting for it
are two functions, so that work stands between them, and each is the other's derivative: in backward, too, the
rows are on their way while other gradients are computed. There are derivatives of any order.

Every process of the group has to launch the same exchanges in the same order, also one that has no rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


class Transfer:
    """One exchange: the number of rows that are sent to and received from each process, in their order."""

    def __init__(self, sent: list[int], received: list[int], group: ProcessGroup) -> None:
        self.sent, self.received, self.group = sent, received, group
        self.gradient: Transfer | None = None
        """The exchange of the gradient, from its launch on."""
        self._work: Work | None = None
        self._rows: tuple[torch.Tensor, ...] = ()

    def reverse(self) -> Transfer:
        """The exchange that brings rows back to where they came from."""
        return Transfer(self.received, self.sent, self.group)

    def launch(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [sum of sent, H], on their way from here on -> a token for ``wait``."""
        token: torch.Tensor = _Launch.apply(rows, self)  # type: ignore[no-untyped-call]
        return token

    def wait(self, token: torch.Tensor) -> torch.Tensor:
        """The rows that arrive, [sum of received, H]."""
        rows: torch.Tensor = _Wait.apply(token, self)  # type: ignore[no-untyped-call]
        return rows

    def start(self, rows: torch.Tensor) -> None:
        rows = rows.contiguous()
        arriving = rows.new_empty((sum(self.received), *rows.shape[1:]))
        self._rows = arriving, rows  # both have to live until the exchange is over
        self._work = dist.all_to_all_single(
            arriving, rows, self.received, self.sent, group=self.group, async_op=True
        )

    def finish(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        arrived = self._rows[0]
        self._work, self._rows = None, ()
        return arrived


# The token is an empty tensor that ties the two functions together: a gradient has the shape of its tensor,
# and what travels in backward has the shape of what was sent, not of what arrived.


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        transfer.start(rows)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Wait.apply(grads[0], ctx.transfer.gradient), None  # type: ignore[no-untyped-call]


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        return transfer.finish()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.transfer.gradient = ctx.transfer.reverse()
        return _Launch.apply(grads[0], ctx.transfer.gradient), None  # type: ignore[no-untyped-call]
