"""torch.compile of the transformer's blocks, one by one: blocks of one class share their graphs, so a model of 60
blocks is compiled in the time of one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from schemas.config.training import Train
from trainer.run.run_state import RunError

MOST_GRAPHS = 64  # of a class of blocks: shapes of pictures and text, with and without gradient


def check_compile(settings: Train) -> None:
    """RunError for a backend that this torch does not have. Called before a model is loaded."""
    if settings.compile == "none":
        return
    known = torch.compiler.list_backends(())
    if settings.compile_backend not in known:
        raise RunError(
            f"train.compile_backend: torch {torch.__version__} has no backend {settings.compile_backend!r}",
            f"Choose one of {', '.join(sorted(known))}.",
        )


def compile_blocks(blocks: Sequence[torch.nn.Module], backend: str, log: Callable[[str], None]) -> None:
    """Compile each block's forward pass at its first call. log: gets a line for each graph that is made.

    The hooks of methods on a block stay outside of its graph.
    """
    # torch's guide to custom backends documents it under this name; imported late, as it takes a second.
    from torch._dynamo import lookup_backend

    compile_graph, graphs = lookup_backend(backend), 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        nonlocal graphs
        graphs += 1
        nodes = sum(node.op in ("call_function", "call_method", "call_module") for node in graph.graph.nodes)
        remark = "; another shape may need another" if graphs == 1 else ""
        log(f"torch.compile: graph {graphs} of the blocks ({nodes} operations){remark}")
        return compile_graph(graph, inputs, **options)

    # By default a class of blocks has 8, and computes further shapes without a graph.
    torch.compiler.config.recompile_limit = max(MOST_GRAPHS, torch.compiler.config.recompile_limit)
    for block in blocks:
        block.__dict__["forward"] = torch.compile(block.forward, backend=count)
