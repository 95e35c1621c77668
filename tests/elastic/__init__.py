"""Elastic training: its protocol, the tree, real kills. `python -m elastic.model` runs alone."""
