"""The GPU backend's own sources with a runtime, kernels and a BLAS that need no GPU, and calls of it."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from multigemm import _abi

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
NOTHING, PACKED, ANYTHING = range(3)
DEVICE, STREAM = 2, 0x7000
# What has to happen on the call's device and in the order of its stream.
ORDERED = re.compile(r"launch|allocate|release|copy_to_host|is_capturing|rows_sm|wgrad_sm|blas_")
MARGIN, MARK = 256, 0xA5


def sources() -> list[Path]:
    """What every GPU backend is built of."""
    text = (ROOT / "shared" / "cmake" / "MultigemmBackend.cmake").read_text(encoding="utf-8")
    found = re.search(r"^set\(MULTIGEMM_GPU_SOURCES\n((?:  \S+\n)+)\)", text, re.MULTILINE)
    assert found, "the sources of the GPU backends are not where they were"
    return [ROOT / "shared" / name for name in found[1].split()] + sorted(HERE.glob("*.cpp"))


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def build(folder: Path, without: str | None = None, whole: Path | None = None) -> Path:
    """Compile and link into ``folder``; the library's path.

    ``without`` names a defence that is left out; ``whole`` is then the folder of a build that has it, whose
    objects serve where the defences are not read.
    """
    flags = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Werror"]
    # The stand-in's folder comes first: its files in vendor/ are found before the real ones.
    flags += [f"-I{HERE}", f"-I{ROOT / 'shared'}", f"-I{ROOT / 'shared' / 'include'}", "-DMG_SUFFIX=standin"]
    flags += ['-DMG_VERSION="0"', '-DMG_BACKEND_NAME="standin"', '-DMG_BACKEND_KIND="cuda"']
    if without is not None:
        flags.append(f"-DMG_WITHOUT_{without.upper().replace('-', '_')}")

    def compiled(source: Path) -> str:
        if whole is not None and "runtime/without.h" not in source.read_text(encoding="utf-8"):
            return str(whole / f"{source.name}.o")
        target = folder / f"{source.name}.o"
        run([str(compiler()), *flags, "-c", "-x", "c++", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources()))
    library = folder / "libmultigemm_standin.so"
    run([str(compiler()), "-shared", "-o", str(library), *objects, "-Wl,-z,defs"])
    return library


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


@dataclass
class Record:
    """One call of the runtime or of a library: with which current device, on which stream."""

    call: str
    device: int
    stream: int
    detail: int


@dataclass
class Memory:
    """What a caller lends: an allocator in stream order, and a product."""

    library: Library
    stream: int
    refuse_after: int | None = None  # so many allocations succeed
    product: Callable[[_abi.Matmul], int] | None = None
    lent: dict[int, Any] = field(default_factory=dict)
    given_back: list[tuple[int, Any, int]] = field(default_factory=list)
    allocated: int = 0
    devices: set[int] = field(default_factory=set)  # that were current

    def __post_init__(self) -> None:
        self._allocate, self._release = _abi.Allocate(self.allocate), _abi.Release(self.release)
        self._matmul = _abi.HostMatmul(lambda _, product: self.product(product.contents))

    def host(self) -> _abi.Host:
        host = _abi.Host(allocate=self._allocate, release=self._release)
        if self.product is not None:
            host.matmul = self._matmul
        return host

    def allocate(self, _: Any, size: int) -> int | None:
        self.devices.add(self.library.current_device())
        if self.refuse_after is not None and self.allocated >= self.refuse_after:
            return None
        self.allocated += 1
        room = (ctypes.c_ubyte * (size + 3 * MARGIN))()
        address = (ctypes.addressof(room) + MARGIN) // MARGIN * MARGIN + MARGIN
        ctypes.memset(address - MARGIN, MARK, size + 2 * MARGIN)
        ctypes.memset(address, 0xFF, size)
        self.lent[address] = room, size
        return address

    def release(self, _: Any, address: int) -> None:
        self.devices.add(self.library.current_device())
        room, size = self.lent.pop(address)
        self.given_back.append((address, room, size))

    def free(self) -> None:
        """After the stream is done: what lies around each block is as it was."""
        for address, _, size in self.given_back:
            for start in (address - MARGIN, address + size):
                assert ctypes.string_at(start, MARGIN) == bytes([MARK]) * MARGIN, f"outside {size} bytes"
        self.given_back.clear()


class Library(_abi.Library):
    def __init__(self, path: Path) -> None:
        self.handle = ctypes.CDLL(str(path))
        super().__init__(self.handle, "standin")
        self.control: dict[str, Any] = {}
        for name, result, *arguments in (
            ("reset", None),
            ("log", ctypes.c_char_p),
            ("clear_log", None),
            ("fail", None, ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
            ("take", None, ctypes.c_char_p, ctypes.c_int),
            ("grouped_products", None, ctypes.c_int),
            ("capture", None, ctypes.c_void_p),
            ("set_device", None, ctypes.c_int),
            ("device", ctypes.c_int),
            ("forget_contexts", None),
            ("has_context", ctypes.c_int, ctypes.c_int),
            ("synchronize", None, ctypes.c_void_p),
            ("drop", None, ctypes.c_void_p),
            ("lent", ctypes.c_int64),
            ("overruns", ctypes.c_int64),
            ("complaints", ctypes.c_int64),
            ("copy", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
        ):
            self.control[name] = self._function(self.handle, f"stand_in_{name}", result, *arguments)

        self._handles = self._function(
            self.handle, "mg_blas_handles_standin", ctypes.c_int32, ctypes.c_void_p,
            ctypes.c_int64, ctypes.c_void_p,
        )  # fmt: skip

    def handles(self) -> dict[str, Any]:
        """What the pool of BLAS handles holds."""
        length = ctypes.c_int64()
        text = ctypes.create_string_buffer(1 << 16)
        assert self._handles(text, len(text), ctypes.byref(length)) == _abi.OK and length.value < len(text)
        told: dict[str, Any] = json.loads(text.value)
        return told

    def current_device(self) -> int:
        return int(self.control["device"]())

    def fail(self, call: str, error: int, after: int = 0) -> None:
        """The call of that name after the next ``after`` ones answers ``error``."""
        self.control["fail"](call.encode(), after, error)

    def let(self, what: int) -> None:
        """What the kernels of one architecture take from now on."""
        for kernel in (b"rows_sm90", b"rows_sm80", b"wgrad_sm90", b"wgrad_sm80"):
            self.control["take"](kernel, what)

    def records(self) -> list[Record]:
        lines = [line.split() for line in self.control["log"]().decode().splitlines()]
        return [Record(call, *map(int, numbers)) for call, *numbers in lines]

    def calls(self) -> list[str]:
        return [record.call for record in self.records()]

    @contextmanager
    def hidden(self, tensors: list[torch.Tensor], stream: int) -> Iterator[None]:
        """Inside, the tensors hold nothing yet: earlier work on the stream fills them."""
        kept = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            copy = storage.clone()
            storage.fill_(0xFF)
            self.control["copy"](storage.data_ptr(), copy.data_ptr(), storage.nbytes(), stream)
            kept.append(copy)
        yield
        del kept

    def product_of(self, stream: int) -> Callable[[_abi.Matmul], int]:
        """PyTorch's product on the CPU, in the order of the stream."""

        def product(m: _abi.Matmul) -> int:
            self.control["synchronize"](stream)
            a = view(m.a, (m.batch, m.rows, m.inner), m.a_stride, m.dtype)
            b = view(m.b, (m.batch, m.inner, m.cols), m.b_stride, m.dtype)
            c = view(m.c, (m.batch, m.rows, m.cols), m.c_stride, m.dtype)
            c.copy_(a.double() @ b.double())
            return 0

        return product


