"""Tensors (batch, seqlen, heads, head_dim) of the same values, laid out in memory in other ways."""

import torch
import torch.nn.functional as F
from torch import Tensor


def fused(tensor: Tensor) -> Tensor:
    """As the middle part of one fused projection."""
    return torch.cat([tensor, tensor, tensor], dim=2).split(tensor.shape[2], dim=2)[1]


def transposed(tensor: Tensor) -> Tensor:
    """Stored with heads before seqlen."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def every_second_row(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, dim=1)[:, ::2]


def every_second_column(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, dim=3)[..., ::2]


def lazily_negated(tensor: Tensor) -> Tensor:
    """As real parts of conjugated tensors are: memory holds the opposite sign."""
    return torch._neg_view(-tensor)


def columns_first(tensor: Tensor) -> Tensor:
    return tensor.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


def one_element_late(tensor: Tensor) -> Tensor:
    """A storage offset that is no multiple of 16 bytes."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def odd_rows(tensor: Tensor) -> Tensor:
    """Rows that are one element longer than their columns."""
    return F.pad(tensor, (0, 1))[..., :-1]


VIEWS = (
    fused,
    transposed,
    every_second_row,
    every_second_column,
    lazily_negated,
    columns_first,
    one_element_late,
    odd_rows,
)
