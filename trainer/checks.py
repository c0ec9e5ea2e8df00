"""checks: every check of training that needs neither weights nor a set. `latentpress run` starts it before its first
stage, so that training refuses nothing after hours of encoding."""

from cache.models.weights import WeightsError
from cache.runs.training_checks import check_before_stages, require_trackers
from schemas.activities import activity
from schemas.cli.console import NOT_DIVIDED, Console, Options, Report, make_app
from schemas.cli.report import for_each_expert
from schemas.cli.starting import garbage_collection_paused
from schemas.config.pipeline import Config
from schemas.devices import find_device
from trainer.run.resume import check_signature
from trainer.run.run_state import check_run, config_signature, find_checkpoint


@for_each_expert()
def run(config: Config, options: Options, console: Console) -> Report:
    check_before_stages(config, console.warn, is_run=True)
    check_run(config, 1)
    require_trackers(config.train)
    if checkpoint := find_checkpoint(config):
        signature, before = config_signature(config), checkpoint.state.terms["methods"]
        if "regularization" in before:  # of a set with regularization data, which need not be configured
            signature["methods"].setdefault("regularization", before["regularization"])
        check_signature(checkpoint, signature)
    with garbage_collection_paused(), activity("loading torch and diffusers", at_once=True):
        from trainer.attention import check_attention
        from trainer.families.base import module_of
        from trainer.setup.checks import check_start

    family, device = module_of(config.model.family_spec), find_device(options.device or config.train.device)
    try:
        check_start(config, family, device)
        check_attention(config, family, device)
    except WeightsError as error:  # of a repository that can't be reached
        console.warn(f"not everything is checked before training: {error}")
    return Report("checks", dry_run=options.dry_run, what="checks")


app = make_app("checks", "Check what training needs, before anything is encoded.", run, unused=NOT_DIVIDED[:1])

if __name__ == "__main__":
    app(prog_name="latentpress checks")
