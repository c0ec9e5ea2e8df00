"""A reader whose process hangs at one picture and crashes at another, like a faulty decoder. Processes that read import
this module in a moment."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from stages.encoding import member_reader

SIGNALS = {"stopped.png": signal.SIGSTOP, "crashed.png": signal.SIGSEGV}


def make_failing_reader() -> Callable[[member_reader.ReadRequest], member_reader.MemberPixels]:
    return read


def read(request: member_reader.ReadRequest) -> member_reader.MemberPixels:
    if number := SIGNALS.get(Path(str(request.files[0][0])).name):
        os.kill(os.getpid(), number)
    return member_reader.read_member(request)
