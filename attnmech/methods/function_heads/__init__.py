"""Which heads carry a task from examples in the prompt to the answer."""
