"""Trains a reward model on pairs of completions (Bradley-Terry)."""

from jaxrl.builders.supervised import set_up
from jaxrl.config.preference import RewardModelConfig
from jaxrl.core import Metrics, Minibatch, jit
from jaxrl.huggingface import Checkpoint
from jaxrl.learner import make_ranker, make_scores
from jaxrl.losses.preference import ranked
from jaxrl.models import Params
from jaxrl.training.mirror import mirrored
from jaxrl.training.supervised.fit import FitResult, check_resumable
from jaxrl.training.supervised.pairs import fit_pairs, load_pairs


@mirrored
def train_reward_model(config: RewardModelConfig, *, fork: str | None = None) -> FitResult:
    """Trains a reward model on pairs; raises as `fit`, and ValueError for bad data or model.

    It starts from a reward model, or from a language model, which scores every text 0.
    """
    start = check_resumable(config, fork=fork)
    checkpoint = Checkpoint(config.model.path)
    data = load_pairs(config.data, checkpoint.tokenizer, max_tokens=config.train.row_length)
    setup, center_rewards = set_up(config, checkpoint), config.loss.center_rewards
    shardings = setup.param_shardings
    scores = make_scores(setup.model, precision=config.precision, param_shardings=shardings)

    @jit
    def measure(params: Params, minibatch: Minibatch) -> Metrics:
        return ranked(scores(params, minibatch), minibatch.batch, center_rewards=center_rewards)[1]

    return fit_pairs(
        config,
        data,
        setup=setup,
        measure=measure,
        title="reward model",
        fork=start,
        learner=make_ranker(
            setup.model,
            center_rewards=center_rewards,
            optimizer=setup.optimizer.transformation,
            precision=config.precision,
            param_shardings=shardings,
        ),
    )
