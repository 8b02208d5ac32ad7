"""What replays cost over the turns of a conversation, each of which is served from what the last one left in the cache.

    scripts/eval_turns --model-path models/tiny-local --turns 8 --length 2048 --count 200 --out RUN -- FLAGS OF SERVERS

The same conversations are continued in these ways, on a server each:

    full       every turn computed without any cache: the reference
    r=...      on top of the replayed last turn; the error of every turn stays in the cache (a way for each of --ratios)
    fresh=...  the same, but nothing is built on what a replay computed: --tail-replay-max-generation 0
    anchored   states saved about every so many tokens (a way for each of --anchor-intervals)
    zero       KV reused, states zero (with --zero)

For models of scripts/train_hybrid, whose tasks are texts, and with --ids for models over token ids. The history of a
turn holds the right answers, so that all ways are asked the same. OUT/answers.jsonl has every answer, and the same
command goes on from there; OUT/report.md, OUT/report.json and OUT/turns.svg have, by turn, scores and equality with
full prefill. The exit code is non-zero when a turn was not served as it was meant to be."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from arguments import model_config, names, numbers, settings
from origin import origin
from quality import drift, facts, turns, turns_report
from quality.answers import AnswerFile, AnswersDiffer
from quality.ask import Asker
from quality.codec import Codec, has_tokenizer
from quality.drift import Way
from quality.progress import Progress
from quality.runs import PATIENCE, NotStarted, server, twice
from quality.turns import Conversation


def parse(argv: Sequence[str]) -> argparse.Namespace:
    argv = list(argv)
    own, flags = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser("eval_turns", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--tasks", type=names(turns.WORD_TASKS), default=("niah", "kv"), help="of niah,kv,vt; niah,kv")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048, help="tokens before the first question")
    parser.add_argument("--count", type=int, default=100, help="conversations of each task; 100")
    parser.add_argument("--ratios", type=numbers(float), default=(0.05,), help="of replays; 0.05")
    parser.add_argument("--anchor-intervals", type=numbers(int), default=(), help="a server for each")
    parser.add_argument("--zero", action="store_true", help="continue from zero states, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ids", action="store_true", help="tasks over token ids; so for a model without a tokenizer")
    parser.add_argument("--out", type=Path, default=Path("turns"), help="folder; an earlier run in it is continued")
    parser.add_argument("--report-only", action="store_true", help="ask nothing, write the report of what is there")
    parser.add_argument("--concurrency", type=int, default=4, help="conversations at a time, of each server")
    parser.add_argument("--side-by-side", action="store_true", help="all servers at a time, not one after the other")
    parser.add_argument("--seconds", type=float, help="for the whole run: what has not been asked by then is left out")
    parser.add_argument("--server-env", action="append", default=[], metavar="[SERVER:]NAME=VALUE")
    parser.add_argument("--server-flag", action="append", default=[], metavar="[SERVER:]--FLAG=VALUE")
    parser.add_argument("--ready-seconds", type=float, default=1800, help="time limit for the start of a server")
    parser.add_argument("--commit", help="where the checkout has no .git")
    options = parser.parse_args(own)
    if min(options.turns, options.count, options.concurrency) < 1 or options.length < facts.LEAST_LENGTH:
        parser.error(f"--turns, --count, --concurrency must be positive, --length at least {facts.LEAST_LENGTH}")
    options.server_flags, options.model_shape = flags, None
    return options


class Talk:
    """A run: what is asked of which server, and what came of it."""

    def __init__(self, options: argparse.Namespace, codec: Codec | None, kept: AnswerFile):
        self.options, self.codec, self.kept = options, codec, kept
        self.ways = drift.ways(options.ratios, options.anchor_intervals, options.zero)
        self.servers = list(dict.fromkeys(way.server for way in self.ways))
        self.errors: list[str] = []
        self._lock = threading.Lock()

    def run(self, conversations: Sequence[Conversation]) -> None:
        todo = {name: self._missing(name, conversations) for name in self.servers}
        total = len(conversations) * len(self.ways)
        self._progress = Progress(total, total - sum(map(len, todo.values())), Path(self.options.model_path).name)
        self._until = time.monotonic() + (self.options.seconds or math.inf)
        with ThreadPoolExecutor(len(todo) if self.options.side_by_side else 1) as pool:
            try:
                list(pool.map(lambda name: self._on_server(name, todo[name]), [name for name in todo if todo[name]]))
            except BaseException:
                self._until = 0.0  # or the pool would wait for all that is left
                raise

    def _missing(self, name: str, conversations: Sequence[Conversation]) -> list[tuple[Conversation, Way]]:
        ways = [way for way in self.ways if way.server == name]
        return [(c, w) for c in conversations for w in ways if not drift.is_answered(c, w.variant, self.kept)]

    def _on_server(self, name: str, todo: Sequence[tuple[Conversation, Way]]) -> None:
        options = self.options
        env, own = (settings(given, name, str, self.servers) for given in (options.server_env, options.server_flag))
        tokenizer = [] if self.codec else ["--skip-tokenizer-init"]
        flags = [*drift.flags_of(name), *tokenizer, *options.server_flags, *(f"{k}={v}" for k, v in own.items())]
        log, failed = options.out / f"server-{name}.log", [0]
        try:
            with server(options.model_path, flags, env, log, options.ready_seconds) as url:
                asker = Asker(url, uuid.uuid4().hex, self.codec)
                with ThreadPoolExecutor(options.concurrency) as pool:
                    list(pool.map(lambda one: self._converse(asker, *one, failed), todo))
        except NotStarted as error:  # the other servers go on
            self.errors.append(str(error))

    def _converse(self, asker: Asker, conversation: Conversation, way: Way, failed: list[int]) -> None:
        if failed[0] >= PATIENCE or time.monotonic() > self._until:
            return
        error = twice(lambda: drift.converse(asker, conversation, way.variant, self.kept))
        with self._lock:
            failed[0] = failed[0] + 1 if error else 0
            self.errors += [f"{conversation.name} {way.variant}: {error}"] if error else []
        self._progress.step(f"{conversation.name} {way.variant}", failed=error is not None)


def conversations_of(options: argparse.Namespace, codec: Codec | None) -> list[Conversation]:
    """The i-th of every task before any (i+1)-th."""
    what = (options.length, options.turns)
    if codec is not None:
        facts.check(codec, (options.length,))
        return [turns.over_words(t, *what, i, options.seed) for i in range(options.count) for t in options.tasks]
    size = model_config(Path(options.model_path))["vocab_size"]
    return [turns.over_ids(t, *what, i, options.seed, size) for i in range(options.count) for t in options.tasks]


def write_report(options: argparse.Namespace, kept: AnswerFile, errors: Sequence[str]) -> None:
    numbers, model = turns_report.document(kept.answers.values()), Path(options.model_path).name
    head = origin("scripts/eval_turns", options)
    report = {"tool": "eval_turns", **head, "problems": list(errors), **numbers}
    (options.out / "report.json").write_text(json.dumps(report, indent=1, default=str) + "\n")
    text = [f"# Turns on {model}", f"`{head['command']}`, commit {head['commit']}", turns_report.tables(numbers)]
    text += [f"PROBLEM not counted: {error}" for error in errors]
    (options.out / "report.md").write_text("\n\n".join(text) + "\n")
    drawn = turns_report.draw(numbers, model, options.out / "turns.svg")
    print("\n" + "\n\n".join(text[2:]) + f"\n\nwritten to {options.out}: report.md, report.json", *drawn, sep=", ")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server's group is killed too
    text = not options.ids and has_tokenizer(Path(options.model_path))
    codec = Codec.load(options.model_path) if text else None
    conversations = conversations_of(options, codec)
    options.out.mkdir(parents=True, exist_ok=True)
    same = ("seed", "turns", "length", "server_flags", "server_flag", "server_env")
    about = {"model": Path(options.model_path).name, "text": text, **{name: getattr(options, name) for name in same}}
    try:
        talk = Talk(options, codec, AnswerFile(options.out / "answers.jsonl", about))
        if not options.report_only:
            talk.run(conversations)
    except AnswersDiffer as error:
        raise SystemExit(f"error: {error}") from None
    talk.kept.close()
    write_report(options, talk.kept, talk.errors)
    return 1 if talk.errors else 0


if __name__ == "__main__":
    sys.exit(main())
