import functools
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from jaxrl.builders.recipe import make_recipe
from jaxrl.config.toml_file import ConfigError, dumps, flatten, keys, load, validate
from jaxrl.config.training import Config
from jaxrl.core.precision import parse
from jaxrl.losses import one_sequence

REQUIRED = {
    "model": {"path": "m"},
    "data": {"path": "d.jsonl"},
    "reward": {"path": ["exact_match"]},
}

FIXED = "fp32,sums=fixed"
ASLEEP = {"sampler__sleep": True, "sampler__name": "vllm"}

# What a text in a config may hold: no halves of characters, and no NUL.
text = functools.partial(st.text, st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def with_keys(**changes):
    tree = {k: dict(v) if isinstance(v, dict) else v for k, v in REQUIRED.items()}
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            tree.setdefault(section, {})[key] = value
        else:
            tree[section] = value
    return validate(Config, tree)


def test_every_key_is_documented():
    described = {name: field.description or "" for name, field in keys(Config).items()}
    assert [name for name, text in described.items() if not text.endswith(".")] == []


@given(
    st.fixed_dictionaries(
        {
            "run_dir": text(min_size=1).filter(lambda s: s != "none"),
            "loss": st.dictionaries(
                text(min_size=1).filter(lambda s: s not in ("name", "advantage")),
                st.one_of(text(), st.booleans(), st.integers(-9, 9), st.floats(-1, 1)),
                max_size=3,
            ),
            "optimizer": st.fixed_dictionaries(
                {
                    "learning_rate": st.floats(1e-12, 1e12),
                    "clip_norm": st.sampled_from(["none", 0.5, 1e-20]),
                }
            ),
            "data": st.fixed_dictionaries(
                {"path": text(min_size=1), "answer_key": st.sampled_from(["none", "a\x7f\n"])}
            ),
        }
    )
)
def test_resolved_config_round_trips(tree):
    config = validate(Config, REQUIRED | tree)
    assert validate(Config, tomllib.loads(dumps(config))) == config


@pytest.mark.parametrize(
    ("value", "text"), [([1.0, True], "[1.0, true]"), ({"a": 1}, "{a = 1}"), (float("nan"), "nan")]
)
def test_what_a_table_hands_on_is_plain(value, text):
    with pytest.raises(ConfigError) as error:
        with_keys(loss__taus=value)
    assert str(error.value) == f"loss.taus = {text}: numbers, texts and booleans only"


def test_command_line_wins_over_file(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(
        'seed = 3\n[model]\npath = "m"\n[data]\npath = "d"\neval_path = "e"\n'
        '[reward]\npath = ["exact_match"]\n[train]\nsteps = 7\ngroup_size = 4\n'
    )
    overrides = [
        ("train.steps", "9"),
        ("train.packing", "false"),
        ("data.eval_path", "none"),
        ("reward.path", "numeric_match,file.py:f"),
        ("reward.weights", "1,0.5"),
        ("optimizer.betas", "[0.8, 0.9]"),
        ("sampling.stop", "\n"),
        ("loss.clip_high", "0.28"),
        ("run_dir", "12"),
    ]
    config = load(Config, file=file, overrides=overrides)
    assert (config.seed, config.train.steps, config.train.group_size) == (3, 9, 4)
    assert config.train.packing is False
    assert config.data.eval_path is None
    assert config.reward.path == ("numeric_match", "file.py:f")
    assert config.reward.weights == (1.0, 0.5)
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.sampling.stop == ("\n",)
    assert config.loss.parameters == {"clip_high": 0.28}
    assert config.run_dir == "12"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__stpes": 3}, "train.stpes: there is no such key; did you mean train.steps?"),
        ({"train__learning_rate": 1.0}, "did you mean optimizer.learning_rate?"),
        ({"trian__steps": 3}, "trian.steps: there is no such key; did you mean train.steps?"),
        ({"optimizer__lr": 1.0}, "TRL's lr is optimizer.learning_rate here"),
        ({"train__num_generations": 4}, "TRL's num_generations is train.group_size here"),
        ({"train__steps": "3"}, "train.steps = '3': input should be a valid integer"),
        ({"train__steps": 0}, "train.steps = 0"),
        ({"train__remat": "some"}, "train.remat = 'some': input should be 'none'"),
        ({"optimizer__learning_rate": float("nan")}, "optimizer.learning_rate = nan"),
        ({"data__prompt_format": "Q:"}, "data.prompt_format = 'Q:': it lacks the prompt"),
        ({"train__updates_per_rollout": 3}, "32 x 8 = 256 completions; choose a divisor"),
        ({"train__max_kl": 0.02}, "with train.updates_per_rollout = 1 there are none"),
        ({"rollouts__replay_share": 0.01}, "train.train_batch = 32 groups is less than one"),
        (
            {"rollouts__replay_share": 0.5, "rollouts__max_staleness": 1},
            "samples ahead trains on every group once",
        ),
        ({"train__row_length": 100}, "data.max_prompt_tokens + sampling.max_tokens = 1024"),
        ({"train__microbatch_tokens": 1000}, "raise it to a multiple of 1024"),
        ({"reward__weights": [1, 2]}, "2 numbers for 1 functions in reward.path"),
        ({"reward__weights": [0]}, "gives no completion a reward, so nothing would be learnt"),
        (
            {"sampler__name": "vllm", "sampling__temperature": 0.001},
            "sampling.temperature = 0.001 and sampler.name = 'vllm': vLLM samples at .01",
        ),
        ({"optimizer__warmup_steps": 100}, "the run's 100 optimizer steps"),
        (
            {"precision": "bf16_master,moments=bf16", "optimizer__betas": [0.9, 0.999]},
            "moments=bf16 in precision = 'bf16_master,moments=bf16': a beta above 0.996",
        ),
        ({"eval__every": 5}, "eval.every = 5 needs data.eval_path"),
        ({"critic__trunk": "shared", "critic__path": "c"}, "leave critic.path out"),
        ({"critic__trunk": "shared", "lora__rank": 4}, "lora.rank = 4 keeps frozen"),
        (
            {"precision": "fp32,latent=sampler", "sampler__name": "vllm"},
            "latent=sampler applies to sampler.name = 'embedded'",
        ),
        ({"precision": "fp32,latent=sampler,sums=fixed"}, "latent=sampler and sums=fixed"),
        ({"precision": "phantom,sums=fixed"}, "sums=fixed, but compute = f32"),
        ({"sampler__name": "vllm", "sampler__tensor": 2}, "applies to a sampler in this program"),
        ({"sampler__name": "vllm_tpu", "sampler__expert": 2}, "sampler.expert = 2 applies to"),
        (
            {"sampler__name": "vllm_tpu", "sampler__url": ["http://host:1"]},
            "sampler.name = 'vllm_tpu', which uses no server",
        ),
        ({"sampler__name": "vllm_tpu", "sampler__vllm_args": ["--x"]}, "arguments of a server"),
        ({"sampler__name": "vllm_tpu", "probe__replay": True}, "probe.replay needs a server"),
        ({"sampler__name": "vllm_tpu", "train__replay_routing": True}, "without experts"),
        (
            {"sampler__name": "vllm_tpu", "mesh__fsdp": 2, "rollouts__max_staleness": 1},
            "two threads that start programs on the same devices",
        ),
        ({"sampler__sleep": True}, "one server on the learner's own GPU"),
        (
            {"sampler__sleep": True, "sampler__name": "vllm", "sampler__url": ["http://h:1"] * 2},
            "at most one sampler.url",
        ),
        ({**ASLEEP, "rollouts__max_staleness": 1}, "the server samples while the learner trains"),
        ({**ASLEEP, "mesh__fsdp": 2}, "[mesh] of 2 devices"),
        ({**ASLEEP, "lora__rank": 4, "lora__publish": "adapters"}, "base weights are lost asleep"),
        ({**ASLEEP, "probe__replay": True}, "the server scores while the learner trains"),
        ({"precision": FIXED, "sampler__name": "vllm"}, "sums=fixed applies to sampler.name"),
        (
            {"alarms__precision": FIXED, "sampler__name": "vllm"},
            f"alarms.precision = {FIXED!r}: sums=fixed applies to sampler.name",
        ),
        (
            {"alarms__precision": FIXED, "sampler__tensor": 2},
            f"alarms.precision = {FIXED!r}: sums=fixed, but sampler.tensor = 2 divides sums",
        ),
        ({"precision": "fp32,blocks=e4m3", "sampler__name": "vllm"}, "blocks=e4m3 does not apply"),
        (
            {
                "precision": "fp32,blocks=int8",
                "sampler__name": "vllm",
                "lora__rank": 4,
                "lora__publish": "adapters",
            },
            "blocks=int8 rounds merged weights",
        ),
        ({"precision": FIXED, "sampler__tensor": 2}, "sampler.tensor = 2 divides sums"),
        ({"lora__path": "adapter"}, "lora.rank = 0 trains none; set lora.rank"),
        ({"lora__rank": 4, "lora__publish": "adapters"}, "needs a server that loads them"),
        (
            {"lora__rank": 4, "lora__publish": "adapters", "lora__targets": ["lm_*"]},
            "includes lm_head, and servers apply adapters of the layers alone",
        ),
        (
            {"lora__rank": 4, "lora__publish": "adapters", "rollouts__order": "finished"},
            "set rollouts.order = 'begun'",
        ),
        (
            {"data__template": "text", "data__system_prompt": "Hi"},
            "[data] system_prompt needs a chat template",
        ),
        ({"reward__path": "brevity"}, 'write a list, reward.path = ["brevity"]'),
        ({"reward__path": ["brevity", 3]}, "reward.path = ['brevity', 3]: input should be a valid"),
        ({"optimizer__betas": [0.9]}, "optimizer.betas = [0.9]: the list is too short (Decay of"),
        ({"optimizer__betas": [0.9, 1.0]}, "optimizer.betas = [0.9, 1.0]: input should be less"),
        ({"train__profile_steps": [1]}, "train.profile_steps = [1]: the list is too short (First"),
        ({"model__path": ""}, "model.path = '': the text is empty; leave the key out"),
        ({"sampling__stop": ["x", ""]}, "sampling.stop = ['x', '']: the text is empty"),
        (
            {"model__path": "a\0"},
            "model.path = 'a\\x00': a text of valid characters without NUL is expected",
        ),
        ({"model__path": "\ud800"}, "model.path = '\\ud800': a text of valid characters"),
        ({"train__steps": 2**63}, "train.steps = 9223372036854775808: a number of at most 64 bits"),
        (
            {"train__steps": 1 << 20_000},
            "train.steps = int (too long to show): a number of at most",
        ),
        ({"optimizer__learning_rate": 1e-320}, "optimizer.learning_rate = 1e-320: a number of 32"),
        ({"loss__kl": 1e308}, "loss.kl = 1e+308: a number of 32 bits is expected"),
        ({"reward__timeout": 1e9}, "reward.timeout = 1000000000.0: input should be less than or"),
        (
            {"sampler__name": "vllm", "sampler__url": ["x:1"]},
            "sampler.url = 'x:1': expected an address, such as",
        ),
        (
            {"sampler__name": "vllm", "sampler__store": "file:///x"},
            "'file:///x' is for running servers",
        ),
        ({"sampler__name": "vllm", "sampler__store": "/mnt/x"}, "not the address of a store"),
        ({"hosts__coordinator": "host"}, "hosts.coordinator = 'host': expected HOST:PORT"),
        ({"hosts__coordinator": "a:65536"}, "hosts.coordinator = 'a:65536': expected HOST:PORT"),
        (
            {"tracking__prometheus": "a:\u00b2"},
            "tracking.prometheus = 'a:\u00b2': expected HOST:PORT",
        ),
        ({"environment__game": "x.py:G"}, "environment.game: no environment takes it; set"),
    ],
)
def test_error_names_key_and_fix(changes, message):
    with pytest.raises(ConfigError) as error:
        with_keys(**changes)
    assert message in str(error.value)


