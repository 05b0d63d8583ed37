from .baselines import (
    gdpo as gdpo,
    opo as opo,
    optimal_token_baseline as optimal_token_baseline,
    reinforce_pp as reinforce_pp,
    reinforce_pp_baseline as reinforce_pp_baseline,
    remax as remax,
)
from .critic import (
    explained_variance as explained_variance,
    gae as gae,
    generalized as generalized,
    lambda_returns as lambda_returns,
    length_adaptive as length_adaptive,
)
from .groups import (
    batch_relative as batch_relative,
    centred as centred,
    gpg as gpg,
    group_relative as group_relative,
    leave_one_out as leave_one_out,
    leave_one_out_relative as leave_one_out_relative,
    leave_one_out_whitened as leave_one_out_whitened,
    max_rl as max_rl,
    pass_at_k as pass_at_k,
    pass_at_k_relative as pass_at_k_relative,
    zero_std_groups as zero_std_groups,
)
from .outcomes import (
    AdvantageEstimator as AdvantageEstimator,
    Advantages as Advantages,
    Outcomes as Outcomes,
    by_component as by_component,
    estimate as estimate,
    is_marked as is_marked,
    per_episode as per_episode,
    within_group as within_group,
)
from .penalties import overlong_penalty as overlong_penalty
from .teacher import log_ratios as log_ratios, with_log_ratios as with_log_ratios
