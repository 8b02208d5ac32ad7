"""Where a program of scripts/ runs: in the Python it was called with, or in .venv."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def enter(*needed: str) -> None:
    """Go on with this program in .venv, which scripts/setup makes, if this Python lacks one of the modules it needs."""
    folder = CHECKOUT / ".venv"
    if all(map(find_spec, needed)) or Path(sys.prefix).resolve() == folder.resolve():
        return
    code = subprocess.call([str(CHECKOUT / "scripts" / "setup")])
    if code:
        sys.exit(code)
    python = str(folder / "bin" / "python")
    sys.stdout.flush()
    os.execv(python, [python, *sys.argv])
