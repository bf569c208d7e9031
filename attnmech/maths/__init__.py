"""Pure functions of tensors, without a model: one home for each formula."""
