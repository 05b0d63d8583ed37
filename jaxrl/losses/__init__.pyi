from . import preference as preference, recipes as recipes
from .aggregation import (
    fixed_length as fixed_length,
    sequence_mean_token_mean as sequence_mean_token_mean,
    sequence_mean_token_sum as sequence_mean_token_sum,
    token_mean as token_mean,
    token_sum as token_sum,
)
from .algebra import (
    Clip as Clip,
    Shift as Shift,
    TokenLoss as TokenLoss,
    Unit as Unit,
    Weights as Weights,
    add as add,
    both as both,
    prefix as prefix,
    reweight as reweight,
    scale as scale,
    token_loss as token_loss,
    whole_batch as whole_batch,
)
from .centering import score_centering as score_centering
from .controllers import (
    Controller as Controller,
    EntropyController as EntropyController,
    KLController as KLController,
    controlled as controlled,
)
from .corrections import (
    gamma_shaped as gamma_shaped,
    masked as masked,
    normalized as normalized,
    truncated as truncated,
)
from .from_config import build as build, loss_arguments as loss_arguments
from .imitation import (
    completion_likelihood as completion_likelihood,
    cross_entropy as cross_entropy,
    dft as dft,
    observation_likelihood as observation_likelihood,
    positive_likelihood as positive_likelihood,
)
from .objectives import Aggregation as Aggregation, Objective as Objective, objective as objective
from .ratios import (
    Level as Level,
    Ratio as Ratio,
    anchor_over_sampler as anchor_over_sampler,
    geometric as geometric,
    on_policy as on_policy,
    over_anchor as over_anchor,
    over_sampler as over_sampler,
    product as product,
    sequence as sequence,
    shadowed as shadowed,
    token as token,
)
from .recipe import Recipe as Recipe, Terms as Terms, with_terms as with_terms
from .recipes import (
    bnpo as bnpo,
    cispo as cispo,
    clip_cov as clip_cov,
    dapo as dapo,
    dppo as dppo,
    dr_grpo as dr_grpo,
    gdpo as gdpo,
    gmpo as gmpo,
    gpg as gpg,
    grpo as grpo,
    grpo_seq_mis as grpo_seq_mis,
    grpo_token_tis as grpo_token_tis,
    gspo as gspo,
    kl_cov as kl_cov,
    max_rl as max_rl,
    mlperf as mlperf,
    opo as opo,
    opsm as opsm,
    pass_at_k as pass_at_k,
    pg_seq_is as pg_seq_is,
    pg_token_is as pg_token_is,
    ppo as ppo,
    prime as prime,
    prime_ipo as prime_ipo,
    reinforce_pp as reinforce_pp,
    reinforce_pp_baseline as reinforce_pp_baseline,
    remax as remax,
    rloo as rloo,
    sapo as sapo,
    vapo as vapo,
    vespo as vespo,
)
from .regularizers import (
    KLEstimator as KLEstimator,
    absolute as absolute,
    drift_penalty as drift_penalty,
    entropy_bonus as entropy_bonus,
    k1 as k1,
    k1_plus as k1_plus,
    k2 as k2,
    k3 as k3,
    k3_plus as k3_plus,
    kl_penalty as kl_penalty,
    load_balance as load_balance,
    squared as squared,
)
from .rejections import (
    Divergence as Divergence,
    binary_kl as binary_kl,
    error_within as error_within,
    k2_sum_within as k2_sum_within,
    k2_within as k2_within,
    k3_sum_within as k3_sum_within,
    k3_within as k3_within,
    near as near,
    off_policy_negatives as off_policy_negatives,
    total_variation as total_variation,
    trust_region as trust_region,
    vetoed as vetoed,
    within as within,
)
from .scores import Need as Need, Scores as Scores, one_sequence as one_sequence, require as require
from .selections import (
    top_covariance as top_covariance,
    top_entropy as top_entropy,
    without_covariance as without_covariance,
)
from .surrogates import (
    clipped as clipped,
    geometric_clipped as geometric_clipped,
    likelihood as likelihood,
    reinforce as reinforce,
    soft_gated as soft_gated,
    surrogate as surrogate,
    unclipped as unclipped,
)
from .value import (
    Critic as Critic,
    clipped_value_loss as clipped_value_loss,
    value_loss as value_loss,
)
