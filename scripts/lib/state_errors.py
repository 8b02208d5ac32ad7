"""How far replayed states are from those of a full prefill, layer by layer and head by head, against what the gates
keep over the tail: without a server, in torch, on the CPU or the GPU.

    scripts/state_errors --model-path models/tiny-local --length 2048 --tails 64,128,256,512,1024 --count 32 --out RUN

For hybrids of Qwen3.5's layout as scripts/train_hybrid writes them, and with --ids for others of that layout whose
prompts are token ids. The cached prefix of every prompt ends at the last multiple of 64 tokens before its question. A
replay begins at zero states and the exact input of its group, so that a group's first layer misses only what lies
before the tail: the gates bound that. The layers behind it read approximate inputs, too. OUT/states.json has quantiles
by layer and tail, and errors by what the gates keep; OUT/states.png shows both."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arguments import model_config, numbers
from origin import origin
from quality import facts, id_tasks
from quality.codec import Codec, has_tokenizer
from quality.prompt import Prompt
from train.delta_rule import CHUNK
from train.model import Hybrid
from train.states import Errors, errors

QUANTILES = (0.1, 0.5, 0.9)
KEPT_EDGES = (0, 1e-6, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 1.0001)
BATCH = 8


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "state_errors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--ids", action="store_true", help="prompts are token ids; so for a model without a tokenizer")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--tails", type=numbers(int), default=(64, 128, 256, 512, 1024), help="multiples of 64")
    parser.add_argument("--count", type=int, default=32, help="prompts of each task; 32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("states"))
    parser.add_argument("--commit", help="where the checkout has no .git")
    options = parser.parse_args(argv)
    if options.count < 1 or options.length < 256:
        parser.error("--count must be positive and --length at least 256")
    if bad := [tail for tail in options.tails if tail % CHUNK or not 0 < tail < options.length // 2 + CHUNK]:
        parser.error(f"--tails: {bad[0]} is no multiple of {CHUNK} up to half of --length")
    options.model_shape = None
    return options


def load(folder: Path) -> Hybrid:
    from safetensors.torch import load_file

    model = Hybrid(model_config(folder))
    model.load_state_dict({name: value.float() for name, value in load_file(folder / "model.safetensors").items()})
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def prompts(options: argparse.Namespace) -> list[Prompt]:
    folder, every = Path(options.model_path), range(options.count)
    if options.ids or not has_tokenizer(folder):
        size = model_config(folder)["vocab_size"]
        return [id_tasks.prompt(t, options.length, i, options.seed, size) for t in id_tasks.TASKS for i in every]
    facts.check(Codec.load(options.model_path), (options.length,))
    return [facts.prompt(t, options.length, i, options.seed) for t in ("niah", "kv", "vt") for i in every]


def prefixes(found: Sequence[Prompt]) -> torch.Tensor:
    """[N, m]: all of the same length."""
    m = min(prompt.boundary for prompt in found) // CHUNK * CHUNK
    return torch.tensor([prompt.ids[prompt.boundary - m : prompt.boundary] for prompt in found])


class Collected:
    """What batches gave, by layer and tail."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, int], list[Errors]] = {}

    def add(self, found: Iterable[Errors]) -> None:
        for one in found:
            self.of.setdefault((one.layer, one.tail), []).append(one)

    def rows(self) -> list[dict[str, Any]]:
        return [self._row(layer, tail) for layer, tail in sorted(self.of)]

    def _row(self, layer: int, tail: int) -> dict[str, Any]:
        found = self.of[layer, tail]
        recurrent, kept, bound = (self.values(found, name) for name in ("recurrent", "kept", "bound"))
        return {
            **{"layer": layer, "place": found[0].place, "tail": tail, "heads": len(recurrent)},
            **{"recurrent": _quantiles(recurrent), "kept": _quantiles(kept)},
            "conv": _quantiles(self.values(found, "conv")),
            "error_over_bound": _quantiles(recurrent / np.maximum(bound, 1e-30)),
            # Where both are rounding, neither says anything.
            "over_bound": float(((recurrent > 1.02 * bound) & (recurrent > 1e-4)).mean()),
        }

    def by_kept(self) -> list[dict[str, Any]]:
        """Median error of the states whose gates keep that much over the tail, by place in the group."""
        rows = []
        for place in sorted({found[0].place for found in self.of.values()}):
            of = [one for found in self.of.values() for one in found if one.place == place]
            recurrent, kept = self.values(of, "recurrent"), self.values(of, "kept")
            for low, high in zip(KEPT_EDGES, KEPT_EDGES[1:], strict=False):
                inside = (kept >= low) & (kept < high)
                if inside.sum() >= 10:
                    rows.append(
                        {
                            **{"place": place, "low": low, "high": min(high, 1.0), "heads": int(inside.sum())},
                            **{"kept": float(np.median(kept[inside])), "recurrent": _quantiles(recurrent[inside])},
                        }
                    )
        return rows

    @staticmethod
    def values(found: Sequence[Errors], name: str) -> np.ndarray:
        return np.concatenate([getattr(one, name).double().flatten().cpu().numpy() for one in found])


