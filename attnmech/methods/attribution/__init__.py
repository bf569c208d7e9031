"""Attribution patching estimates the effect of patching each head, MLP or edge, and confirms the strongest."""
