"""Which parts of a text do heads attend to, and what do they give?"""
