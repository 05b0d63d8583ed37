"""Arguments that would undo a check are refused however vLLM lets them be written."""

import argparse
import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from jaxrl.bridge.servers import arguments as checked
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


OTHERS = (
    "--model-impl",
    "--ssl-ciphers",
    "--hf-token",
    "--port-range",
    "--max-num-seqs",
    "--dtype",
)


def read_by_vllm(arguments: list[str]) -> dict[str, str]:
    """Parses as vLLM does: underscores are dashes before "=" and ".", prefixes are options."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for name in (*checked._RESERVED, *OTHERS):
        parser.add_argument(name, nargs="?", const="given", default=argparse.SUPPRESS)
    dashed = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        name = name.partition(".")[0].replace("_", "-") if name.startswith("--") else name
        dashed.append(name + equals + value)
    return vars(parser.parse_known_args(dashed)[0])


@st.composite
def spellings(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from([*checked._RESERVED, *OTHERS]))
    name = name[: draw(st.integers(1, len(name)))] + draw(st.sampled_from(["", "", "-x", ".y"]))
    name = "".join(
        draw(st.sampled_from("-_")) if c == "-" and i > 1 else c for i, c in enumerate(name)
    )
    return name + draw(st.sampled_from(["", "", "=", "=0.0.0.0"]))


@settings(max_examples=2000)
@given(st.lists(spellings() | st.text(max_size=8), max_size=4))
def test_what_vllm_reads_as_reserved_is_refused(arguments: list[str]) -> None:
    reserved = {name[2:].replace("-", "_") for name in checked._RESERVED}
    with contextlib.suppress(ValueError):
        check_arguments(arguments)
        with contextlib.suppress(argparse.ArgumentError, SystemExit):
            assert not reserved & read_by_vllm(arguments).keys()
