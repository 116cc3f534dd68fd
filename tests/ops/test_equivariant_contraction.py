"""SymmetricContraction: values and derivatives against the dense couplings, elements, transforms."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import pytest
import torch
from calls import Calls

import multigemm
from multigemm import _route_polynomial
from multigemm.cli._memory import peak_bytes
from multigemm.equivariant import Irreps, SymmetricContraction
from multigemm.equivariant._clebsch_gordan import coupling_basis, wigner_3j

CASES = [
    ("3x0e + 3x1o + 3x2e", "3x0e + 3x1o", 3),
    ("2x0e + 2x1o", "2x1o + 2x0e + 2x2e", 2),
    ("2x1o + 2x0e", "2x0e", 1),
    ("1x0e + 1x1o + 1x2e", "1x0o + 1x1e + 1x3o", 3),
]
LABELS = [2, 0, 2, -1, 3, 0, 2, 5]  # of five elements, 1 and 4 absent; -1 and 5 are none


def dense(m: SymmetricContraction, x: torch.Tensor, labels: torch.Tensor, weights) -> torch.Tensor:
    """x [N, C, D] -> [N, C, O] by the couplings as they are, one degree after the other."""
    known = (labels >= 0) & (labels < m.num_elements)
    outputs = []
    for own, contraction in zip(weights, m.contractions, strict=True):
        total = 0.0
        for nu, w in zip(range(contraction.correlation, 0, -1), own, strict=True):
            letters = "ijk"[:nu]
            u = contraction.basis(nu).to(x)
            rows = w[labels.clamp(0, m.num_elements - 1)] * known[:, None, None]
            factors = ",".join(f"nc{letter}" for letter in letters)
            total = total + torch.einsum(f"d{letters}p,npc,{factors}->ncd", u, rows, *[x] * nu)
        outputs.append(total)
    return torch.cat(outputs, 2)


def columns(m: SymmetricContraction, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.flatten(1) for part in y.split([b.ir.dim for b in m.irreps_out], 2)], 1)


def make(case: tuple[str, str, int], device: torch.device, **options) -> SymmetricContraction:
    torch.manual_seed(0)
    options = {"num_elements": 5, "device": device, "dtype": torch.float64, **options}
    return SymmetricContraction(*case, **options)


def features(m: SymmetricContraction, rows: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    width = sum(block.ir.dim for block in m.irreps_in)
    return torch.randn(rows, m.num_features, width, dtype=torch.float64, generator=generator).to(device)


@pytest.fixture(params=["grouped", "fused"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_derivatives(case, path: str, device: torch.device, poisoned: None) -> None:
    m = make(case, device, implementation=path)
    labels = torch.tensor(LABELS, device=device)
    own = m._weights()
    flat = [w for ws in own for w in ws if w.requires_grad]

    def derivatives(call):
        """The value, then sums of derivatives of rising order, in x and every weight."""
        x = features(m, 8, device).requires_grad_()
        level = [call(x)]
        results = [level]
        for order in (1, 2, 3):
            total = sum((t.tanh() * (1 + i)).sum() if order == 1 else t.sum() for i, t in enumerate(level))
            level = list(torch.autograd.grad(total, [x, *flat], create_graph=True, allow_unused=True))
            level = [
                g if g is not None else torch.zeros_like(t) for g, t in zip(level, [x, *flat], strict=True)
            ]
            results.append(level)
            level = [g.square() for g in level]
        return results

    mine = derivatives(lambda x: m(x, labels))
    others = derivatives(lambda x: columns(m, dense(m, x, labels, own)))
    for a, b in zip(mine, others, strict=True):
        size = max(t.abs().max().item() for t in b)
        for s, t in zip(a, b, strict=True):
            torch.testing.assert_close(s, t, rtol=1e-10, atol=1e-12 * size)
    assert mine[0][0][3].abs().max() == 0
    assert mine[0][0][7].abs().max() == 0
    for ws in own:
        for w, g in zip(flat, mine[1][1:], strict=True):
            if any(w is v for v in ws):
                assert g[1].abs().max() == 0
                assert g[4].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_labels_and_layouts(dtype: torch.dtype, path: str, device: torch.device) -> None:
    m = make(CASES[0], device, implementation=path, dtype=dtype)
    x, labels = features(m, 6, device).to(dtype), torch.tensor([4, 0, 3, 3, 0, 4], device=device)
    y = m(x, labels)
    expected = columns(m, dense(m, x.double(), labels, [[w.double() for w in ws] for ws in m._weights()]))
    torch.testing.assert_close(
        y.double(), expected, rtol=1e-4 if dtype == torch.float32 else 1e-12, atol=1e-4
    )
    one_hot = torch.nn.functional.one_hot(labels, 5).to(dtype)
    assert torch.equal(m(x, one_hot), y)
    assert torch.equal(m(x, order=multigemm.sort_by_group(labels, 5)), y)
    assert torch.equal(m(x, labels.int()), y)
    blocks = torch.cat([part.flatten(1) for part in x.split([b.ir.dim for b in m.irreps_in], 2)], 1)
    torch.testing.assert_close(m(blocks, labels), y)
    other = make(CASES[0], device, implementation=path, dtype=dtype, layout_in="ir_mul", layout_out="ir_mul")
    other.load_state_dict(m.state_dict())
    z = other(x.transpose(1, 2).flatten(1), labels).unflatten(1, (4, 3)).transpose(1, 2)
    torch.testing.assert_close(columns(m, z), y)


def test_nothing_to_compute(path: str, device: torch.device) -> None:
    m = make(CASES[0], device, implementation=path)
    x = features(m, 0, device).requires_grad_()
    y = m(x, torch.zeros(0, dtype=torch.int64, device=device))
    assert tuple(y.shape) == (0, m.irreps_out.dim)
    y.sum().backward()
    assert m.contractions[0].weights_max.grad.abs().max() == 0
    none = make(CASES[0], device, implementation=path, num_elements=0)
    y = none(features(m, 2, device), torch.zeros(2, dtype=torch.int64, device=device))
    assert tuple(y.shape) == (2, m.irreps_out.dim)
    assert y.abs().max() == 0


def test_frozen_weights_are_turned_into_coefficients_once(path: str, device: torch.device) -> None:
    m = make(CASES[0], device, implementation=path).requires_grad_(False)
    x, labels = features(m, 4, device), torch.tensor([1, 2, 1, 2], device=device)
    y = m(x, labels)
    kept = m._kept._entry
    assert torch.equal(m(x, labels), y)
    assert m._kept._entry is kept
    assert copy.deepcopy(m)._kept._entry is None
    with torch.inference_mode():
        m(x, torch.tensor([0, 2, 1, 2], device=device))
    z = x.clone().requires_grad_()
    m(
        z, torch.tensor([0, 2, 1, 2], device=device)
    ).sum().backward()  # what inference mode made serves here too
    with torch.no_grad():
        for w in m.parameters():
            w.mul_(2)
    torch.testing.assert_close(m(x, labels), 2 * y)
    m.requires_grad_()
    m(x, labels).sum().backward()
    assert m._kept._entry is None
    assert m.contractions[0].weights_max.grad is not None


def calls_of(m: SymmetricContraction, x: torch.Tensor, labels: torch.Tensor) -> Counter[str]:
    """The operators of a forward and a backward pass."""
    with Calls() as calls:
        m(x.requires_grad_(), labels).sum().backward()
    return calls.names


def test_frozen_weights_cost_nothing_in_the_backward_pass(path: str, device: torch.device) -> None:
    m = make(CASES[0], device, implementation=path)
    x, labels = features(m, 4, device), torch.tensor([1, 2, 1, 2], device=device)
    product = "multigemm.indexed_polynomial" if path == "fused" else "multigemm.grouped_mm"
    gradients = 1 if path == "fused" else 2  # of the matrices and of what is added to their products
    trained, frozen = calls_of(m, x, labels), calls_of(m.requires_grad_(False), x, labels)
    for names, count in ((trained, gradients), (frozen, 0)):
        assert names[f"{product}_wgrad.default"] == count
        assert sum(n for name, n in names.items() if name.startswith(product)) == 2 + count
    # With coefficients made before, none of the weights is touched again.
    m(x, labels)
    kept = m._kept._entry
    m(x, labels).sum().backward()
    assert m._kept._entry is kept
    assert all(w.grad is None or not w.requires_grad for w in m.parameters())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_the_fused_way_reads_nothing_back(device: torch.device) -> None:
    """On a GPU PyTorch refuses to synchronise; a traced graph has none of the operators that would."""
    m = make(CASES[0], device, implementation="fused")
    x, labels = features(m, 6, device), torch.tensor([4, 0, 3, 3, 0, 4], device=device)
    exported = torch.export.export(m, (x, labels)).graph
    targets = [str(node.target) for node in exported.nodes]
    assert targets.count("multigemm.indexed_polynomial.default") == 1  # one name for every instance
    assert not any(word in t for t in targets for word in ("_local_scalar_dense", "nonzero", "unique"))
    if device.type != "cuda":
        return
    for weights in (True, False):
        m.requires_grad_(weights)
        m(x.requires_grad_(), labels).sum().backward()
        torch.cuda.synchronize(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            y = m(x, labels)
            (gx,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
            gx.backward(torch.ones_like(gx))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_little_is_kept_for_elements_without_atoms(device: torch.device) -> None:
    """A few coefficients for each element, where the polynomial has hundreds of terms; so too in training."""
    if not _route_polynomial.served(device):
        pytest.skip(_route_polynomial.why_not(device))
    case = ("8x0e + 8x1o + 8x2e + 8x3o", "8x0e + 8x1o", 3)
    m = make(case, device, implementation="fused", num_elements=89)
    x, labels = features(m, 100, device), torch.arange(100, device=device) % 89
    weights = sum(w.nbytes for w in m.parameters())

    def step() -> object:
        return torch.autograd.grad(m(x.requires_grad_(), labels).sum(), [x, *m.parameters()])

    step()  # PyTorch's BLAS keeps a workspace from its first product on
    peak = peak_bytes(step, device)
    assert m.explain().terms == 94 + 316
    assert peak < 4 * weights + 8 * x.nbytes
    m.requires_grad_(False)
    m(x.detach(), labels)
    kept = m._kept._entry
    assert kept is not None
    assert tuple(kept[1].shape) == (89, 13 + 16, 8)


def test_transforms(path: str, device: torch.device) -> None:
    m = make(("2x0e + 2x1o", "2x0e + 2x1o", 3), device, implementation=path)
    x, labels = features(m, 3, device), torch.tensor([1, 4, 1], device=device)
    y = m(x, labels)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, labels), y)
    exported = torch.export.export(m, (x, labels)).module()
    torch.testing.assert_close(exported(x, labels), y)
    exported = torch.export.export(copy.deepcopy(m).requires_grad_(False), (x, labels)).module()
    torch.testing.assert_close(exported(x, labels), y)

    def energy(x: torch.Tensor) -> torch.Tensor:
        return m(x, labels).sin().sum()

    size = x.numel()
    x.requires_grad_()
    gradient = torch.autograd.grad(energy(x), x, create_graph=True)[0].flatten()
    rows = [torch.autograd.grad(g, x, retain_graph=True)[0].flatten() for g in gradient]
    hessian = torch.stack(rows)
    torch.testing.assert_close(torch.func.hessian(energy)(x.detach()).reshape(size, size), hessian)
    eye = torch.eye(size, dtype=torch.float64, device=device)
    batched = torch.autograd.grad(gradient, x, eye, is_grads_batched=True)[0]
    torch.testing.assert_close(batched.reshape(size, size), hessian)
    parameters = dict(m.named_parameters())

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(m, parameters, (x.detach(), labels)).sin().sum()

    gradients = torch.func.grad(loss)({k: v.detach() for k, v in parameters.items()})
    loss(parameters).backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_copies_and_dtypes(path: str, device: torch.device) -> None:
    m = make(CASES[0], device, implementation=path)
    x, labels = features(m, 4, device), torch.tensor([1, 2, 0, 2], device=device)
    y = m(x, labels)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(other(x, labels), y)
    fresh = make(CASES[0], device, implementation=path)
    torch.manual_seed(9)
    for w in fresh.parameters():
        torch.nn.init.normal_(w)
    fresh.load_state_dict(m.state_dict())
    assert torch.equal(fresh(x, labels), y)
    assert {name.split(".")[0] for name in m.state_dict()} == {"contractions"}  # no table of this module
    assert all(buffer.device.type == "meta" for buffer in copy.deepcopy(m).to("meta").buffers())
    single = copy.deepcopy(m).float()
    assert single(x.float(), labels).dtype == torch.float32
    for name in ("coefficients", "mixtures"):
        tables = [t.clone() for t in m._tables(name)]
        single = copy.deepcopy(m).float().double()
        assert all(torch.equal(a, b) for a, b in zip(single._tables(name), tables, strict=True))
    assert torch.equal(single.factors, m.factors)


def test_a_state_of_another_basis_is_refused() -> None:
    m = make(CASES[0], torch.device("cpu"))
    state = m.state_dict()
    state["contractions.0.U_matrix_2"] = state["contractions.0.U_matrix_2"].neg()
    with pytest.raises(RuntimeError, match=r"U_matrix_2 \[9, 9, 3\] is not the coupling of this module"):
        m.load_state_dict(state)


def test_bad_calls_say_what_is_wrong() -> None:
    error = multigemm.errors
    for arguments, message in (
        (("2x0e + 3x1o", "2x0e", 2), "same number of channels"),
        (("2x0e", "", 2), "some block"),
        (("2x0e", "2x0e", 4), "correlation must be 1 to 3"),
        (("2x0e", "2x0e", 2, "components"), "irrep_normalization"),
        (("2x0e", "2x0e", 2, None, None, False, False), "internal_weights"),
    ):
        with pytest.raises(error.OptionError, match=message):
            SymmetricContraction(*arguments, num_elements=2)
    with pytest.raises(error.OptionError, match="num_elements"):
        SymmetricContraction("2x0e", "2x0e", 2)
    with pytest.raises(error.OptionError, match="implementation"):
        SymmetricContraction("2x0e", "2x0e", 2, num_elements=2, implementation="fast")
    m = SymmetricContraction("2x0e + 2x1o", "2x0e", 2, num_elements=2)
    labels = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(error.ShapeError, match=r"\[N, 2, 4\] \(mul_ir\) or \[N, 8\], got \[3, 4, 2\]"):
        m(torch.randn(3, 4, 2), labels)
    with pytest.raises(error.DTypeError, match="dtype of the weights"):
        m(torch.randn(3, 2, 4, dtype=torch.float64), labels)


# --- the couplings themselves ------------------------------------------------------------------------


def rotation(degree: int) -> torch.Tensor:
    """[2l+1, 2l+1] of one rotation; degree 1 in the order y, z, x, higher ones as parts of products of it."""
    torch.manual_seed(3)
    q, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    one = q * torch.linalg.det(q)
    result = torch.ones(1, 1, dtype=torch.float64)
    for step in range(1, degree + 1):
        w = wigner_3j(1, step - 1, step)
        result = (2 * step + 1) * torch.einsum("ijk,ia,jb,abc->kc", w, one, result, w).contiguous()
    return result


@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 2, 3), (2, 2, 2), (3, 2, 4), (3, 3, 1), (5, 4, 6)])
def test_the_coupling_of_three_degrees_is_invariant(degrees: tuple[int, int, int]) -> None:
    w = wigner_3j(*degrees)
    turned = torch.einsum("ijk,ia,jb,kc->abc", w, *(rotation(degree) for degree in degrees))
    torch.testing.assert_close(turned, w, rtol=0, atol=1e-12)
    torch.testing.assert_close(w.norm(), torch.tensor(1.0, dtype=torch.float64))


def test_couplings_known_in_closed_form() -> None:
    """Of vectors: the dot product over sqrt(3), the cross product over sqrt(2)."""
    torch.testing.assert_close(wigner_3j(1, 0, 1)[:, 0], torch.eye(3, dtype=torch.float64) / 3**0.5)
    cross = coupling_basis("1x1o", "1x1e", 2)[..., 0]
    y, z = torch.eye(3, dtype=torch.float64)[:2]
    x = torch.einsum("dij,i,j->d", cross, y, z)
    torch.testing.assert_close(x.abs(), torch.tensor([0, 0, 0.5**0.5], dtype=torch.float64))


@pytest.mark.parametrize("correlation", [1, 2, 3])
def test_the_contraction_turns_with_its_input(correlation: int) -> None:
    m = make(("2x0e + 2x1o + 2x2e", "2x0e + 2x1o + 2x2e + 2x1e", correlation), torch.device("cpu"))
    x, labels = features(m, 4, torch.device("cpu")), torch.tensor([0, 3, 3, 1])
    d_in = torch.block_diag(*(rotation(b.ir.l) for b in m.irreps_in))
    d_out = torch.block_diag(*(torch.kron(torch.eye(b.mul), rotation(b.ir.l)) for b in Irreps(m.irreps_out)))
    torch.testing.assert_close(m(x @ d_in.T, labels), m(x, labels) @ d_out.T.double())
