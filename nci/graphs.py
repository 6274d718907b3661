"""Functions of tensors -> the same as CUDA graphs: one recording per shape, replayed without any work of the host.

A shape is run as it is when it comes for the first time (which also compiles its kernels), recorded when it comes again,
and replayed from then on. What cannot be recorded, or does not fit into the memory, keeps running as it is.
Knows nothing of searches or training. One thread at a time: a recording has one place for its inputs and one for its outputs.
"""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Recorder:
    """Recordings by key, the oldest forgotten first.

    Args:
        device: The GPU.
        most: Recordings kept at a time.
    """

    def __init__(self, device: str = "cuda", most: int = 48) -> None:
        self.device, self.most = torch.device(device), most
        self.recordings: OrderedDict[Hashable, _Recording | None] = OrderedDict()  # none: seen once
        self.refused: set[Hashable] = set()
        self.places: dict[Hashable, Tensor] = {}  # where recordings read their inputs: equal ones share a place
        self.pool = torch.cuda.graph_pool_handle()

    def run(self, key: Hashable, function: Function, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What `function(*inputs)` gives; valid until the same key is run again. Inputs may be on the host."""
        with torch.cuda.device(self.device):
            recording = self._recording(key, function, inputs)
            if recording is None:
                return function(*self._moved(inputs))
            for place, given in zip(recording.inputs, inputs, strict=True):
                place.copy_(given, non_blocking=True)
            recording.graph.replay()
            return recording.outputs

    def _recording(self, key: Hashable, function: Function, inputs: tuple[Tensor, ...]) -> _Recording | None:
        """The recording of a key, made now when it comes for the second time; none where there cannot be one."""
        if key in self.refused:
            return None
        if key not in self.recordings:
            self.recordings[key] = None
            self._forget()
            return None
        if self.recordings[key] is None:
            stream = torch.cuda.current_stream()
            try:
                self.recordings[key] = self._record(function, inputs)
            except RuntimeError as error:  # out of memory is one, too
                torch.cuda.set_stream(stream)  # a recording that breaks off may leave its own
                log.warning("a shape is not recorded, and runs as it is: %s", str(error).splitlines()[0])
                self.refused.add(key)
                del self.recordings[key]
            # Outside the handler: the error holds the frames, and with them the tensors that filled the memory.
            if key in self.refused:
                torch.cuda.empty_cache()
                return None
        self.recordings.move_to_end(key)
        return self.recordings[key]

    def _forget(self) -> None:
        while len(self.recordings) > self.most:
            self.recordings.popitem(last=False)

    def _moved(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(given.to(self.device, non_blocking=True) for given in inputs)

    def _place(self, number: int, given: Tensor) -> Tensor:
        place = self.places.setdefault((number, given.shape, given.dtype), torch.empty_like(given))
        return place.copy_(given)

    def _record(self, function: Function, inputs: tuple[Tensor, ...]) -> _Recording:
        kept = tuple(self._place(number, given) for number, given in enumerate(self._moved(inputs)))
        random = torch.cuda.get_rng_state(self.device)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up at their first call, which cannot be recorded
            function(*kept)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.set_rng_state(random, self.device)  # as if nothing had run yet
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # a collection may free device memory, which must not happen while recording
        try:
            # Other threads may allocate meanwhile: only what this one does must be fit for a recording.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                outputs = function(*kept)
        finally:
            if collects:
                gc.enable()
        return _Recording(graph, kept, outputs)
