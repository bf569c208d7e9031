"""Attribution patching estimates the effect of patching each head and MLP, and confirms the strongest."""