@pytest.mark.parametrize("loss", [{}, {"advantage": "opo"}, {"name": "max_rl"}])
def test_single_answers_have_no_baseline(loss):
    keys = {f"loss__{key}": value for key, value in loss.items()}
    with pytest.raises(ValueError, match=r"set train\.group_size to 2 or more"):
        make_recipe(with_keys(train__group_size=1, **keys))
    make_recipe(with_keys(train__group_size=1, loss__name="ppo"))


@pytest.mark.parametrize("loss", [{"name": "gdpo"}, {"advantage": "gdpo"}])
def test_unused_penalty_is_refused(loss):
    keys = {f"loss__{key}": value for key, value in loss.items()}
    with pytest.raises(ValueError, match=r"reward\.kl = 0\.1 .* use loss\.kl"):
        make_recipe(with_keys(reward__kl=0.1, **keys))
    make_recipe(with_keys(loss__kl=0.1, **keys))


def test_max_rl_refuses_penalties():
    with pytest.raises(ValueError, match=r"reward\.overlong_buffer = 8 can make rewards negative"):
        make_recipe(with_keys(loss__name="max_rl", reward__overlong_buffer=8))


def test_a_greedy_baseline_needs_a_server_that_is_awake():
    with pytest.raises(ValueError, match=r"leave sampler\.sleep out"):
        make_recipe(with_keys(loss__name="remax", **ASLEEP))
    make_recipe(with_keys(loss__name="grpo", **ASLEEP))


