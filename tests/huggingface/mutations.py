"""Mutations of checkpoint directories: values, keys, texts, bytes, tensors and files."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

Mutation = Callable[[Path], None]
"""Changes one file of a directory."""

# Values that a reader may not expect: of another type, out of bounds, or not finite.
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 64, 65, 2**31, 2**63, 10**40, -(10**40),
    0.0, -0.0, 0.5, 1.0, -2.5, 1e-320, 1e308, float("nan"), float("inf"), -float("inf"),
    "", "2", "1.0", "true", "llama", "<end>", "{{", "{{ 1 / 0 }}", "{{ raise_exception('no') }}",
    "../config.json", "/etc/passwd", "a\x00b", "\ud800", "é" * 300,
    [], [None], [0], [-1], [1, 2], ["full_attention"] * 2, ["sliding_attention"] * 2, [[]], [{}],
    {}, {"a": 1}, {"": None}, {"rope_type": "default"}, {"full_attention": {"rope_theta": 5.0}},
    {"rope_type": "linear", "factor": 0}, {"type": "llama3", "factor": 8, "rope_theta": "x"},
]  # fmt: skip

# Keys that readers look for, and that the file may lack.
KEYS = [
    "architectures", "head_dim", "sliding_window", "use_sliding_window", "layer_types",
    "max_window_layers", "rope_theta", "rope_scaling", "rope_parameters", "eos_token_id",
    "bos_token_id", "pad_token_id", "num_experts", "num_local_experts", "id2label", "num_labels",
    "is_causal", "quantization_config", "tokenizer_class", "auto_map", "dtype", "torch_dtype",
    "transformers_weights", "per_layer_config", "chat_template", "eos_token", "unk_token",
    "model_max_length", "added_tokens_decoder", "additional_special_tokens", "added_tokens",
    "normalizer", "post_processor", "truncation", "padding", "decoder", "weight_map", "metadata",
    "r", "lora_alpha", "use_dora", "rank_pattern", "model_type", "is_local", "processor_class",
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "type",
    "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
]  # fmt: skip

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
BYTES = [
    b"", b"\x00" * 64, b"\xff" * 64, b"{}", b"[]", b"null", b"7", b'"x"', b"{", b"[" * 100_000,
    b'{"a":' * 100_000, LFS_POINTER, "{}".encode("utf-16"), b"\xef\xbb\xbf{}", b"1" * 5000,
    b"\x80\x04",
]  # fmt: skip


def _nodes(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every object, list and value, in the order of the file."""
    yield path
    children = enumerate(tree) if isinstance(tree, list) else ()
    for key, child in tree.items() if isinstance(tree, dict) else children:
        yield from _nodes(child, (*path, key))


def _parent(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree


@st.composite
def json_mutations(draw: Any, file: Path, *, nodes: int = 200) -> Mutation:
    """Replaces, adds or deletes a value of a JSON file, among its first `nodes` ones."""
    tree = json.loads(file.read_text())
    paths = list(_nodes(tree))[1:nodes]
    objects = [(), *(p for p in paths if isinstance(_parent(tree, (*p, None)), dict))]
    kind = draw(st.sampled_from(["replace", "replace", "add", "delete"]))
    changed = copy.deepcopy(tree)
    if kind == "add":
        place = draw(st.sampled_from(objects))
        _parent(changed, (*place, None))[draw(st.sampled_from(KEYS))] = draw(
            st.sampled_from(VALUES)
        )
    else:
        path = draw(st.sampled_from(paths))
        if kind == "delete":
            del _parent(changed, path)[path[-1]]
        else:
            _parent(changed, path)[path[-1]] = draw(st.sampled_from(VALUES))
    text = json.dumps(changed)
    return lambda directory: _write(directory / file.name, text.encode("ascii"))


@st.composite
def byte_mutations(draw: Any, file: Path) -> Mutation:
    """Replaces, truncates or removes a file, or changes one of its bytes."""
    content = file.read_bytes()
    kind = draw(st.sampled_from(["replace", "truncate", "flip", "unlink", "directory", "loop"]))
    if kind == "replace":
        content = draw(st.sampled_from(BYTES))
    if kind == "truncate":
        content = content[: draw(st.integers(0, len(content) - 1))]
    if kind == "flip":
        # Early bytes are structure more often than late ones.
        place = draw(st.integers(0, min(len(content), 4000) - 1))
        byte = content[place] ^ (1 << draw(st.integers(0, 7)))
        content = content[:place] + bytes([byte]) + content[place + 1 :]

    def mutate(directory: Path) -> None:
        path = directory / file.name
        path.unlink()
        if kind == "directory":
            path.mkdir()
        elif kind == "loop":
            path.symlink_to(path)
        elif kind != "unlink":
            path.write_bytes(content)

    return mutate


@st.composite
def header_mutations(draw: Any, file: Path) -> Mutation:
    """Changes the header of a safetensors file: a dtype, shape, offset, or its length."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    path = draw(st.sampled_from(list(_nodes(header))[1:]))
    values = [*VALUES, "I8", "F64", "BF16", "F8_E4M3", "BOOL", [2**40, 2**40], [0], [8, 8]]
    _parent(header, path)[path[-1]] = draw(st.sampled_from(values))
    text = json.dumps(header).encode("ascii")
    length = draw(st.sampled_from([len(text)] * 6 + [0, 7, len(text) + 9, 2**62]))
    changed = length.to_bytes(8, "little") + text + content[8 + size :]
    return lambda directory: _write(directory / file.name, changed)


@st.composite
def tensor_mutations(draw: Any, file: Path) -> Mutation:
    """Removes, adds, reshapes, casts or spoils a tensor of a valid safetensors file."""
    tensors = load_file(file)
    name = draw(st.sampled_from(sorted(tensors)))
    value = tensors[name]
    nan = value.copy()
    nan.flat[-1] = np.nan
    changes: dict[str, dict[str, np.ndarray] | None] = {
        "remove": None,
        "rename": {f"{name}_": value},
        "transpose": {name: np.ascontiguousarray(value.T)},
        "shorten": {name: value[:-1]},
        "flatten": {name: value.reshape(-1)},
        "integers": {name: value.astype(np.int32)},
        "bfloat16": {name: value.astype(ml_dtypes.bfloat16)},
        "doubles": {name: value.astype(np.float64) * 1e300},
        "not a number": {name: nan},
        "surplus": {name: value, "odd": value},
    }
    del tensors[name]
    tensors |= changes[draw(st.sampled_from(list(changes)))] or {}
    return lambda directory: save_file(tensors, directory / file.name, metadata={"format": "pt"})


def mutations(file: Path) -> st.SearchStrategy[Mutation]:
    """Mutations of a file, by its kind."""
    if file.suffix == ".json":
        return st.one_of(json_mutations(file), json_mutations(file), byte_mutations(file))
    if file.suffix == ".safetensors":
        return st.one_of(tensor_mutations(file), header_mutations(file), byte_mutations(file))
    return byte_mutations(file)


def mutated(source: Path, mutation: Mutation, target: Path) -> Path:
    """Copies a checkpoint in place of an earlier copy and changes it."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    mutation(target)
    return target


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
