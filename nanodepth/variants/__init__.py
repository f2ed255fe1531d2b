"Details and alternatives of the ideas, for the second reading."
