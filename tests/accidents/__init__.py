"""Accidents with stated truth, and what `gradwire explain` says: `python -m tests.accidents`."""
