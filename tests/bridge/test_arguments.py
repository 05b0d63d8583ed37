"""Arguments that would undo a check are refused however vLLM lets them be written."""

from pathlib import Path

import pytest

from jaxrl.bridge.servers.arguments import check_arguments
from jaxrl.bridge.servers.launch import LocalServer, ServerOptions
from jaxrl.commands.serve.command import ServeConfig
from jaxrl.config import toml_file
from jaxrl.config.toml_file import ConfigError
from jaxrl.config.training import Config

RESERVED = [
    ("--host", "0.0.0.0"),
    ("--host=0.0.0.0",),
    ("--hos", "0.0.0.0"),
    ("--skip-tokenizer-init", "--host", "::"),
    ("--port", "80"),
    ("--uds", "/tmp/socket"),
    ("--grpc",),
    ("--grpc_port", "81"),
    ("--headless",),
    ("--api-key", "x"),
    ("--api_key=x",),
    ("--config", "vllm.yaml"),
    ("--ssl_keyfile=k",),
    ("--root-path", "/x"),
    ("--model", "another"),
    ("--max_model_len", "8"),
    ("--max-model-l", "8"),
    ("--weight-transfer-config.backend", "nccl"),
]


@pytest.mark.parametrize("arguments", RESERVED, ids=" ".join)
def test_reserved_arguments_are_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    name = next(a for a in arguments if a not in ("--skip-tokenizer-init", "::")).partition("=")[0]
    message = name.partition(".")[0].replace("_", "-") + " cannot be given to vLLM; "
    options = ServerOptions(python=Path("none"), dtype="float32", arguments=arguments)
    with pytest.raises(ValueError, match=message):
        LocalServer(tmp_path, options, log=tmp_path / "log")
    assert not (tmp_path / "log").exists()
    with pytest.raises(ConfigError, match=f"vllm_args.*{message}"):
        toml_file.validate(ServeConfig, {"vllm_args": list(arguments)})
    with pytest.raises(ConfigError, match=f"sampler.vllm_args.*{message}"):
        toml_file.load(Config, overrides=[("sampler.vllm_args", ",".join(arguments))])


def test_other_arguments_pass() -> None:
    check_arguments(
        ("--skip-tokenizer-init", "-O3", "-tp", "2", "--model-impl", "transformers", "--ssl-x=1")
    )
