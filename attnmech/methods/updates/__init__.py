"""What do heads write into the residual stream?"""