@pytest.mark.parametrize(("key", "value"), [("path", "c"), ("pretrain_steps", 3)])
def test_keys_of_a_critic_need_one(key, value):
    with pytest.raises(ValueError, match=rf"critic\.{key} = .* loss\.name = 'grpo' has no critic"):
        make_recipe(with_keys(**{f"critic__{key}": value}))
    make_recipe(with_keys(loss__name="ppo", **{f"critic__{key}": value}))


def test_policy_loss_reading_values_is_refused():
    with pytest.raises(ValueError, match="critic=Critic"):
        make_recipe(with_keys(loss__name="jaxrl.losses:value_loss"))


def test_a_recipe_knows_the_longest_answer():
    recipe = make_recipe(with_keys(loss__name="dr_grpo", sampling__max_tokens=100))
    _, batch = one_sequence(advantages=[1.0], logprobs=[-1.0])
    assert recipe.objective.denominator(batch) == 100


def test_all_errors_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        validate(Config, {"train": {"group_size": 1}, "data": {}})
    for key in ("model.path is missing", "data.path is missing", "reward.path is missing"):
        assert key in str(error.value)


def test_precision_errors_name_the_key():
    message = r"precision = 'bf17': there is no preset 'bf17' \(did you mean bf16\?\)"
    with pytest.raises(ConfigError, match=message):
        load(Config, overrides=[("model.path", "m"), ("data.path", "d"), ("precision", "bf17")])


