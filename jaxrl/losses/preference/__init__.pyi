from .contrasts import (
    discopop as discopop,
    exo as exo,
    hinge as hinge,
    ipo as ipo,
    ipo_summed as ipo_summed,
    length_desensitized as length_desensitized,
    robust as robust,
    rpo as rpo,
    sigmoid as sigmoid,
    sigmoid_averaged as sigmoid_averaged,
)
from .divergences import (
    alpha_divergence as alpha_divergence,
    forward_kl as forward_kl,
    js_divergence as js_divergence,
)
from .pairs import (
    PairLoss as PairLoss,
    ScoredCompletion as ScoredCompletion,
    ScoredPair as ScoredPair,
    bradley_terry as bradley_terry,
    pair_count as pair_count,
    pair_mean as pair_mean,
    pairs_there as pairs_there,
    pairwise as pairwise,
    ranked as ranked,
    split_pairs as split_pairs,
)
from .singles import (
    apo_down as apo_down,
    apo_zero as apo_zero,
    bco as bco,
    nca as nca,
    sppo_hard as sppo_hard,
)
from .transport import aot as aot, aot_unpaired as aot_unpaired
