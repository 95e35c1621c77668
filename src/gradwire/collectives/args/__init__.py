"""Validation of arguments: groups, ranks, tensors, sizes and reduction ops."""
