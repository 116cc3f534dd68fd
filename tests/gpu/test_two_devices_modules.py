"""Modules that move between two GPUs: buffers left behind, caches of another device, copies that share."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from gpu import two_kit
from gpu.two_kit import MODULES, Way, check, check_gradients, make

from multigemm import _dispatch, errors

pytestmark = pytest.mark.two_gpus
DEFAULTS = [way for way in MODULES if way.pin is None]


def places(module: torch.nn.Module) -> set[torch.device]:
    return {t.device for t in (*module.parameters(), *module.buffers())}


def serves_cpu() -> bool:
    try:
        return _dispatch.backend_for("cpu") is not None
    except ImportError:
        return False


def on(work: two_kit.Work, module: torch.nn.Module, device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Values and gradients of a module that lies on a device, with operands of ``work`` brought there."""
    late = [t.detach().to(device) for t in work.late]
    late[0].requires_grad_()
    y = module(*late)
    parameters = [p for p in module.parameters() if p.requires_grad]
    return y, list(torch.autograd.grad(y, [late[0], *parameters], work.gy.to(device)))


@pytest.mark.parametrize("way", DEFAULTS, ids=str)
def test_there_and_back(way: Way) -> None:
    """Used on the one, moved, used on the other, moved back; device 0 is current all the time."""
    work = make(way, "cuda:0")
    module = work.module
    assert module is not None
    names = list(module.state_dict())
    for device in ("cuda:0", "cuda:1", "cuda:0", "cpu", "cuda:1"):
        module.to(device)
        assert places(module) == {torch.device(device)} and list(module.state_dict()) == names
        if device == "cpu" and way.what == "native layer of experts" and not serves_cpu():
            with pytest.raises(errors.OptionError, match="cpu"):
                on(work, module, device)
            continue
        y, gradients = on(work, module, device)
        assert y.device == torch.device(device) and torch.cuda.current_device() == 0
        check(way, y)
        check_gradients(way, gradients)


@pytest.mark.parametrize("way", DEFAULTS, ids=str)
def test_frozen_weights_are_those_of_their_device(way: Way) -> None:
    """What is kept of frozen weights between calls is made anew where they are now."""
    work = make(way, "cuda:0")
    module = work.module
    assert module is not None
    module.requires_grad_(False)
    for device in ("cuda:0", "cuda:1", "cuda:1", "cuda:0"):
        module.to(device)
        with torch.no_grad():
            y = module(*(t.detach().to(device) for t in work.late))
        assert y.device == torch.device(device)
        check(way, y)


@pytest.mark.parametrize("way", DEFAULTS, ids=str)
def test_copies_are_independent(way: Way) -> None:
    """A deep copy on the other device, and one by a file; the first is changed and they are not."""
    work = make(way, "cuda:0")
    assert work.module is not None
    work.call()  # whatever is kept, is kept now
    twin = copy.deepcopy(work.module).to("cuda:1")
    file = io.BytesIO()
    torch.save(work.module.state_dict(), file)
    file.seek(0)
    third = make(way, "cuda:1", seed=1).module
    assert third is not None
    third.load_state_dict(torch.load(file, map_location="cuda:1"))
    with torch.no_grad():
        for parameter in work.module.parameters():
            parameter.zero_()
    for module in (twin, third):
        assert places(module) == {torch.device("cuda:1")}
        y, gradients = on(work, module, "cuda:1")
        check(way, y)
        check_gradients(way, gradients)
    assert not work.call().any()


@pytest.mark.filterwarnings("ignore")  # of PyTorch's, about DataParallel itself
@pytest.mark.parametrize("way", DEFAULTS, ids=str)
def test_data_parallel(way: Way) -> None:
    """Replicas in threads: halves of a batch have the values and gradients of the whole."""
    work = make(way, "cuda:0")
    assert work.module is not None
    parallel = torch.nn.DataParallel(work.module, [0, 1])
    for _ in range(2):
        y = parallel(*work.late)
        assert y.device == torch.device("cuda:0")
        check(way, y)
        check_gradients(way, list(torch.autograd.grad(y, work.leaves, work.gy)))
    work.module.requires_grad_(False)
    with torch.no_grad():
        for _ in range(2):
            check(way, parallel(*work.late))