def view(address: int, shape: tuple[int, ...], strides: Any, dtype: int) -> torch.Tensor:
    """A tensor over memory that somebody else holds."""
    name = next(name for name, number in _abi.DTYPES.items() if number == dtype)
    kind = getattr(torch, name)
    strides = list(strides)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    room = (ctypes.c_ubyte * (elements * kind.itemsize)).from_address(address)
    return torch.frombuffer(room, dtype=kind).as_strided(shape, strides)


@dataclass
class Done:
    """What a call has answered, and what it did for that."""

    status: int
    error: str
    records: list[Record]
    memory: Memory | None

    def calls(self) -> list[str]:
        return [record.call for record in self.records]


def call(
    library: Library,
    problem: Any,
    tensors: list[torch.Tensor],
    groups: torch.Tensor,
    *,
    on_host: bool = False,
    memory: Memory | None = None,
    device: int = DEVICE,
    stream: int = STREAM,
) -> Done:
    """Run a problem whose operands are there only once the stream is; checks what holds of every call.

    ``groups`` on the host lose their values as soon as the call returns.
    """
    control = library.control
    control["clear_log"]()
    storage = groups.untyped_storage().clone()
    groups = groups.new_empty(0).set_(storage, groups.storage_offset(), groups.shape, groups.stride())
    problem.groups.data = groups.data_ptr()
    problem.device, problem.stream = device, stream
    if on_host:
        problem.groups.flags |= _abi.GROUPS_ON_HOST
    host = memory.host() if memory else None
    if host is not None:
        problem.host = ctypes.pointer(host)
    before = library.current_device()
    with library.hidden([*tensors, *([] if on_host else [groups])], stream):
        status = library.call(problem)
        error = library.last_error() if status else ""
        if on_host:
            groups.fill_(-77)
        records = library.records()
        control["synchronize"](stream)
    assert library.current_device() == before, "the caller's current device has changed"
    for record in records:
        if ORDERED.match(record.call):
            assert (record.device, record.stream) == (device, stream), record
    assert control["lent"]() == 0 and control["overruns"]() == 0 and control["complaints"]() == 0
    if memory is not None:
        assert not memory.lent, "memory of the caller is not given back"
        assert memory.devices <= {device}
        assert not [record for record in records if record.call in ("allocate", "release")]
        memory.free()
    return Done(status, error, records, memory)
