"The evidence: what the study runs, how it is judged, and the tables that show it."
