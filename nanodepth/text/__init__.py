"Turn text into tokens, and tokens into a dataset that train.py's Loader reads."
