from .accuracy import (
    half_interval as half_interval,
    majority as majority,
    mean_and_interval as mean_and_interval,
    pass_at_k as pass_at_k,
)
from .alarms.check import (
    Alarm as Alarm,
    check_alarms as check_alarms,
    replay_alarms as replay_alarms,
)
from .alarms.history import History as History, Series as Series
from .alarms.limits import LIMITS as LIMITS, Limits as Limits
from .alarms.rules import RULES as RULES
from .alarms.table import Cause as Cause, Finding as Finding, Rule as Rule
from .completions import completion_metrics as completion_metrics, format_marks as format_marks
from .judgement import judge_metrics as judge_metrics, ordered_alike as ordered_alike
from .ratio.agreement import agreement_metrics as agreement_metrics, phantom_clips as phantom_clips
from .ratio.attribution import (
    MODULES as MODULES,
    Attribution as Attribution,
    attribute as attribute,
)
from .ratio.certificate import (
    BANDS as BANDS,
    Certificate as Certificate,
    certify as certify,
    forward_facts as forward_facts,
)
from .ratio.drift import make_drift as make_drift
from .ratio.frontier import (
    Choice as Choice,
    candidates as candidates,
    cheapest as cheapest,
    draw_frontier as draw_frontier,
    frontier as frontier,
)
from .ratio.pictures import draw as draw
from .ratio.replay import (
    Score as Score,
    log_ratio_parts as log_ratio_parts,
    replay_batch as replay_batch,
)
from .ratio.shape_noise import longer_rows as longer_rows, shape_noise as shape_noise
from .ratio.split import (
    LogRatio as LogRatio,
    Split as Split,
    moments as moments,
    split as split,
    split_log_ratio as split_log_ratio,
)
