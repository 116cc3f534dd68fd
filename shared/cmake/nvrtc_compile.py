"""Compile one CUDA source where no nvcc is: its kernels by NVRTC, the rest by clang, into one object.

    python nvrtc_compile.py --source FILE.cu --object FILE.o --site FOLDER --clang PROGRAM --work FOLDER
                            --architectures sm_80 compute_90 ... -- OPTION ...

NVRTC is nvcc's device compiler as a library, and nvFatbin what packs machine code. Both are in wheels for
CUDA 12, below FOLDER of packages, where nvcc itself is not. clang compiles the host's half and says which
kernels it registers; NVRTC compiles exactly these, from the *.cuh files that the source includes. OPTION
is clang's; NVRTC has those that begin with -D and -I too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

PACKAGES = ("cuda_nvcc", "cuda_runtime", "cuda_cccl")  # below nvidia/, whose headers make the toolkit's
STUB = "__device_stub__"
# NVRTC has no headers of a host. What kernels and CUTLASS want of these is in CCCL, or built in.
SHIMS = {
    "initializer_list": "",
    "cuda.h": "#include <cute/arch/copy_sm90_desc.hpp>\ntypedef cute::TmaDescriptor CUtensorMap;\n",
    "stddef.h": "#include <cuda/std/cstddef>\n",
    "stdint.h": "#include <cuda/std/cstdint>\n"
    + "".join(
        f"using cuda::std::{sign}int{bits}_t;\n"
        for sign in ("", "u")
        for bits in ("8", "16", "32", "64", "ptr")
    ),
    "stdlib.h": "",
    "string.h": "",
    "string": "namespace std {\nclass string;\n}\n",
    "type_traits": "#include <cuda/std/type_traits>\nnamespace std {\nusing namespace cuda::std;\n}\n",
    "utility": "#include <cuda/std/utility>\nnamespace std {\nusing namespace cuda::std;\n}\n",
}
# What compilers of a host have built in.
DEVICE_PRELUDE = """
#include <type_traits>
#include <utility>
#define __builtin_inf() __longlong_as_double(0x7ff0000000000000LL)
#define __builtin_rint rint
"""
# Functions of the device that clang's own headers leave out; it only has to know that they exist.
HOST_PRELUDE = """
template <class T> __attribute__((device)) T __ldcs(const T* address);
template <class T> __attribute__((device)) void __stcs(T* address, T value);
"""
# Not told: attributes and variables that only the host's half has a use for.
NVRTC_OPTIONS = ("-std=c++17", "-default-device", "-DNDEBUG", "-diag-suppress=177,1097")
CLANG_OPTIONS = (
    "-x", "cuda", "--cuda-host-only", "--cuda-gpu-arch=sm_90a", "-Wno-unknown-cuda-version",
    "-Wno-unknown-attributes", "-Wno-ignored-attributes", "-Wno-cuda-compat", "-std=c++17", "-O3", "-DNDEBUG",
    "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden",
)  # fmt: skip


class Library:
    """A C library whose functions return a status, 0 for success, which `text` puts into words."""

    def __init__(self, path: Path, prefix: str) -> None:
        self.handle, self.prefix = ctypes.CDLL(str(path)), prefix
        self.text = self.handle[f"{prefix}GetErrorString"]
        self.text.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: object, check: bool = True) -> int:
        """Call a function; raises RuntimeError for a status other than 0 unless that is to be returned."""
        status = int(self.handle[self.prefix + name](*arguments))
        if status and check:
            raise RuntimeError(f"{self.prefix}{name}: {self.text(status).decode()}")
        return status

    def bytes(self, size: str, get: str, handle: ctypes.c_void_p) -> bytes:
        """What a pair of functions gives: the one tells the size, the other fills the memory."""
        count = ctypes.c_size_t()
        self.call(size, handle, ctypes.byref(count))
        room = ctypes.create_string_buffer(count.value)
        self.call(get, handle, room)
        return room.raw


class Toolkit:
    """NVRTC, nvFatbin and the headers of one CUDA major, in a folder of packages."""

    def __init__(self, site: Path, major: int) -> None:
        self.nvidia = site / "nvidia"
        for part in ("cuda_nvrtc/lib", "nvfatbin/lib", *(f"{package}/include" for package in PACKAGES)):
            if not (self.nvidia / part).is_dir():
                wheel = f"nvidia-{part.partition('/')[0].replace('_', '-')}-cu{major}"
                raise SystemExit(f"{self.nvidia / part} is not there: python -m pip install {wheel}")
        for path in (self.nvidia / "cuda_nvrtc" / "lib").glob(f"libnvrtc-builtins.so.{major}*"):
            ctypes.CDLL(str(path))  # which the next one opens by its bare name
        self.nvrtc = Library(self.nvidia / "cuda_nvrtc" / "lib" / f"libnvrtc.so.{major}", "nvrtc")
        self.nvfatbin = Library(self.nvidia / "nvfatbin" / "lib" / f"libnvfatbin.so.{major}", "nvFatbin")

    @property
    def version(self) -> tuple[int, int]:
        """NVRTC's version, which is the toolkit's."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.nvrtc.call("Version", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def device_code(
        self, source: str, kernels: Iterable[str], architecture: str, options: Sequence[str]
    ) -> tuple[bytes, dict[str, str]]:
        """Machine code of the kernels, or PTX for a compute_ architecture, and how they are named in it."""
        program = ctypes.c_void_p()
        self.nvrtc.call("CreateProgram", ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
        for name in kernels:
            self.nvrtc.call("AddNameExpression", program, name.encode())
        given = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in options)]
        array = (ctypes.c_char_p * len(given))(*given)
        status = self.nvrtc.call("CompileProgram", program, len(given), array, check=False)
        log = (
            self.nvrtc.bytes("GetProgramLogSize", "GetProgramLog", program)
            .rstrip(b"\0")
            .decode(errors="replace")
        )
        if log.strip():
            print(log.strip(), file=sys.stderr)
        if status:
            raise SystemExit(f"NVRTC could not compile for {architecture}")
        names = {}
        for name in kernels:
            lowered = ctypes.c_char_p()
            self.nvrtc.call("GetLoweredName", program, name.encode(), ctypes.byref(lowered))
            names[name] = (lowered.value or b"").decode()
        kind = "PTX" if architecture.startswith("compute") else "CUBIN"
        code = self.nvrtc.bytes(f"Get{kind}Size", f"Get{kind}", program)
        self.nvrtc.call("DestroyProgram", ctypes.byref(program))
        return code, names

    def fat_binary(self, code: dict[str, bytes]) -> bytes:
        """One binary with the code of every architecture, as the runtime registers it."""
        handle = ctypes.c_void_p()
        options = (ctypes.c_char_p * 2)(b"-64", b"-host=linux")
        self.nvfatbin.call("Create", ctypes.byref(handle), options, ctypes.c_size_t(2))
        for architecture, data in code.items():
            kind, number = architecture.split("_")
            size = ctypes.c_size_t(len(data))
            if kind == "sm":
                self.nvfatbin.call("AddCubin", handle, data, size, number.encode(), b"")
            else:
                self.nvfatbin.call("AddPTX", handle, data, size, number.encode(), b"", b"")
        binary = self.nvfatbin.bytes("Size", "Get", handle)
        self.nvfatbin.call("Destroy", ctypes.byref(handle))
        return binary

    def tree(self, folder: Path) -> Path:
        """A folder laid out as a toolkit's, for clang: links to what the packages hold."""
        for part in ("bin", "include", "lib64", "nvvm"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        link(folder / "nvvm" / "libdevice", self.nvidia / "cuda_nvcc" / "nvvm" / "libdevice")
        link(folder / "bin" / "ptxas", self.nvidia / "cuda_nvcc" / "bin" / "ptxas")
        for package in PACKAGES:
            for entry in (self.nvidia / package / "include").iterdir():
                if not entry.name.startswith("__"):
                    link(folder / "include" / entry.name, entry)
        (folder / "include" / "curand_mtgp32_kernel.h").touch()  # clang includes it and needs nothing of it
        return folder


def link(path: Path, target: Path) -> None:
    """Make a link, unless a compilation beside this one has."""
    with contextlib.suppress(FileExistsError):
        path.symlink_to(target.resolve())


# --- kernels --------------------------------------------------------------------------------------


def demangled(symbols: Sequence[str]) -> list[str]:
    """The names as C++ has them."""
    done = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def without_stub(symbol: str) -> str:
    """Return the mangled name of the kernel that a stub of the host is for."""
    found = re.search(rf"(\d+){STUB}", symbol)
    if found is None:
        raise ValueError(f"{symbol} is no kernel's stub")
    wanted = demangled([symbol])[0].replace(STUB, "")
    # The first digits may end the name before: right is what demangles to the kernel.
    for start in range(found.start(1), found.end(1)):
        length = int(symbol[start : found.end(1)])
        name, rest = symbol[found.end() : found.end(1) + length], symbol[found.end(1) + length :]
        if symbol[start] != "0" and name:
            kernel = f"{symbol[:start]}{len(name)}{name}{rest}"
            if demangled([kernel])[0] == wanted != kernel:
                return kernel
    raise ValueError(f"{symbol} has no name of a known length")


def kernel_name(stub: str) -> str:
    """Return the C++ name of a kernel, template arguments included, given its stub with its parameters."""
    text = stub.strip().replace(STUB, "")
    if not text.endswith(")"):
        raise ValueError(f"{stub} is no function")
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += (text[at] == ")") - (text[at] == "(")
        if depth == 0:
            break
    return text[:at].removeprefix("void ").strip()


def kernels_of(host_object: Path) -> dict[str, str]:
    """The kernels that an object launches: C++ names and mangled names."""
    listed = subprocess.run(["nm", str(host_object)], capture_output=True, text=True, check=True).stdout
    stubs = sorted({line.split()[-1] for line in listed.splitlines() if STUB in line})
    if not stubs:
        raise SystemExit("the source launches no kernel")
    return {kernel_name(name): without_stub(stub) for name, stub in zip(demangled(stubs), stubs, strict=True)}


def renamed(assembly: str, names: dict[str, str]) -> str:
    """The host's half with kernels under NVRTC's names, which differ for those that only one file knows."""
    for symbol, name in names.items():
        registered = f'.asciz\t"{symbol}"'
        if registered not in assembly:
            raise SystemExit(f"the host does not register {symbol}")
        assembly = assembly.replace(registered, f'.asciz\t"{name}"')
    return assembly


def device_source(source: Path) -> str:
    """The text that NVRTC compiles: the files with kernels that a CUDA source includes."""
    found = re.findall(r'^#include "([^"]+\.cuh)"', source.read_text(encoding="utf-8"), re.MULTILINE)
    if not found:
        raise SystemExit(f"{source} includes no *.cuh, where kernels have to be")
    return DEVICE_PRELUDE + "".join(f'#include "{name}"\n' for name in found)


@contextlib.contextmanager
def shims() -> Iterator[Path]:
    """A folder with the headers that a host would have."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in SHIMS.items():
            (Path(folder) / name).write_text(f"#pragma once\n{text}", encoding="utf-8")
        yield Path(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path)
    parser.add_argument("--object", type=Path)
    parser.add_argument("--site", type=Path, required=True, help="folder of packages that holds nvidia/")
    parser.add_argument("--major", type=int, default=12)
    parser.add_argument("--clang", default="clang++-19")
    parser.add_argument("--work", type=Path, required=True, help="folder for what is laid out as a toolkit")
    parser.add_argument("--architectures", nargs="+", metavar="sm_80", default=[])
    parser.add_argument("--prepare", action="store_true", help="lay the toolkit out and print its version")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="of clang, after --")
    given = parser.parse_args(arguments)
    toolkit = Toolkit(given.site, given.major)
    tree = toolkit.tree(given.work)
    major, minor = toolkit.version
    if given.prepare:
        print(f"{major}.{minor}", end="")
        return 0
    version = [f"-D__CUDACC_VER_MAJOR__={major}", f"-D__CUDACC_VER_MINOR__={minor}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "prelude.h").write_text(HOST_PRELUDE, encoding="utf-8")
        clang = [given.clang, *CLANG_OPTIONS, f"--cuda-path={tree}", "-include", str(folder / "prelude.h")]
        clang += [*version, "-D__CUDACC_VER_BUILD__=0", *given.options, str(given.source)]
        subprocess.run([*clang, "-w", "-c", "-o", str(folder / "host.o")], check=True)
        kernels = kernels_of(folder / "host.o")
        code, names = {}, {}
        with shims() as headers:
            # The shims come first: the toolkit's own cuda.h declares functions of the host.
            shared = [option for option in given.options if option.startswith(("-D", "-I"))]
            options = [*NVRTC_OPTIONS, f"-I{headers}", *shared, f"-I{tree / 'include'}"]
            text = device_source(given.source)
            for architecture in given.architectures:
                code[architecture], names = toolkit.device_code(text, kernels, architecture, options)
        (folder / "kernels.fatbin").write_bytes(toolkit.fat_binary(code))
        inside = ["-Xclang", "-fcuda-include-gpubinary", "-Xclang", str(folder / "kernels.fatbin")]
        depends = ["-MD", "-MT", str(given.object), "-MF", f"{given.object}.d"]
        assembly = folder / "host.s"
        subprocess.run([*clang, *depends, *inside, "-S", "-o", str(assembly)], check=True)
        text = renamed(assembly.read_text(encoding="utf-8"), {kernels[n]: names[n] for n in kernels})
        assembly.write_text(text, encoding="utf-8")
        subprocess.run([given.clang, "-c", str(assembly), "-o", str(given.object)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
