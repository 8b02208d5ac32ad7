"""Agents with a common system prompt and tool list, each with its own role and history, that hand over to each other.

A hand-over gives the next agent a history without its last exchange: its prompt leaves a cached one in the middle."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from client import Client
from load import Load

AGENTS = 6
SYSTEM, TOOLS, ROLE, RESULT = 800, 2400, 150, 300
HANDOVER_EVERY = 3  # rounds


@dataclass
class Agent:
    name: int
    start: list[int]  # system prompt, tools, role
    exchanges: list[list[int]] = field(default_factory=list)  # what was said, an answer with the tool's result each

    def prompt(self) -> list[int]:
        return self.start + [token for exchange in self.exchanges for token in exchange]

    def take_over(self, other: Agent, note: list[int]) -> None:
        """Go on with the other agent's conversation, but for its last exchange."""
        self.start, self.exchanges = other.start, [*other.exchanges[:-1], note]


def step(client: Client, load: Load, agent: Agent, number: int) -> None:
    task = load.text(f"{agent.name}/result/{number}", RESULT)
    answer = client.generate(agent.prompt() + task).tokens
    agent.exchanges.append(task + answer)


def run(client: Client, load: Load) -> None:
    """In a round every agent makes one step, all at once."""
    common = load.text("system", SYSTEM) + load.text("tools", TOOLS)
    agents = [Agent(i, common + load.text(f"{i}/role", ROLE)) for i in range(AGENTS)]
    for number in range(load.rounds):
        if number and number % HANDOVER_EVERY == 0:
            for giver, taker in zip(agents[::2], agents[1::2], strict=False):
                taker.take_over(giver, load.text(f"{taker.name}/handover/{number}", ROLE))
        client.together([partial(step, client, load, agent, number) for agent in agents], load.concurrency)
