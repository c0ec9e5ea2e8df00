"""Parts of `make gpu`, one for each way to end."""

import json
import os
import signal
import subprocess
import time


def card(options) -> None:
    print("a library's greeting")
    print(json.dumps({"card": "A Card 80GB", "versions": "torch 9", "details": "80 GiB.", "peak_flops": 5e14}))


def no_card(options) -> None:
    raise SystemExit("torch 9 finds no CUDA device")


def fine(options) -> None:
    print(f"| fine | {options.device} | {options.tiny} | {options.peak_flops:g} |")


def fails(options) -> None:
    print("| before it failed | 1 |", flush=True)
    raise RuntimeError("a kernel is not there")


def hangs(options) -> None:
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    time.sleep(600)


def crashes(options) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_that_passes() -> None:
    pass


def test_that_fails() -> None:
    raise AssertionError("a number differs")


def test_that_hangs() -> None:
    os.kill(os.getpid(), signal.SIGINT)  # like this part, before it is ended
