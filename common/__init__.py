"What everything stands on."
