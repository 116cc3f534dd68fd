"""A mixture of experts learns handwritten digits; the layer is also written as a loop over experts.

    scores [T,E] = h W_r          T tokens (images), E experts, D width, H width within an expert
    weights [T,k] = softmax of the k largest scores
    y[t] = sum over the k experts e of t: weights * (gelu(h[t] W1[e] + b1[e]) W2[e] + b2[e])

The grouped form sorts the T k (token, expert) pairs by expert once, makes two grouped products over all
of them, and puts the results back: the sum over k runs in a fixed order, so that a run can be repeated
bit by bit. The images are those that scikit-learn bundles: 1797 of 8 x 8 pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

import multigemm

from .._support import require
from .compare import Part, cost

REQUIRED_ACCURACY = 0.95
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-12}


@dataclass(frozen=True)
class Config:
    experts: int = 16
    top_k: int = 2
    width: int = 64
    hidden: int = 64
    epochs: int = 16
    batch: int = 128
    learning_rate: float = 3e-3
    balance: float = 0.01
    """Weight of the term that keeps all experts in use."""
    seed: int = 0


@dataclass
class Data:
    """Images [n, 64] in 0 .. 1 and labels [n]; a quarter of them is kept for the test."""

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


@dataclass
class Curve:
    epochs: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)


Layer = Callable[["Experts", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Experts(torch.nn.Module):
    """The experts' weights: W1 [E,D,H], b1 [E,H], W2 [E,H,D], b2 [E,D]."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = torch.nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.b1 = torch.nn.Parameter(torch.zeros(experts, hidden))
        self.w2 = torch.nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)
        self.b2 = torch.nn.Parameter(torch.zeros(experts, width))


