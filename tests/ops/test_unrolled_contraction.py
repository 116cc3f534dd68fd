"""The kernels that MACE's contractions are compiled into, against those that read tables, and sums."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from multigemm import _route_polynomial
from multigemm.equivariant._terms import Setting, Terms, fingerprint, shared, terms
from multigemm.ops.indexed_polynomial import Polynomial, indexed_polynomial

GROUPS = 5
IRREPS_IN = "1x0e+1x1o+1x2e+1x3o"
OUTPUTS = [
    ("1x0e",),
    ("1x1o",),
    ("1x2e",),
    ("1x0e", "1x1o"),
    ("1x0e", "1x2e"),
    ("1x0e", "1x1o", "1x2e"),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _has_kernels(device: torch.device) -> None:
    if not _route_polynomial.served(device):
        pytest.skip(_route_polynomial.why_not(device))


def case(
    outputs: tuple[str, ...],
    labels: torch.Tensor,
    channels: int,
    dtype: torch.dtype,
    device: torch.device,
    whole: bool = False,
) -> tuple[Polynomial, torch.Tensor, torch.Tensor, Terms]:
    """``whole``: columns of x [C, D], else [D, C]; y's are [O, C], or [C, O] where x's are not whole."""
    setting = Setting(IRREPS_IN, outputs, (3,) * len(outputs), False)
    found, few = terms(setting), shared(setting)
    places = [[i, found.width] if whole else [i * channels, 1] for i in range(found.width)]
    places += [[o * channels, 1] if whole else [o, found.components] for o in range(found.components)]
    tables = (found.heads, few.pairs, few.last, few.factors.to(dtype), few.entries, few.entry_ends)
    torch.manual_seed(1)
    x = torch.randn(len(labels), found.width * channels, dtype=torch.float64).to(dtype)
    w = torch.randn(GROUPS, len(few.entry_ends), channels, dtype=torch.float64).to(dtype)
    on_device = [t.to(device) for t in (*tables, torch.tensor(places))]
    polynomial = Polynomial(labels.to(device), None, None, *on_device, fingerprint(setting), "simt")
    return polynomial, x.to(device), w.to(device), found


def derivatives(p: Polynomial, x: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of each kernel: value, both gradients, and all three along a direction."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = indexed_polynomial(x, w, p)
    torch.manual_seed(2)
    gy = torch.randn(y.shape, dtype=torch.float64).to(y).requires_grad_()
    v = torch.randn(x.shape, dtype=torch.float64).to(x)
    gx, gw = torch.autograd.grad(y, (x, w), gy, create_graph=True)
    along = torch.autograd.grad(gx, (x, w, gy), v)
    found = {"y": y, "gx": gx, "gw": gw} | dict(zip(("xgrad", "wgrad", "value"), along, strict=True))
    return {name: value.detach() for name, value in found.items()}


def compare(p: Polynomial, x: torch.Tensor, w: torch.Tensor) -> None:
    found = derivatives(p, x, w)
    expected = derivatives(p._replace(fingerprint=0, factors=p.factors.double()), x.double(), w.double())
    tolerance = 1e-11 if x.dtype == torch.float64 else 2e-4
    for name, value in found.items():
        scale = max(float(expected[name].abs().max()), 1.0)
        difference = float((value.double() - expected[name]).abs().max())
        assert difference <= tolerance * scale, f"{name}: {difference} of {scale}"


@pytest.mark.parametrize("outputs", OUTPUTS, ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_kernel(
    outputs: tuple[str, ...], dtype: torch.dtype, device: torch.device, poisoned: None
) -> None:
    torch.manual_seed(0)
    labels = torch.randint(-1, GROUPS + 1, (37,))
    labels[labels == 2] = 1  # one without rows
    compare(*case(outputs, labels, 5, dtype, device, whole=len(outputs) > 1)[:3])


def test_the_sum_over_terms(device: torch.device) -> None:
    labels = torch.tensor([0, 3, 1, 7, 3])
    p, x, w, found = case(("1x0e", "1x1o", "1x2e"), labels, 3, torch.float64, device)
    values = torch.cat([x.unflatten(-1, (found.width, 3)), x.new_ones(5, 1, 3)], 1)
    d, i, j, k, t = p.entries.long().unbind(1)
    weight = torch.searchsorted(p.entry_ends.long(), torch.arange(len(t), device=device), right=True)
    own = w[p.labels.clamp(0, GROUPS - 1)] * (p.labels < GROUPS)[:, None, None]
    products = own[:, weight] * p.factors[t, None] * values[:, i] * values[:, j] * values[:, k]
    expected = x.new_zeros(5, found.components, 3).index_add_(1, d, products).transpose(1, 2).flatten(1)
    torch.testing.assert_close(indexed_polynomial(x, w, p), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "sizes", [(0, 600, 1, 0, 130), (3, 4, 4, 5, 4), (0, 0, 0, 0, 9), (1, 1, 1, 1, 1), (0,) * 5]
)
def test_gradients_of_weights_over_chunks_of_rows(
    sizes: tuple[int, ...], device: torch.device, poisoned: None
) -> None:
    labels = torch.arange(GROUPS).repeat_interleave(torch.tensor(sizes))
    labels = torch.cat([labels, torch.tensor([-1, GROUPS, GROUPS])])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))]
    compare(*case(("1x0e", "1x1o"), labels, 3, torch.float64, device)[:3])


def test_no_rows_and_no_channels(device: torch.device, poisoned: None) -> None:
    for rows, channels in ((0, 3), (3, 0)):
        p, x, w, _ = case(
            ("1x0e", "1x1o"), torch.zeros(rows, dtype=torch.int64), channels, torch.float64, device
        )
        found = derivatives(p, x, w)
        assert not found["gw"].any() and found["gx"].shape == x.shape


def test_repeats_are_equal_bit_for_bit(device: torch.device) -> None:
    labels = torch.arange(200) * 7 % 3
    p, x, w, _ = case(("1x0e", "1x1o"), labels, 4, torch.float32, device)
    first, second = derivatives(p, x, w), derivatives(p, x, w)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_fingerprint_takes_the_kernels_with_their_own_terms(device: torch.device) -> None:
    p, x, w, _ = case(("1x0e", "1x1o"), torch.tensor([0, 1, 2, 3]), 3, torch.float64, device)
    doubled = p._replace(factors=2 * p.factors)  # which those kernels do not read
    expected, read = derivatives(p, x, w), derivatives(doubled._replace(fingerprint=0), x, w)
    for name, value in derivatives(doubled, x, w).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
        torch.testing.assert_close(read[name], 2 * expected[name], rtol=1e-11, atol=1e-11)


def test_another_polynomial_has_another_fingerprint() -> None:
    found = [
        fingerprint(Setting(irreps, outputs, (degree,) * len(outputs), False))
        for irreps in (IRREPS_IN, "1x0e+1x1o+1x2e")
        for outputs in OUTPUTS[:4]
        for degree in (2, 3)
    ]
    assert len(set(found)) == len(found) and all(0 < number < 2**63 for number in found)


def test_the_compiled_terms_are_those_of_the_tables() -> None:
    path = ROOT / "ci" / "terms.py"
    specification = importlib.util.spec_from_file_location("ci_terms", path)
    assert specification is not None and specification.loader is not None
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    text = script.PATH.read_text(encoding="utf-8")
    assert text == script.text()
    known = dict(re.findall(r"\{(\d+), (\d)\},", text))
    for outputs in OUTPUTS:
        mask = sum({"1x0e": 1, "1x1o": 2, "1x2e": 4}[output] for output in outputs)
        number = fingerprint(Setting(IRREPS_IN, outputs, (3,) * len(outputs), False))
        assert known[str(number)] == str(mask)
