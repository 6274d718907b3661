"""Several processes on one GPU: NVIDIA's multi-process service, for as long as they run, where it is installed.

Without it they take turns on the chip: four that train beside each other are then about as fast as one after the other.
`python -m nci.mps COMMAND...` runs a command inside. Knows nothing of what the processes do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
USUAL = Path("/tmp/nvidia-mps")  # where a service that somebody else began is found by itself
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent is gone
_PATIENCE = 5.0  # seconds
# Only Linux has it. Found here, since a forked process must not look.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """To be called in a new process: it gets this signal when the one that began it is gone."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, int(number))


@contextlib.contextmanager
def shared_gpu(wanted: bool) -> Iterator[bool]:
    """Processes begun inside share the GPU; says whether they do. Where a service is at work already, nothing is changed."""
    control = shutil.which(CONTROL)
    if not wanted or control is None or _at_work(USUAL) or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield False
        return
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nci-mps-", ignore_cleanup_errors=True)))
        names = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
        for name in names.values():
            Path(name).mkdir()
        service = subprocess.Popen(
            [control, "-f"],
            # Its clients number GPUs as it does: chosen here and there, they would be chosen twice.
            env={name: value for name, value in (os.environ | names).items() if name != "CUDA_VISIBLE_DEVICES"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for its clients
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),
        )
        stack.callback(_end, service, control, os.environ | names)
        if not _ready(service, folder / "pipe"):
            yield False
            return
        os.environ.update(names)
        try:
            yield True
        finally:
            for name in names:
                os.environ.pop(name, None)


def _at_work(pipe: Path) -> bool:
    """Whether a service listens there; one that has ended leaves its folder. One outside of a container is not seen."""
    try:
        os.kill(int((pipe / f"{CONTROL}.pid").read_text()), 0)
    except PermissionError:  # somebody else's
        return True
    except (OSError, ValueError):
        return False
    return True


def _ready(service: subprocess.Popen[bytes], pipe: Path) -> bool:
    """Whether the service listens; it needs a moment, and on some machines it may not run at all."""
    until = time.monotonic() + _PATIENCE
    while service.poll() is None and time.monotonic() < until:
        if any(pipe.iterdir()):
            return True
        time.sleep(0.05)
    return False


def _end(service: subprocess.Popen[bytes], control: str, environment: dict[str, str]) -> None:
    if service.poll() is None:
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            subprocess.run([control], input=b"quit\n", env=environment, capture_output=True, timeout=_PATIENCE)
    try:
        service.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        service.kill()
        service.wait()


def run_inside(command: Sequence[str]) -> int:
    """Run a command whose processes share the GPU, and give its exit code; a signal to this one reaches all of them."""
    with shared_gpu(True):
        child = subprocess.Popen(command, start_new_session=True, preexec_fn=lambda: end_with_parent(signal.SIGTERM))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda received, _: os.killpg(child.pid, received))
        code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run_inside(sys.argv[1:]))
