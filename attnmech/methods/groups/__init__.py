"""What do groups of words give and receive?"""