def grouped_layer(e: Experts, h: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """h [T,D], chosen [T,k] experts, weights [T,k] -> y [T,D], all experts at once."""
    top_k = chosen.shape[1]
    order = multigemm.sort_by_group(chosen.flatten(), e.w1.shape[0])
    rows = h[order.permutation // top_k]
    inner = F.gelu(multigemm.grouped_mm(rows, e.w1, order.group_sizes, bias=e.b1))
    outer = multigemm.grouped_mm(inner, e.w2, order.group_sizes, bias=e.b2)
    per_choice = outer[order.inverse].view(*chosen.shape, -1)
    return (per_choice * weights.unsqueeze(-1)).sum(1)


def loop_layer(e: Experts, h: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same, as it is commonly written: one expert after the other."""
    y = torch.zeros_like(h)
    for expert in range(e.w1.shape[0]):
        tokens, places = torch.where(chosen == expert)
        if tokens.numel() == 0:
            continue
        inner = F.gelu(h[tokens] @ e.w1[expert] + e.b1[expert])
        outer = inner @ e.w2[expert] + e.b2[expert]
        y = y.index_add(0, tokens, outer * weights[tokens, places].unsqueeze(-1))
    return y


class Classifier(torch.nn.Module):
    """Pixels [T,64] -> class scores [T,10], through one mixture-of-experts layer with a residual."""

    def __init__(self, config: Config, layer: Layer) -> None:
        super().__init__()
        self.top_k, self.layer = config.top_k, layer
        self.embed = torch.nn.Linear(64, config.width)
        self.norm = torch.nn.LayerNorm(config.width)
        self.router = torch.nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config.experts, config.width, config.hidden)
        self.head = torch.nn.Linear(config.width, 10)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Class scores, and how unevenly the experts are used: 1 where all are used alike."""
        h = self.embed(pixels)
        normed = self.norm(h)
        scores = self.router(normed)
        best, chosen = scores.topk(self.top_k, dim=-1)
        h = h + self.layer(self.experts, normed, chosen, best.softmax(-1))
        share = scores.softmax(-1).mean(0)
        used = F.one_hot(chosen, scores.shape[1]).to(share.dtype).mean((0, 1))
        return self.head(h), (share * used).sum() * scores.shape[1]


def load() -> Data:
    """A fixed split, the same share of each digit in both parts."""
    datasets = require("sklearn.datasets", "demo", "The demo's handwritten digits")
    selection = require("sklearn.model_selection", "demo", "The demo's handwritten digits")
    pixels, labels = datasets.load_digits(return_X_y=True)
    parts = selection.train_test_split(pixels / 16.0, labels, test_size=0.25, random_state=0, stratify=labels)
    train_x, test_x = (torch.tensor(p, dtype=torch.float32) for p in parts[:2])
    train_y, test_y = (torch.tensor(p, dtype=torch.int64) for p in parts[2:])
    return Data(train_x, train_y, test_x, test_y)


def train(
    model: Classifier, data: Data, config: Config, progress: Callable[[int], None] = lambda epoch: None
) -> Curve:
    """Adam with a falling rate; the test images are only looked at, never learned from."""
    curve = Curve()
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs)
    for epoch in range(1, config.epochs + 1):
        total = 0.0
        for index in torch.split(torch.randperm(len(data.train_x), generator=generator), config.batch):
            scores, uneven = model(data.train_x[index])
            loss = F.cross_entropy(scores, data.train_y[index])
            optimizer.zero_grad()
            (loss + config.balance * uneven).backward()
            optimizer.step()
            total += loss.item() * len(index)
        schedule.step()
        curve.epochs.append(epoch)
        curve.loss.append(total / len(data.train_x))
        curve.accuracy.append(accuracy(model, data))
        progress(epoch)
    return curve


def accuracy(model: Classifier, data: Data) -> float:
    with torch.no_grad():
        return float((model(data.test_x)[0].argmax(-1) == data.test_y).float().mean())


def run(
    config: Config, layer: Layer = grouped_layer, progress: Callable[[int], None] = lambda epoch: None
) -> tuple[Part, Curve]:
    """Train with ``layer``, then compare it with the loop over experts: values, gradients, time, memory."""
    data = load()
    torch.manual_seed(config.seed)
    model = Classifier(config, layer)
    curve = train(model, data, config, progress)
    part = Part("mixture of experts on handwritten digits", "the loop over experts")
    part.facts["experts"] = f"{config.experts}, top {config.top_k}"
    part.facts["implementation"] = told(model, data)
    part.facts["test accuracy"] = f"{curve.accuracy[-1]:.1%} of {len(data.test_y)} images"
    if curve.accuracy[-1] < REQUIRED_ACCURACY:
        part.faults.append(f"test accuracy {curve.accuracy[-1]:.1%} is under {REQUIRED_ACCURACY:.0%}")
    for dtype, tolerance in TOLERANCES.items():
        model.to(dtype)
        images = data.train_x.to(dtype)
        got, expected = (derivatives(model, which, images, data.train_y) for which in (layer, loop_layer))
        short = str(dtype).removeprefix("torch.")
        part.agree(f"class scores, {short}", got[:1], expected[:1], tolerance)
        part.agree(f"gradients of all weights, {short}", got[1:], expected[1:], tolerance)
    model.to(torch.float32)
    pixels, labels = data.train_x[: config.batch], data.train_y[: config.batch]
    grouped, loop = (
        lambda which=which: derivatives(model, which, pixels, labels) for which in (layer, loop_layer)
    )
    part.costs.append(cost(f"forward + backward, {config.batch} images", grouped, loop))
    return part, curve


def derivatives(
    model: Classifier, layer: Layer, pixels: torch.Tensor, labels: torch.Tensor
) -> list[torch.Tensor]:
    """Class scores, then the gradient of the loss for each weight, in the order of the parameters."""
    before, model.layer = model.layer, layer
    try:
        scores, uneven = model(pixels)
        loss = F.cross_entropy(scores, labels) + uneven
        gradients = torch.autograd.grad(loss, list(model.parameters()))
    finally:
        model.layer = before
    return [scores.detach(), *gradients]


def told(model: Classifier, data: Data) -> str:
    """Which implementation and kernel the experts' first product takes."""
    experts = model.experts
    rows = torch.zeros(experts.w1.shape[0], experts.w1.shape[1])
    sizes = torch.ones(experts.w1.shape[0], dtype=torch.int64)
    found = multigemm.explain(rows, experts.w1.detach(), sizes, bias=experts.b1.detach())
    return f"{found.implementation}: {found.kernel}"
