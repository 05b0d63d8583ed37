"""A checkpoint imported and exported again is the same, bit for bit; what does not fit is named."""

import contextlib
import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl import huggingface
from jaxrl.bridge.source import ParamsSource
from jaxrl.core.casts import as_served
from jaxrl.core.precision import parse
from jaxrl.huggingface import pretrained, tokenizer
from jaxrl.huggingface.files import SINGLE
from jaxrl.models import spec
from jaxrl.models.parameters import param_specs
from tests.models.references import FAMILIES, assert_same_model, checkpoint
from tests.tiny import write_checkpoint


def tensors(directory):
    """Every tensor of a directory as bits, and the file that holds it."""
    values, files = {}, {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, value in load_file(file).items():
            assert name not in values
            values[name], files[name] = (str(value.dtype), value.tobytes()), file.name
    return values, files


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    checkpoint(directory, "qwen3", tied=True)
    return directory


@pytest.fixture
def broken(tiny, tmp_path):
    """A copy to damage."""
    return shutil.copytree(tiny, tmp_path / "broken")


@pytest.mark.parametrize("shard", [None, 20_000], ids=["single", "sharded"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_round_trip_is_bit_identical(family, dtype, tied, shard, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    options = {} if shard is None else {"max_shard_size": shard}
    checkpoint(before, family, tied=tied, dtype=dtype, **options)
    config, params = huggingface.load(before, dtype=None)
    (stored,) = {x.dtype for x in jax.tree.leaves(params)}
    limit = {} if shard is None else {"max_shard_bytes": shard}
    huggingface.save(after, params, config, dtype=stored, **limit)

    expected, got = tensors(before), tensors(after)
    assert got[0] == expected[0]
    assert (len(set(got[1].values())) > 1) == (shard is not None)
    if shard is not None:
        index = json.loads((after / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == got[1]
        original = json.loads((before / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == original["metadata"]["total_size"]
        for file in set(got[1].values()):
            names = [name for name, where in got[1].items() if where == file]
            assert len(names) == 1 or sum(len(got[0][name][1]) for name in names) <= shard


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_an_export(family, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    reference = checkpoint(before, family, tied=False)
    config, params = huggingface.load(before, dtype=None)
    huggingface.save(after, params, config, dtype=np.dtype("float32"), max_shard_bytes=30_000)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        after, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.dtype == torch.float32
    assert tensors(after)[0] == tensors(before)[0]
    assert_same_model(again, reference)


def test_correction_stays_f32(tmp_path):
    before, after, dtype = tmp_path / "before", tmp_path / "after", np.dtype(jnp.bfloat16)
    checkpoint(before, "glm4_moe", tied=False, dtype=torch.bfloat16)
    content = load_file(before / SINGLE)
    for name in (name for name in content if name.endswith("correction_bias")):
        content[name] = content[name].astype(np.float32) + np.float32(2**-12)  # no bf16 number
    extra = {"model.layers.3.embed_tokens.weight": content["lm_head.weight"]}
    save_file(content | extra, before / SINGLE, metadata={"format": "pt"})
    config, params = huggingface.load(before, dtype=dtype)
    huggingface.save(after, params, config, dtype=dtype)
    save_file(content, before / SINGLE)
    assert tensors(after)[0] == tensors(before)[0]
    published = dict(ParamsSource(params, param_specs(config), dtype=dtype))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert published[name].tobytes() == content[name].tobytes()
    served = as_served(params, parse("bf16"))["layers"]["correction_f32"]
    assert np.asarray(served[0]).tobytes() == content[name].tobytes()


@pytest.mark.parametrize(
    ("family", "name", "key"),
    [
        ("glm4_moe", "model.layers.3.eh_proj.weight", "num_nextn_predict_layers"),
        ("deepseek_v3", "model.layers.3.shared_head.head.weight", "num_nextn_predict_layers"),
        ("qwen3_next", "mtp.fc.weight", "num_nextn_predict_layers"),
        ("qwen3_5_text", "mtp.layers.0.mlp.up_proj.weight", "mtp_num_hidden_layers"),
        ("qwen3_5_moe_text", "mtp.layers.0.mlp.experts.down_proj", "mtp_num_hidden_layers"),
    ],
)
def test_multi_token_prediction_layers_are_exported(family, name, key, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    checkpoint(before, family, tied=False)
    content = load_file(before / SINGLE)
    extra = {name: np.arange(6, dtype=np.float32).reshape(2, 3).astype(jnp.bfloat16)}
    save_file(content | extra, before / SINGLE, metadata={"format": "pt"})
    raw = json.loads((before / "config.json").read_text()) | {key: 1}
    (before / "config.json").write_text(json.dumps(raw))
    config, params = huggingface.load(before, dtype=None)
    source = huggingface.Checkpoint(before)
    settings = {"dtype": np.dtype("float32"), "max_shard_bytes": 30_000, "source": source}
    huggingface.save(after, params, config, **settings)
    assert tensors(after)[0] == tensors(before)[0]
    assert json.loads((after / "config.json").read_text())[key] == 1
    assert huggingface.load(after, dtype=None)[0] == config
    _, info = transformers.AutoModelForCausalLM.from_pretrained(after, output_loading_info=True)
    assert not info["missing_keys"]
    assert set(info["unexpected_keys"]) <= {name}
    with pytest.raises(ValueError, match=f"holds tensors that must be kept .'{name}'."):
        huggingface.save(before, params, config, **settings)
    with pytest.raises(ValueError, match=f"blocks=e4m3: .*'{name}'.*leave blocks out"):
        huggingface.save(after, params, config, blocks="e4m3", **settings)
    # Without their file, from another model, and in a reward model there are none.
    other = dataclasses.replace(config, bos_id=5)
    scorer = dataclasses.replace(config, scored=True)
    score = {"score": np.zeros((1, 32), np.float32)}
    scored = {path: value for path, value in params.items() if path != "head"} | score
    cases = [(config, params, None), (other, params, source), (scorer, scored, source)]
    for one, own, given in cases:
        huggingface.save(after, own, one, source=given, dtype=np.dtype("float32"))
        assert name not in tensors(after)[0]
        assert json.loads((after / "config.json").read_text()).get(key, 0) == 0


def test_load_casts_and_puts_each_parameter(tiny):
    seen = {}

    def put(path, array):
        seen[path] = array
        return path

    config, params = huggingface.load(tiny, dtype=np.dtype("float16"), put=put)
    specs = spec.flatten(param_specs(config))
    assert list(seen) == list(specs)
    assert {path: x.shape for path, x in seen.items()} == {p: s.shape for p, s in specs.items()}
    assert {x.dtype for x in seen.values()} == {np.dtype("float16")}
    assert params["layers"]["q"] == "layers/q"


def test_save_replaces_an_earlier_save(tiny, tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    (tmp_path / "source" / "generation_config.json").write_text('{"eos_token_id": [1]}')
    config, params = huggingface.load(tiny, dtype=None)
    out = tmp_path / "out"
    f32 = np.dtype("float32")
    huggingface.save(out, params, config, dtype=f32, max_shard_bytes=30_000)
    source = huggingface.Checkpoint(tmp_path / "source")
    huggingface.save(out, params, config, dtype=f32, source=source)
    assert sorted(x.name for x in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert tensors(out)[0] == tensors(tiny)[0]


def test_generation_config_adds_end_ids(broken):
    config = huggingface.Checkpoint(broken).config
    (broken / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    assert (config.eos_ids, tokenizer.read_end_ids(broken, config)) == ((1,), (1, 7))


def change(directory, function):
    """Applies `function` to the dict of a checkpoint's tensors."""
    file = directory / "model.safetensors"
    content = load_file(file)
    function(content)
    save_file(content, file, metadata={"format": "pt"})


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda x: x.pop(QUERY), f"misses 1 tensor.*{QUERY}"),
        (lambda x: x.update(score=x[QUERY]), "has surplus 1 tensor.*score"),
        (lambda x: x.update({QUERY: x[QUERY][:-1]}), rf"{QUERY}.*\(63, 32\).*\(64, 32\)"),
        (lambda x: x.update({QUERY: x[QUERY].T.copy()}), rf"{QUERY}.*\(32, 64\)"),
        (lambda x: x.update({QUERY: x[QUERY].astype(np.int8)}), f"{QUERY}.*I8"),
        (
            lambda x: x.update({"lm_head.weight": x["model.embed_tokens.weight"] + 1}),
            "lm_head.weight.*differs",
        ),
    ],
)
def test_mismatched_tensor_is_named(damage, named, broken):
    change(broken, damage)
    with pytest.raises(ValueError, match=named):
        huggingface.load(broken, dtype=None)


def test_harmless_surplus_is_ignored(broken):
    def add(content):
        content["lm_head.weight"] = content["model.embed_tokens.weight"].copy()
        content["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    change(broken, add)
    huggingface.load(broken, dtype=None)


def test_a_damaged_file_is_named(broken):
    file = broken / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:-4], content[:100], b"", b"\xff" * 64):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors is not a readable"):
            huggingface.load(broken, dtype=None)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors does not exist"):
        huggingface.load(broken, dtype=None)
    (broken / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        huggingface.load(broken, dtype=None)


def test_missing_directory_error_says_where():
    with pytest.raises(ValueError, match=r"'org/model' is not a directory; relative paths start"):
        _ = huggingface.Checkpoint("org/model").tokenizer


def test_a_directory_around_a_model_is_explained(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no config\.json; did you mean '.*/model'\?"):
        _ = huggingface.Checkpoint(tmp_path).tokenizer


def test_a_damaged_index_is_named(tmp_path):
    checkpoint(tmp_path, "qwen3", tied=True, max_shard_size=30_000)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = index["weight_map"][QUERY]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names tensor 'ghost'"):
        huggingface.load(tmp_path, dtype=None)
    index["weight_map"]["ghost"] = "ghost.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"ghost\.safetensors"):
        huggingface.load(tmp_path, dtype=None)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "", "."])
def test_an_index_that_points_outside_is_refused(name, tmp_path):
    checkpoint(tmp_path / "model", "qwen3", tied=True, max_shard_size=30_000)
    path = tmp_path / "model" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shutil.copy(tmp_path / "model" / index["weight_map"][QUERY], tmp_path / "outside.safetensors")
    index["weight_map"][QUERY] = name
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"index\.json: weight_map names the file '{name}'"):
        huggingface.load(tmp_path / "model", dtype=None)


def test_file_beside_a_foreign_index_is_refused(tiny, tmp_path):
    # transformers would read the single file, and a vLLM server the others.
    checkpoint(tmp_path, "qwen3", tied=True, max_shard_size=30_000)
    shutil.copy(tiny / "model.safetensors", tmp_path)
    with pytest.raises(ValueError, match=r"both model\.safetensors and model\.safetensors\.index"):
        huggingface.load(tmp_path, dtype=None)
    tensors = load_file(tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    huggingface.load(tmp_path, dtype=None)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_git_lfs_pointer_is_named(file, tmp_path):
    directory = write_checkpoint(tmp_path)
    (directory / file).write_text(POINTER)
    with pytest.raises(ValueError, match=rf"/{file} is a Git LFS pointer.*`git lfs pull`"):
        pretrained.load(directory)


def test_pickled_weights_are_refused_without_being_read(broken):
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only pickled weights .pytorch_model\.bin"):
        huggingface.load(broken, dtype=None)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", "[]", r"config\.json holds \[\]"),
        ("config.json", "[" * 100_000, r"config\.json is not JSON"),
        ("generation_config.json", "[]", r"generation_config\.json holds \[\]"),
        ("generation_config.json", '{"eos_token_id": "1"}', r"n_config\.json: eos_token_id='1'"),
        ("generation_config.json", '{"eos_token_id": 64}', r"n_config\.json: eos_token_id=64"),
        ("tokenizer.json", "{}", r"/tokenizer\.json: transformers cannot load"),
        ("tokenizer.json", "7", r"/tokenizer\.json: transformers cannot load"),
        ("tokenizer_config.json", "7", r"tokenizer_config\.json holds 7"),
        ("tokenizer_config.json", '{"eos_token": 5}', r"tokenizer_config\.json.*: transformers"),
        ("tokenizer_config.json", '{"eos_token": "new"}', "token .* has the id 6. but vocab_size"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template=5 is not a valid text"),
        ("tokenizer_config.json", '{"chat_template": "\\ud800"}', "is not a valid text"),
        ("special_tokens_map.json", "null", r"special_tokens_map\.json holds None"),
        ("special_tokens_map.json", '{"pad_token": 5}', r"special_tokens_map\.json.*transformers"),
        ("model.safetensors.index.json", "{}", r"index\.json: weight_map is missing"),
        ("model.safetensors.index.json", '{"weight_map": [1]}', r"index\.json: weight_map=\[1\]"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', "weight_map.a=1"),
    ],
)
def test_malformed_file_is_named(file, content, named, tmp_path):
    directory = write_checkpoint(tmp_path)
    (directory / file).write_text(content)
    with pytest.raises(ValueError, match=named):
        pretrained.load(directory)


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"decoder": {"type": "Strip", "content": "<", "start": 100, "stop": 100}},
    ],
    ids=lambda part: next(iter(part)),
)
def test_a_tokenizer_that_panics_is_named(part, tmp_path):
    file = write_checkpoint(tmp_path) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | part))
    with pytest.raises(ValueError, match=r"tokenizer\.json.*PanicException"):
        _ = huggingface.Checkpoint(tmp_path).tokenizer


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    directory = write_checkpoint(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    with pytest.raises(ValueError, match="has no tokenizer"):  # transformers makes an empty one
        _ = huggingface.Checkpoint(directory).tokenizer


def test_save_refuses_parameters_of_another_config(tiny, tmp_path):
    config, params = huggingface.load(tiny, dtype=None)
    f32 = np.dtype("float32")
    with pytest.raises(ValueError, match="score"):
        huggingface.save(tmp_path, {**params, "score": params["embed"]}, config, dtype=f32)
    with pytest.raises(ValueError, match=r"'head' has shape \(95, 32\)"):
        huggingface.save(tmp_path, {**params, "head": params["embed"][1:]}, config, dtype=f32)
    with pytest.raises(ValueError, match=r"'embed' has shape \(95, 32\)"):
        huggingface.save(tmp_path, {**params, "embed": params["embed"][1:]}, config, dtype=f32)


@pytest.mark.parametrize("name", [None, "Foreign"], ids=["known class", "only its own"])
def test_no_code_of_a_checkpoint_is_run(name, tmp_path):
    directory = write_checkpoint(tmp_path)
    ran = directory / "ran"
    (directory / "foreign.py").write_text(f"open({str(ran)!r}, 'w')\nclass Foreign: pass\n")
    for file, key in (("tokenizer_config.json", "AutoTokenizer"), ("config.json", "AutoConfig")):
        described = json.loads((directory / file).read_text())
        described["auto_map"] = {key: "foreign.Foreign"}
        if name is not None and key == "AutoTokenizer":
            described["tokenizer_class"] = name
        (directory / file).write_text(json.dumps(described))
    _ = huggingface.Checkpoint(directory).config
    with contextlib.suppress(ValueError):  # transformers' word that it would have to run code
        _ = huggingface.Checkpoint(directory).tokenizer
    assert not ran.exists()
