"""Soak a server that runs, or one that is started here: load of every kind that could break a prefix cache, and proof
that nothing did. Exit code 1 if anything failed; the document tells the seed and the step.

    scripts/soak --url http://127.0.0.1:30000 --seconds 600
    scripts/soak --model-path M --seconds 600 --kill -- --tail-replay-host-gb 4

A soak empties the cache and, towards its end, wants the server for itself: no other client may use it."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(CHECKOUT / "tests" / "serving")]

import server as serving  # noqa: E402
from origin import commit_of, gpus  # noqa: E402

from soak.client import Client  # noqa: E402
from soak.judge import Failure  # noqa: E402
from soak.plan import MALFORMED, Limits  # noqa: E402
from soak.restart import kill_and_restart  # noqa: E402
from soak.run import Calibration, Settings, Soak, calibrate  # noqa: E402

PACKAGES = ("sglang-tailreplay", "sglang", "torch", "triton", "transformers")
READY_SECONDS = 900  # pinning host memory and capturing graphs take their time


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(
        "scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    which = parse.add_mutually_exclusive_group(required=True)
    which.add_argument("--url", help="of a running server")
    which.add_argument("--model-path", help="start a server of this model; its flags follow after --")
    parse.add_argument("--seconds", type=float, default=600, help="of load; start and checks come on top")
    parse.add_argument("--rounds", type=int, help="stop after so many, too: what repeats a failure need not go on")
    parse.add_argument("--concurrency", type=int, default=16, help="requests of a common round")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--max-prompt", type=int, default=600, help="tokens")
    parse.add_argument("--max-new", type=int, default=128, help="tokens of the longest answers")
    parse.add_argument("--checked-share", type=float, default=0.5, help="of the exact answers, compared with cold ones")
    parse.add_argument(
        "--compare", choices=("auto", "tokens", "logprobs"), default="auto", help="auto: tokens in float32"
    )
    parse.add_argument("--max-logprob-difference", type=float, help="default: measured on cold answers before the load")
    parse.add_argument("--max-growth-mib", type=float, default=256, help="of the server's memory in the second half")
    parse.add_argument("--deadline", type=float, default=300, help="seconds for one request")
    parse.add_argument("--server-pid", type=int, help="with --url, of a server on this machine: watch its memory, too")
    parse.add_argument("--vocabulary", type=int, nargs=2, default=(2, 1000), metavar=("LOW", "HIGH"), help="token ids")
    parse.add_argument("--kill", action="store_true", help="at last kill -9 the scheduler under load, and start again")
    parse.add_argument("--commit", default=os.environ.get("GIT_COMMIT"), help="where the checkout has no .git")
    parse.add_argument("--out", type=Path, help="where the document goes; default: standard output")
    parse.add_argument("--log", type=Path, default=Path("build/soak/server.log"), help="of a server started here")
    return parse


def options_of(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The soak's options and the server's flags, which follow after a `--`."""
    own, flags = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, flags = own[:at], own[at + 1 :]
    parse = parser()
    options = parse.parse_args(own)
    if options.url and (flags or options.kill):
        parse.error(
            "server flags and --kill need --model-path: a running server is not this program's to start or kill"
        )
    if options.server_pid and not options.url:
        parse.error("--server-pid goes with --url")
    if not 0 <= options.checked_share <= 1:
        parse.error("--checked-share is a share, from 0 to 1")
    return options, flags


