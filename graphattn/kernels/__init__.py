"""Kernels: tensors in, tensors out. They know no Graph and no module."""
