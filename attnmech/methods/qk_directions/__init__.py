"""The singular directions of W_Q W_Kᵀ: what a head's queries and keys read, and how much of its scores each carries."""
