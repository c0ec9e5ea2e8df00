"""The section notify contains no URL, because a URL is a secret, and no message contains one."""

import json
from pathlib import Path
from typing import Any

import pytest

from schemas.config.loading import ConfigError, load_config

SECRET = "s3cret-t0ken"
URL = f"https://discord.com/api/webhooks/1/{SECRET}"


def load(folder: Path, notify: Any, *overrides: str) -> Any:
    dataset = {"id": "a", "instance_data_dir": "a"}
    settings = {"root": "work", "model": {"family": "sana"}, "datasets": [dataset], "notify": notify}
    (folder / "pipeline.yaml").write_text(json.dumps(settings, indent=1))
    return load_config(folder / "pipeline.yaml", overrides).notify


REFUSED = [
    URL,
    {"webhooks": URL},
    {"webhooks": [URL]},
    {"webhooks": [{"url_env": URL}]},
    {"webhooks": [{"url_env": URL.removeprefix("https://")}]},
    {"webhooks": [{"url": URL}]},
    {"webhooks": [{"url_env": "HOOK", "webhook_url": URL}]},
]


@pytest.mark.parametrize("notify", REFUSED)
def test_a_url_is_refused_with_advice_and_not_repeated(tmp_path: Path, notify: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, notify)
    message = str(caught.value)
    assert SECRET not in message + json.dumps(caught.value.to_dict())
    assert "an environment variable" in message and "pipeline.yaml:" in message


def test_a_url_in_an_override_is_refused_too(tmp_path: Path) -> None:
    for override in (f"notify.webhooks=[{{url_env: '{URL}'}}]", f"notify.webhooks=['{URL}']", f"notify={URL}"):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, {}, override)
        assert SECRET not in str(caught.value) and "environment variable" in str(caught.value)


def test_a_webhook_is_named_once_by_a_variable(tmp_path: Path) -> None:
    notify = load(tmp_path, {"webhooks": [{"url_env": "MY_HOOK"}, {"url_env": "OTHER", "events": ["failed"]}]})
    assert [hook.url_env for hook in notify.webhooks] == ["MY_HOOK", "OTHER"]
    assert notify.webhooks[0].events == ("started", "validation", "checkpoint", "finished", "failed")
    with pytest.raises(ConfigError, match=r"webhooks.1.url_env: MY_HOOK"):
        load(tmp_path, {"webhooks": [{"url_env": "MY_HOOK"}, {"url_env": "MY_HOOK"}]})
    with pytest.raises(ConfigError, match="is not the name of an environment variable"):
        load(tmp_path, {"webhooks": [{"url_env": "MY HOOK"}]})
    with pytest.raises(ConfigError, match="valid: started, validation, checkpoint, finished, failed"):
        load(tmp_path, {"webhooks": [{"url_env": "MY_HOOK", "events": ["ended"]}]})
