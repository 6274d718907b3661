"""Systems to compare -> their rankings in files, several processes at once: `nci compare --jobs`.

A system is begun as soon as what it needs is made; what several need is made once. Results go through the files that
`nci.compare` keeps anyway, so this leaves only latencies, which are measured when nothing else runs. No process outlives
the one that began it.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from nci.compare import Task, check_names, judged, ranked, ranking_file
from nci.console import set_up_logging
from nci.errors import NciError
from nci.mps import end_with_parent, shared_gpu
from nci.records import Query
from nci.search.engine import is_out_of_memory
from nci.systems import SHARED, make, needs, seeds_of
from nci.workbench import Workbench

log = logging.getLogger("nci")

DIED = "its process died; is there enough memory?"
FULL = "the memory of the GPU is not enough"
_AWAKE = 1.0  # seconds
Files = Mapping[Path, tuple[str, list[Query]]]
"""Rankings to write, each with its split and queries."""


def rank_in_parallel(
    bench: Workbench,
    systems: Sequence[str],
    splits: Sequence[str],
    out: Path,
    *,
    jobs: int,
    on_ranked: Callable[[str], None] = lambda name: None,
) -> None:
    """Make every system with every seed and rank the splits, in so many processes.

    What fails is named in one error after all that does not need it is done; the rankings of the others are kept.
    `on_ranked` is called with each system as soon as the rankings of all its seeds are there.
    """
    check_names(bench, systems)
    queries = {split: judged(bench, split)[0] for split in splits}
    work: dict[Task, Files] = {}
    for task in [(name, seed) for name in systems for seed in range(seeds_of(bench, name))]:
        files = {ranking_file(bench, task, part[1], part[0], out): part for part in queries.items()}
        if missing := {file: part for file, part in files.items() if not file.with_suffix(".json").exists()}:
            work[task] = missing
    unranked = {name: {task for task in work if task[0] == name} for name in systems}

    def ended(task: Task) -> None:
        if task in work:
            unranked[task[0]].discard(task)
            if not unranked[task[0]]:
                on_ranked(task[0])

    for name in systems:
        if not unranked[name]:
            on_ranked(name)
    with shared_gpu(bool(work) and jobs > 1 and bench.device != "cpu" and torch.cuda.is_available()):
        failed = _all(bench, work, jobs, ended)
    if failed:
        reasons = "; ".join(f"{_label(task)}: {reason}" for task, reason in failed.items())
        raise NciError(f"{reasons} (what the other systems found is kept)")


def _all(bench: Workbench, work: Mapping[Task, Files], jobs: int, told: Callable[[Task], None]) -> dict[Task, str]:
    """Everything, and what it needs: why each task that failed did so."""
    left = in_order(bench, work)
    finished: set[Task] = set()
    failed: dict[Task, str] = {}
    while left:
        ended = _run(bench, {task: work.get(task, {}) for task in left}, finished, jobs, told)
        finished |= {task for task, reason in ended.items() if reason is None}
        died = [task for task, reason in ended.items() if reason in (DIED, FULL)]
        for task in died:  # with one process all of its pool die; alone it has all the memory, and is to blame
            ended |= _run(bench, {task: work.get(task, {})}, finished, 1, told)
        finished |= {task for task, reason in ended.items() if reason is None}
        failed |= {task: reason for task, reason in ended.items() if reason is not None}
        left = [task for task in left if task not in ended] if died else []
    return failed


def in_order(bench: Workbench, wanted: Iterable[Task]) -> list[Task]:
    """What is wanted and what that needs, each after what it needs; what many wait for comes first."""
    level: dict[Task, int] = {}

    def place(task: Task) -> int:
        if task not in level:
            level[task] = 1 + max((place(other) for other in needs(bench, *task)), default=-1)
        return level[task]

    for task in wanted:
        place(task)
    return sorted(level, key=lambda task: (level[task], task[0] not in SHARED))


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes begun inside do not hear Ctrl-C, which a terminal sends to all: their parent ends them, in one line."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM is as Ctrl-C, so that processes are ended first."""
    if threading.current_thread() is not threading.main_thread():  # no other may set a handler
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@_stopped_by_sigterm()
def _run(
    bench: Workbench, tasks: Mapping[Task, Files], finished: set[Task], jobs: int, told: Callable[[Task], None]
) -> dict[Task, str | None]:
    """Work on tasks in so many new processes until no more can begin: why each of those that were begun failed, or None.

    `told` hears of each that did not.
    A process that dies takes all with it: those then at work have DIED, and no others are begun.
    """
    ended: dict[Task, str | None] = {}
    waiting, running = list(tasks), dict[Future[None], Task]()
    threads = max(1, torch.get_num_threads() // jobs)
    spawned = multiprocessing.get_context("spawn")  # a forked child cannot use a GPU that the parent has used
    closed = replace(bench, made={})
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), spawned, _begin, (threads, log.level))
    try:
        while True:
            done = finished | {task for task, reason in ended.items() if reason is None}
            ready = [task for task in waiting if done.issuperset(needs(bench, *task))]
            if DIED not in ended.values():
                waiting = [task for task in waiting if task not in ready]
                with _deaf():
                    running |= {pool.submit(_work, closed, task, dict(tasks[task])): task for task in ready}
            if not running:
                return ended
            # With a limit, since a Ctrl-C that comes just before Python waits is not heard until it wakes.
            for future in wait(running, timeout=_AWAKE, return_when=FIRST_COMPLETED).done:
                error = future.exception()
                reason = str(error) or type(error).__name__
                if isinstance(error, BrokenProcessPool):
                    reason = DIED
                elif error is not None and is_out_of_memory(error):
                    reason = FULL
                task = running.pop(future)
                ended[task] = reason if error is not None else None
                if error is None:
                    told(task)
    except KeyboardInterrupt:
        for process in list(pool._processes.values()):
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(threads: int, level: int) -> None:
    """A new process: its share of the cores, no bars, which would overwrite each other; it ends with its parent."""
    end_with_parent()
    _check_parent()
    torch.set_num_threads(threads)
    os.environ["TQDM_DISABLE"] = "1"
    tqdm.set_lock(threading.RLock())  # one that processes share would be left behind by a killed one
    set_up_logging(level)


def _check_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


def _work(bench: Workbench, task: Task, files: Files) -> None:
    _check_parent()
    name, seed = task
    try:
        if name in SHARED:
            SHARED[name](bench)
        elif not files:
            make(bench, name, seed)
        for file, (split, queries) in files.items():
            ranked(bench, task, split, queries, file, timed=False)
    finally:
        bench.made.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what this process has cached would be missing in the others


def _label(task: Task) -> str:
    name, seed = task
    return f"{name}, seed {seed}" if seed else name
