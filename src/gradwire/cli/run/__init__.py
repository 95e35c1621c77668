"""`gradwire run`: torchrun with gradwire in place of PyTorch's classes and backends."""
