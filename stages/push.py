"""push: uploads a run's adapter, or model, to the Hugging Face Hub, with a model card.

<output>/<run>/hub/ has the card and its pictures. pushed.json records the last upload: equal files are not uploaded
again.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from cache.models.weights import hash_file
from cache.runs.training_run import RESULT_NOTE, ResultNote
from cache.store.json_checks import check_object, printable
from cache.store.store import Store
from schemas.cli.console import NOT_COMPUTING, Console, Options, Report, make_app
from schemas.cli.report import for_each_expert
from schemas.config.loading import ConfigError, load_config
from schemas.config.pipeline import Config
from schemas.config.section import PATTERNS, REPO
from schemas.config.training import FILE_NAMES, Hub
from schemas.errors import USAGE, LatentpressError
from schemas.identity import hash_bytes
from schemas.json_records import Record, parse_json
from stages.discovery.sources.urls import scrub_secrets
from stages.follow.card import CARD, base_model, write_card

CARD_FOLDER, PUSHED_FILE = "hub", "pushed.json"
RETRY_ADVICE = "Run `latentpress push` again: it continues, and does not upload finished files twice."
SAVE_ADVICE = "Save the result again: latentpress train"
LOGIN_ADVICE = "Log in with `hf auth login`, or set HF_TOKEN, with a token that can write to the repository."
#: Patterns of the files in a transformer's folder that diffusers saves.
MODEL_FILES = ("config.json", "diffusion_pytorch_model*.safetensors", "diffusion_pytorch_model*.safetensors.index.json")
#: Path in the repository -> the local file, or its content.
Files = Mapping[str, Path | bytes]


class NoRepository(LatentpressError):
    """Raised if neither hub.repo nor --repo is set."""

    exit_code = USAGE


class HubError(LatentpressError):
    """Raised if the result cannot be uploaded."""


class LastUpload(Record):
    """Content of pushed.json. digest: hash of the repository's name and the files."""

    repo: str
    url: str
    commit: str
    digest: str


def parse_repo(text: str) -> str:
    if not re.fullmatch(REPO, text) or len(text) > 96:
        raise typer.BadParameter(f"{text!r} is not the name of a repository; {PATTERNS[REPO]}")
    return text


@for_each_expert()
def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    repo: Annotated[
        str | None,
        typer.Option(
            "--repo", parser=parse_repo, metavar="USER/NAME", help="Repository on the Hub.  [default: hub.repo]"
        ),
    ] = None,
) -> Report:
    report, folder = Report(program="push", dry_run=options.dry_run, what="files"), config.run_folder
    repo = repo or config.hub.repo
    if repo is None:
        raise NoRepository("hub.repo is not set", "Set hub.repo to user/name, or use --repo user/name.")
    repo += f"-{config.train.experts}" if config.train.experts else ""  # one repository for each expert
    trained = _read_trained(folder, config.run_name)
    import jinja2  # noqa: F401  # a missing library is reported before other work
    import PIL  # noqa: F401

    step = _finished_step(folder)
    card_files = write_card(trained, config.hub, repo, step, folder, folder / CARD_FOLDER)
    files: dict[str, Path | bytes] = {str(path.relative_to(folder / CARD_FOLDER)): path for path in card_files}
    files |= result_files(trained, folder)
    report.details = {"repo": repo, "private": config.hub.private, "card": str(folder / CARD_FOLDER / CARD)}
    report.details["files"] = [{"file": name, "bytes": count_bytes(content)} for name, content in sorted(files.items())]
    digest = digest_files(repo, files, Store(config.root))
    last_upload = LastUpload.try_read(folder / PUSHED_FILE)
    if last_upload is not None and last_upload.digest == digest:
        report.skipped = len(files)
        report.details |= {"url": last_upload.url, "commit": last_upload.commit}
        return report
    if options.dry_run:
        report.remaining = len(files)
        return report
    size = sum(map(count_bytes, files.values())) / 2**20
    with console.activity(f"uploading {len(files)} files, {size:.1f} MiB, to {repo}"):
        url, commit = upload(config.hub, repo, files, f"Step {step} of {trained.run_name}")
    LastUpload(repo=repo, url=url, commit=commit, digest=digest).write(folder / PUSHED_FILE)
    report.done = len(files)
    report.details |= {"url": url, "commit": commit}
    return report


def _read_trained(folder: Path, name: str) -> Config:
    """Read the configuration that the run was trained with."""
    if not (folder / "config.yaml").exists():
        raise HubError(f"{folder} does not contain a trained run", "Train first: latentpress run")
    try:
        return load_config(folder / "config.yaml")
    except ConfigError as error:
        message = f"this version cannot read the configuration of run {name}: {error.message}"
        raise HubError(message, "use the version that trained the run") from error


def _finished_step(folder: Path) -> int:
    try:
        return ResultNote.read(folder / RESULT_NOTE).step
    except FileNotFoundError as error:
        raise HubError(f"the run in {folder} is not finished", "Continue the run: latentpress run") from error
    except (OSError, ValueError) as error:
        raise HubError(f"{folder / RESULT_NOTE} cannot be read: {printable(error)}", SAVE_ADVICE) from error


