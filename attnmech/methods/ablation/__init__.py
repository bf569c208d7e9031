"""What changes when heads are ablated: one by one, in sets, in pairs, and until a budget is spent?"""
