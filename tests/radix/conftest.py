"""Test files are imported by path (--import-mode=importlib), so the helpers beside them are loaded by path as well."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from sglang_tailreplay.cpu import activate

activate()

for _name in ("checked_scheduler", "server_machine", "simulated_device", "tiered_scheduler"):
    if _name not in sys.modules:
        _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
        sys.modules[_name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_name])
