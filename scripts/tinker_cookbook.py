"""Runs recipes of the Tinker cookbook, unmodified, against `jaxrl tinker` and a tiny model.

The cookbook needs an environment of its own, and Qwen3's tokenizer (scripts/fetch_tokenizers.sh):

    python -m venv .venv-cookbook
    .venv-cookbook/bin/pip install tinker-cookbook[math-rl]==0.6.1
    python scripts/tinker_cookbook.py --python .venv-cookbook/bin/python

The recipes name a model and data sets of the hub. In the folder where they run, paths of these
names hold a tiny random model with the published tokenizer and a few rows of the same form. The
model that sl_loop trains is the teacher of the distillation. code_rl, whose episodes have a turn
with a call of a tool and one with the answer, begins from a model that has learned both, the
answer right half of the time, and trains all its parameters; a stand-in for SandboxFusion runs the
code, without a sandbox. The recipes' own numbers go to the standard output, as JSON lines.
"""

import base64
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import jax.numpy as jnp
import make_arithmetic
from experiments.runs import exit_on_sigterm, plain_parser
from transformers import AutoTokenizer

from jaxrl import huggingface, models

ROOT = Path(__file__).parent.parent
TOKENIZER = ROOT / ".cache" / "tokenizers" / "qwen3"
MODEL, RENDERER = "Qwen/Qwen3-8B", "qwen3_disable_thinking"
RL = ("groups_per_batch=4", "group_size=4", "max_tokens=48", "learning_rate=1e-3", "lora_rank=32")
RL += ("behavior_if_log_dir_exists=delete",)
RECIPES = {
    "sl_loop": ("batch_size=8", "max_length=256", "learning_rate=1e-3"),
    "rl_loop": ("batch_size=2", "group_size=4", "max_tokens=8", "loss_fn=importance_sampling"),
    "preference.dpo.train": (
        "dataset=hhh",
        "batch_size=8",
        "max_length=256",
        "learning_rate=1e-2",
        "lr_schedule=constant",
        "behavior_if_log_dir_exists=delete",
    ),
    "distillation.on_policy_distillation": (
        f"teacher_model={MODEL}",
        "dataset=deepmath",
        "loss_fn=importance_sampling",
        *RL,
    ),
    "code_rl.train": (
        f"renderer_name={RENDERER}",
        "groups_per_batch=2",
        "group_size=4",
        "max_tokens=48",
        "learning_rate=3e-3",
        "eval_every=0",
        "save_every=0",
        "behavior_if_log_dir_exists=delete",
    ),
}
SHOWN = {
    "sl_loop": ("train_mean_nll",),
    "rl_loop": ("reward/total",),
    "preference.dpo.train": ("dpo_loss", "margin"),
    "distillation.on_policy_distillation": ("teacher_kl",),
    "code_rl.train": ("env/all/reward/total", "env/all/turns_per_episode"),
}


def write_model(directory: Path) -> None:
    """Writes a tiny random model with Qwen3's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(str(TOKENIZER))
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = huggingface.from_hf_config(
        make_arithmetic.TINY | ids | {"max_position_embeddings": 2048}
    )
    f32 = jnp.dtype(jnp.float32)
    params = models.init(models.param_specs(config), jax.random.key(0), dtype=f32)
    huggingface.save(directory, params, config, dtype=f32)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, directory)


def write_data(place: Path) -> None:
    """Writes rows in the form of the recipes' data sets."""
    rng = random.Random(0)
    pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(512)]
    robots = [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} + {b}?"},
                {"role": "assistant", "content": f"It is {a + b}."},
            ]
        }
        for a, b in pairs
    ]
    school = [{"question": f"What is {a} + {b}?", "answer": f"So #### {a + b}"} for a, b in pairs]
    ask = "\n\nHuman: What is {} + {}?\n\nAssistant: It is {}."
    preferred = [
        {"chosen": ask.format(a, b, a + b), "rejected": ask.format(a, b, "not known")}
        for a, b in pairs
    ]
    write_rows(place / "HuggingFaceH4/no_robots", robots)
    write_rows(place / "openai/gsm8k", school)
    write_rows(place / "Anthropic/hh-rlhf", preferred)
    write_rows(place / "zwhe99/DeepMath-103K", school)
    tests = json.dumps([{"input": "", "output": "7", "testtype": "stdin_stdout"}])
    tasks = [{"problem": "Print the number 7.", "tests": tests, "number": i} for i in range(512)]
    names = ("primeintellect", "taco", "lcbv5", "codeforces")
    write_rows(place / "agentica-org/DeepCoder-Preview-Dataset", tasks, names=names)


