"""torch.compile, torch.export, torch.func, vmap, autocast, fake and meta tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import multigemm

SIZES = [2, 0, 3]


def rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The product by a gather and einsum, for comparison. x [7,(B,)3], w [3,(B,)3,4]."""
    index = torch.tensor([0, 0, 2, 2, 2], device=x.device)
    letters = "nk,nkm->nm" if x.dim() == 2 else "nbk,nbkm->nbm"
    wide = w.expand(-1, x.shape[1], -1, -1) if x.dim() == 3 else w
    y = torch.einsum(letters, x[:5], wide[index])
    return torch.cat([y, y.new_zeros(2, *y.shape[1:])])


@pytest.fixture
def product(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    sizes = torch.tensor(SIZES, device=device)
    return lambda x, w: multigemm.grouped_mm(x, w, sizes)


@pytest.fixture
def xw(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(7, 3, dtype=torch.float64, device=device),
        torch.randn(3, 3, 4, dtype=torch.float64, device=device),
    )


Transform = Callable[[Callable[..., torch.Tensor]], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]


def energy(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, w: f(x, w).sin().sum()


TRANSFORMS: dict[str, Transform] = {
    "grad": lambda f: torch.func.grad(energy(f)),
    "grad in w": lambda f: torch.func.grad(energy(f), argnums=1),
    "grad of grad": lambda f: torch.func.grad(lambda x, w: torch.func.grad(energy(f))(x, w).pow(2).sum()),
    "grad in w of grad": lambda f: torch.func.grad(
        lambda x, w: torch.func.grad(energy(f))(x, w).pow(2).sum(), argnums=1
    ),
    "third": lambda f: torch.func.grad(
        lambda x, w: (
            torch.func.grad(lambda x, w: torch.func.grad(energy(f))(x, w).pow(2).sum())(x, w).sin().sum()
        )
    ),
    "jacrev": lambda f: torch.func.jacrev(f),
    "hessian": lambda f: torch.func.jacrev(torch.func.jacrev(energy(f))),
    "hessian in w": lambda f: torch.func.jacrev(torch.func.jacrev(energy(f), argnums=1), argnums=1),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("batch", [None, 2])
def test_torch_func(name: str, batch: int | None, product, xw) -> None:
    x, w = xw
    if batch is not None:
        x = x[:, None] * torch.arange(1, batch + 1, device=x.device).double()[:, None]
        w = w[:, None] * torch.arange(1, batch + 1, device=x.device).double()[:, None, None]
    transform = TRANSFORMS[name]
    torch.testing.assert_close(transform(product)(x, w), transform(rows)(x, w))


def test_vmap_of_vjp(product, xw) -> None:
    """A batch of vector-Jacobian products: how Hessians are computed."""
    x, w = xw
    cotangents = torch.randn(5, 7, 4, dtype=torch.float64, device=x.device)

    def pull(f: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        _, vjp = torch.func.vjp(f, x, w)
        return torch.vmap(vjp)(cotangents)

    for ours, theirs in zip(pull(product), pull(rows), strict=True):
        torch.testing.assert_close(ours, theirs)


def _moved(shape: tuple[int, ...], dim: int | None, size: int, device: torch.device) -> torch.Tensor:
    if dim is None:
        return torch.randn(shape, dtype=torch.float64, device=device)
    return torch.randn(size, *shape, dtype=torch.float64, device=device).movedim(0, dim)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("batch", "own"), [((), ()), ((2,), (2,)), ((2,), (1,))])
@pytest.mark.parametrize("dims", list(itertools.product([None, 0, 1], [None, 0, -1]))[1:], ids=str)
def test_vmap_of_grouped_mm(dims, batch, own, bias, device) -> None:
    sizes = torch.tensor(SIZES, device=device)
    x = _moved((7, *batch, 3), dims[0], 4, device)
    w = _moved((3, *own, 3, 4), dims[1], 4, device)
    b = _moved((3, *own, 4), 0 if bias and dims[1] == 0 else None, 4, device) if bias else None
    in_dims = (*dims, (0 if dims[1] == 0 else None) if bias else None)

    def f(x, w, b):
        return multigemm.grouped_mm(x, w, sizes, bias=b)

    mapped = torch.vmap(f, in_dims)(x, w, b)
    for i in range(4):
        at = [t if d is None else t.select(d, i) for t, d in zip((x, w, b), in_dims, strict=True)]
        torch.testing.assert_close(mapped[i], f(*at))


@pytest.mark.parametrize("batch", [None, False, True])
@pytest.mark.parametrize("dims", [(0, None), (None, 1), (1, 0)], ids=str)
def test_vmap_of_grouped_mm_wgrad(dims, batch: bool | None, device) -> None:
    """``batch`` None: no B; otherwise whether B is summed."""
    sizes = torch.tensor(SIZES, device=device)
    b = () if batch is None else (2,)
    x = _moved((7, *b, 3), dims[0], 4, device)
    gy = _moved((7, *b, 5), dims[1], 4, device)

    def f(x, gy):
        return multigemm.grouped_mm_wgrad(x, gy, sizes, sum_batch=bool(batch))

    mapped = torch.vmap(f, dims)(x, gy)
    for i in range(4):
        at = [t if d is None else t.select(d, i) for t, d in zip((x, gy), dims, strict=True)]
        torch.testing.assert_close(mapped[i], f(*at))


def test_vmap_over_group_sizes_and_over_nothing(xw, device) -> None:
    x, w = xw
    sizes = torch.tensor([[2, 0, 3], [7, 0, 0], [0, 0, 0]], device=device)
    mapped = torch.vmap(lambda s: multigemm.grouped_mm(x, w, s))(sizes)
    for i in range(3):
        torch.testing.assert_close(mapped[i], multigemm.grouped_mm(x, w, sizes[i]))
    none = torch.vmap(lambda x: multigemm.grouped_mm(x, w, sizes[0]))(x.new_empty(0, 7, 3))
    assert none.shape == (0, 7, 4)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(backend: str, pinned: str, product, xw) -> None:
    torch._dynamo.reset()
    x, w = (t.clone().requires_grad_() for t in xw)
    compiled = torch.compile(product, fullgraph=True, backend=backend)
    y = compiled(x, w)
    torch.testing.assert_close(y, product(x, w))
    gradients = torch.autograd.grad(y.sin().sum(), (x, w))
    for ours, theirs in zip(gradients, torch.autograd.grad(rows(x, w).sin().sum(), (x, w)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["grad", "grad in w", "grad of grad"])
def test_compile_with_a_gradient_inside(name: str, product, xw) -> None:
    """Forces inside a compiled step: never silently zero."""
    torch._dynamo.reset()
    force = torch.compile(TRANSFORMS[name](product), fullgraph=True, backend="aot_eager")
    expected = TRANSFORMS[name](rows)(*xw)
    assert expected.abs().max() > 0
    torch.testing.assert_close(force(*xw), expected)


def test_compile_with_other_sizes_does_not_recompile(xw, device) -> None:
    torch._dynamo.reset()
    x, w = xw
    count = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda s: multigemm.grouped_mm(x, w, s), fullgraph=True, backend=count)
    for sizes in ([2, 0, 3], [0, 7, 0], [1, 1, 1]):
        s = torch.tensor(sizes, device=device)
        torch.testing.assert_close(compiled(s), multigemm.grouped_mm(x, w, s))
    assert count.frame_count == 1


class Layer(torch.nn.Module):
    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(w)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return multigemm.grouped_mm(x, self.w, sizes)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool, xw, device) -> None:
    x, w = xw
    sizes = torch.tensor(SIZES, device=device)
    dynamic = ({0: torch.export.Dim("rows", min=2, max=1 << 20)}, None)
    program = torch.export.export(Layer(w), (x, sizes), dynamic_shapes=dynamic, strict=strict)
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert calls == ["multigemm.grouped_mm.default"]
    longer = torch.randn(11, 3, dtype=torch.float64, device=device)
    torch.testing.assert_close(program.module()(longer, sizes), multigemm.grouped_mm(longer, w, sizes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, device: torch.device) -> None:
    """Operands are converted as torch.mm's are; gradients come back in the parameters' dtype."""
    x = torch.randn(7, 3, device=device, requires_grad=True)
    w = torch.randn(3, 3, 4, device=device, requires_grad=True)
    sizes = torch.tensor(SIZES, device=device)
    with torch.autocast(device.type, dtype=dtype):
        assert torch.mm(x, w[0]).dtype == dtype
        y = multigemm.grouped_mm(x, w.to(dtype), sizes)  # mixed operands, as under autocast they may be
        dw = multigemm.grouped_mm_wgrad(x, x, sizes)
        wide = multigemm.grouped_mm(x.double(), w.double(), sizes)
    assert (y.dtype, dw.dtype, wide.dtype) == (dtype, dtype, torch.float64)
    y.sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32
    torch.testing.assert_close(
        w.grad, multigemm.grouped_mm_wgrad(x, torch.ones(7, 4, device=device), sizes), atol=0.05, rtol=0.02
    )


def test_fake_and_meta(xw) -> None:
    x, w = (t.cpu() for t in xw)
    sizes = torch.tensor(SIZES)
    with FakeTensorMode() as mode:
        y = multigemm.grouped_mm(*(mode.from_tensor(t) for t in (x, w, sizes)), out_dtype=torch.float32)
        assert (y.shape, y.dtype, y.device.type) == ((7, 4), torch.float32, "cpu")
    meta = multigemm.grouped_mm_wgrad(x.to("meta"), torch.empty(7, 6, dtype=x.dtype, device="meta"), sizes)
    assert (meta.shape, meta.device.type) == ((3, 3, 6), "meta")


def test_operator_registrations(xw, device) -> None:
    """torch's own checker of custom operators: schema, autograd, fake kernel, ahead-of-time dispatch."""
    x, w = (t.clone().requires_grad_() for t in xw)
    sizes = torch.tensor(SIZES, device=device)
    torch.library.opcheck(torch.ops.multigemm.grouped_mm.default, (x, w, sizes, False, None, None, "", ""))
    torch.library.opcheck(
        torch.ops.multigemm.grouped_mm_wgrad.default, (x, x.detach(), sizes, False, False, None, "", "")
    )
    out = x.new_empty(7, 4).detach()
    arguments = (x.detach(), w.detach(), sizes, False, None, out, "", "")
    torch.library.opcheck(torch.ops.multigemm.grouped_mm_out.default, arguments)
