"""With a limited cache: the encoding stages that `run` starts beside training, or in turns with it."""

import threading

from cache.store.layout import ENCODE_PROGRAMS
from schemas.cli.console import Options
from schemas.config.encoding import StageName
from schemas.config.pipeline import Config
from schemas.errors import INCOMPLETE, OK
from stages.engines.stage_processes import StageProcesses


class EncodingFollowers:
    """With a limited cache, the encoding stages that run beside training, or take turns with it.

    results: of each stage, exit codes and reports. failed: stages that failed, and so ended training.
    """

    def __init__(self, config: Config, options: Options, training: StageProcesses) -> None:
        limit = None if options.dry_run else config.cache.limit
        order = config.stage_order
        self.stages = tuple(stage for stage in order if limit and stage in ENCODE_PROGRAMS.values())
        self._alternate = limit is not None and limit.alternate
        self._options, self._training = options, training
        self._processes = {stage: StageProcesses({}) for stage in self.stages}
        self._ending = False
        self.results: dict[StageName, list[tuple[int, dict]]] = {stage: [] for stage in self.stages}
        self.failed: set[StageName] = set()

    def train(self) -> tuple[int, dict]:
        """Run `train` with the encoding stages: its exit code and report."""
        return self._take_turns() if self._alternate else self._train_beside()

    def _train_beside(self) -> tuple[int, dict]:
        threads = [threading.Thread(target=self._follow, args=(stage,)) for stage in self.stages]
        for thread in threads:
            thread.start()
        try:
            return self._training.run("train", self._options)
        finally:
            self.stop()
            for thread in threads:
                thread.join()

    def _follow(self, stage: StageName) -> None:
        if self._run(stage) and not self._ending:
            self.failed.add(stage)
            self._training.stop()  # which saves a checkpoint

    def _run(self, stage: StageName) -> bool:
        """Whether it failed."""
        code, document = self._processes[stage].run(stage, self._options)
        self.results[stage].append((code, document))
        return code != OK or "error" in document

    def _take_turns(self) -> tuple[int, dict]:
        """Encode what fits, train on it, and so on."""
        done = idle = 0
        while True:
            for stage in self.stages:
                if self._run(stage) and not self._ending:
                    self.failed.add(stage)
                    return INCOMPLETE, {}
            code, document = self._training.run("train", self._options)
            if "error" in document or not document:
                return code, document
            done += document["done"]
            # What was there may be that of steps before which the run was killed: then it is encoded next.
            idle = 0 if document["done"] else idle + 1
            if self._ending or not document["remaining"] or idle > 1:
                return code, document | {"done": done}

    def stop_all(self) -> None:
        """`stop`, and training."""
        self._training.stop()
        self.stop()

    def stop(self) -> None:
        """Terminate what encodes; nothing more is started."""
        self._ending = True
        for processes in self._processes.values():
            processes.stop()
