"""Fast operators, one folder each; import them from their folder, as in ``kernels.window_attention``."""
