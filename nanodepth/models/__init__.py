"Open and write models: runs of train.py, and Hugging Face folders."
