"""Measurements beside PyTorch's own, in one launch, alternating: docs/benchmarks.md says how."""
