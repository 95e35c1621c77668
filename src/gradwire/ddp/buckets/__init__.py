"""Buckets of gradients: which parameters share one, copies in and out, who owns the memory."""
