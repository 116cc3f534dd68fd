"""A third party's accelerator, which prefers a third party's implementation."""

import torch

from multigemm.accelerator import Accelerator

calls: list[str] = []


class Counting(Accelerator):
    """Takes over the CPU and prefers the implementation below for ``grouped_mm`` alone."""

    def device_count(self) -> int:
        return 1

    def capability(self) -> tuple[str, int]:
        return ("counting", 1)

    def get_property(self, key: str) -> str | None:
        return "row_by_row" if key == "grouped_mm" else None


class RowByRow:
    """The functions of an implementation: they write all of ``out``."""

    @staticmethod
    def grouped_mm(x, w, groups, offsets, bias, out, precision):
        calls.append("grouped_mm")
        out.zero_()
        start = 0
        for g, value in enumerate(groups.tolist()):
            end = value if offsets else start + value
            for n in range(start, end):
                out[n] = torch.matmul(x[n].unsqueeze(-2), w[g]).squeeze(-2) + (0 if bias is None else bias[g])
            start = end

    @staticmethod
    def grouped_mm_wgrad(x, gy, groups, offsets, sum_batch, out, precision):
        calls.append("grouped_mm_wgrad")
        out.zero_()
        start = 0
        for g, value in enumerate(groups.tolist()):
            end = value if offsets else start + value
            for n in range(start, end):
                product = x[n].unsqueeze(-1) * gy[n].unsqueeze(-2)
                out[g] += product.sum(0, keepdim=True) if sum_batch else product
            start = end
