"""`jaxrl export` writes the checkpoint that was asked for, or says why it cannot."""

import jax
import numpy as np

from jaxrl import huggingface
from jaxrl.builders.layout import make_layout
from jaxrl.builders.model import load_model
from jaxrl.builders.optimizer import make_optimizer
from jaxrl.cli import main
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.core import precision
from jaxrl.learner import policy
from jaxrl.learner.checkpoints import Checkpoints
from jaxrl.losses.aggregation import token_mean
from jaxrl.losses.objectives import objective
from jaxrl.losses.surrogates import reinforce
from tests import tiny

REQUIRED = ["--model.path", "m", "--data.path", "d", "--reward.path", "exact_match"]


def test_export_of_a_run_without_a_checkpoint_says_what_to_do(tmp_path, capsys):
    assert main(["config", *REQUIRED]) == 0
    (tmp_path / "config.toml").write_text(capsys.readouterr().out)
    for folder in (None, "checkpoints"):
        if folder:
            (tmp_path / folder).mkdir()
        assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 1
        said = capsys.readouterr().err
        assert "has no checkpoint yet" in said
        assert "Rerun the command that started it" in said
    assert main(["report", str(tmp_path)]) == 1
    assert "has no step yet" in capsys.readouterr().err


def test_export_refuses_before_it_reads_a_checkpoint(tmp_path, capsys):
    model = tmp_path / "model"
    huggingface.save(model, tiny.params(config=tiny.MOE), tiny.MOE, dtype=np.dtype(np.float32))
    required = [("model.path", str(model)), ("data.path", "d"), ("reward.path", "exact_match")]
    config = toml_file.load(Config, overrides=required)
    (tmp_path / "config.toml").write_text(toml_file.dumps(config))
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)  # unreadable
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--blocks", "int8"]) == 1
    assert "blocks=int8 is for decoders without experts" in capsys.readouterr().err


def test_export_writes_the_requested_checkpoint(material, tmp_path, capsys):
    required = [("model.path", f"{material}/untrained"), ("data.path", "d")]
    config = toml_file.load(
        Config, overrides=[*required, ("reward.path", "exact_match"), ("precision", "fp32")]
    )
    (tmp_path / "config.toml").write_text(toml_file.dumps(config))
    model, params = load_model(
        huggingface.Checkpoint(config.model.path),
        layout=make_layout(config.mesh),
        dtype=np.dtype(np.float32),
    )
    made = policy.make_learner(
        model,
        objective(reinforce(), token_mean),
        optimizer=make_optimizer(
            config.optimizer, total_steps=config.optimizer_steps, specs=model.specs
        ).transformation,
        precision=precision.parse("fp32"),
    )
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    scaled = {step: jax.tree.map(lambda x, s=step: x * s, params) for step in (2, 3)}
    for (step, weights), accuracy in zip(scaled.items(), (0.9, 0.1), strict=True):
        checkpoints.save(step, made.init(weights), host={}, metric=accuracy)
    checkpoints.close()

    for name, step in (("latest", 3), ("best", 2), ("2", 2)):
        out = tmp_path / name
        assert main(["export", str(tmp_path), str(out), "--step", name, "--dtype", "f32"]) == 0
        assert capsys.readouterr().out == f"step {step}: {out}\n"
        _, exported = huggingface.load(out, dtype=None)
        jax.tree.map(np.testing.assert_array_equal, exported, scaled[step])
        assert (out / "tokenizer.json").exists()
    assert main(["export", str(tmp_path), str(tmp_path / "x"), "--step", "9"]) == 1
    assert "there is no checkpoint" in capsys.readouterr().err
