"""Several prompts at once: each is a sequence of its own in the context, and all of them share every pass."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from pyhotexperts.context import Context
from pyhotexperts.generation import Sampler, Writing
from pyhotexperts.results import Generation
from pyhotexperts.scoring import token_logprob


class Job:
    """One prompt on its way to a generation.

    Parameters
    ----------
    ids
        Tokens of the prompt.
    writing
        The generation, empty so far.
    n_logprobs
        The most likely tokens to tell beside each chosen one, None = no log-probabilities.
    """

    def __init__(self, ids: Sequence[int], sampler: Sampler, writing: Writing, n_logprobs: int | None) -> None:
        self.ids = ids
        self.sampler = sampler
        self.n_places = len(ids) + writing.limit - 1  # the last token needs no place in the context
        self.waiting = list(ids)  # tokens to be evaluated
        self.sequence = -1
        self._writing = writing
        self._n_logprobs = n_logprobs
        self._begin = self._first = 0.0
        self.result: Generation | None = None

    def start(self, sequence: int) -> None:
        """Take a sequence."""
        self.sequence = sequence
        self.sampler.accept(self.ids)
        self._begin = time.perf_counter()

    def choose(self, context: Context, row: int) -> None:
        """Choose the next token after an output row of the last pass."""
        token = self.sampler.choose(context, row)
        if not self._first:
            self._first = time.perf_counter()
        logprob = None
        if self._n_logprobs is not None:
            logprob = token_logprob(context.logits(row + 1)[row], token, self._n_logprobs)
        self._writing.add(token, logprob)
        if self._writing.finish_reason is None:
            self.waiting = [token]
        else:
            now = time.perf_counter()
            self.result = self._writing.result(len(self.ids), 0, self._first - self._begin, now - self._first)


def run(context: Context, jobs: Sequence[Job]) -> list[Generation]:
    """Run all jobs, as many at a time as there are sequences and places in the context; their results in order.

    Every pass evaluates the next token of each running sequence, and as much of waiting prompts as fits beside them.
    """
    queue = deque(jobs)
    free = list(range(context.n_sequences))
    running: list[Job] = []
    n_places = context.n_ctx
    context.clear()
    try:
        while queue or running:
            while queue and free and queue[0].n_places <= n_places:
                job = queue.popleft()
                n_places -= job.n_places
                job.start(free.pop())
                running.append(job)
            for row, job in enumerate(_evaluate(context, running)):
                job.choose(context, row)
            for job in [job for job in running if job.result is not None]:
                running.remove(job)
                context.clear_sequence(job.sequence)
                free.append(job.sequence)
                n_places += job.n_places
    finally:
        context.clear()
    return [job.result for job in jobs if job.result is not None]


def _evaluate(context: Context, running: Sequence[Job]) -> list[Job]:
    """One pass; returns the jobs whose last token was in it, in the order of the output rows."""
    tokens: list[int] = []
    sequences: list[int] = []
    wanted: list[int] = []
    done: list[Job] = []
    for job in sorted(running, key=lambda job: len(job.waiting)):
        part = job.waiting[: context.n_ubatch - len(tokens)]
        if not part:
            break
        job.waiting = job.waiting[len(part) :]
        tokens += part
        sequences += [job.sequence] * len(part)
        wanted += [0] * (len(part) - 1) + [not job.waiting]
        if not job.waiting:
            done.append(job)
    context.decode_sequences(tokens, sequences, wanted)
    return done
