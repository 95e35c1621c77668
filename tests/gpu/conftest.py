"""Runs these tests only where a device is named: `.ci/gpu` does, on a GPU or with `--dry`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `gpu` is not installed

if "GRADWIRE_TEST_DEVICE" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
