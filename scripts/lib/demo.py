"""Serve one list of OpenAI requests with stock SGLang and then with tail replay, and compare what came from the cache.

The model is the small trained hybrid of models/tiny-local: it reads a text in which "the code of ada is blue castle ."
and then, asked for Ada's code, answers "blue castle". Its heads keep half of what they hold for 64 tokens at most, so
that a short replayed tail is enough here: no evidence for another model. Times are those of a tiny model too."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
BUILD = CHECKOUT / "build" / "demo"
MODEL = CHECKOUT / "models" / "tiny-local"
sys.path[:0] = [str(CHECKOUT / "tests" / "serving"), str(CHECKOUT / "scripts" / "lib")]

import numpy as np  # noqa: E402
import server as serving  # noqa: E402
from tables import table  # noqa: E402
from train import tasks, vocabulary  # noqa: E402

NEW_TOKENS = 8
FLAGS = ("--enable-metrics", "--enable-cache-report", "--max-mamba-cache-size", "64")
# On a CPU SGLang 0.5.17 chooses the no_buffer strategy, whose cached states are right only without overlap scheduling,
# and leaves overlap scheduling on.
STOCK_CPU_FLAGS = ("--disable-overlap-schedule",)
QUESTION = "what is the code ? answer :"


@dataclass(frozen=True)
class Message:
    """One request: a text, or the messages of a chat. The last question in it has the answer `expected`."""

    name: str
    prompt: str | list[dict[str, str]]
    expected: str

    def tokens(self) -> list[str]:
        """The model's tokens are words."""
        text = self.prompt if isinstance(self.prompt, str) else render(self.prompt)
        return ["<s>", *words_of(text)]


@dataclass
class Reply:
    text: str
    prompt_tokens: int
    cached: int
    ttft_ms: float
    replayed: int = 0


@dataclass
class Conversation:
    """Sends requests one after the other and knows how much of each prompt the server has seen before."""

    client: object
    server: serving.Server
    seen: list[list[str]] = field(default_factory=list)

    def shared(self, message: Message) -> int:
        """Tokens that the cache can give: the longest common prefix, but never the whole prompt."""
        tokens = message.tokens()
        longest = max((len(os.path.commonprefix([tokens, earlier])) for earlier in self.seen), default=0)
        return min(longest, len(tokens) - 1)

    def send(self, message: Message) -> Reply:
        before = self.server.metrics().get("sglang:tail_replay_replayed_tokens_total", 0.0)
        reply = stream(self.client, message)
        after = self.server.metrics().get("sglang:tail_replay_replayed_tokens_total", 0.0)
        tokens = message.tokens()
        if reply.prompt_tokens != len(tokens):
            raise RuntimeError(f"{message.name}: {reply.prompt_tokens} tokens, expected {len(tokens)}")
        reply.replayed = int(after - before)
        self.seen.append(tokens + words_of(reply.text))
        return reply


def words_of(text: str) -> list[str]:
    return re.findall(r"</s>|\w+|[^\w\s]", text)


def render(messages: Sequence[dict[str, str]]) -> str:
    """The model's chat template, without the <s> at its beginning."""
    ends = {"assistant": " </s>"}
    return " ".join(m["content"] + ends.get(m["role"], "") for m in messages)


