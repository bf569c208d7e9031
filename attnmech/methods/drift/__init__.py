"""How far do tokens move from their embeddings, layer by layer?"""
