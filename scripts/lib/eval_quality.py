"""What replaying a tail costs in quality: RULER and LongBench through the real server, every prompt served from a
cached prefix that ends where its question begins, and from one that ends at a random token.

    scripts/eval_quality --model-path M --benchmarks ruler,longbench --modes full,zero,replay --ratios 0.05,0.10
    scripts/eval_quality --model-path M --url http://HOST:30000 --modes full,replay   # a server that runs already

Modes, all over the same prompts:

    full      nothing cached
    zero      KV reused and states zero: the paper's baseline, on a server of its own
    replay    at each of --ratios, and with each of --tails
    plain     the tail of each of --ratios prefilled as ordinary tokens, from zero states: what a replay is without rows
    anchored  states saved about every so many tokens, a server for each of --anchor-intervals
    seeded    the tail of a replay on top of the state at the last multiple of 1,024 tokens, on a server of its own
    again     full once more, on the server of mode zero: what rounding does to answers, best with passes of another
              size (--server-flag zero:--chunked-prefill-size=2048)

Flags after -- go to all servers that this script starts:

    scripts/eval_quality --model-path M --lengths 1024,2048 --count 50 -- --dtype float32

Every answer is kept in OUT/answers.jsonl, and the same command goes on from there. OUT/report.md has tables in the
shape of the paper's Tables 1 and 3, OUT/report.json the numbers, OUT/quality.svg a plot. An answer that was not served
from the intended boundary is an error, not a data point. The exit code is non-zero when there were errors, or when a
replay of all rows (a ratio of 1) does not give the answers of full prefill. How to read it: docs/quality.md."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from arguments import model_config, names, numbers, settings
from origin import origin
from quality import facts, id_tasks, longbench, plan, plot, ruler, summary
from quality.answers import AnswerFile, AnswersDiffer
from quality.ask import Asker
from quality.codec import Codec, has_tokenizer
from quality.plan import BENCHMARKS, DEFAULT_MODES, MODES, REPLAY_SERVER, ZERO_SERVER, Choice, Job
from quality.progress import Progress
from quality.prompt import CUTS
from quality.runs import NotStarted, Outcome, by_prompt, run, server


def parse(argv: Sequence[str]) -> argparse.Namespace:
    argv = list(argv)
    own, flags = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser("eval_quality", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    _add_what(parser)
    _add_how(parser)
    options = parser.parse_args(own)
    options.server_flags, options.model_shape = flags, None
    _check(parser, options)
    return options


def _add_what(parser: argparse.ArgumentParser) -> None:
    tasks = sorted({*ruler.TASKS, *id_tasks.TASKS, *longbench.TASKS, *facts.TASKS})
    parser.add_argument("--model-path", required=True, help="for the server, and for its tokenizer")
    parser.add_argument("--benchmarks", type=names(BENCHMARKS), default=("ruler",), help=f"of {','.join(BENCHMARKS)}")
    parser.add_argument("--tasks", type=names(tuple(tasks)), help=f"all, or some of {','.join(tasks)}")
    parser.add_argument("--modes", type=names(MODES), default=DEFAULT_MODES, help=f"of {','.join(MODES)}")
    parser.add_argument("--ratios", type=numbers(float), default=(0.05, 0.1), help="of replays; 0.05,0.1")
    parser.add_argument("--tails", type=numbers(int), default=(), help="fixed tails, in tokens")
    parser.add_argument("--anchor-intervals", type=numbers(int), default=(1024,), help="of mode anchored; 1024")
    parser.add_argument("--cuts", type=names(CUTS), default=CUTS, help="where the cached prefix ends; question,random")
    parser.add_argument("--lengths", type=numbers(int), default=(8192, 16384), help="tokens of prompt and answer")
    parser.add_argument("--count", type=int, default=200, help="prompts a cell (a task at a length); 200")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longbench-dir", type=Path, help="folder with LongBench's narrativeqa.jsonl, ...")
    parser.add_argument("--qa-file", type=Path, help="documents and questions of ruler's qa, in SQuAD's format")
    parser.add_argument("--haystack", type=Path, help="a text file to hide needles in; a few fixed sentences without")
    parser.add_argument("--ids", action="store_true", help="tasks over token ids; so for a model without a tokenizer")
    parser.add_argument("--chat", action="store_true", help="put the model's chat template around each prompt")


def _add_how(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("quality"), help="folder; an earlier run in it is continued")
    parser.add_argument("--report-only", action="store_true", help="ask nothing, write the report of what is there")
    parser.add_argument("--concurrency", type=int, default=4, help="prompts at a time, of each server")
    parser.add_argument("--side-by-side", action="store_true", help="all servers at a time, not one after the other")
    share = "NAME=COUNT,...: so many of a server share what is asked of it; by name of mode, anchored-1024; 1 each"
    parser.add_argument("--servers", type=_counts, default={}, metavar="NAME=COUNT", help=share)
    parser.add_argument("--seconds", type=float, help="for the whole run: what has not been asked by then is left out")
    parser.add_argument("--url", help="a running server with this plugin in mode replay")
    parser.add_argument("--zero-url", help="one in mode zero")
    parser.add_argument("--min-tokens", type=int, help="the server's --tail-replay-min-tokens")
    parser.add_argument("--max-tokens", type=int, help="the server's --tail-replay-max-tokens")
    parser.add_argument("--server-env", action="append", default=[], metavar="[SERVER:]NAME=VALUE")
    parser.add_argument("--server-flag", action="append", default=[], metavar="[SERVER:]--FLAG=VALUE")
    parser.add_argument("--ready-seconds", type=float, default=1800, help="time limit for the start of a server")
    parser.add_argument("--commit", help="where the checkout has no .git")


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if bad := [ratio for ratio in options.ratios if not 0 < ratio <= 1]:
        parser.error(f"--ratios must lie in (0, 1], not {bad[0]:g}")
    if min(options.count, options.concurrency, *options.lengths) < 1:
        parser.error("--count, --concurrency and --lengths must be positive")
    if min((*options.tails, *options.anchor_intervals), default=1) < 1:
        parser.error("--tails and --anchor-intervals must be positive")
    needed = plan.servers(choice_of(options))
    if unknown := [name for name in options.servers if name not in needed]:
        parser.error(f"--servers: {unknown[0]} is none of {', '.join(needed)}")
    if options.url and ZERO_SERVER in needed and not options.zero_url:
        parser.error("--modes zero, plain and again need a server of their own: --zero-url, or leave them out")
    if options.url and (others := [name for name in needed if name not in (REPLAY_SERVER, ZERO_SERVER)]):
        parser.error(f"{others[0]} is a server that this script starts: leave --url out")
    if any(flag.startswith("--tail-replay-anchor-interval") for flag in options.server_flags):
        parser.error("--tail-replay-anchor-interval: hits near a saved state do not depend on r; --modes anchored")
    if (options.url or options.zero_url) and options.server_flags:
        parser.error("flags after -- are for servers that this script starts, not for --url")


def _counts(text: str) -> dict[str, int]:
    """Argument type NAME=COUNT,..."""
    pairs = [part.partition("=") for part in text.split(",")]
    if bad := [f"{name}{equals}{count}" for name, equals, count in pairs if not count.isdecimal() or int(count) < 1]:
        raise argparse.ArgumentTypeError(f"{bad[0]!r} is not NAME=COUNT with a count of at least 1")
    return {name: int(count) for name, _, count in pairs}


def choice_of(options: argparse.Namespace) -> Choice:
    fields = ("benchmarks", "tasks", "modes", "ratios", "tails", "anchor_intervals", "cuts", "lengths", "count", "seed")
    files = ("longbench_dir", "qa_file", "haystack")
    return Choice(**{field: getattr(options, field) for field in (*fields, *files)})


def settings_of(options: argparse.Namespace, text: bool) -> dict[str, Any]:
    """What may not change between the answers of one file. Modes, tasks, lengths and counts may."""
    same = ("seed", "min_tokens", "max_tokens", "server_flags", "server_flag", "server_env", "url", "zero_url", "chat")
    return {"model": Path(options.model_path).name, "text": text, **{name: getattr(options, name) for name in same}}


# ------------------------------------------------------------------------------------------------------- executing


def server_flags(options: argparse.Namespace, name: str, text: bool) -> list[str]:
    """What makes the server that of its name comes behind the flags for all, what is meant for it alone last."""
    flags = [] if text and has_tokenizer(Path(options.model_path)) else ["--skip-tokenizer-init"]
    flags += [*options.server_flags, *plan.flags_of(name)]
    for key in ("min_tokens", "max_tokens"):
        if (value := getattr(options, key)) is not None:
            flags += [f"--tail-replay-{key.replace('_', '-')}", str(value)]
    own = settings(options.server_flag, name, str, plan.servers(choice_of(options)))
    return [*flags, *(f"{flag}={value}" for flag, value in own.items())]


class Asking:
    """A run: what is left to ask, of which servers."""

    def __init__(self, options: argparse.Namespace, codec: Codec | None, kept: AnswerFile):
        self.options, self.codec, self.kept = options, codec, kept
        self._until = time.monotonic() + (options.seconds or math.inf)
        self._progress = Progress(0, 0, "")

    def run(self, jobs: dict[str, list[Job]]) -> Outcome:
        """`jobs` by name of server."""
        options, total = self.options, sum(map(len, jobs.values()))
        left = {name: missing(found, self.kept) for name, found in jobs.items()}
        done = total - sum(map(len, left.values()))
        self._progress = Progress(total, done, Path(options.model_path).name)
        if done:
            print(f"{done} of {total} answers are in {self.kept.path}", flush=True)
        parts = [part for name, found in left.items() for part in self._parts(name, found)]
        with ThreadPoolExecutor(max(1, len(parts)) if options.side_by_side else 1) as pool:
            try:
                outcomes = list(pool.map(lambda part: self._on_server(*part), parts))
            except BaseException:
                self._until = 0.0  # or the pool would wait for all that is left
                raise
        errors = [error for one in outcomes for error in one.errors]
        return Outcome(errors, next((one.stopped for one in outcomes if one.stopped), None))

    def _expired(self) -> bool:
        return time.monotonic() > self._until

    def _parts(self, name: str, jobs: list[Job]) -> list[tuple[str, str, list[Job]]]:
        """Name of server, of its log, and jobs. A server that has much to answer may have its like (`--servers`)."""
        count = 1 if self._url(name) else self.options.servers.get(name, 1)
        prompts = by_prompt(jobs)
        shares = [[job for same in prompts[i::count] for job in same] for i in range(count)]
        return [(name, f"{name}{f'-{i + 1}' if i else ''}", share) for i, share in enumerate(shares) if share]

    def _url(self, name: str) -> str | None:
        return {REPLAY_SERVER: self.options.url, ZERO_SERVER: self.options.zero_url}.get(name)

    def _on_server(self, name: str, log: str, jobs: list[Job]) -> Outcome:
        options, given = self.options, self._url(name)
        if given:
            return self._ask(given, name, jobs)
        env = settings(options.server_env, name, str, plan.servers(choice_of(options)))
        flags, path = server_flags(options, name, self.codec is not None), options.out / f"server-{log}.log"
        try:
            with server(options.model_path, flags, env, path, options.ready_seconds) as url:
                return self._ask(url, name, jobs)
        except NotStarted as error:  # the other servers go on
            return Outcome(stopped=str(error))

    def _ask(self, url: str, name: str, jobs: list[Job]) -> Outcome:
        options = self.options
        asker = Asker(url.rstrip("/"), uuid.uuid4().hex, self.codec, options.max_tokens)
        asker = replace(asker, min_tokens=options.min_tokens or asker.min_tokens)
        # What a pass computes must not depend on what else is asked, where it says which states are saved.
        at_a_time = 1 if name == plan.SEEDED_SERVER else options.concurrency
        return run(jobs, asker, self.kept, at_a_time, self._progress, self._expired)


def missing(jobs: Sequence[Job], kept: AnswerFile) -> list[Job]:
    return [job for job in jobs if kept.find(job.key, job.prompt.digest) is None]


def write_report(options: argparse.Namespace, kept: AnswerFile, outcome: Outcome) -> list[str]:
    """Returns the problems, which are in the report too."""
    answers, model = list(kept.answers.values()), Path(options.model_path).name
    problems = summary.problems(answers)
    if outcome.stopped:
        problems.append(f"stopped after {outcome.stopped}")
    problems += [f"not counted: {error}" for error in outcome.errors]
    numbers = summary.document(answers)
    head = origin("scripts/eval_quality", options)
    report = {"tool": "eval_quality", **head, "settings": _settings_in(kept), "problems": problems, "cuts": numbers}
    (options.out / "report.json").write_text(json.dumps(report, indent=1, default=str) + "\n")
    text = [f"# Quality of {model}", f"`{head['command']}`, commit {head['commit']}", summary.tables(numbers, model)]
    text += ["\n".join(f"PROBLEM {problem}" for problem in problems)] if problems else []
    (options.out / "report.md").write_text("\n\n".join(text) + "\n")
    drawn = plot.draw(numbers, model, options.out / "quality.svg")
    print("\n" + "\n\n".join(text[2:]) + f"\n\nwritten to {options.out}: report.md, report.json", *drawn, sep=", ")
    return problems


def _vocab_size(folder: Path) -> int:
    if not (folder / "config.json").is_file():
        raise SystemExit(f"--ids needs the model's config.json: {folder} is no folder that has one")
    return model_config(folder)["vocab_size"]


def _settings_in(kept: AnswerFile) -> dict[str, Any]:
    with kept.path.open() as lines:
        return json.loads(next(lines))["settings"]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server's group is killed too
    choice, folder = choice_of(options), Path(options.model_path)
    text = not options.ids and has_tokenizer(folder)
    codec = Codec.load(options.model_path, options.chat) if text else None
    plan.check(choice, codec)
    vocab_size = 0 if text else _vocab_size(folder)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        kept = AnswerFile(options.out / "answers.jsonl", settings_of(options, text))
        outcome = Outcome()
        if not options.report_only:
            prompts = list(plan.prompts(choice, codec, vocab_size))
            jobs = {name: plan.jobs(choice, prompts, name) for name in plan.servers(choice)}
            outcome = Asking(options, codec, kept).run(jobs)
    except AnswersDiffer as error:
        raise SystemExit(f"error: {error}") from None
    kept.close()
    return 1 if write_report(options, kept, outcome) else 0


if __name__ == "__main__":
    sys.exit(main())
