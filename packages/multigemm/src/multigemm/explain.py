"""``explain``: where a call would go, and why not elsewhere. Nothing is computed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import _checks, _choice, _dispatch, _precision, _rules
from ._errors import OptionError
from .ops import _route


class Explanation(NamedTuple):
    """What a call takes. ``str()`` of it is text for people, ``as_dict()`` is data."""

    operator: str
    device: str
    implementation: str
    """The implementation that runs: a backend's name such as "cpu", "reference", or a third party's."""
    named: str
    """The implementation's name as it was asked for; "" is the default."""
    source: str
    """What asked for it: "argument", "context", "environment", "property" or "default"."""
    kernel: str
    """The kernel that a backend takes, or the torch call of the reference."""
    reasons: dict[str, str]
    """Why each other backend, kernel or implementation is not taken."""
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()

    def __str__(self) -> str:
        lines = [
            f"{self.operator} on {self.device}: {self.implementation}, kernel {self.kernel}",
            f"  asked for: {self.named or 'nothing'} ({self.source})",
        ]
        lines += [f"  not {name}: {why}" for name, why in self.reasons.items()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def explain(
    x: torch.Tensor,
    other: torch.Tensor,
    group_sizes: Any = None,
    *,
    op: str = "grouped_mm",
    offsets: Any = None,
    bias: torch.Tensor | None = None,
    sum_batch: bool = False,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Explanation:
    """Tell which backend, implementation and kernel a call takes, and why not the others.

    The arguments are those of ``grouped_mm`` (``other`` is w), or of ``grouped_mm_wgrad`` (``other`` is
    gy) with ``op="grouped_mm_wgrad"``. Raises what the call itself would raise.
    """
    groups, is_offsets = _checks.groups_argument(op, group_sizes, offsets)
    if op == "grouped_mm":
        _checks.grouped_mm(x, other, groups, is_offsets, bias, out_dtype, precision, implementation)
        shape = (*x.shape[:-1], other.shape[-1])
    elif op == "grouped_mm_wgrad":
        _checks.grouped_mm_wgrad(x, other, groups, is_offsets, out_dtype, precision, implementation)
        if sum_batch:
            _rules.sum_batch(op, x.shape)
        batch = (1,) if sum_batch else x.shape[1:-1]
        shape = (groups.shape[0], *batch, x.shape[-1], other.shape[-1])
    else:
        raise OptionError(f'explain: op must be "grouped_mm" or "grouped_mm_wgrad", got {op!r}.')
    name = "" if implementation is None else _choice.known(implementation, "explain")
    found = _route.route(op, x.device, name, _choice.pinned())
    reasons = _other_backends(x.device.type, found)
    notes = []
    if found.backend is None:
        kernel = "torch.mm on each group's rows" if x.dim() == 2 else "torch.bmm over B on each group's rows"
        if found.kind == "third party":
            kernel = "unknown: it is a third party's"
        elif x.device.type not in ("cpu", "meta") and groups.device.type != "cpu":
            notes.append("the group sizes are read back from the device, which synchronises")
        where = found.kind if found.kind == "reference" else found.choice.name
        return Explanation(
            op, str(x.device), where, found.choice.name, found.choice.source, kernel, reasons, tuple(notes)
        )
    from . import _abi

    out = torch.empty(shape, dtype=out_dtype or x.dtype, device="meta")
    plan = _abi.explain(
        found.backend,
        op,
        x,
        other,
        groups,
        is_offsets,
        bias,
        sum_batch,
        out,
        _precision.resolved(x, precision or ""),
        found.choice.name,
    )
    reasons.update(plan.get("rejected", {}))
    notes += plan.get("notes", [])
    return Explanation(
        op,
        str(x.device),
        found.backend.name,
        found.choice.name,
        found.choice.source,
        plan["kernel"],
        reasons,
        tuple(notes),
    )


def _other_backends(device_type: str, found: _route.Route) -> dict[str, str]:
    """The installed backends that are not taken, and why."""
    if found.kind != "backend" and found.choice.name not in ("", "torch"):
        return {"backends": f"the implementation {found.choice.name!r} was asked for"}
    reasons = {}
    for finding in _dispatch.findings():
        if found.backend is None or finding.folder != found.backend.folder:
            reasons[finding.backend] = finding.reason or finding.verdict
    if not reasons and found.backend is None:
        reasons["backends"] = f"none is installed for {device_type}"
    return reasons


__all__ = ["Explanation", "explain"]
