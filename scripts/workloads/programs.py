"""Frontend-language programs that fork from a shared prompt: few-shot batches, self-consistency, tree of thought.

The language works on text, the server is asked in token ids, so that this runs against a model without a tokenizer: a
word of a program's text is the number of a token."""

from __future__ import annotations

import importlib
from typing import Any

from client import Client
from load import Load

EXAMPLES, QUESTION, HINT = 4000, 100, 20
VOTES = 4
WIDTH, DEPTH = 3, 2


def to_text(ids: list[int]) -> str:
    return "".join(f"{token} " for token in ids)


def to_ids(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def import_language() -> None:
    """SGLang imports Triton even for its frontend; a machine without CUDA has this package's stand-in."""
    from sglang_tailreplay import cpu
    from sglang_tailreplay.launch_server import has_cuda

    if not has_cuda():
        cpu.activate()
    importlib.import_module("sglang")


def make_backend(client: Client) -> Any:
    """A backend of the frontend language whose requests are the client's."""
    from sglang.lang.backend.base_backend import BaseBackend

    class TokenBackend(BaseBackend):
        def generate(self, s: Any, sampling_params: Any) -> tuple[str, dict[str, Any]]:
            answer = client.generate(to_ids(s.text_), sampling_params.max_new_tokens)
            return to_text(answer.tokens), answer.sample._asdict()

        # No commit_lazy_operations: before a fork the interpreter asks for the shared part to be cached only if its
        # thread happens to have come that far, and two servers would get different requests.

    return TokenBackend()


def make_programs() -> tuple[Any, Any, Any]:
    import sglang as sgl

    @sgl.function
    def few_shot(s, examples, question, new_tokens):
        s += examples
        s += question
        s += sgl.gen("answer", max_tokens=new_tokens)

    @sgl.function
    def self_consistency(s, examples, question, hints, new_tokens):
        s += examples
        s += question
        forks = s.fork(len(hints))
        for fork, hint in zip(forks, hints, strict=True):
            fork += hint
            fork += sgl.gen("path", max_tokens=new_tokens)
        s += max(fork["path"] for fork in forks)  # the vote: any choice that both servers make alike
        s += sgl.gen("answer", max_tokens=new_tokens)

    @sgl.function
    def tree_of_thought(s, examples, question, hints, depth, new_tokens):
        s += examples
        s += question
        for level in range(depth):
            forks = s.fork(len(hints))
            for fork, hint in zip(forks, hints, strict=True):
                fork += hint
                fork += sgl.gen(f"thought{level}", max_tokens=new_tokens)
            s += max(fork[f"thought{level}"] for fork in forks)
        s += sgl.gen("answer", max_tokens=new_tokens)

    return few_shot, self_consistency, tree_of_thought


def run(client: Client, load: Load) -> None:
    """One kind of program after the other; those of a kind run beside each other, as many as the load has rounds."""
    import_language()
    from sglang.global_config import global_config

    # SGLang would send what a batch's programs begin with before them, as a request of its own.
    global_config.enable_precache_with_tracing = False

    def text(name: str, count: int) -> str:
        return to_text(load.text(name, count))

    backend, new = make_backend(client), client.new_tokens
    few_shot, self_consistency, tree_of_thought = make_programs()
    examples = text("examples", EXAMPLES)
    votes = [text(f"hint/{i}", HINT) for i in range(VOTES)]
    common = {"examples": examples, "new_tokens": new}
    for kind, program, more in (
        ("few-shot", few_shot, {}),
        ("self-consistency", self_consistency, {"hints": votes}),
        ("tree", tree_of_thought, {"hints": votes[:WIDTH], "depth": DEPTH}),
    ):
        batch = [{**common, **more, "question": text(f"{kind}/{i}", QUESTION)} for i in range(load.rounds)]
        states = program.run_batch(batch, backend=backend, num_threads=load.concurrency)
        for state in states:
            state.sync()
            if state.error() is not None:
                raise state.error()