def result_files(trained: Config, folder: Path) -> dict[str, Path | bytes]:
    """Returns the result's files: path in the repository -> file or content. trained: configuration of the run in
    `folder`. Raises HubError if a file is missing, or is a link to a place outside the run's folder."""
    adapter, part = trained.train.adapter, trained.part
    if adapter.type != "full":
        names = [FILE_NAMES["diffusers"], *([FILE_NAMES["lycoris"]] if adapter.type == "lokr" else [])]
        paths = {name: folder / "adapter" / name for name in names}
        if trained.comfyui_file is not None:
            paths[trained.comfyui_file.name] = folder / trained.comfyui_file.name
    else:
        model = folder / "model" / part
        paths = {f"{part}/{path.name}": path for name in MODEL_FILES for path in sorted(model.glob(name))}
    if missing := [str(path) for path in paths.values() if not path.is_file()]:
        raise HubError(f"missing files of the result: {', '.join(missing)}", SAVE_ADVICE)
    if not any(name.endswith(".safetensors") for name in paths):
        raise HubError(f"{folder} does not contain trained weights", "Train first: latentpress run")
    for path in paths.values():
        if not path.resolve().is_relative_to(folder.resolve()):
            raise HubError(f"{path} is a link to a place outside {folder}", "Replace the link with the file.")
    base = base_model(trained.model)
    return {name: _without_path(path, base) if path.suffix == ".json" else path for name, path in paths.items()}


def _without_path(path: Path, base_model: str) -> bytes:
    """Returns a config.json with `base_model` as its _name_or_path, in which diffusers may store a local path."""
    try:
        content = check_object(parse_json(path.read_bytes()), "the whole")
    except ValueError as error:
        raise HubError(f"{path} cannot be read: {printable(error)}", SAVE_ADVICE) from error
    if "_name_or_path" in content:
        content["_name_or_path"] = base_model
    return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"


def digest_files(repo: str, files: Files, memo: Store) -> str:
    """Hash of the repository's name and the files. memo: store for the hashes of large files."""
    parts = [repo.encode()]
    for name, content in sorted(files.items()):
        parts += [name.encode(), content if isinstance(content, bytes) else hash_file(content, memo).encode()]
    return hash_bytes(*parts)


def count_bytes(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def upload(hub: Hub, repo: str, files: Files, message: str) -> tuple[str, str]:
    """Create the repository if it does not exist, and commit the files. Returns (URL of the repository, commit).

    Raises HubError if the repository is public and `hub.private` is true.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    api = HfApi(library_name="latentpress")
    with _explained(repo):
        url = str(api.create_repo(repo, private=hub.private, exist_ok=True))
        head = api.repo_info(repo)
        if hub.private and not head.private:
            raise HubError(
                f"{repo} is public, and hub.private is true",
                "Set hub.private to false, make the repository private on the Hub, or choose another hub.repo.",
            )
        operations = [
            CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in files.items()
        ]
        commit = api.create_commit(repo, operations, commit_message=message, parent_commit=head.sha)
    return url, commit.oid


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Context that turns errors of the Hub and the network into HubError, without the token."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError

    try:
        yield
    except LocalTokenNotFoundError as error:
        raise HubError("no token of the Hugging Face Hub was found", LOGIN_ADVICE) from error
    except HfHubHTTPError as error:
        raise _explain_status(repo, error) from None
    except (HTTPError, OSError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {_scrub(str(error))}".partition("\n")[0]
        raise HubError(f"{repo} cannot be uploaded: the connection failed ({problem})", RETRY_ADVICE) from None


def _explain_status(repo: str, error: Any) -> HubError:
    status = error.response.status_code if error.response is not None else 0
    problems = {
        401: (f"the Hugging Face Hub refuses to upload {repo}: the token is missing or invalid", LOGIN_ADVICE),
        403: (f"the token does not have write access to {repo}", LOGIN_ADVICE),
        404: (f"{repo} does not exist, or the token does not have read access to it", LOGIN_ADVICE),
        409: (f"{repo} was changed during the upload", RETRY_ADVICE),
        412: (f"{repo} was changed during the upload", RETRY_ADVICE),
    }
    problem, step = problems.get(status, (f"the Hugging Face Hub answered {status} for {repo}", RETRY_ADVICE))
    message = _scrub(error.server_message or "")
    return HubError(f"{problem}: {message}" if message else problem, step)


def _scrub(text: str) -> str:
    from huggingface_hub import get_token

    token = get_token()
    text = scrub_secrets(text)
    return text.replace(token, "***") if token else text


app = make_app(
    "push",
    "Upload the adapter or model to the Hugging Face Hub, with a model card; --dry-run writes only the card.",
    run,
    examples=["--repo user/name"],
    unused=NOT_COMPUTING,
)

if __name__ == "__main__":
    app()
