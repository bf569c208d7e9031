"""How does information flow through attention from token to token?"""
