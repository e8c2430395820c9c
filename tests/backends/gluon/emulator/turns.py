"""Turns: agents that run one at a time in a seeded order, and events that happen between their turns."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from threading import Lock, Thread
from typing import Any

LATEST, OFTEN = 0.0, 4.0  # how often events happen, relative to an agent's turn
MOST = 20_000_000  # turns; a kernel in the tests takes some thousands
LAST = 0.2  # agents of a lower rank run only when nothing else can


class StuckError(RuntimeError):
    """No agent can continue."""


class _Over(BaseException):
    """Another agent has failed."""


class Agent:
    """A thread that waits until `until` holds. about: what the emulated functions know it by."""

    def __init__(self, name: str, work: Callable[[], Any], about: Any, rank: float) -> None:
        self.name, self.work, self.about, self.rank = name, work, about, rank
        self.until: Callable[[], bool] | None = None
        self.where = "its beginning"
        self.baton = Lock()
        self.baton.acquire()


class Turns:
    """may_happen: events that happen once each, at any time before the end.

    Of three seeds, the first lets all agents proceed alike, the second lets some of them run far ahead, and the third
    does so too and changes their order now and then.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._ranked, self._fickle = seed % 3 != 0, seed % 3 == 2
        self._haste = self._random.choice((LATEST, 0.1, 1.0, OFTEN))
        self._agents: list[Agent] = []
        self._failure: BaseException | None = None
        self._main = Lock()
        self._turns = 0
        self.may_happen: list[Callable[[], None]] = []
        self.current: Any = None

    def add(self, name: str, work: Callable[[], Any], about: Any) -> Agent:
        agent = Agent(name, work, about, self._random.random())
        self._agents.append(agent)
        Thread(target=self._live, args=(agent,), daemon=True).start()
        return agent

    def run(self) -> None:
        """Run until all agents have ended. Raise what one of them raises."""
        self._main.acquire()
        if self._agents:
            self._hand_on()
            try:
                self._main.acquire()
            except BaseException as interrupted:
                self._failure = interrupted  # for the remaining agents
                raise
        self._main.release()
        if self._failure is not None:
            raise self._failure
        while self.may_happen:
            self._happen()

    def pause(self, until: Callable[[], bool] | None = None, where: str = "") -> None:
        """Let other agents run; continue once `until` holds."""
        me = self.current
        me.until, me.where = until, where or me.where
        chosen = self._choose()
        if chosen is not me:
            self._wake(chosen)
            me.baton.acquire()
            if self._failure is not None:
                raise _Over
        me.until = None

    def chance(self) -> bool:
        return self._random.random() < self._haste / (1 + self._haste)

    def _live(self, agent: Agent) -> None:
        agent.baton.acquire()
        if self._failure is None:
            try:
                agent.work()
            except _Over:
                pass
            except BaseException as failure:  # run() raises it
                self._failure = self._failure or failure
        self._agents.remove(agent)
        self._hand_on()

    def _hand_on(self) -> None:
        if not self._agents:
            self._main.release()
        elif self._failure is not None:
            self._wake(self._agents[0])
        else:
            try:
                chosen = self._choose()
            except BaseException as failure:  # events between turns may fail too
                self._failure = failure
                chosen = self._agents[0]
            self._wake(chosen)

    def _wake(self, agent: Agent) -> None:
        self.current = agent
        agent.baton.release()

    def _happen(self) -> None:
        """Let one of the pending events happen."""
        self.may_happen.pop(self._random.randrange(len(self.may_happen)))()

    def _choose(self) -> Agent:
        self._turns += 1
        if self._turns > MOST:
            raise StuckError(f"no end after {MOST} turns")
        while True:
            able = [agent for agent in self._agents if agent.until is None or agent.until()]
            in_time = not self._ranked or any(agent.rank > LAST for agent in able)
            if self.may_happen and (not (able and in_time) or self.chance()):
                self._happen()
            elif not able:
                raise StuckError("; ".join(f"{agent.name} at {agent.where}" for agent in self._agents))
            elif self._ranked:
                if self._fickle and self._random.random() < 0.05:
                    self._random.choice(able).rank = self._random.random()
                return max(able, key=lambda agent: agent.rank)
            else:
                return self._random.choice(able)
