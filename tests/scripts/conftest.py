"""scripts/lib is no package: its modules are found as they are when a script runs, and so are the helpers here."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "scripts" / "lib"), str(Path(__file__).resolve().parent)]
