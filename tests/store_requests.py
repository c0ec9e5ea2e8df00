"""What the stores that tests serve on loopback share: they record their requests, and some of these go wrong."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """What was asked: the operation, by a name of its server, and the object's key or prefix."""

    operation: str
    key: str


class RecordedRequests:
    """`answer(request)` names what goes wrong with a request, by a word of its server; "" lets it pass."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[Request] = []
        self.answer: Callable[[Request], str] = lambda request: ""

    def reset(self) -> None:
        self.requests, self.answer = [], lambda request: ""

    def counts(self) -> Counter[str]:
        return Counter(request.operation for request in self.requests)

    def fail(self, kind: str, times: int, *operations: str, key: str = "") -> None:
        """The next `times` requests of these operations (default: all), about keys that hold `key`, go wrong."""
        left = [kind] * times

        def answer(request: Request) -> str:
            wanted = (not operations or request.operation in operations) and key in request.key
            return left.pop() if wanted and left else ""

        self.answer = answer
