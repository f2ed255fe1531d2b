"Text becomes tokens, and tokens a dataset, which train.py's Loader reads."
