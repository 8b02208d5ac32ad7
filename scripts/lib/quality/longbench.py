"""Five tasks of LongBench from its published files: one JSON object a line with `context`, `input` and `answers`.

The instructions are this project's own words. A context that is too long loses its middle, as LongBench does it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quality.codec import Codec
from quality.prompt import Prompt


class Task(NamedTuple):
    instruction: str
    title: str  # of the context
    question: str  # with {input}
    new_tokens: int
    metric: str


_SHORT = "Answer with the answer only, in as few words as possible."

TASKS = {
    "narrativeqa": Task(
        f"Read the story, which is a novel or a screenplay, and answer the question after it. {_SHORT}",
        *("Story", "Question: {input}\nAnswer:", 128, "token_f1"),
    ),
    "qasper": Task(
        "Read the scientific article and answer the question after it in one phrase or sentence. Write 'yes' or 'no' "
        "where that is the answer, and 'unanswerable' if the article does not tell.",
        *("Article", "Question: {input}\nAnswer:", 128, "token_f1"),
    ),
    "hotpotqa": Task(
        f"Answer the question after these passages from what they say. {_SHORT}",
        *("Passages", "Question: {input}\nAnswer:", 32, "token_f1"),
    ),
    "musique": Task(
        f"Answer the question after these passages from what they say. {_SHORT}",
        *("Passages", "Question: {input}\nAnswer:", 32, "token_f1"),
    ),
    "qmsum": Task(
        "Read the transcript of a meeting and answer the query after it in one or more sentences.",
        *("Transcript", "Query: {input}\nAnswer:", 512, "rouge_l"),
    ),
}
LEAST_CONTEXT = 32  # tokens; below that nothing of the text is left


def check_files(folder: Path | None, tasks: Iterable[str]) -> None:
    """SystemExit that names every missing file."""
    if folder is None:
        raise SystemExit(f"longbench needs --longbench-dir, a folder with {_listed(tasks)} as LongBench publishes them")
    if missing := [task for task in tasks if not (folder / f"{task}.jsonl").is_file()]:
        raise SystemExit(
            f"--longbench-dir {folder}: missing {_listed(missing)}; they are in LongBench's data.zip, "
            "or leave these tasks out with --tasks"
        )


def _listed(tasks: Iterable[str]) -> str:
    return ", ".join(f"{task}.jsonl" for task in tasks)


def read(folder: Path, task: str, count: int) -> list[dict[str, Any]]:
    """The first `count` records of a task, fewer if there are not as many."""
    records = []
    with (folder / f"{task}.jsonl").open() as lines:
        for number, line in enumerate(lines, start=1):
            if len(records) == count:
                break
            if line.strip():
                records.append(_record(line, f"{folder / task}.jsonl:{number}"))
    return records


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        fields = {key: record[key] for key in ("context", "input", "answers")}
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{where}: not a record of LongBench ({error!r})") from None
    if not fields["answers"]:
        raise SystemExit(f"{where}: the record has no answers")
    return fields


def prompt(name: str, length: int, index: int, record: dict[str, Any], codec: Codec) -> Prompt:
    """With its answer at most `length` tokens."""
    task = TASKS[name]
    question = "\n\n" + task.question.replace("{input}", record["input"])
    head, budget = f"{task.instruction}\n\n{task.title}:\n", length - task.new_tokens
    ids, boundary = codec.encode(head, question, record["context"], budget)
    bare, _ = codec.encode(head, question)
    if len(bare) + LEAST_CONTEXT > budget:
        needed = len(bare) + LEAST_CONTEXT + task.new_tokens
        raise SystemExit(f"longbench/{name}@{length}: record {index} needs {needed} tokens; raise --lengths")
    answers: Sequence[str] = record["answers"]
    return Prompt("longbench", name, length, index, ids, boundary, task.new_tokens, tuple(answers), task.metric)
