// Memory of large gradients that outlives them: fresh memory of that size is ruled by page faults.
#pragma once

#include "cpu/detail/tensors.h"

namespace crowdnal::cpu {

// As `empty`. Large memory is taken over from the tensor that last let go of as much, once nobody holds it (its storage
// is gone), and marked so that the system may have it back in the meantime; one at most is kept. So is none before
// torch 2.11, which tells nobody that a storage is gone.
Tensor empty_gradient(const Tensor& like, std::initializer_list<int64_t> sizes);

}  // namespace crowdnal::cpu
