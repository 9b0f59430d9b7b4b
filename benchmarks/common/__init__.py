"""The helpers that benchmarks share: shapes, peers, timing, rooflines and reports."""

import sys
from pathlib import Path

# A checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
