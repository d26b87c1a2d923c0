"""Attention in plain torch, which kernels are checked against."""
