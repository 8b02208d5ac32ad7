"""Trains a small hybrid of Qwen3.5's layout on texts with facts in them, within a budget of seconds, and writes a
folder that SGLang loads.

    scripts/train_hybrid --out models/mine --seconds 240                    # what ships with this project, on a GPU
    scripts/train_hybrid --regime remember --size large --seconds 840 --out models/large
    scripts/train_hybrid --size toy --seconds 300 --out /tmp/toy            # short texts only, on two CPU cores

Regimes. local: no head of a recurrent layer keeps half of its state for more than --half-life tokens, whatever it
reads, so that attention must do the recall, as in the paper's models. The limit holds by the weights themselves, in any
engine. remember: no limit; heads may keep facts over a whole text, which a replay of a short tail cannot bring back.

The same seed gives the same first weights and texts; how many steps fit into the time depends on the machine, so that
two runs are alike, not equal. OUT/training.json tells what was trained, how fast, how long heads remember, and how well
texts are answered that were not trained on."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from origin import origin
from train import checkpoint, shapes
from train.gates import half_lives, limit_half_lives, spread_half_lives
from train.held_out import accuracies
from train.loader import Loader
from train.loop import Progress, train
from train.model import Hybrid
from train.step import TrainingStep

REGIMES = ("local", "remember")
FIRST_HALF_LIVES = {"local": (4.0, 48.0), "remember": (4.0, 1024.0)}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "train_hybrid", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--regime", choices=REGIMES, default="local")
    parser.add_argument("--half-life", type=float, default=64.0, help="of regime local, in tokens; 64")
    parser.add_argument("--size", choices=tuple(shapes.RECIPES), default="tiny")
    parser.add_argument("--seconds", type=float, required=True, help="of training; writing and checking come on top")
    parser.add_argument("--rate", type=float, help="highest learning rate; the size's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=max(0, min(14, (os.cpu_count() or 1) - 2)), help="for texts")
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel on its own")
    parser.add_argument("--check-lengths", type=lambda text: tuple(map(int, text.split(","))), help="at the end")
    parser.add_argument("--check-count", type=int, default=100, help="texts per task and length, at the end")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default=os.environ.get("GIT_COMMIT"), help="where the checkout has no .git")
    options = parser.parse_args(argv)
    options.model_shape, options.model_path = options.size, None  # what origin() names
    if options.seconds <= 0 or options.half_life <= 1:
        parser.error("--seconds must be positive and --half-life more than 1")
    return options


def new_model(recipe: shapes.Recipe, options: argparse.Namespace) -> Hybrid:
    model = Hybrid(shapes.config(recipe), options.seed)
    low, high = FIRST_HALF_LIVES[options.regime]
    generator = torch.Generator().manual_seed(options.seed + 1)
    for layer in model.recurrent:
        spread_half_lives(layer, low, min(high, options.half_life) if limit_of(options) else high, generator)
    if limit := limit_of(options):
        limit_half_lives(model.recurrent, limit)
    return model


def limit_of(options: argparse.Namespace) -> float | None:
    return options.half_life if options.regime == "local" else None


def remembered(model: Hybrid) -> list[dict[str, Any]]:
    """Half-lives of every recurrent layer, in tokens."""
    found = []
    for number, layer in enumerate(model.model.layers):
        if layer.kind == "linear_attention":
            lives = half_lives(layer)
            found.append({"layer": number} | {k: [round(x, 1) for x in v.tolist()] for k, v in lives._asdict().items()})
    return found


def report(model: Hybrid, progress: Progress, options: argparse.Namespace, device: str) -> dict[str, Any]:
    lengths = options.check_lengths or sorted({n for s in shapes.RECIPES[options.size].stages for n in s.lengths})[-4:]
    begin = time.monotonic()
    right = accuracies(model, lengths, options.check_count, options.seed)
    say(f"checked in {time.monotonic() - begin:.0f} s; share of {options.check_count} held-out prompts answered right:")
    for variant, by_task in right.items():
        for task, values in by_task.items():
            say(f"  {variant:7} {task:7}" + "".join(f"{length:6}: {value:.3f}" for length, value in values.items()))
    return {
        **origin("scripts/train_hybrid", options),
        **{name: getattr(options, name) for name in ("regime", "size", "seed", "seconds")},
        "half_life_limit": limit_of(options),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "parameters": sum(p.numel() for p in model.parameters()),
        **{name: getattr(progress, name) for name in ("steps", "tokens")},
        "trained_seconds": round(progress.seconds, 1),
        "half_lives": remembered(model),
        "held_out": {"prompts": options.check_count, "right": right},
        "history": progress.history,
    }


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    options = parse()
    recipe = shapes.RECIPES[options.size]
    if options.rate:
        recipe = replace(recipe, rate=options.rate)
    loader = Loader(recipe.stages, options.seed, options.processes)
    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            torch.set_float32_matmul_precision("high")
        model = new_model(recipe, options).to(device)
        say(f"{options.size}, {options.regime}: {sum(p.numel() for p in model.parameters()):,} parameters on {device}")
        rate, limit = recipe.rate, limit_of(options)
        step = TrainingStep(model, rate, limit, graphs=not options.no_graphs)
        progress = train(step, loader, recipe, options.seconds, say)
    finally:
        loader.close()
    checkpoint.round_weights(model, limit)
    checkpoint.write(model, options.out)  # before the check, which may be interrupted
    told = report(model, progress, options, device)
    (options.out / "training.json").write_text(json.dumps(told, indent=1) + "\n")
    for layer in told["half_lives"]:
        say(f"layer {layer['layer']}: half-lives typical {layer['typical']}, longest {layer['longest']}")
    say(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
