"""checks: every check of training that needs neither weights nor a set of this configuration. `latentpress run` starts
it before its first stage, so that training does not fail with an invalid setting after hours of encoding."""

from contextlib import ExitStack

from cache.sets.set_lookup import open_configured_set
from cache.sets.training_checks import check_before_stages, require_trackers
from schemas.activities import activity
from schemas.cli.console import Console, Options, Report, make_app
from schemas.cli.report import for_each_expert
from schemas.cli.starting import garbage_collection_paused
from schemas.config.pipeline import Config
from schemas.devices import find_device
from trainer.run.resume import check_signature
from trainer.run.run_state import config_signature, find_checkpoint, find_resume_state


@for_each_expert()
def run(config: Config, options: Options, console: Console) -> Report:
    knows_model = check_before_stages(config, console.warn, is_run=True)
    require_trackers(config.train)
    with ExitStack() as stack:
        data, schedule = None, None
        if config.train.set != "current":
            data = open_configured_set(config, lambda message: None)  # warnings were shown above
            stack.callback(data.close)
            schedule = data.make_schedule(config.train)
            find_resume_state(config, data, schedule)
        elif checkpoint := find_checkpoint(config.run_folder, config.train.resume):
            signature, saved_methods = config_signature(config), checkpoint.state.terms["methods"]
            if "regularization" in saved_methods:  # from the set's regularization data, which need not be configured
                signature["methods"].setdefault("regularization", saved_methods["regularization"])
            check_signature(checkpoint, signature)
        with garbage_collection_paused(), activity("loading torch and diffusers", at_once=True):
            from trainer.attention import choose_attention
            from trainer.families.base import module_of
            from trainer.memory.card_fit import list_buckets
            from trainer.setup.checks import check_options, check_training

        buckets = (
            [bucket.name for bucket in schedule.buckets]
            if schedule
            else list_buckets(config.model, config.datasets, None)[0]
        )
        family, device = module_of(config.model.family_spec), find_device(options.device or config.train.device)
        if knows_model:
            check_training(config, family, device, console.warn, buckets, data)
            choose_attention(config, family, device)
        else:
            check_options(config, device, buckets)
    return Report("checks", dry_run=options.dry_run, what="checks")


app = make_app("checks", "Check the settings and files of training before anything is encoded.", run)

if __name__ == "__main__":
    app(prog_name="latentpress checks")
