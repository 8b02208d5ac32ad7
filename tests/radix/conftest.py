"""Test files are imported by path (--import-mode=importlib), so the helper beside them is loaded by path as well."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from sglang_tailreplay.cpu import activate

activate()

_NAME = "checked_scheduler"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name(f"{_NAME}.py"))
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])