def write_rows(
    directory: Path, rows: list[dict[str, object]], *, names: Sequence[str] = ("main",)
) -> None:
    """Writes a data set with the splits train and test, which has the first rows alone, once under
    each name."""
    directory.mkdir(parents=True)
    for split, own in (("train", rows), ("test", rows[:4])):
        (directory / f"{split}.jsonl").write_text("\n".join(map(json.dumps, own)))
    about = "---\nconfigs:\n"
    for name in names:
        about += f"- config_name: {name}\n  default: {json.dumps(name == names[0])}\n"
        about += "  data_files:\n"
        for split in ("train", "test"):
            about += f"  - split: {split}\n    path: {split}.jsonl\n"
    (directory / "README.md").write_text(about + "---\n")


def trained(place: Path) -> dict[str, str]:
    """Returns the last checkpoint of sl_loop."""
    return json.loads((place / "sl_loop/checkpoints.jsonl").read_text().splitlines()[-1])


@contextmanager
def sandbox() -> Iterator[str]:
    """Serves SandboxFusion's answers to programs; yields the address. They run as this user."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with tempfile.TemporaryDirectory() as place:
                for name, content in asked["files"].items():
                    (Path(place) / name).write_bytes(base64.b64decode(content))
                command = [sys.executable, "-c", asked["code"]]
                ran = subprocess.run(command, cwd=place, capture_output=True, check=False)
            answer = json.dumps({"status": "Failed" if ran.returncode else "Success"}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/run_code"
    server.shutdown()


def taught(python: str, place: Path, client: dict[str, str]) -> str:
    """Returns the state of a model that calls the tool of code_rl."""
    command = [python, str(ROOT / "scripts/cookbook/teach_code.py"), MODEL, RENDERER]
    found = subprocess.run(
        command, cwd=place, env=client, check=True, stdout=subprocess.PIPE, text=True
    )
    return found.stdout.strip()


def show(place: Path, name: str) -> None:
    """Prints a recipe's numbers of each step."""
    for line in (place / name / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found = {key: round(row[key], 4) for key in SHOWN[name] if key in row}
        if found:
            print(json.dumps({"recipe": name, "step": row.get("step")} | found), flush=True)


def main() -> None:
    """Starts the server, runs the recipes and prints their metrics."""
    parser = plain_parser(__doc__)
    parser.add_argument("--python", required=True, help="interpreter with tinker-cookbook")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    arguments = parser.parse_args()
    exit_on_sigterm()
    python = os.path.abspath(arguments.python)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        write_model(place / MODEL)
        write_data(place)
        command = [sys.executable, "-m", "jaxrl", "tinker", MODEL, "--port", "0"]
        command += ["--precision", "fp32", "--state_dir", "state"]
        own = {**os.environ, "PYTHONPATH": str(ROOT)}
        server = subprocess.Popen(command, cwd=place, env=own, stdout=subprocess.PIPE, text=True)
        with ExitStack() as closing:
            closing.callback(server.wait)
            closing.callback(server.terminate)
            assert server.stdout is not None
            lines = [server.stdout.readline().removeprefix("export ").strip() for _ in range(2)]
            client = os.environ | dict(line.split("=", 1) for line in lines)
            client["SANDBOX_URL"] = closing.enter_context(sandbox())
            for name in arguments.recipes:
                steps = arguments.steps * (4 if name == "sl_loop" else 1)
                module = ["-m", f"tinker_cookbook.recipes.{name}"]
                run = [python, *module, f"model_name={MODEL}", *RECIPES[name]]
                run += [f"max_steps={steps}", f"log_path={name}"]
                if name.startswith("distillation"):
                    run.append(f"teacher_checkpoint={trained(place)['sampler_path']}")
                if name.startswith("code_rl"):
                    run.append(f"load_checkpoint_path={taught(python, place, client)}")
                subprocess.run(run, cwd=place, env=client, check=True)
                show(place, name)


if __name__ == "__main__":
    main()
