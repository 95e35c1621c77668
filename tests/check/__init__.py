"""Tests of `gradwire check`."""
