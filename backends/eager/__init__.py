"""Eager: the lowering to ATen's own kernels, one node after the other."""
