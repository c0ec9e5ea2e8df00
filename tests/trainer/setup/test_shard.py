"""FSDP2: two processes that share a model train like one process with the whole model."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from schemas.config.training import Parallel
from schemas.errors import OK, USAGE
from tests.forms import long
from tests.processes import prepare_fork
from tests.trainer.pipelines import KINDS
from tests.trainer.runs import LOADS, check_result, check_shown, in_two_forks, lines, on_ranks, train, write
from tests.trainer.setup.test_quantize import NAMES, adapted, errors, step
from trainer.run.sharded import local
from trainer.setup import wrap
from trainer.setup.blocks import checkpoint_blocks, compile_blocks
from trainer.setup.quantize import stored_bytes

pytestmark = pytest.mark.slow

FSDP = {"strategy": "fsdp2"}


@pytest.mark.long
def test_shards_compute_as_whole_weights_do(wide, tmp_path) -> None:
    """Quantized bases, of which each process has half the bytes, with each adapter; linear layers gathered in bfloat16,
    norms not; compiled blocks. With gradient checkpointing, one pair of processes for all cases."""
    kandinsky = "kandinsky5-image-t2i"
    adapters = [{"type": "lora"}, {"type": "lora", "dora": True}, {"type": "lokr"}, {"type": "lora"}]
    cases = [Case("sana", wide("sana"), adapter, name) for name, adapter in zip(NAMES, adapters, strict=True)]
    full = {"type": "full"}
    cases += [Case("sana", wide("sana"), full, half=True), Case(kandinsky, wide(kandinsky), full, half=True)]
    cases += [Case("sana", wide("sana"), {"type": "lora"}, compiled=True)]
    cases += [Case("z-image", wide("z-image"), full, half=True), Case("z-image", wide("z-image"), {}, "nf4-bnb")]
    cases += [Case("qwen-image", wide("qwen-image"), full), Case("qwen-image", wide("qwen-image"), {}, "int8-torchao")]
    cases += [Case("krea2", wide("krea2"), full, half=True), Case("krea2", wide("krea2"), {}, "int8-quanto")]
    cases += [Case("flux3", wide("flux3"), full, half=True), Case("flux3", wide("flux3"), {}, "nf4-bnb")]
    qwen_21 = "qwen-image-2.1"
    cases += [Case(qwen_21, wide(qwen_21), full, half=True), Case(qwen_21, wide(qwen_21), {}, "int8-torchao")]
    plus = "qwen-image-edit-plus"
    cases += [Case(plus, wide(plus), full, half=True), Case(plus, wide(plus), {}, "nf4-bnb")]
    expected = [case.step(case.make()) for case in cases]
    torch.compiler.reset()  # imports what both processes need

    def check(rank: int) -> None:
        prepare_fork()
        options = {"rank": rank, "world_size": 2, "timeout": timedelta(minutes=5)}
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", **options)
        for case, result in zip(cases, expected, strict=True):
            case.check(result)
        torch.distributed.barrier()

    in_two_forks(check)


@dataclass
class Case:
    """A model whose loss, prediction and gradients equal the whole model's. half: whether full rank runs under
    autocast."""

    kind: str
    folder: Path
    adapter: dict
    base: str | None = None
    half: bool = False
    compiled: bool = False

    def make(self) -> torch.nn.Module:
        model = adapted(self.kind, self.folder, self.base, torch.float32, **self.adapter).train()
        family, task = KINDS[self.kind]
        checkpoint_blocks(model, family.blocks(model, task))
        return model

    def step(self, model: torch.nn.Module) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            return step(self.kind, model)

    def check(self, expected: tuple[torch.Tensor, ...]) -> None:
        model, (family, task), dtypes = self.make(), KINDS[self.kind], set()
        total = sum(map(stored_bytes, model.parameters()))
        if self.compiled:
            compile_blocks(family.blocks(model, task), "eager", lambda text: None)
        gathered = torch.bfloat16 if self.half else None
        hosted, is_quanto = self.base == "nf4-bnb", self.base == "int8-quanto"
        parallel = Parallel(strategy="fsdp2", cpu_offload=hosted, reshard_after_forward=not is_quanto)
        wrap.shard_model(model, family, task, {}, parallel, torch.device("cpu"), gathered)
        assert all(isinstance(weight, DTensor) for weight in model.parameters())
        assert sum(stored_bytes(local(weight)) for weight in model.parameters()) < 0.51 * total

        def look(part: torch.nn.Module, _: object) -> None:
            for weight in part.parameters(recurse=False):
                dtypes.add((isinstance(part, wrap.AUTOCAST), weight.dtype))

        for part in family.blocks(model, task)[0].modules():
            if self.half:
                part.register_forward_pre_hook(look)
        errors_found = errors(self.step(model), expected)
        assert errors_found == pytest.approx([0, 0, 0], abs=2**-8 if self.half else 1e-5), self
        assert not self.half or dtypes == {(True, torch.bfloat16), (False, torch.float32)}


@pytest.mark.parametrize(
    ("kind", "adapter", "settings"),
    [
        long("t2i", {"rank": 4, "dropout": 0.0}, {"base_precision": "nf4-bnb"}),
        long("sana", {"type": "full"}, {"cpu_offload": True, "precision": "bfloat16"}),
        long("flux3", {"type": "full"}, {}),  # with blocks that do not compute
    ],
)
def test_two_processes_share_a_model(
    make_config, make_set, wide, tmp_path, monkeypatch, kind, adapter, settings
) -> None:
    sharded = tmp_path / "sharded"

    def shard_model(model, *parts, real=wrap.shard_model):
        real(model, *parts)
        assert all(isinstance(weight, DTensor) for weight in model.parameters())
        sharded.touch()

    monkeypatch.setattr("trainer.setup.prepare.shard_model", shard_model)
    settings = dict(settings)
    parallel = FSDP | {key: settings.pop(key) for key in ("cpu_offload",) if key in settings}
    look = {"eval_samples": 2, "eval_sigmas": [0.5], "every": 2}
    common = {"steps": 2, "caption_dropout": 0.3, "adapter": adapter, "batch_size": 2, "validation": look, **settings}
    common |= {"checkpoint_every": 2}
    common |= {"ema": {"decay": 0.5, "warmup": "none", "validate": True}}
    alone = make_config(kind, name="alone", accumulate=4, **common)
    two = make_config(kind, name="two", accumulate=2, parallel=parallel, **common)
    if "base_precision" in settings:
        for config in (alone, two):
            object.__setattr__(config.model, "path", str(wide("kandinsky5-image-t2i")))
    make_set(alone)
    make_set(two)
    train(alone)
    assert on_ranks(write(two, tmp_path))["done"] == 2
    assert sharded.exists()
    rounded = "precision" in settings  # weights that differ in their last bits may be two bfloat16 numbers
    assert lines(two) == pytest.approx(lines(alone), rel=1e-4 if rounded else 1e-5)
    assert lines(two, "grad_norm") == pytest.approx(lines(alone, "grad_norm"), rel=1e-3 if rounded else 1e-4)
    assert lines(two, "eval_loss") == pytest.approx(lines(alone, "eval_loss"), rel=2e-3 if rounded else 1e-4)
    check_shown(two, alone, 0)
    check_shown(two, alone, 2, 0.1 if rounded else 1e-3)
    check_result(two, alone)


def test_one_process_has_nothing_to_share(make_config, make_set, program) -> None:
    common = {"steps": 1, "validation": {"eval_samples": 0, "every": 2}}
    plain, offloaded = (make_config(parallel=FSDP | more, **common) for more in ({}, {"cpu_offload": True}))
    make_set(plain)
    code, report, log = program(offloaded)
    assert code == USAGE and LOADS not in log and "train.parallel.cpu_offload" in report["error"]["message"]
    assert "train.offload.blocks" in report["error"]["next_step"]
    code, _, log = program(plain)
    assert code == OK and "not sharded" in log


FULL = ("sana", {"type": "full"}, {"parallel": FSDP, "ema": {"decay": 0.9}, "gradient_checkpointing_interval": 2})


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "adapter", "settings", "last"),
    [long("i2v", {"rank": 4}, {"ema": {"decay": 0.9, "warmup": "none"}}, 4), (*FULL, 2), long(*FULL, 4)],
    ids=["ddp", "fsdp2", "fsdp2 on four"],
)
def test_a_run_goes_on_with_another_number_of_processes(
    ready, make_config, make_set, tmp_path, kind, adapter, settings, last
) -> None:
    """2, 1 and 4 processes (for a shared model 2, in the long form 4), with the samples and noise of one process."""
    plan = [2, 1, last]
    path = tmp_path / "pipeline.yaml"
    common = {"adapter": adapter, "caption_dropout": 0.3, "checkpoint_every": 2, **settings}
    alone = ready(kind, name="alone", accumulate=4, steps=2 * len(plan), **common)
    make_set(make_config(kind, name="elastic", **common))
    train(alone)
    for steps, ranks in zip(range(2, 9, 2), plan, strict=False):
        elastic = make_config(kind, name="elastic", accumulate=4 // ranks, steps=steps, **common)
        write(elastic, path)
        report = on_ranks(path, (OK,) * ranks)
        assert (report["done"], report["skipped"]) == (2, steps - 2)
    assert lines(elastic) == pytest.approx(lines(alone), rel=2e-4)
    check_result(elastic, alone)
