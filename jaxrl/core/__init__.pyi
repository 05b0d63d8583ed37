from .batch import (
    End as End,
    Episode as Episode,
    Minibatch as Minibatch,
    Rollout as Rollout,
    TokenBatch as TokenBatch,
    action_sequences as action_sequences,
    action_tokens as action_tokens,
    by_group as by_group,
    chains as chains,
    earlier_actions as earlier_actions,
    from_json as from_json,
    given_rollout as given_rollout,
    observed as observed,
    segment_sum as segment_sum,
    segment_totals as segment_totals,
    sequence_weights as sequence_weights,
    to_json as to_json,
)
from .buckets import count_bucket as count_bucket, row_multiple as row_multiple
from .casts import as_served as as_served, cast as cast, dtype_of as dtype_of
from .compiled import (
    jit as jit,
    jit_forward as jit_forward,
    keep_collectives_ordered as keep_collectives_ordered,
)
from .compiler_flags import flags_note as flags_note
from .files import (
    cache_directory as cache_directory,
    check_regular as check_regular,
    read_whole as read_whole,
    write_whole as write_whole,
)
from .hosts import Hosts as Hosts, ReportedError as ReportedError, report as report
from .kept import Kept as Kept, most_kept as most_kept
from .loss_scale import LossScale as LossScale, LossScaleSpec as LossScaleSpec
from .metrics import (
    Latest as Latest,
    Mean as Mean,
    Metrics as Metrics,
    masked_mean as masked_mean,
    masked_means as masked_means,
    merge as merge,
    to_floats as to_floats,
)
from .names import nearest as nearest
from .packing import (
    SHARED as SHARED,
    Alignment as Alignment,
    MinibatchShape as MinibatchShape,
    abstract_minibatch as abstract_minibatch,
    most_rows as most_rows,
    pack_minibatch as pack_minibatch,
    plan_rows as plan_rows,
    unpack as unpack,
)
from .plugins import (
    check_parameters as check_parameters,
    declared_parameters as declared_parameters,
    load_function as load_function,
    naming_keys as naming_keys,
)
from .precision import (
    PRESETS as PRESETS,
    DType as DType,
    Precision as Precision,
    check_products as check_products,
    disagreement as disagreement,
    sampler_precision as sampler_precision,
    short_name as short_name,
)
from .processor import product_unit as product_unit
from .runs import Runs as Runs
