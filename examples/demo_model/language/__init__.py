"""The demo model's language: the grammar that makes its texts, its words and tokenizer, and its training sequences."""