def stream(client: object, message: Message) -> Reply:
    options = {
        "model": "tiny",
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin, first, parts, usage = time.perf_counter(), None, [], None
    if isinstance(message.prompt, str):
        chunks = client.completions.create(prompt=message.prompt, **options)
    else:
        chunks = client.chat.completions.create(messages=message.prompt, **options)
    for chunk in chunks:
        text = "".join(_text(choice) for choice in chunk.choices)
        first = first or (time.perf_counter() if text else None)
        parts.append(text)
        usage = chunk.usage or usage
    end = first or time.perf_counter()
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return Reply("".join(parts).strip(), usage.prompt_tokens, cached or 0, (end - begin) * 1e3)


def _text(choice: object) -> str:
    return (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""


# ------------------------------------------------------------------------------------------------------- requests


class Text:
    """Sentences with facts among them; another seed gives another text from the first words on."""

    def __init__(self, seed: int, words: int):
        self._draw = np.random.default_rng(seed)
        facts = tasks.make_facts(self._draw, "kv", words // 2)
        self.words = vocabulary.text(tasks.make_text(self._draw, facts, words + 1)[1:]).split()

    def cut(self, words: int) -> str:
        return " ".join(self.words[:words])

    def pause(self) -> str:
        """A sentence to separate a subject from the question about it."""
        return vocabulary.text(tasks.filler(self._draw, 1)[0])


def facts_in(text: str) -> dict[str, str]:
    """Name -> code, of names that occur in one fact only."""
    found = re.findall(r"the code of (\w+) is (\w+ \w+) \.", text)
    names = [name for name, _ in found]
    return {name: code for name, code in found if names.count(name) == 1}


def requests(conversation: Conversation, seed: int) -> Iterator[Message]:
    """A generator, because a chat goes on from the answers that the server gave."""
    text = Text(seed, 1000)
    whole = text.cut(1000)
    codes = facts_in(whole)
    a, b, c, d, *_ = codes
    pauses = [text.pause() for _ in range(4)]
    yield Message("long text, first time", f"{whole} consider {a} . {pauses[0]} {QUESTION}", codes[a])
    yield Message("same text, other question", f"{whole} consider {b} . {pauses[1]} {QUESTION}", codes[b])
    longer = f"{whole} consider {b} . {pauses[1]} {pauses[2]} {QUESTION}"
    yield Message("a sentence more before it", longer, codes[b])
    for number, (name, share) in enumerate({"10%": 100, "half": 500, "90%": 900}.items(), start=1):
        other = Text(seed + number, 200)
        mixed = f"{text.cut(share)} . {other.cut(200)}"
        known = facts_in(mixed)
        subject = next(iter(known))  # the oldest fact: in the shared part, if there is one
        prompt = f"{mixed} consider {subject} . {pauses[3]} {QUESTION}"
        yield Message(f"differs after {name}", prompt, known[subject])
    system = Text(seed + 4, 600)
    codes = facts_in(system.cut(600))
    a, b, c, *_ = codes
    chat = [{"role": "system", "content": system.cut(600)}, {"role": "user", "content": f"consider {a} . {QUESTION}"}]
    yield Message("chat, first turn", list(chat), codes[a])
    answer = conversation.seen[-1][len(Message("", chat, "").tokens()) :]
    follow_up = {"role": "user", "content": f"consider {b} . {QUESTION}"}
    chat_on = [*chat, {"role": "assistant", "content": " ".join(answer)}, follow_up]
    yield Message("chat, second turn", chat_on, codes[b])
    inside = f"{render(chat)} {' '.join(answer[:1])} . consider {c} . {pauses[3]} {QUESTION}"
    yield Message("cut inside the first answer", inside, codes[c])


@dataclass(frozen=True)
class Row:
    name: str
    shared: int
    expected: str
    reply: Reply


def converse(server: serving.Server) -> list[Row]:
    """The measured requests, after a round with other texts that warms every code path up."""
    import openai

    client = openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0, timeout=300)
    rows: list[Row] = []
    for seed in (500, 100):
        rows.clear()
        server.flush()
        conversation = Conversation(client, server)
        for message in requests(conversation, seed):
            shared = conversation.shared(message)
            rows.append(Row(message.name, shared, message.expected, conversation.send(message)))
        print(f"  {'warm-up' if seed == 500 else 'measured'}: {len(rows)} requests", flush=True)
    return rows


# -------------------------------------------------------------------------------------------------------- running


LEGEND = """
shared      tokens of the prompt that an earlier prompt or answer began with, the end of the answer not counted
stock, ours cached tokens that each server reports; ours: --tail-replay-mode {mode} --tail-replay-ratio {ratio}
replayed    tokens at the end of the cached ones for which the recurrent states were rebuilt
TTFT        time to the first token in ms

Right answers: stock {stock} of {total}, ours {ours} of {total}. The model was trained for this project, and its heads
forget quickly: this shows what is reused and what answers are like, not how good a short tail is for another model, and
not what a GPU gains. With --mode zero the states are not rebuilt."""


@contextmanager
def step(text: str) -> Iterator[None]:
    """Say what takes long, and that it still runs."""
    over, begin = threading.Event(), time.monotonic()

    def tick() -> None:
        while not over.wait(10):
            print(f"  still {text} ({time.monotonic() - begin:.0f} s)", flush=True)

    print(f"{text} ...", flush=True)
    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        over.set()
        ticker.join()


def run_server(name: str, model: Path, flags: Sequence[str], gpu: bool) -> list[Row]:
    log = BUILD / f"{name.replace(' ', '-')}.log"
    shared_flags, env = (FLAGS, {}) if gpu else ((*FLAGS, *serving.FLOAT32), serving.FLOAT32_ENV)
    server = serving.start(model, *shared_flags, *flags, env=env, log_path=log)
    try:
        with step(f"starting {name}"):
            serving.wait_ready(server, 600)
        with step(f"sending requests to {name}"):
            return converse(server)
    except Exception as error:
        error.add_note(server.log_tail())
        raise
    finally:
        serving.stop(server)


def has_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def report(stock: Sequence[Row], ours: Sequence[Row], options: argparse.Namespace) -> list[str]:
    """Prints the table and returns what went wrong."""
    header = ("request", "prompt", "shared", "stock", "ours", "replayed", "TTFT stock", "TTFT ours")
    pairs = list(zip(stock, ours, strict=True))
    rows = [
        (a.name, a.reply.prompt_tokens, b.shared, a.reply.cached, b.reply.cached, b.reply.replayed)
        + (round(a.reply.ttft_ms), round(b.reply.ttft_ms))
        for a, b in pairs
    ]
    answers = [(a.name, a.expected, a.reply.text, b.reply.text) for a, b in pairs]
    right = [sum(row.reply.text == row.expected for row in side) for side in (stock, ours)]
    legend = LEGEND.format(mode=options.mode, ratio=options.ratio, stock=right[0], ours=right[1], total=len(rows))
    print(f"\n{table(header, rows)}\n\n{table(('request', 'right answer', 'stock', 'ours'), answers)}\n{legend}")
    return [f"{b.name}: cached {b.reply.cached} of {b.shared} shared tokens" for b in ours if b.reply.cached < b.shared]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("scripts/demo", description=__doc__)
    parser.add_argument("--ratio", type=float, default=0.05)
    parser.add_argument("--mode", choices=("replay", "zero"), default="replay")
    return parser.parse_args()


def main() -> int:
    options = parse()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))  # so that the servers are stopped
    BUILD.mkdir(parents=True, exist_ok=True)
    gpu = has_gpu()
    try:
        off = ("--tail-replay-mode", "off", *(() if gpu else STOCK_CPU_FLAGS))
        stock = run_server("stock SGLang", MODEL, off, gpu)
        on = ("--tail-replay-mode", options.mode, "--tail-replay-ratio", str(options.ratio))
        ours = run_server("tail replay", MODEL, on, gpu)
    except Exception as error:
        lines = [f"demo failed: {error!r}", *getattr(error, "__notes__", []), f"logs: {BUILD}"]
        print("\n".join(lines), file=sys.stderr)
        return 1
    problems = report(stock, ours, options)
    for problem in problems:
        print(f"FAILED {problem}; logs: {BUILD}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
