"""The shapes, how they are scaled down for a CPU, and how group sizes are drawn. No timing here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

import torch

KINDS = ("even", "random", "skew")
SEED = 0

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

# Limits of the scaling rule on a CPU. Halves are computed one by one on most CPUs, a hundred times
# slower than float32, hence their lower limit.
CPU_FLOPS = {torch.float32: 2**30, torch.float64: 2**30, torch.float16: 2**27, torch.bfloat16: 2**27}
CPU_WEIGHT_BYTES = 2**28
CPU_ROW_BYTES = 2**30
CPU_MIN_WIDTH = 256


@dataclass(frozen=True)
class Case:
    """x[N,(B,)K] @ w[G,(B,)K,M]; ``present`` limits how many groups have rows."""

    name: str
    group: str
    N: int
    G: int
    K: int
    M: int
    B: int | None = None
    present: int | None = None
    kinds: tuple[str, ...] = KINDS

    @property
    def is_moe(self) -> bool:
        return self.B is None

    def flops(self) -> int:
        """Of one product in which every row has a group."""
        return 2 * self.N * (self.B or 1) * self.K * self.M

    def shape(self) -> str:
        batch = "" if self.B is None else f" B={self.B}"
        present = "" if self.present is None else f" ({self.present} present)"
        return f"N={self.N} G={self.G}{present}{batch} K={self.K} M={self.M}"


@lru_cache(maxsize=1)
def all_cases() -> tuple[Case, ...]:
    """Every case of ``data/shapes.json``, in its order."""
    text = resources.files("multigemm").joinpath("data/shapes.json").read_text(encoding="utf-8")
    data = json.loads(text)
    result = []
    for group, entries in data.items():
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            continue  # the note, the kinds of sizes, and the layers, which are no products
        for entry in entries:
            fields = {k: v for k, v in entry.items() if k != "sizes"}
            result.append(Case(group=group, kinds=tuple(entry.get("sizes", data["sizes"])), **fields))
    return tuple(result)


def select(names: Sequence[str], *, quick: bool = False) -> list[Case]:
    """The cases named by case, by group, by a group's first word ("prefill") or by "all"."""
    known = all_cases()
    chosen: list[Case] = []
    for name in names:
        hits = [c for c in known if name in ("all", c.name, c.group, c.group.partition("_")[0])]
        if not hits:
            groups = sorted({c.group for c in known})
            raise ValueError(
                f"there is no case or group {name!r}; groups: {', '.join(groups)}; "
                f"cases: {', '.join(c.name for c in known)}"
            )
        chosen += [c for c in hits if c not in chosen]
    if quick:
        firsts = {c.group: c for c in reversed(chosen)}
        chosen = [c for c in chosen if firsts[c.group] is c]
    return chosen


def own_dtypes(case: Case, device_type: str) -> list[torch.dtype]:
    """The dtypes that the group's name states; on a CPU the bf16 cases run in float32."""
    named = [DTYPES[word] for word in case.group.split("_") if word in DTYPES]
    return [torch.float32] if device_type == "cpu" and case.is_moe else named


def scaled(case: Case, dtype: torch.dtype, device_type: str) -> Case:
    """The case as it runs on this kind of device; GPUs run it as it is.

    On a CPU, for mixtures of experts: the larger of K and M is halved, down to no less than 256, and
    then N, down to no less than G, while the product takes more than 2^30 FLOP (2^27 for the half
    precisions) or the weights, in float32, more than 256 MiB. So the rows of a group and the kind of
    sizes stay what they are for as long as possible. For equivariant cases only N is halved, while
    x and y, in float64, take more than 1 GiB. The shape does not depend on the machine.
    """
    if device_type != "cpu":
        return case
    if not case.is_moe:
        while case.N * (case.B or 1) * (case.K + case.M) * 8 > CPU_ROW_BYTES and case.N // 2 >= case.G:
            case = replace(case, N=case.N // 2)
        return case
    limit = CPU_FLOPS[dtype]
    while case.flops() > limit or case.G * case.K * case.M * 4 > CPU_WEIGHT_BYTES:
        if max(case.K, case.M) // 2 >= CPU_MIN_WIDTH:
            case = replace(case, K=case.K // 2) if case.K > case.M else replace(case, M=case.M // 2)
        elif case.flops() > limit and case.N // 2 >= case.G:
            case = replace(case, N=case.N // 2)
        else:
            break
    return case


def applies(case: Case, kind: str) -> bool:
    """Whether the kind of sizes makes sense: with fewer rows than groups, even sizes are all zero."""
    return kind in case.kinds and (kind != "even" or (case.present or case.G) <= case.N)


def draw_sizes(case: Case, kind: str) -> list[int]:
    """[G] group sizes. even: N // G each, the remaining rows belong to no group; random: rows drawn
    uniformly over the groups; skew: with probability 1/rank, the order of the groups shuffled.

    ``present`` groups, drawn at random, take the part of G.
    """
    generator = torch.Generator().manual_seed(SEED)
    count = case.G if case.present is None else case.present
    if kind == "even":
        sizes = torch.full((count,), case.N // count, dtype=torch.int64)
    elif kind == "random":
        rows = torch.randint(count, (case.N,), generator=generator)
        sizes = torch.bincount(rows, minlength=count)
    elif kind == "skew":
        odds = 1.0 / torch.arange(1, count + 1, dtype=torch.float64)
        odds = odds[torch.randperm(count, generator=generator)]
        rows = torch.multinomial(odds, case.N, replacement=True, generator=generator)
        sizes = torch.bincount(rows, minlength=count)
    else:
        raise ValueError(f"there is no kind of sizes {kind!r}; there are: {', '.join(KINDS)}")
    if case.present is not None:
        places = torch.randperm(case.G, generator=generator)[:count].sort().values
        sizes = torch.zeros(case.G, dtype=torch.int64).index_put((places,), sizes)
    result: list[int] = sizes.tolist()
    return result
