"""How do two models differ, text by text?"""
