"""Work for two GPUs: every operator and layer by every way, with late operands and values to compare with."""

from __future__ import annotations

import contextlib
import ctypes
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from gpu.kit import lacks_blas

import multigemm
from multigemm import _dispatch
from multigemm.equivariant import IndexedLinear, SymmetricContraction

SLOW = 100_000_000  # clock cycles, about a twentieth of a second
SIZES = [40, 0, 77, 9]
ROWS, K, M, GROUPS = sum(SIZES) + 5, 24, 40, 4
IRREPS, ATOMS = "16x0e + 16x1o", 90


@dataclass(frozen=True)
class Way:
    """Something that multiplies, and the implementation that its products are pinned to, if any."""

    what: str
    pin: str | None = None

    def __str__(self) -> str:
        return f"{self.what}, {self.pin or 'default'}"

    def __repr__(self) -> str:
        return str(self)


PINS = (None, "native", "blas", "torch", "simt")
WAYS = [
    *(Way("grouped_mm", pin) for pin in PINS),
    *(Way("grouped_mm_wgrad", pin) for pin in PINS),
    *(Way("native layer of experts", pin) for pin in (None, "blas", "torch")),
    *(Way("layer of experts", pin) for pin in (None, "native", "blas", "torch")),
    *(Way("indexed linear", pin) for pin in (None, "native", "blas", "torch")),
    Way("fused contraction"),
    *(Way("grouped contraction", pin) for pin in (None, "native", "blas", "torch")),
]
CAPTURED = [way for way in WAYS if way.pin not in ("blas", "torch")]
"""Those that need no sizes on the host."""
MODULES = [way for way in WAYS if not way.what.startswith("grouped_mm")]


@dataclass
class Work:
    """``late`` are the operands whose values earlier work of the stream writes, ``leaves`` get gradients."""

    way: Way
    function: Callable[..., torch.Tensor]
    late: list[torch.Tensor]
    leaves: list[torch.Tensor]
    module: torch.nn.Module | None = None
    gy: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def call(self) -> torch.Tensor:
        with multigemm.use(self.way.pin):
            return self.function(*self.late)

    def gradients(self, gy: torch.Tensor | None = None) -> list[torch.Tensor]:
        with multigemm.use(self.way.pin):
            return list(torch.autograd.grad(self.function(*self.late), self.leaves, gy))


def make(way: Way, device: torch.device | str, seed: int = 0) -> Work:
    """The same float64 values on every device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    if way.what.startswith("grouped_mm"):
        x, w, gy = normal(ROWS, K), normal(GROUPS, K, M), normal(ROWS, M)
        sizes = torch.tensor(SIZES, device=device)
        if way.what == "grouped_mm":
            leaves = [x.requires_grad_(), w.requires_grad_()]
            return Work(way, multigemm.grouped_mm, [x, w, sizes], leaves, gy=gy)
        leaves = [x.requires_grad_(), gy.requires_grad_()]
        return Work(way, multigemm.grouped_mm_wgrad, [x, gy, sizes], leaves, gy=normal(GROUPS, K, M))
    module, x, labels = _module(way, normal)
    module = module.to(device)
    late = [x.requires_grad_(), *([] if labels is None else [labels.to(device)])]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(normal(*parameter.shape) * 0.3)
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
    width = int(x.shape[1])
    gy = normal(x.shape[0], width)
    return Work(way, partial(_run, module), late, leaves, module, gy)


def _run(module: torch.nn.Module, *operands: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = module(*operands)
    return y


def _module(
    way: Way, normal: Callable[..., torch.Tensor]
) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor | None]:
    """A layer that gives as many columns as it takes, x, and labels where it wants any."""
    if way.what.endswith("layer of experts"):
        from multigemm.moe import MoEConfig, MoEFeedForward

        config = MoEConfig(
            hidden_size=32, intermediate_size=24, num_experts=8, top_k=2, shared_intermediate_size=16,
            input_dtype=torch.float64,
        )  # fmt: skip
        name = "multigemm_native_moe" if way.what.startswith("native") else "multigemm_moe"
        return MoEFeedForward(config, implementation=name), normal(70, 32), None
    labels = torch.arange(ATOMS) * 7 % 5 - 1  # of 6 elements, two of them without an atom; some of none
    x = normal(ATOMS, 64)
    if way.what == "indexed linear":
        return IndexedLinear(IRREPS, IRREPS, 6, dtype=torch.float64), x, labels
    return (
        SymmetricContraction(
            IRREPS, IRREPS, 2, num_elements=6, dtype=torch.float64, implementation=way.what.split()[0]
        ),
        x,
        labels,
    )


def plain(way: Way) -> Way:
    """The same by PyTorch's own operators, on any device."""
    other = {"native layer of experts": "layer of experts", "fused contraction": "grouped contraction"}
    return Way(other.get(way.what, way.what), "reference")


