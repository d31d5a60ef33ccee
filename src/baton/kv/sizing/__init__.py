"""How large a request's KV is, from a model's configuration alone. Pure.

File map:
    parts.py     what a layer keeps: attention, latent vectors, a state
    config.py    Hugging Face's config.json, as far as KV depends on it
    families.py  config → what each layer keeps; what is not known is refused; the states of layers
                 without attention (Mamba, linear attention, convolutions)
    sizes.py     parts, a format, tokens → bytes; numbers → bytes, with the scales of quantised
                 ones
"""
