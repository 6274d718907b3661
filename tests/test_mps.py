"""Sharing a GPU between processes, with a stand-in for NVIDIA's program: begun, told to quit, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nci import mps

CONTROL = """#!{python}
import os, signal, sys, time
pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
if sys.argv[1:] == ["-f"]:
    {start}
    open(os.path.join(pipe, "control"), "w").close()
    open("{folder}/pid", "w").write(str(os.getpid()))
    while os.path.exists(os.path.join(pipe, "control")):
        time.sleep(0.02)
else:
    assert sys.stdin.read() == "quit\\n"
    {quit}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(mps, "USUAL", tmp_path / "nothing")
    monkeypatch.setattr(mps, "_PATIENCE", 2.0)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return tmp_path


def install(folder: Path, *, start: str = "pass", quit: str = 'os.remove(os.path.join(pipe, "control"))') -> None:
    program = folder / mps.CONTROL
    program.write_text(CONTROL.format(python=sys.executable, folder=folder, start=start, quit=quit))
    program.chmod(0o755)


def gone(folder: Path) -> bool:
    """Whether the service has ended, within a second; one that nobody has waited for yet has ended, too."""
    pid = int((folder / "pid").read_text())
    for _ in range(50):
        said = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        if not said or said.startswith("Z"):
            return True
        time.sleep(0.02)
    return False


def test_processes_inside_are_told_of_the_service_and_those_outside_are_not(folder: Path) -> None:
    install(folder)
    with mps.shared_gpu(True) as shared:
        assert shared
        said = subprocess.run(
            [sys.executable, "-c", "import os; print(os.environ['CUDA_MPS_PIPE_DIRECTORY'])"],
            capture_output=True,
            text=True,
        ).stdout.strip()
        assert (Path(said) / "control").exists()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert gone(folder)
    assert not Path(said).exists()


def test_nothing_is_begun_where_it_is_not_wanted_not_installed_or_there_already(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mps.shared_gpu(True) as shared:
        assert not shared
    install(folder)
    with mps.shared_gpu(False) as shared:
        assert not shared
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(folder))
    with mps.shared_gpu(True) as shared:
        assert not shared
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    monkeypatch.setattr(mps, "USUAL", folder)
    (folder / f"{mps.CONTROL}.pid").write_text(f"{os.getpid()}\n")
    with mps.shared_gpu(True) as shared:
        assert not shared
    assert not (folder / "pid").exists()


@pytest.mark.parametrize("left", ["a process that is gone", "nothing", "no number"])
def test_a_folder_that_a_service_has_left_is_no_service(
    folder: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    install(folder)
    monkeypatch.setattr(mps, "USUAL", folder)
    file = folder / f"{mps.CONTROL}.pid"
    if left == "a process that is gone":
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        file.write_text(f"{ended.pid}\n")
    elif left == "no number":
        file.write_text("")
    with mps.shared_gpu(True) as shared:
        assert shared


def test_a_service_that_cannot_run_is_done_without(folder: Path) -> None:
    install(folder, start="sys.exit(1)")
    with mps.shared_gpu(True) as shared:
        assert not shared
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_a_service_that_does_not_quit_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "_PATIENCE", 0.5)
    install(folder, quit="pass")
    with pytest.raises(RuntimeError), mps.shared_gpu(True):
        raise RuntimeError
    assert gone(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_killed_parent_leaves_no_service_behind(folder: Path) -> None:
    install(folder)
    program = (
        "import time\nfrom nci import mps\nwith mps.shared_gpu(True):\n    print('up', flush=True)\n    time.sleep(60)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(mps.__file__).parents[1])}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(folder)


def test_a_command_runs_inside_and_signals_reach_all_that_it_began(folder: Path) -> None:
    install(folder)
    told = 'echo "$CUDA_MPS_PIPE_DIRECTORY"; exit 3'
    variables = {**os.environ, "PYTHONPATH": str(Path(mps.__file__).parents[1])}
    command = [sys.executable, "-m", "nci.mps", "bash", "-c"]
    result = subprocess.run([*command, told], env=variables, capture_output=True, text=True, timeout=60)
    assert (result.returncode, "nci-mps-" in result.stdout) == (3, True)
    assert gone(folder)
    # a shell dies of the signal; what it has begun must not go on
    began = f"(sleep 60 & echo $! > {folder}/began.tmp; mv {folder}/began.tmp {folder}/began; wait) & wait"
    process = subprocess.Popen([*command, began], env=variables)
    until = time.monotonic() + 30
    while not (folder / "began").exists() and time.monotonic() < until:
        time.sleep(0.02)
    (folder / "pid").write_text((folder / "began").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert gone(folder)