def left_out() -> set[str]:
    """Pins that the backend cannot take in this process."""
    return {"blas"} if lacks_blas(_dispatch.backend_for("cuda")) else set()


def usable(ways: list[Way]) -> list[Way]:
    return [way for way in ways if way.pin not in left_out()]


@cache
def expected(way: Way, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Values and gradients of PyTorch's own operators on the CPU."""
    work = make(plain(way), "cpu", seed)
    return work.call().detach(), work.gradients(work.gy)


def check(way: Way, y: torch.Tensor, seed: int = 0) -> None:
    torch.testing.assert_close(y.detach().cpu(), expected(way, seed)[0], rtol=1e-9, atol=1e-9)


def check_gradients(way: Way, found: list[torch.Tensor], seed: int = 0) -> None:
    for ours, theirs in zip(found, expected(way, seed)[1], strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-9)


@contextlib.contextmanager
def arriving(tensors: list[torch.Tensor], dry: Callable[[], object]) -> Iterator[None]:
    """Inside, the operands are zeros, until slow work on their device's current stream has written them.

    ``dry`` runs on the zeros before: then memory of the stream is at hand, and holds nothing that is right.
    """
    device = tensors[0].device
    with torch.no_grad():
        ready = [t.detach().clone() for t in tensors]
        for t in tensors:
            t.zero_()
    dry()
    torch.cuda.synchronize(device)
    with torch.no_grad(), torch.cuda.device(device):
        torch.cuda._sleep(SLOW)
        for t, value in zip(tensors, ready, strict=True):
            t.copy_(value)
    yield


def warm(*works: Work) -> None:
    """Once without delay: what is loaded or made at first use is there, on the device of each."""
    for work in works:
        with torch.cuda.device(work.late[0].device):
            work.call(), work.gradients(work.gy)
            torch.cuda.synchronize()


# --- what the libraries say -------------------------------------------------------------------------------


def handles() -> list[dict[str, Any]]:
    """The BLAS handles of the backend: device, device that was current when it was made, stream, idle."""
    backend = _dispatch.backend_for("cuda")
    assert backend is not None
    function = getattr(backend.handle, f"mg_blas_handles_{backend.name}")
    function.restype, function.argtypes = ctypes.c_int32, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    text, length = ctypes.create_string_buffer(1 << 16), ctypes.c_int64()
    assert function(text, len(text), ctypes.byref(length)) == 0
    found: list[dict[str, Any]] = json.loads(text.value)["handles"]
    return found


def device_work(call: Callable[[], object]) -> list[tuple[str, int]]:
    """Kernels, copies and fills that a call has queued, as CUDA's tracing tells: name and device."""
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)
        events = profiler.profiler.kineto_results.events()
    # Waits and the user's own marks are told as the device's too, by some versions.
    marks = [e for e in events if getattr(e, "is_user_annotation", bool)()]
    names = {"Stream Sync", "Stream Wait Event", "Context Sync", "Event Sync", *(e.name() for e in marks)}
    on_device = [e for e in events if e.device_type() == torch.autograd.DeviceType.CUDA]
    return [(e.name(), int(e.device_index())) for e in on_device if e.name() not in names]


CONTEXTS = """
import ctypes
def contexts():
    driver, found = ctypes.CDLL("libcuda.so.1"), []
    assert driver.cuInit(0) == 0
    count = ctypes.c_int()
    assert driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    for index in range(count.value):
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        assert driver.cuDeviceGet(ctypes.byref(device), index) == 0
        assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        found.append(active.value)
    return found
"""
"""For a process of its own: which devices have a context, as the driver tells."""
