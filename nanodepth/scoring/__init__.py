"Score a model: ways of running it, likelihoods, data, lm-eval."
