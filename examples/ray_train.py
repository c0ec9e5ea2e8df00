"""Training as a job of Ray Train: the trainer's program on each of its workers, wherever Ray places them.

    python examples/ray_train.py --workers 16 --gpus 1 -- --config pipeline.yaml

Run it on a machine of the cluster. The environment and the configuration are at the same paths on all machines. What
follows `--` goes to `latentpress train`. Where a process or a machine is lost, the job is started again as often as
--retries allows, and goes on from the last checkpoint.
"""

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, get_context
from ray.train.torch import TorchConfig, TorchTrainer

MAX_SECONDS_TO_END = 60  # a trainer that is told to stop saves a checkpoint


def run_rank(settings: dict[str, Any]) -> None:
    """On each worker: `latentpress train` with the variables that torchrun would set. RuntimeError where it fails."""
    ray_train = get_context()
    with socket.socket() as free:
        free.bind(("", 0))
        meeting = [(ray.util.get_node_ip_address(), free.getsockname()[1])]
    torch.distributed.broadcast_object_list(meeting)  # where rank 0 can be reached
    address, port = meeting[0]
    numbers = {
        "RANK": ray_train.get_world_rank(),
        "WORLD_SIZE": ray_train.get_world_size(),
        "LOCAL_RANK": ray_train.get_local_rank(),
        "LOCAL_WORLD_SIZE": ray_train.get_local_world_size(),
        "GROUP_RANK": ray_train.get_node_rank(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    environment = os.environ | {name: str(value) for name, value in numbers.items()}
    environment.pop("ACCELERATE_TORCH_DEVICE", None)  # Ray's choice: train.device is in force
    program = Path(sys.executable).with_name("latentpress")
    trainer = subprocess.Popen([program, "train", *settings["arguments"]], cwd=settings["folder"], env=environment)
    try:
        code = trainer.wait()
    finally:
        if trainer.poll() is None:
            trainer.terminate()
            trainer.wait(MAX_SECONDS_TO_END)
    if code:
        raise RuntimeError(f"rank {numbers['RANK']} on {socket.gethostname()} ended with exit code {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--address", default="auto", help="HOST:PORT of the cluster's head; default: found on this machine"
    )
    parser.add_argument("--workers", type=int, required=True, help="processes, on all machines together")
    parser.add_argument("--gpus", type=int, default=1, help="of each process; 0 to train on CPUs")
    parser.add_argument("--cpus", type=int, default=1, help="of each process")
    parser.add_argument("--retries", type=int, default=0, help="how often the job is started again after a failure")
    parser.add_argument("arguments", nargs="*", help="of latentpress train, after --")
    options = parser.parse_args()
    ray.init(address=options.address)
    scaling = ScalingConfig(
        num_workers=options.workers,
        use_gpu=options.gpus > 0,
        resources_per_worker={"CPU": options.cpus, **({"GPU": options.gpus} if options.gpus else {})},
        placement_strategy="SPREAD" if not options.gpus else "PACK",
    )
    trainer = TorchTrainer(
        run_rank,
        train_loop_config={"arguments": options.arguments, "folder": os.getcwd()},
        torch_config=TorchConfig(backend="gloo"),  # to agree on a port; the trainers connect by themselves
        scaling_config=scaling,
        run_config=RunConfig(failure_config=FailureConfig(max_failures=options.retries)),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
