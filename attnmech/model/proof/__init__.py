"""The certificate: is what is read of a model what the model computes?"""
