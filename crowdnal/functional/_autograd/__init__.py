"""The ops as autograd Functions, one file a family: differentiable to any order, batched, compiled."""
