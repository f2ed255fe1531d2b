"A model to scores: ways of running it, likelihoods, data, lm-eval."
