"""Which heads do the same, and which are unlike all others?"""
