"""Which simulated partition of a Gluon kernel runs next: one at a time, in an order that a seed decides."""

import random
import threading
from collections.abc import Callable

from gluon_memories import SimulationError

# Warps of a partition that arrive one by one.
WARPGROUP = 4


class Scheduler:
    """Runs threads one at a time and draws who is next wherever one pauses."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.turns: list[threading.Lock] = []  # of each thread, released when it is its turn
        self.waiting: dict[int, object] = {}  # thread -> condition that it waits for, or None
        self.current: int | None = None
        self.copies: list[Callable[[], None]] = []  # issued, not done
        self.held: int | None = None  # a thread that others overtake for some turns
        self.turns_held = 0
        self.error: BaseException | None = None

    def run(self, functions) -> None:
        threads = [threading.Thread(target=self._thread, args=(i, f), daemon=True) for i, f in enumerate(functions)]
        self.waiting = dict.fromkeys(range(len(functions)))
        self.turns = [threading.Lock() for _ in threads]
        for turn, thread in zip(self.turns, threads):
            turn.acquire()
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        if self.copies:
            raise SimulationError(f"{len(self.copies)} copies were never waited for")

    def _thread(self, i: int, function) -> None:
        self.turns[i].acquire()
        try:
            if self.error is None:
                function()
        except BaseException as error:
            self.error = self.error or error
        del self.waiting[i]
        self._pass_on()

    def pause(self, until=None) -> None:
        """Let others run; come back when `until()` holds."""
        i = self.current
        self.waiting[i] = until
        self._pass_on()
        self.turns[i].acquire()
        self.waiting[i] = None
        if self.error is not None:
            raise SimulationError("another partition failed")

    def _choose(self, choices: list):
        """One at random; now and then a thread is held up, as one is whose warps wait for memory."""
        if not self.turns_held and self.random.random() < 0.1:
            self.held, self.turns_held = self.random.choice(list(self.waiting)), self.random.randrange(40)
        if self.turns_held:
            self.turns_held -= 1
            choices = [choice for choice in choices if choice != self.held] or choices
        return self.random.choice(choices)

    def _pass_on(self) -> None:
        while self.waiting:
            ready = [i for i, until in self.waiting.items() if self.error or until is None or until()]
            choices = [*ready, *(["copy"] if self.copies else [])]
            if not choices:
                self.error = SimulationError("deadlock: every partition waits for a barrier that none will complete")
                continue
            chosen = self._choose(choices)
            if chosen == "copy":
                self._do(self.copies.pop(self.random.randrange(len(self.copies))))
                continue
            self.current = chosen
            self.turns[chosen].release()
            break
        else:
            for copy in self.copies:
                self._do(copy)
            self.copies.clear()
            self.current = None

    def _do(self, copy) -> None:
        try:
            copy()
        except BaseException as error:
            # Not the error of whoever comes to be running: it may have ended, and then nobody would see it.
            self.error = self.error or error
