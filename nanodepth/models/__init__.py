"What a training run needs."
