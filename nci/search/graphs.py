"""Functions of tensors -> the same as CUDA graphs: one recording per shape, replayed without any work of the host.

A shape is run as it is when it comes for the first time (which also compiles its kernels), recorded when it comes again,
and replayed from then on. Where a recording does not fit into the memory the function keeps running as it is.
Knows nothing of searches.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Recorder:
    """Recordings by key, the oldest forgotten first.

    Args:
        most: Recordings kept at a time.
    """

    def __init__(self, most: int = 48) -> None:
        self.most = most
        self.recordings: OrderedDict[Hashable, _Recording | None] = OrderedDict()
        self.pool = torch.cuda.graph_pool_handle()

    def run(self, key: Hashable, function: Function, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What `function(*inputs)` gives; valid until the same key is run again. Inputs may be on the host."""
        if key not in self.recordings:
            self.recordings[key] = None
            return function(*self._moved(inputs))
        recording = self.recordings[key]
        if recording is None:
            try:
                recording = self._record(function, inputs)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                return function(*self._moved(inputs))
            self.recordings[key] = recording
        self.recordings.move_to_end(key)
        while len(self.recordings) > self.most:
            self.recordings.popitem(last=False)
        for place, given in zip(recording.inputs, inputs, strict=True):
            place.copy_(given, non_blocking=True)
        recording.graph.replay()
        return recording.outputs

    @staticmethod
    def _moved(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(given.to("cuda", non_blocking=True) for given in inputs)

    def _record(self, function: Function, inputs: tuple[Tensor, ...]) -> _Recording:
        kept = tuple(given.clone() for given in self._moved(inputs))
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up at their first call, which cannot be recorded
            function(*kept)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # a collection may free device memory, which must not happen while recording
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                outputs = function(*kept)
        finally:
            gc.enable()
        return _Recording(graph, kept, outputs)
