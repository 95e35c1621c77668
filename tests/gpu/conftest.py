"""Runs these tests only where a device is named: `.ci/gpu` does, on a GPU or with `--dry`."""

from __future__ import annotations

import os

if "GRADWIRE_TEST_DEVICE" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
