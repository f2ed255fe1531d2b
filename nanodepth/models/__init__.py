"A path to a model and back: ours, Hugging Face's."
