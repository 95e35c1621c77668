"""Makes `fuzz` importable, here and in the processes it starts: it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
