"""Where do heads look?"""
