"""Arguments of vLLM that a user may not give, because jaxrl sets or checks them."""

from collections.abc import Iterator, Mapping, Sequence

_HTTP = "the bridge talks to a server by plain HTTP, on a host and port, with a key"
# Option -> advice. vLLM takes the last of several values, so one of these would undo a check.
_RESERVED: Mapping[str, str] = {
    "--host": "use --host of jaxrl serve, which asks for a key where others can reach the server",
    "--port": "use --port of jaxrl serve",
    "--uds": _HTTP,
    "--grpc": _HTTP,
    "--grpc-port": _HTTP,
    "--headless": _HTTP,
    "--ssl-keyfile": _HTTP,
    "--ssl-certfile": _HTTP,
    "--root-path": _HTTP,
    "--api-key": "set JAXRL_API_KEY, which also protects the routes that change weights",
    "--config": "jaxrl would not check its contents; give its options one by one",
    "--model": "the model is an argument of jaxrl serve, or model.path",
    "--max-model-len": "use --max_model_len of jaxrl serve; a run sets it from its own limits",
    "--weight-transfer-config": "jaxrl sets it, so that the server takes weights from a learner",
}


def names(arguments: Sequence[str]) -> Iterator[str]:
    """Yields the options among vLLM's arguments as vLLM reads them: underscores are dashes."""
    for argument in arguments:
        name = argument.partition("=")[0].partition(".")[0]
        if name.startswith("-"):
            yield name.replace("_", "-")


def check_arguments(arguments: Sequence[str]) -> None:
    """Raises ValueError for an argument that jaxrl sets itself; vLLM takes abbreviations too."""
    for name in names(arguments):
        meant = [option for option in _RESERVED if len(name) > 2 and option.startswith(name)]
        if meant:
            option = name if name in _RESERVED else meant[0]
            raise ValueError(f"{name} cannot be given to vLLM; {_RESERVED[option]}")
