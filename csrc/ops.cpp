// Registers the CPU kernels under the schemas of crowdnal/ops.py (torch.library), through the stable ABI.
#include "ops.h"

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CPU, m) {
  using namespace crowdnal::cpu;
  m.impl("mix", TORCH_BOX(&mix_op));
  m.impl("mix_items", TORCH_BOX(&mix_items_op));
  m.impl("mix_annotators", TORCH_BOX(&mix_annotators_op));
  m.impl("select", TORCH_BOX(&select_op));
  m.impl("softmax_link", TORCH_BOX(&softmax_link_op));
  m.impl("softmax_link_backward", TORCH_BOX(&softmax_link_backward_op));
  m.impl("mixture_link", TORCH_BOX(&mixture_link_op));
  m.impl("mixture_link_backward", TORCH_BOX(&mixture_link_backward_op));
  m.impl("label_log_likelihood", TORCH_BOX(&label_log_likelihood_op));
  m.impl("label_counts", TORCH_BOX(&label_counts_op));
  m.impl("em_step", TORCH_BOX(&em_step_op));
  m.impl("joint_link", TORCH_BOX(&joint_link_op));
  m.impl("joint_link_backward", TORCH_BOX(&joint_link_backward_op));
  m.impl("pair_confusion", TORCH_BOX(&pair_confusion_op));
  m.impl("pair_confusion_backward", TORCH_BOX(&pair_confusion_backward_op));
}
