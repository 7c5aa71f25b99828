"""Keep the repository's root off the import path: its `megatron/` holds mirrors, not a package."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or '.').resolve() != _ROOT]