def server_flags(options: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """Flags of a server whose KV is too small for the load, so that it evicts and retracts. The user's win."""
    tokens = max(512, 4 * (options.max_prompt + options.max_new))
    defaults = {
        "--max-total-tokens": str(tokens),
        "--context-length": str(options.max_prompt + options.max_new + 64),
        "--chunked-prefill-size": str(max(64, options.max_prompt // 3)),
        "--max-running-requests": "8",
        "--max-mamba-cache-size": "16",
        "--schedule-conservativeness": "0.1",  # reserve little for answers: retract instead
    }
    given = {flag.split("=")[0] for flag in flags}
    chosen = [word for flag, value in defaults.items() if flag not in given for word in (flag, value)]
    return [*chosen, "--enable-metrics", "--enable-cache-report", *flags]


def limits_of(info: dict[str, Any], options: argparse.Namespace) -> Limits:
    """What the server takes. ValueError if it is too small for the load that was asked for."""
    state = info["internal_states"][0] if info.get("internal_states") else {}
    tokens = int(info.get("max_total_num_tokens") or state.get("max_total_num_tokens") or sys.maxsize)
    context = int(info.get("context_length") or info.get("max_req_input_len") or sys.maxsize)
    if options.max_prompt + options.max_new >= min(tokens, context):
        raise ValueError(
            f"--max-prompt {options.max_prompt} and --max-new {options.max_new} do not fit into the server's context "
            f"of {context} and its {tokens} tokens of KV: lower them"
        )
    running = int(info.get("max_running_requests") or state.get("effective_max_running_requests_per_dp") or 16)
    if context == sys.maxsize:
        raise ValueError("the server does not tell its context length: start it with --context-length")
    concurrency = options.concurrency
    return Limits(
        options.max_prompt, options.max_new, concurrency, min(running, 64), context, tuple(options.vocabulary)
    )


@dataclass
class Run:
    """One call of the program."""

    options: argparse.Namespace
    flags: list[str]
    server: serving.Server | None = None
    soak: Soak | None = None
    calibration: Calibration | None = None
    info: dict[str, Any] | None = None

    def start(self) -> None:
        self.server = serving.start(
            self.options.model_path, *server_flags(self.options, self.flags), log_path=self.options.log
        )
        serving.wait_ready(self.server, READY_SECONDS)

    async def drive(self) -> list[Failure]:
        options = self.options
        url, pid = options.url, options.server_pid
        if not url:
            say(f"starting a server, log in {options.log}")
            self.start()
            url, pid = self.server.base_url, self.server.process.pid
        client = Client(url, options.deadline, connections=512)
        try:
            self.info = await client.info()
            limits = limits_of(self.info, options)
            bound = await self._bound(client, limits)
            settings = Settings(
                **{"seed": options.seed, "seconds": options.seconds, "max_rounds": options.rounds or math.inf},
                **{"limits": limits, "checked_share": options.checked_share, "max_logprob_difference": bound},
                max_growth_bytes=int(options.max_growth_mib * 2**20),
            )
            self.soak = Soak(client, settings, pid, say)
            await self.soak.run()
            if options.kill:
                await self._kill(client)
        finally:
            await client.close()
        return self.soak.failures

    async def _bound(self, client: Client, limits: Limits) -> float | None:
        options = self.options
        exact = self.info.get("dtype") == "float32" if options.compare == "auto" else options.compare == "tokens"
        if exact and options.max_logprob_difference is None:
            return None
        if options.max_logprob_difference is not None:
            return options.max_logprob_difference
        self.calibration = await calibrate(client, options.seed, limits)
        say(f"two cold answers differ by up to {self.calibration.noise:.3g}; bound {self.calibration.bound:.3g}")
        return self.calibration.bound

    async def _kill(self, client: Client) -> None:
        def start() -> serving.Server:
            say("the scheduler was killed under load; starting again")
            self.start()
            return self.server

        settings = self.soak.settings
        self.soak.failures += await kill_and_restart(client, self.server, start, serving.stop, settings)

    def document(self, failures: Sequence[Failure], seconds: float) -> dict[str, Any]:
        soak, info = self.soak, self.info or {}
        samples = soak.samples if soak else []
        return {
            "ok": not failures,
            "failures": [failure._asdict() for failure in failures],
            "seed": self.options.seed,
            "command": ["scripts/soak", *sys.argv[1:]],
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
            **commit_of(self.options),
            "gpus": gpus(),
            "versions": {name: package_version(name) for name in PACKAGES},
            "server": {
                key: info.get(key) for key in ("version", "model_path", "dtype", "device", "max_total_num_tokens")
            },
            "compared": "tokens" if soak and soak.settings.max_logprob_difference is None else "logprobs",
            "max_logprob_difference": soak.settings.max_logprob_difference if soak else None,
            "calibration": self.calibration._asdict() if self.calibration else None,
            "limits": soak.settings.limits._asdict() if soak else None,
            "rounds": soak.rounds if soak else 0,
            "malformed_bodies": len(MALFORMED),
            "flushes": soak.flushes if soak else {},
            "memory_mib": [round(s.rss_bytes / 2**20) for s in (samples[:1] + samples[-1:])],
            "memory_watched": bool(samples),
            "metrics_watched": bool(soak and soak.metrics_watched),
            **(soak.tally.report() if soak else {}),
        }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main(argv: Sequence[str] | None = None) -> int:
    options, flags = options_of(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server started here is stopped
    run, begin = Run(options, flags), time.monotonic()
    try:
        failures = asyncio.run(run.drive())
    except Exception as error:
        failures = [*(run.soak.failures if run.soak else []), Failure("broken", f"{type(error).__name__}: {error}")]
    finally:
        if run.server is not None:
            serving.stop(run.server)
    document = json.dumps(run.document(failures, time.monotonic() - begin), indent=1)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(document + "\n")
    else:
        print(document)
    for failure in failures:
        say(f"FAILED {failure.what} (seed {options.seed}, step {failure.step}): {failure.text}")
    return 1 if failures else 0
