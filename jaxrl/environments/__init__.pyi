from . import builtin as builtin
from .episodes.base import (
    Environment as Environment,
    EpisodeError as EpisodeError,
    EpisodeLimits as EpisodeLimits,
    Step as Step,
)
from .episodes.chat import Chat as Chat
from .episodes.context import EnvironmentContext as EnvironmentContext
from .episodes.conversations import (
    Conversations as Conversations,
    Place as Place,
    Templates as Templates,
)
from .episodes.episode import (
    environment_reward as environment_reward,
    episode_metrics as episode_metrics,
    last_turn as last_turn,
)
from .episodes.runner import (
    ContinuousScheduler as ContinuousScheduler,
    EpisodeResults as EpisodeResults,
    EpisodeRunner as EpisodeRunner,
    LockstepScheduler as LockstepScheduler,
    TurnScheduler as TurnScheduler,
)
from .episodes.single_turn import (
    Accuracy as Accuracy,
    accuracy as accuracy,
    as_rollout as as_rollout,
    rollouts as rollouts,
)
from .episodes.tool_chat import ToolChat as ToolChat
from .gateway.dialect import (
    SamplingRequest as SamplingRequest,
    TurnAnswer as TurnAnswer,
    TurnRefusedError as TurnRefusedError,
    TurnRequest as TurnRequest,
)
from .gateway.session import Endpoint as Endpoint
from .isolation.calls import use_processors as use_processors
from .isolation.sandbox import (
    ProgramResult as ProgramResult,
    SandboxError as SandboxError,
    SandboxLimits as SandboxLimits,
    UnsupportedTestsError as UnsupportedTestsError,
    run_python as run_python,
    run_tests as run_tests,
)
from .rewards.batches import batched as batched, is_batched as is_batched
from .rewards.builtin import (
    boxed_format as boxed_format,
    brevity as brevity,
    exact_match as exact_match,
    hash_format as hash_format,
    math_verify as math_verify,
    novelty as novelty,
    numeric_match as numeric_match,
    python_tests as python_tests,
)
from .rewards.numbers import final_number as final_number
from .rewards.score import (
    Reward as Reward,
    RewardScores as RewardScores,
    RewardTerm as RewardTerm,
    load_rewards as load_rewards,
    score as score,
    with_component as with_component,
)
from .tools.formats import ToolCall as ToolCall
from .tools.reading import Reading as Reading
from .tools.schema import (
    Tool as Tool,
    ToolError as ToolError,
    ToolResult as ToolResult,
    load_tools as load_tools,
    make_tool as make_tool,
)
