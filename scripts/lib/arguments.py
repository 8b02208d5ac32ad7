"""Command line arguments that the measuring scripts share: which model, which settings of which engine."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
CHECKOUT = SCRIPTS.parent


def add_common(parser: argparse.ArgumentParser, out: str) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model-shape", choices=sorted(p.parent.name for p in SCRIPTS.glob("shapes/*/config.json")))
    model.add_argument("--model-path", help="a folder with a config.json (engine argument load_format: auto)")
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--dry-run", action="store_true", help="print the plan; needs no GPU")
    parser.add_argument("--commit", default=os.environ.get("GIT_COMMIT"), help="where the checkout has no .git")
    setting = {"action": "append", "default": []}
    parser.add_argument("--engine-arg", **setting, metavar="[ENGINE:]KEY=JSON", help="of sglang.Engine, for all or one")
    parser.add_argument("--engine-env", **setting, metavar="[ENGINE:]NAME=VALUE")
    parser.add_argument("--config", **setting, metavar="[ENGINE:]KEY=JSON", help="of SGLANG_TAILREPLAY")


def names(allowed: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Argument type NAME,... in the order of `allowed`."""

    def split(text: str) -> tuple[str, ...]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(allowed):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} not in {', '.join(allowed)}")
        return tuple(name for name in allowed if name in chosen)

    return split


def numbers(kind: type) -> Callable[[str], tuple]:
    return lambda text: tuple(kind(part) for part in text.split(","))


def settings(pairs: Sequence[str], engine: str, read: Callable[[str], Any], engines: Collection[str]) -> dict[str, Any]:
    """KEY=VALUE for every engine, ENGINE:KEY=VALUE for one. SystemExit for anything else."""
    chosen = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise SystemExit(f"{pair!r} is not KEY=VALUE")
        owner, colon, rest = key.partition(":")
        if colon and owner not in engines:
            raise SystemExit(f"{pair!r}: no engine is called {owner!r}")
        if not colon or owner == engine:
            chosen[rest or key] = read(value)
    return chosen


def model_folder(options: argparse.Namespace) -> Path:
    return Path(options.model_path or SCRIPTS / "shapes" / options.model_shape).resolve()


def model_config(folder: Path) -> dict[str, Any]:
    """The text part of a config.json."""
    config = json.loads((folder / "config.json").read_text())
    return config.get("text_config", config)


def model_plugins(config: Mapping[str, Any]) -> list[str]:
    """What stock SGLang needs as well, where only this project's plugin, idle otherwise, knows the model."""
    return ["tailreplay"] if config["model_type"] == "olmo_hybrid" else []


def python_path(*plugins: str) -> str:
    """PYTHONPATH of an engine that finds the SGLang plugins in these folders of scripts/lib."""
    folders = [str(SCRIPTS / "lib" / plugin) for plugin in plugins]
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
