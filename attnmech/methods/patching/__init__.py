"""Which heads carry what differs between two prompts?"""
