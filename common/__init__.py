"What everything uses."
