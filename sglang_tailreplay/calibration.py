"""The file that `sglang-tailreplay calibrate` writes and the launcher reads: what was measured, on which model, and the
settings that follow from it.

A file made for another model or by other versions is refused: its numbers say nothing about this start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang_tailreplay.errors import TailReplayError

FORMAT = 3
TOOL = "sglang-tailreplay calibrate"
FLAG = "--tail-replay-calibration"
# Keys of TailReplayConfig: those that are measured, and those of the measured servers that change answers, too.
MEASURED = ("ratio", "min_tokens", "max_tokens", "anchor_interval")
KEPT = ("row_dtype", "anchor_dtype")
RECOMMENDED = (*MEASURED, *KEPT)
DISTRIBUTIONS = ("sglang", "sglang-tailreplay")
_SAMPLE = 1 << 16  # bytes read at each of _SAMPLES places of a weight file
_SAMPLES = 16


def versions() -> dict[str, str | None]:
    """Of what computes the answers; None for what is not installed as a package."""

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in DISTRIBUTIONS}


def model_folder(path: str) -> Path:
    """The folder of a checkpoint; of a hub's name its local snapshot. TailReplayError where there is none."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, local_files_only=True))
    except Exception as error:  # no such package, no such name, nothing downloaded
        raise TailReplayError(
            f"--model-path {path}: no folder, and no local snapshot of that name ({type(error).__name__}); a "
            f"calibration belongs to a checkpoint that is here: download it first, or leave {FLAG} out"
        ) from None


def fingerprint(folder: Path) -> str:
    """A digest of config.json and of samples of every weight file: cheap, and another one for another fine-tune.

    Where the folder lies and what its files are called does not count.
    """
    digest = hashlib.sha256()
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise TailReplayError(f"--model-path {folder}: cannot read its config.json ({error})") from None
    digest.update(json.dumps(config, sort_keys=True).encode())
    weights = (path for suffix in ("safetensors", "bin", "pt") for path in folder.glob(f"*.{suffix}"))
    for one in sorted(_sampled(path) for path in weights):
        digest.update(one)
    return digest.hexdigest()


def _sampled(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(size - _SAMPLE, 0) * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE))
    return digest.digest()


def read(path: str | Path) -> dict[str, Any]:
    """The document; TailReplayError for a file that is none."""
    try:
        document = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise TailReplayError(f"{FLAG} {path}: cannot be read ({error}); make one with '{TOOL}'") from None
    if not isinstance(document, dict) or document.get("tool") != TOOL:
        raise TailReplayError(f"{FLAG} {path}: was not written by '{TOOL}'; make one with it")
    if document.get("format") != FORMAT:
        raise TailReplayError(
            f"{FLAG} {path}: format {document.get('format')}, this version reads {FORMAT}; calibrate again"
        )
    return document


def recommended(document: Mapping[str, Any], path: str | Path, model_path: str) -> dict[str, Any]:
    """Settings for a start of this model: keys of RECOMMENDED. TailReplayError if the file says nothing about it."""
    installed = versions()
    for name, made_with in document["versions"].items():
        if made_with != installed.get(name):
            raise TailReplayError(
                f"{FLAG} {path}: measured with {name} {made_with}, installed is {installed.get(name)}; "
                "calibrate again, or leave the flag out"
            )
    if fingerprint(model_folder(model_path)) != document["model"]["fingerprint"]:
        raise TailReplayError(
            f"{FLAG} {path}: measured on another model ({document['model']['path']}) than --model-path {model_path}; "
            "calibrate this one, or leave the flag out"
        )
    chosen = document["recommendation"]
    if chosen is None:
        raise TailReplayError(
            f"{FLAG} {path}: it recommends nothing: {document['verdict']}. Calibrate again, or leave the flag out and "
            "give --tail-replay-ratio yourself"
        )
    return {key: chosen[key] for key in RECOMMENDED}
