"""Readers of items that are nowhere; without pytest, whose import takes half a second in every process."""

from stages.engines.sandbox import MAX_ITEMS_PER_TASK, MAX_QUEUED_PER_PROCESS


def no_order(number: int) -> int:
    return number * 7919 % 1009


class InventedReader:
    fails = ""  # the path of an item that meets a bug of ours

    def __init__(self, *_: object) -> None:
        pass

    def __call__(self, task) -> dict[str, object]:
        if task.path == self.fails:
            raise ZeroDivisionError("a bug of ours")
        return {"media_id": f"{int(task.path[:4]):032x}", "kind": "image", "width": 64, "height": 64, "face": []}


class FailingReader(InventedReader):
    fails = f"{sorted(range(30, 170), key=no_order)[2 * MAX_QUEUED_PER_PROCESS * MAX_ITEMS_PER_TASK + 25]:04d}.png"
