"""Elastic data parallelism: training that goes on whichever of its processes die."""
