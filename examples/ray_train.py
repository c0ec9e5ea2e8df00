"""Training as a job of Ray Train: the trainer's program runs on each worker.

    python examples/ray_train.py --workers 16 --gpus 1 -- --config pipeline.yaml

Run it on a machine of the cluster. The environment and the configuration must be at the same paths on all machines.
Arguments after `--` are passed to `latentpress train`. If a process or a machine is lost, the job is started again, at
most --retries times, and resumes from the last checkpoint.
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

MAX_SECONDS_TO_END = 60  # time for a trainer that is stopped to save a checkpoint


def run_rank(settings: dict[str, Any]) -> None:
    """Run `latentpress train` on a worker, with the variables that torchrun would set. Raises RuntimeError if it
    fails."""
    ray_train = get_context()
    with socket.socket() as free:
        free.bind(("", 0))
        meeting = [(ray.util.get_node_ip_address(), free.getsockname()[1])]
    torch.distributed.broadcast_object_list(meeting)  # the address of rank 0
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
    environment.pop("ACCELERATE_TORCH_DEVICE", None)  # set by Ray; train.device is used instead
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
        "--address", default="auto", help="HOST:PORT of the cluster's head; default: the cluster of this machine"
    )
    parser.add_argument("--workers", type=int, required=True, help="number of processes on all machines")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs per process; 0 to train on CPUs")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs per process")
    parser.add_argument("--retries", type=int, default=0, help="number of restarts after a failure")
    parser.add_argument("arguments", nargs="*", help="arguments of latentpress train, after --")
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
        torch_config=TorchConfig(backend="gloo"),  # to agree on a port; the trainers connect separately
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
