"""Which prompts are asked in which ways, and of which server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quality import answers, facts, id_tasks, longbench, ruler, words
from quality.answers import AGAIN, FULL, SEEDED, ZERO, Key
from quality.codec import Codec
from quality.prompt import Prompt

BENCHMARKS = ("ruler", "longbench", "facts")
MODES = ("full", "again", "zero", "plain", "replay", "anchored", "seeded")
DEFAULT_MODES = ("full", "zero", "replay")
REPLAY_SERVER, ZERO_SERVER, SEEDED_SERVER = "replay", "zero", "seeded"
SEED_PASS = 1024  # tokens of a pass on the server of mode seeded, and of what lies between its saved states


class Job(NamedTuple):
    prompt: Prompt
    cut: str | None
    variant: str

    @property
    def key(self) -> Key:
        return Key(self.prompt.name, self.cut, self.variant)


@dataclass(frozen=True)
class Choice:
    """What is asked, apart from the model."""

    benchmarks: tuple[str, ...]
    tasks: tuple[str, ...] | None  # None: all
    modes: tuple[str, ...]
    ratios: tuple[float, ...]
    cuts: tuple[str, ...]
    lengths: tuple[int, ...]
    count: int  # prompts a cell
    seed: int
    tails: tuple[int, ...] = ()  # of the replay mode, in tokens
    anchor_intervals: tuple[int, ...] = ()  # of the anchored mode
    longbench_dir: Path | None = None
    qa_file: Path | None = None
    haystack: Path | None = None


def ruler_tasks(choice: Choice, text: bool) -> list[str]:
    names = ruler.TASKS if text else id_tasks.TASKS
    chosen = [name for name in names if choice.tasks is None or name in choice.tasks]
    if "qa" in chosen and choice.qa_file is None:
        if choice.tasks is not None:
            raise SystemExit("ruler's qa needs --qa-file, a JSON file in SQuAD's format")
        chosen.remove("qa")
    return chosen


def longbench_tasks(choice: Choice) -> list[str]:
    return [name for name in longbench.TASKS if choice.tasks is None or name in choice.tasks]


def facts_tasks(choice: Choice) -> list[str]:
    return [name for name in facts.TASKS if choice.tasks is None or name in choice.tasks]


def check(choice: Choice, codec: Codec | None) -> None:
    """SystemExit for what cannot be run, before anything takes time."""
    known = {*(ruler.TASKS if codec else id_tasks.TASKS), *longbench.TASKS, *facts.TASKS}
    if unknown := [task for task in choice.tasks or () if task not in known]:
        raise SystemExit(f"--tasks: {', '.join(unknown)} not in {', '.join(sorted(known))}")
    if "longbench" in choice.benchmarks:
        if codec is None:
            raise SystemExit("longbench is text, and this model has no tokenizer: --benchmarks ruler")
        if tasks := longbench_tasks(choice):
            longbench.check_files(choice.longbench_dir, tasks)
    if "facts" in choice.benchmarks:
        facts.check(codec, choice.lengths)


def prompts(choice: Choice, codec: Codec | None, vocab_size: int) -> Iterator[Prompt]:
    """The i-th prompt of every cell before any (i+1)-th, so that a run that is cut short has them all."""
    makers = []
    if "ruler" in choice.benchmarks:
        makers += _ruler(choice, codec, vocab_size)
    if "longbench" in choice.benchmarks:
        makers += _longbench(choice, codec)
    if "facts" in choice.benchmarks:
        makers += _facts(choice)
    for index in range(choice.count):
        for make, available in makers:
            if index < available:
                yield make(index)


def _ruler(choice: Choice, codec: Codec | None, vocab_size: int) -> list:
    tasks = ruler_tasks(choice, codec is not None)
    sentences = words.sentences(choice.haystack) if choice.haystack else words.NOISE
    documents = ruler.read_documents(choice.qa_file) if "qa" in tasks and codec else ()
    material = ruler.Material(sentences, documents)

    def maker(task: str, length: int):
        if codec is None:
            return lambda index: id_tasks.prompt(task, length, index, choice.seed, vocab_size)
        return lambda index: ruler.prompt(task, length, index, choice.seed, codec, material)

    questions = sum(len(document.questions) for document in documents)
    most = {"qa": questions}
    return [(maker(t, length), most.get(t, choice.count)) for length in choice.lengths for t in tasks]


def _longbench(choice: Choice, codec: Codec) -> list:
    def maker(task: str, length: int, records: list):
        return lambda index: longbench.prompt(task, length, index, records[index], codec)

    records = {task: longbench.read(choice.longbench_dir, task, choice.count) for task in longbench_tasks(choice)}
    return [(maker(t, n, found), len(found)) for n in choice.lengths for t, found in records.items()]


def _facts(choice: Choice) -> list:
    def maker(task: str, length: int):
        return lambda index: facts.prompt(task, length, index, choice.seed)

    return [(maker(task, length), choice.count) for length in choice.lengths for task in facts_tasks(choice)]


def anchor_server(interval: int) -> str:
    return f"anchored-{interval}"


def servers(choice: Choice) -> list[str]:
    """Names of the servers that the modes need, the one for full prefill first."""
    modes, found = set(choice.modes), []
    if modes & {"replay"} or modes <= {"full"}:
        found.append(REPLAY_SERVER)
    if modes & {"again", "zero", "plain"}:
        found.append(ZERO_SERVER)
    if "anchored" in modes:
        found += [anchor_server(interval) for interval in choice.anchor_intervals]
    if "seeded" in modes:
        found.append(SEEDED_SERVER)
    return found


def flags_of(server: str) -> list[str]:
    """How the server of that name differs from the others."""
    if server == SEEDED_SERVER:
        # Reach is two intervals: short, so that the newest state, saved at the end of a pass, lies beyond it.
        return ["--tail-replay-anchor-interval", "64", "--chunked-prefill-size", str(SEED_PASS)]
    if server.startswith("anchored-"):
        return ["--tail-replay-anchor-interval", server.removeprefix("anchored-")]
    return ["--tail-replay-mode", server]


def variants(choice: Choice, server: str) -> list[tuple[str | None, str]]:
    """(cut, variant), what is cold first. Fixed tails, plain extends and seeded replays: at the question only."""
    modes, ratios = choice.modes, choice.ratios
    found: list[tuple[str | None, str]] = []
    if "full" in modes and server == servers(choice)[0]:
        found.append((None, FULL))
    if server == ZERO_SERVER:
        found += [(None, AGAIN)] * ("again" in modes)
        found += [(cut, ZERO) for cut in choice.cuts if "zero" in modes]
        if "plain" in modes and "question" in choice.cuts:
            found += [("question", answers.plain(ratio)) for ratio in ratios]
    elif server == REPLAY_SERVER and "replay" in modes:
        found += [(cut, answers.replay(ratio)) for cut in choice.cuts for ratio in ratios]
        if "question" in choice.cuts:
            found += [("question", answers.tail(tail)) for tail in choice.tails]
    elif server == SEEDED_SERVER:
        found.append(("question", SEEDED))
    elif server.startswith("anchored-"):
        variant = answers.anchored(int(server.removeprefix("anchored-")))
        found += [(cut, variant) for cut in choice.cuts]
    return found


def jobs(choice: Choice, asked: Sequence[Prompt], server: str) -> list[Job]:
    """What to ask of that server, prompt by prompt."""
    chosen = variants(choice, server)
    return [Job(prompt, cut, variant) for prompt in asked for cut, variant in chosen]
