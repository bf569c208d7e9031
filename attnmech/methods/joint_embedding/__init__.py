"""Where do queries and keys lie in one space, and what groups them?"""
