"""Which of the known kinds of heads is each head?"""
