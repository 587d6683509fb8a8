"""Named tensors: wire format, specs and the order-independent mean."""
