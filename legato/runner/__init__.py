"""From a `StepPlan` to tensors, logits and sampled tokens: the only room with a device."""