def _quantiles(values: np.ndarray) -> list[float]:
    return [float(f"{value:.4g}") for value in np.quantile(values, QUANTILES)]


def draw(report: dict[str, Any], out: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_tail, conv, by_kept) = pyplot.subplots(1, 3, figsize=(15, 4.2))
    for layer in sorted({row["layer"] for row in report["layers"]}):
        rows = [row for row in report["layers"] if row["layer"] == layer]
        tails = [row["tail"] for row in rows]
        by_tail.plot(tails, [row["recurrent"][1] for row in rows], marker="o", markersize=3, label=f"layer {layer}")
        conv.plot(tails, [max(row["conv"][1], 1e-7) for row in rows], marker="o", markersize=3, label=f"layer {layer}")
    for place in sorted({row["place"] for row in report["by_kept"]}):
        rows = [row for row in report["by_kept"] if row["place"] == place and row["kept"] > 1e-7]
        by_kept.plot(
            [row["kept"] for row in rows], [row["recurrent"][1] for row in rows], marker="o", markersize=3,
            label=f"layer {place + 1} of a group",
        )  # fmt: skip
    by_kept.plot([1e-7, 1], [1e-7, 1], "k:", lw=1, label="error = what the gates keep")
    by_tail.set(xlabel="tail, tokens", ylabel="median relative error", title="recurrent states", xscale="log")
    conv.set(xlabel="tail, tokens", title="convolution windows", xscale="log", yscale="log")
    by_kept.set(xlabel="exp(sum of log-gates over the tail)", title="recurrent states", xscale="log", yscale="log")
    for axes in (by_tail, conv, by_kept):
        axes.grid(True, alpha=0.25)
        axes.legend(fontsize=7)
    figure.suptitle(f"{Path(report['model']).name}, {report['tokens']} cached tokens")
    figure.tight_layout()
    figure.savefig(out, dpi=90)
    pyplot.close(figure)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    options, begin = parse(argv), time.monotonic()
    model = load(Path(options.model_path))
    ids, collected = prefixes(prompts(options)), Collected()
    device = next(model.parameters()).device
    for start in range(0, len(ids), BATCH):
        collected.add(errors(model, ids[start : start + BATCH].to(device), options.tails))
    report = {
        **{"tool": "state_errors", **origin("scripts/state_errors", options), "model": Path(options.model_path).name},
        **{"device": str(device), "prompts": len(ids), "tokens": ids.shape[1], "quantiles": QUANTILES},
        **{"layers": collected.rows(), "by_kept": collected.by_kept()},
        "seconds": round(time.monotonic() - begin, 1),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "states.json").write_text(json.dumps(report, indent=1, default=str) + "\n")
    for row in report["layers"]:
        print(f"layer {row['layer']:2} tail {row['tail']:5}: recurrent {row['recurrent']}, conv {row['conv']}")
    print(f"written to {options.out}: states.json, {draw(report, options.out / 'states.png').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
