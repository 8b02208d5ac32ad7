"""Retrieval: documents behind common instructions, and many questions to each of them.

Stock SGLang hits where a state lies at the end of a document, which is where no request ended: prompts leave each other
between document and question."""

from __future__ import annotations

from functools import partial

from client import Client
from load import Load

DOCUMENTS = 4
INSTRUCTIONS, DOCUMENT, QUESTION = 300, 6000, 60


def run(client: Client, load: Load) -> None:
    """A wave asks one question of every document at once; waves follow each other."""
    instructions = load.text("instructions", INSTRUCTIONS)
    documents = [load.text(f"document/{i}", DOCUMENT) for i in range(DOCUMENTS)]
    for wave in range(load.rounds + 1):
        prompts = [
            instructions + document + load.text(f"question/{i}/{wave}", QUESTION)
            for i, document in enumerate(documents)
        ]
        client.together([partial(client.generate, prompt) for prompt in prompts], load.concurrency)
