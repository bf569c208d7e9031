"""Does attention to the first token say that a head has nothing to do?"""
