"""Does a claim about heads hold against controls that were drawn for it?"""
