"""Processes of one group, started from a test: each runs the same cases and writes down what came of them."""

from __future__ import annotations

import datetime
import importlib
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

PATIENCE = 20.0


def run(module: str, world: int, backend: str = "gloo", timeout: float = 240) -> dict[str, str]:
    """Run ``module.CASES`` in ``world`` processes -> case: "" where it passed in all, else what went wrong.

    ``module`` is the name of one in tests/, and a case a function of the process's device. After a case that
    failed, a process takes no further one; the others, which may be waiting for it in a collective, are
    given ``PATIENCE`` seconds more.
    """
    cases = importlib.import_module(module).CASES
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (module, world, backend, folder)
        processes = [context.Process(target=_work, args=(rank, *arguments)) for rank in range(world)]
        for process in processes:
            process.start()
        begin = time.monotonic()
        end = begin + timeout
        while time.monotonic() < end and any(process.is_alive() for process in processes):
            if any(process.exitcode for process in processes):
                end = min(end, time.monotonic() + PATIENCE)
                break
            time.sleep(0.1)
        for process in processes:
            process.join(max(0.1, end - time.monotonic()))
        seconds = time.monotonic() - begin
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        found: dict[str, str] = {}
        for rank in range(world):
            file = Path(folder, f"{rank}.json")
            told = json.loads(file.read_text()) if file.exists() else {}
            why = f"not reached; after {seconds:.0f} s these still ran: {late}" if late else "not reached"
            for case in cases:
                text = told.get(case, why) or ""
                if case in told and told[case] is None:
                    text = f"begun, not ended; after {seconds:.0f} s these still ran: {late}"
                found[case] = found.get(case, "") + (f"process {rank}: {text}\n" if text else "")
    return found


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A group of one, in this process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=Path(folder, "meeting").as_uri(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _work(rank: int, module: str, world: int, backend: str, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    options = {} if device.type == "cpu" else {"device_id": device}
    if device.type == "cuda":
        torch.cuda.set_device(device)  # first: no process is to touch another's device
    dist.init_process_group(
        backend,
        init_method=Path(folder, "meeting").as_uri(),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
        **options,
    )
    told: dict[str, str | None] = {}

    def tell() -> None:
        file = Path(folder, f"{rank}.part")
        file.write_text(json.dumps(told))
        file.replace(file.with_suffix(".json"))

    for name, case in importlib.import_module(module).CASES.items():
        told[name] = None
        tell()
        try:
            case(device)
            told[name] = ""
        except BaseException:
            told[name] = traceback.format_exc()
        tell()
        if told[name]:
            os._exit(1)
    dist.barrier()
    dist.destroy_process_group()
