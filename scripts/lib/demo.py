"""Serve one list of OpenAI requests with stock SGLang and then with tail replay, and compare what came from the cache.

The model is tiny and random, so its answers mean nothing. It forgets within some tens of tokens, as most heads of
trained models do: that is why a short replayed tail can be enough here, and this run is no evidence that it is enough
for a given trained model. Times are those of a tiny model too."""

from __future__ import annotations

import argparse
import json
import os
import random
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
sys.path[:0] = [str(CHECKOUT / "tests" / "serving"), str(CHECKOUT / "scripts" / "lib")]

import server as serving  # noqa: E402
from tables import table  # noqa: E402

NEW_TOKENS = 24
FLAGS = ("--enable-metrics", "--enable-cache-report", "--max-mamba-cache-size", "64")
# On a CPU SGLang 0.5.17 chooses the no_buffer strategy, whose cached states are right only without overlap scheduling,
# and leaves overlap scheduling on.
STOCK_CPU_FLAGS = ("--disable-overlap-schedule",)
LETTERS = "abcdefghijklmnopqrstuvwxyz ."  # answers are limited to these, so that an answer is one token per character


@dataclass(frozen=True)
class Message:
    """One request. The prompt is a text, or the messages of a chat; the model's tokens are bytes."""

    name: str
    prompt: str | list[dict[str, str]]

    def rendered(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else render(self.prompt)


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
    letters: Sequence[int]
    seen: list[str] = field(default_factory=list)

    def shared(self, message: Message) -> int:
        """Tokens that the cache can give: the longest common prefix, but never the whole prompt."""
        text = message.rendered()
        longest = max((len(os.path.commonprefix([text, earlier])) for earlier in self.seen), default=0)
        return min(longest, len(text) - 1)

    def send(self, message: Message) -> Reply:
        before = self.server.metrics().get("sglang:tail_replay_replayed_tokens_total", 0.0)
        reply = stream(self.client, message, self.letters)
        after = self.server.metrics().get("sglang:tail_replay_replayed_tokens_total", 0.0)
        if reply.prompt_tokens != len(message.rendered()):
            raise RuntimeError(f"{message.name}: {reply.prompt_tokens} tokens, expected {len(message.rendered())}")
        reply.replayed = int(after - before)
        self.seen.append(message.rendered() + reply.text)
        return reply


def render(messages: Sequence[dict[str, str]]) -> str:
    """The chat template of the tiny model, for the messages used here."""
    return "".join(f"<|{m['role']}|>{m['content']}\n" for m in messages) + "<|assistant|>"


def stream(client: object, message: Message, letters: Sequence[int]) -> Reply:
    options = {
        "model": "tiny",
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "logit_bias": {str(token): 100 for token in letters},
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True},
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
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return Reply("".join(parts), usage.prompt_tokens, cached or 0, (first - begin) * 1e3)


def _text(choice: object) -> str:
    return (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""


# ------------------------------------------------------------------------------------------------------- requests


def handbook(seed: int, characters: int) -> str:
    """Text without long repetitions; another seed gives another text from the first character on."""
    draw = random.Random(seed)
    verbs, nouns = ("checks", "opens", "moves", "counts", "labels"), ("crate", "valve", "ledger", "pump", "door")
    lines = [f"{seed}. Handbook."]
    while sum(map(len, lines)) < characters:
        lines.append(f"Step {draw.randrange(1000)}: {draw.choice(nouns)} {draw.choice(verbs)} {draw.choice(nouns)}.")
    return " ".join(lines)[:characters]


def requests(conversation: Conversation, seed: int) -> Iterator[Message]:
    """A generator, because a chat goes on from the answers that the server gave."""
    book = handbook(seed, 2400)
    yield Message("long prompt, first time", book + " Question: which valve?")
    yield Message("same handbook, other question", book + " Question: who counts?")
    yield Message("differs after 10%", book[:240] + " [edited] " + handbook(seed + 1, 400))
    yield Message("differs after half", book[:1200] + " [edited] " + handbook(seed + 2, 400))
    yield Message("differs after 90%", book[:2160] + " [edited] " + handbook(seed + 3, 400))
    chat = [{"role": "system", "content": handbook(seed + 4, 1500)}, {"role": "user", "content": "Which crate?"}]
    yield Message("chat, first turn", list(chat))
    answer = conversation.seen[-1].removeprefix(render(chat))
    follow_up = [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    yield Message("chat, second turn", chat + follow_up)
    yield Message("cut inside the first answer", render(chat) + answer[: NEW_TOKENS // 2] + "! No: " + book[:100])


@dataclass(frozen=True)
class Row:
    name: str
    shared: int
    reply: Reply


def converse(server: serving.Server, letters: Sequence[int]) -> list[Row]:
    """The measured requests, after a round with other texts that warms every code path up."""
    import openai

    client = openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0, timeout=300)
    rows: list[Row] = []
    for seed in (500, 100):
        rows.clear()
        server.flush()
        conversation = Conversation(client, server, letters)
        for message in requests(conversation, seed):
            shared = conversation.shared(message)
            rows.append(Row(message.name, shared, conversation.send(message)))
        print(f"  {'warm-up' if seed == 500 else 'measured'}: {len(rows)} requests", flush=True)
    return rows


# -------------------------------------------------------------------------------------------------------- running


LEGEND = """
shared      tokens of the prompt that an earlier prompt or answer began with
stock, ours cached tokens that each server reports; ours: --tail-replay-mode {mode} --tail-replay-ratio {ratio}
replayed    tokens at the end of the cached ones for which the recurrent states were rebuilt
TTFT        time to the first token in ms

{same} of {total} greedy answers are equal. The model is tiny, random and made to forget quickly: this shows what is
reused, not how good a short tail is for a trained model, and not what a GPU gains."""


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


def make_model(path: Path) -> None:
    """In a process of its own: importing torch and transformers here would leave less memory to the servers."""
    command = [sys.executable, "-m", "sglang_tailreplay.tiny_model", path, "--decay", "fast"]
    done = subprocess.run(list(map(str, command)), cwd=path.parent, text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"writing the model failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def letter_tokens(model: Path) -> list[int]:
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return [vocabulary["Ġ" if letter == " " else letter] for letter in LETTERS]  # byte-level BPE writes a space as Ġ


def run_server(name: str, model: Path, flags: Sequence[str], gpu: bool) -> list[Row]:
    log = BUILD / f"{name.replace(' ', '-')}.log"
    shared_flags, env = (FLAGS, {}) if gpu else ((*FLAGS, *serving.FLOAT32), serving.FLOAT32_ENV)
    server = serving.start(model, *shared_flags, *flags, env=env, log_path=log)
    try:
        with step(f"starting {name}"):
            serving.wait_ready(server, 600)
        with step(f"sending requests to {name}"):
            return converse(server, letter_tokens(model))
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
    header = ("request", "prompt", "shared", "stock", "ours", "replayed", "TTFT stock", "TTFT ours", "same answer")
    rows = [
        (a.name, a.reply.prompt_tokens, b.shared, a.reply.cached, b.reply.cached, b.reply.replayed)
        + (round(a.reply.ttft_ms), round(b.reply.ttft_ms), "yes" if a.reply.text == b.reply.text else "no")
        for a, b in zip(stock, ours, strict=True)
    ]
    same = sum(row[-1] == "yes" for row in rows)
    legend = LEGEND.format(mode=options.mode, ratio=options.ratio, same=same, total=len(rows))
    print(f"\n{table(header, rows)}\n{legend}")
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
    model, gpu = BUILD / "model", has_gpu()
    try:
        with step("writing a tiny model"):
            make_model(model)
        off = ("--tail-replay-mode", "off", *(() if gpu else STOCK_CPU_FLAGS))
        stock = run_server("stock SGLang", model, off, gpu)
        on = ("--tail-replay-mode", options.mode, "--tail-replay-ratio", str(options.ratio))
        ours = run_server("tail replay", model, on, gpu)
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
