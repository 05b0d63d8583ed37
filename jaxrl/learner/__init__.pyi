from .actor_critic import (
    ActorCritic as ActorCritic,
    Optimizers as Optimizers,
    State as State,
    shared_trunk as shared_trunk,
    side_by_side as side_by_side,
    with_new_loss_scale as with_new_loss_scale,
)
from .checkpoints import (
    CheckpointError as CheckpointError,
    Checkpoints as Checkpoints,
    MisfitError as MisfitError,
    Restored as Restored,
)
from .critic import CriticLearner as CriticLearner, make_critic as make_critic
from .gate import gated as gated
from .minibatches import minibatch as minibatch
from .optimizers import (
    OptimizerName as OptimizerName,
    ScheduleName as ScheduleName,
    make_optimizer as make_optimizer,
    make_schedule as make_schedule,
    usual_learning_rates as usual_learning_rates,
)
from .policy import (
    VALUE_HEAD as VALUE_HEAD,
    Learner as Learner,
    make_learner as make_learner,
    make_score as make_score,
)
from .reward_model import (
    Ranker as Ranker,
    ScoreRows as ScoreRows,
    make_ranker as make_ranker,
    make_scores as make_scores,
)
from .rounding import reporting_publish as reporting_publish
from .update import (
    LearnerState as LearnerState,
    Update as Update,
    applied_steps as applied_steps,
    checkpoint_view as checkpoint_view,
    from_checkpoint as from_checkpoint,
    make_update as make_update,
)