def test_precision_is_an_object_with_its_text():
    assert with_keys().precision == parse("bf16_master")
    text = "bf16_master, params=bf16"  # equal to bf16,grads=f32
    config = with_keys(precision=text, alarms__precision="bf16")
    assert config.precision == parse("bf16,grads=f32")
    assert flatten(config)["precision"] == text
    assert flatten(config)["alarms.precision"] == "bf16"
    assert f'precision = "{text}"\n' in dumps(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("train.step", "3"), "did you mean train.steps?"),
        (("learning-rate", "3"), "learning-rate: there is no such key; did you mean optimizer.l"),
        (("lr-scheduler-type", "x"), "TRL's lr_scheduler_type is optimizer.schedule here"),
        (("model", "x"), "did you mean model.path?"),
        (("epochs", "3"), "epochs: there is no such key; --help all lists them"),
        (("train.steps", "x y"), "train.steps = 'x y' is not a value"),
        (("train", "3"), "train: there is no such key"),
        (("seed", "3\nx = 1"), "seed = '3\\nx = 1' is not a value"),
        (("seed", "9" * 5000), "... is not a value; write a number, true or false"),
        (("seed", "[" * 5000), "... is not a value; write a number, true or false"),
        (("optimizer.betas", "0.9"), "optimizer.betas = [0.9]: the list is too short"),
        (("zz", "1"), "zz: there is no such key; --help all lists them"),
    ],
)
def test_override_errors(override, message):
    with pytest.raises(ConfigError) as error:
        load(Config, overrides=[override])
    assert message in str(error.value)


@pytest.mark.parametrize(
    "content", [b"\xff\xfes\0", b"seed = " + b"9" * 5000, b"a = " + b"[" * 100_000, b"[model"]
)
def test_invalid_toml_names_the_file(tmp_path: Path, content):
    (tmp_path / "a.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.toml: not a TOML file: "):
        load(Config, file=tmp_path / "a.toml")


def test_byte_order_mark_and_crlf_are_accepted(tmp_path: Path):
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf" + b"seed = 3\r\n[model]\r\n")
    with pytest.raises(ConfigError, match=r"^model\.path is missing"):
        load(Config, file=tmp_path / "a.toml")


def test_missing_and_broken_file(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        load(Config, file=tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml: not a TOML file"):
        load(Config, file=tmp_path / "broken.toml")


def test_sizes_follow_from_each_other():
    config = with_keys(
        train__updates_per_rollout=4, train__microbatch_tokens=5000, mesh__data=2, mesh__fsdp=3
    )
    assert config.row_length == 512 + 512
    assert config.microbatch_rows == (5000 // 1024) * 6
    assert config.optimizer_steps == 400


def test_a_row_is_cut_into_equal_parts():
    with pytest.raises(ConfigError, match=r"into 3 shards, .* 1024 tokens; .* = 1026"):
        with_keys(mesh__context=3)
    assert with_keys(mesh__context=3, mesh__activations=["length="]).mesh.row_shards == 1
    assert with_keys(mesh__context=4).mesh.row_shards == 4


def test_mesh_rules_can_be_changed():
    config = with_keys(mesh__fsdp=2, mesh__context=4, mesh__parameters=["embed=fsdp"])
    assert dict(config.mesh.layout_rules().parameters)["embed"] == ("fsdp",)
    assert (config.mesh.batch_shards(), config.mesh.sizes["context"]) == (2, 4)
    assert with_keys(mesh__expert=4, mesh__data=2).mesh.batch_shards() == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh__parameters": ["embed=stage"]}, "names the mesh axis 'stage'; expected .*'tensor'"),
        ({"mesh__parameters": ["embd="]}, "'embd=': .* no logical axis 'embd'; .* layers, vocab"),
        ({"mesh__activations": ["norm="]}, "no logical axis 'norm'; known are batch, routed"),
        ({"mesh__activations": ["embed"]}, "rule 'embed': expected one LOGICAL=MESH"),
    ],
)
def test_rules_must_fit_the_mesh(changes, message):
    with pytest.raises(ConfigError, match=message):
        with_keys(**changes)
