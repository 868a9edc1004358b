"""Every op in plain PyTorch: the definition, the fallback without the native library, the oracle of the tests.

Their names and signatures are those of the ops (`crowdnal.ops`). Shapes: scores [B, C], confusion [R, C, K],
log_probs [B, C], an observed-label-major confusion [R, K, C], indptr [B + 1], item, annotator, order and label [nnz].
Matrices (confusion, log_confusion, difficulty and competence together) may be stored in float16 or bfloat16: everything
else, results and gradients included, is float32 then. Differentiable by autograd; `mix` gathers nnz x C x K, which the
native kernels never build.
"""

from __future__ import annotations

from crowdnal.reference._em_step import em_step
from crowdnal.reference._joint_link import (
    item_upstream,
    joint_link,
    joint_link_backward,
    joint_link_step,
    log_marginal,
    reduce_items,
)
from crowdnal.reference._label_log_likelihood import label_counts, label_log_likelihood
from crowdnal.reference._mix import mix, mix_annotators, mix_items, select
from crowdnal.reference._mixture_link import log_sum, mixture_link, mixture_link_backward, mixture_link_step
from crowdnal.reference._normalization import (
    NONE,
    SOFTMAX,
    SOFTPLUS,
    activation,
    activation_grad,
    log_confusion,
    log_confusion_jvp,
    log_confusion_vjp,
    log_confusion_vjp_jvp,
)
from crowdnal.reference._pair_confusion import add_observed, observed, pair_confusion, pair_confusion_backward
from crowdnal.reference._prior import (
    common_scores,
    common_scores_vjp,
    prior_distance,
    softmax_rows,
    softmax_rows_vjp,
)
from crowdnal.reference._softmax_link import (
    blend,
    cross_entropy,
    residual,
    softmax_link,
    softmax_link_backward,
    softmax_link_step,
)
from crowdnal.reference._terms import compute_dtype, new_empty, reduce, upstream, widen

__all__ = [
    "NONE",
    "SOFTMAX",
    "SOFTPLUS",
    "activation",
    "activation_grad",
    "blend",
    "add_observed",
    "common_scores",
    "common_scores_vjp",
    "compute_dtype",
    "label_counts",
    "cross_entropy",
    "em_step",
    "label_log_likelihood",
    "item_upstream",
    "joint_link",
    "joint_link_backward",
    "joint_link_step",
    "log_confusion",
    "log_confusion_jvp",
    "log_confusion_vjp",
    "log_confusion_vjp_jvp",
    "log_marginal",
    "log_sum",
    "mix",
    "mix_annotators",
    "mix_items",
    "mixture_link",
    "mixture_link_backward",
    "mixture_link_step",
    "new_empty",
    "observed",
    "pair_confusion",
    "pair_confusion_backward",
    "prior_distance",
    "reduce",
    "reduce_items",
    "residual",
    "select",
    "softmax_link",
    "softmax_link_backward",
    "softmax_link_step",
    "softmax_rows",
    "softmax_rows_vjp",
    "upstream",
    "widen",
]
